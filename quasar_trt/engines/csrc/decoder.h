// One pass of a decoder-only model over a packed batch of sequences; the whole pass is one call.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "attention_plan.h"
#include "collectives.h"
#include "kernels.h"
#include "kv_cache.h"
#include "thread_pool.h"

namespace quasar {

// A zeroed, 64-byte aligned array.
template <class T>
class Buffer {
 public:
  int64_t size() const { return size_; }
  void resize(int64_t count) {
    const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    size_ = 0;
    data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes)));
    if (!data_) throw std::bad_alloc();
    std::memset(static_cast<void*>(data_.get()), 0, bytes);
    size_ = count;
  }
  T* get() const { return data_.get(); }

 private:
  struct Free { void operator()(T* p) const { std::free(p); } };
  std::unique_ptr<T, Free> data_;
  int64_t size_ = 0;
};

struct DecoderShape {
  int layers, hidden, intermediate, heads, kv_heads, head, vocab;
  float norm_epsilon;
  int rescored;  // logits of each row, where the head has BF16 rows too
  int max_rows, max_seq_len;
  int rank, ranks;  // heads and intermediate size are those of this rank
  int vocab_share;  // rows of this rank's head; the last ones of all may be padding
  int attention_inputs;  // columns that the first layer's attention reads where rows are given, see GivenRows; else 0

  int qkv() const { return (heads + 2 * kv_heads) * head; }
};

// What a linear reads: the floats themselves (its weight is BF16), or their codes of 8 or 16 bits (its weight is INT8).
enum class Input { kFloats, kCodes8, kCodes16 };

struct Linear {
  Weight weight;
  Input input;
  const float* inverse_smoother;  // of its input, before that becomes codes; null where a norm carries the smoother
  int hadamard;                   // columns of each block that is transformed after the smoothing; 0 for none
};

struct LayerWeights {
  const float *input_norm, *post_norm;
  const float *q_norm, *k_norm;  // over each head, before RoPE; null where the model has none
  Linear qkv, dense, fc_gate, proj;
};

struct DecoderWeights {
  const uint16_t* embedding;  // [vocab, hidden] bfloat16
  std::vector<LayerWeights> layers;
  const float* final_norm;
  Linear head;
  const uint16_t* head_rows;  // [vocab, hidden] bfloat16, which the best logits are computed from again; null: they stand
  const float *cos, *sin;  // [max_seq_len, head / 2]
};

// One sequence's rows in a pass: `rows` tokens appended to its cache, the last `logit_rows` of which want logits.
struct Part {
  int sequence, rows, logit_rows;
  // Of the last rows, where they are a tree: each one's parent among them, before it, or -1 for the row before all of them, which
  // may lie in the cache.
  std::vector<int> parents;
};

// Rows [rows, padded columns] in place of tokens: what the residual stream begins with, and what the first layer's attention reads
// instead of that after a norm.
struct GivenRows {
  const float *residual, *attention_input;
};

class Decoder {
 public:
  // `pool` outlives the decoder; others may use it between two steps. collectives: null for a single rank.
  Decoder(const DecoderShape& shape, DecoderWeights weights, ThreadPool& pool, const Kernels* kernels,
          std::unique_ptr<Collectives> collectives);

  KvCache& cache() { return cache_; }
  // Logits [sum of logit_rows, padded(vocab)] float32, overwritten by the next step. Throws std::invalid_argument, before anything
  // changes, for an unknown token, more than max_rows rows or more than max_seq_len cached tokens. Ranks but the first have no
  // logits; what a collective throws comes out of step once the pass has ended without it.
  std::shared_ptr<const float> step(const std::vector<Part>& parts, const int32_t* tokens);
  // The same for rows that are no tokens', which throws nothing about tokens. Returns the residual stream behind the last layer
  // [rows, padded(hidden)], overwritten by the next step; no logits.
  const float* step(const std::vector<Part>& parts, const GivenRows& given);

  // From the next step on keeps what enters each of these layers, or leaves the final norm where the number is that of all layers.
  // Throws std::invalid_argument for another number.
  void keep_states(std::vector<int> layers);
  // The states [hidden] of a row of the last step, at a place in the list of those kept. Throws std::invalid_argument where there are
  // none.
  const float* state(int place, int row) const;

  // Collectives begun and ended so far; odd while this rank is in one. Any thread may ask.
  int64_t progress() const { return progress_.load(std::memory_order_relaxed); }
  double collective_seconds() const { return collective_seconds_; }

 private:
  // Key and value go to `slot`; what the row sees is as AttentionQuery says, its slots being those from `slots` on in tree_slots_.
  struct Row { int part, position, slot, ordered, slots; };
  // Activations: floats, and room for the codes that some linear reads instead, with a scale per row.
  struct Activations {
    Buffer<float> floats;
    Buffer<int8_t> codes8;
    Buffer<int16_t> codes16;
    int stride = 0;
  };
  // One of a rank's best logits, behind its share of a row; id -1 where there are fewer.
  struct Rescored {
    int32_t id;  // in this rank's head
    float logit;
  };
  // Results of the chunks of one attention task.
  struct Partials {
    Buffer<float> floats;
    std::atomic<int> done{0};  // chunks
  };

  int check(const std::vector<Part>& parts) const;
  void check_tokens(const int32_t* tokens, int rows) const;
  void run(const std::vector<Part>& parts);
  Row row_of(int part, int length, int i);
  void forward(int thread);
  void layer(int index, int thread);
  void embed(int thread);
  void enter(int thread);
  void keep(int layer, int thread);
  void normalize(const float* weight, int thread);
  void normalize_head(const float* weight, float* x, float* scratch) const;
  void rotate(int layer, int thread);
  void attend(int layer, int thread);
  Partials& partials(const AttentionPiece& piece, int thread);
  void quantize(const Linear& reader, Activations& x, int rows, int thread);
  void linear(const Linear& linear, const Activations& x, int rows, int n, Output out, int thread);
  void add_to_residual(const Linear& linear, Activations& x, int thread);
  void logits(int thread);
  void rescore(int row, float* logits, int thread);
  // Of several ranks, in decoder_ranks.cpp.
  void prepare_ranks();
  template <class Collective>
  void together(int thread, Collective collective);
  void add_all_to_residual(const Linear& linear, Activations& x, int thread);
  void collect_logits(int thread);
  int share_stride() const;
  Rescored* rescored(float* share) const { return reinterpret_cast<Rescored*>(share + padded(shape_.vocab_share)); }

  const DecoderShape shape_;
  const DecoderWeights weights_;
  const Kernels* const kernels_;
  ThreadPool& pool_;
  KvCache cache_;

  const std::unique_ptr<Collectives> collectives_;
  std::exception_ptr collective_error_;
  std::atomic<int64_t> progress_{0};
  double collective_seconds_ = 0;

  // The current pass.
  std::vector<Part> parts_;
  std::vector<int> first_row_;                // of each part
  std::vector<std::vector<uint16_t*>> pages_;  // of each part's sequence
  std::vector<Row> rows_;
  std::vector<int> tree_slots_;                // of the rows of trees: those of their ancestors, then their own
  std::vector<int> logit_rows_;
  const int32_t* tokens_ = nullptr;  // or null, and then `given_`
  GivenRows given_{};

  Buffer<float> hidden_, qkv_;
  std::vector<int> kept_layers_;
  Buffer<float> states_;  // [kept layers, max_rows, padded(hidden)]
  std::shared_ptr<Buffer<float>> logits_ = std::make_shared<Buffer<float>>();  // shared with views that callers may keep
  Activations entered_, normed_, attended_, gated_;
  // Of several ranks: sums over this rank's columns, by what the linear reads (of floats those of every rank); absolute maxima of
  // rows as bits; logits, of every rank on the first.
  Buffer<float> float_sums_;
  Buffer<int32_t> sums8_, largest_;
  Buffer<double> sums16_;
  Buffer<float> shares_;
  std::vector<RowScale> scales_;
  std::vector<AttentionPart> attention_parts_;
  std::vector<std::vector<AttentionPiece>> attention_pieces_;  // of each thread
  struct Scratch {
    Buffer<float> floats;
    Buffer<uint16_t> head_block;                // rows of the head, packed as a block of a linear
    std::vector<int32_t> best;                  // ids of a row's best logits
    std::vector<const uint16_t*> keys, values;  // pages of one sequence, layer and key/value head
    Partials own, shared;                       // of tasks of this thread alone; of the task that others finish
  };
  std::vector<Scratch> scratch_;  // per thread
};

}  // namespace quasar
