#include "decoder.h"

#include "best_logits.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace quasar {

Decoder::Decoder(const DecoderShape& shape, DecoderWeights weights, ThreadPool& pool, const Kernels* kernels,
                 std::unique_ptr<Collectives> collectives)
    : shape_(shape),
      weights_(std::move(weights)),
      kernels_(kernels),
      pool_(pool),
      cache_(shape.layers, shape.kv_heads, shape.head),
      collectives_(std::move(collectives)),
      scales_(static_cast<size_t>(shape.max_rows)),
      attention_pieces_(static_cast<size_t>(pool.size())),
      scratch_(static_cast<size_t>(pool.size())) {
  const int64_t rows = shape.max_rows;
  hidden_.resize(rows * padded(shape.hidden));
  qkv_.resize(rows * padded(shape.qkv()));
  const auto prepare = [&](Activations& x, const Linear& reader) {
    x.stride = padded(reader.weight.k);
    const int64_t size = rows * x.stride;
    if (!x.floats.size()) x.floats.resize(size);
    if (reader.input == Input::kCodes8 && !x.codes8.size()) x.codes8.resize(size);
    if (reader.input == Input::kCodes16 && !x.codes16.size()) x.codes16.resize(size);
  };
  for (const LayerWeights& layer : weights_.layers) {
    prepare(shape.attention_inputs ? entered_ : normed_, layer.qkv);
    prepare(attended_, layer.dense);
    prepare(normed_, layer.fc_gate);
    prepare(gated_, layer.proj);
  }
  prepare(normed_, weights_.head);
  const int widest = std::max({entered_.stride, normed_.stride, attended_.stride, gated_.stride});
  for (auto& scratch : scratch_) {
    scratch.floats.resize(std::max(widest, attention_scratch(shape.head)));
    if (!weights_.head_rows) continue;
    scratch.head_block.resize(padded(shape.hidden, 2) * kBlock);
    scratch.best.reserve(best_logits_room(shape.rescored));
  }
  if (collectives_) prepare_ranks();
}

int Decoder::check(const std::vector<Part>& parts) const {
  int rows = 0;
  for (const Part& part : parts) {
    const int after = cache_.length(part.sequence) + part.rows;
    if (after > shape_.max_seq_len)
      throw std::invalid_argument("sequence " + std::to_string(part.sequence) + " would hold " + std::to_string(after) +
                                  " tokens; the engine holds " + std::to_string(shape_.max_seq_len));
    rows += part.rows;
    const int nodes = static_cast<int>(part.parents.size());
    bool tree = nodes <= part.rows;
    for (int i = 0; i < nodes; ++i) tree &= part.parents[static_cast<size_t>(i)] >= -1 && part.parents[static_cast<size_t>(i)] < i;
    if (!tree) throw std::invalid_argument("the parents of sequence " + std::to_string(part.sequence) + " are no tree of its rows");
  }
  if (rows > shape_.max_rows)
    throw std::invalid_argument("the pass would hold " + std::to_string(rows) + " rows; the engine holds " +
                                std::to_string(shape_.max_rows));
  return rows;
}

void Decoder::check_tokens(const int32_t* tokens, int rows) const {
  for (int row = 0; row < rows; ++row)
    if (tokens[row] < 0 || tokens[row] >= shape_.vocab)
      throw std::invalid_argument("token id " + std::to_string(tokens[row]) + " is outside the vocabulary of " +
                                  std::to_string(shape_.vocab));
}

std::shared_ptr<const float> Decoder::step(const std::vector<Part>& parts, const int32_t* tokens) {
  check_tokens(tokens, check(parts));
  tokens_ = tokens;
  run(parts);
  return std::shared_ptr<const float>(logits_, logits_->get());
}

const float* Decoder::step(const std::vector<Part>& parts, const GivenRows& given) {
  check(parts);
  tokens_ = nullptr;
  given_ = given;
  run(parts);
  return hidden_.get();
}

void Decoder::run(const std::vector<Part>& parts) {
  parts_ = parts;
  first_row_.clear();
  rows_.clear();
  tree_slots_.clear();
  logit_rows_.clear();
  attention_parts_.clear();
  pages_.resize(parts.size());
  size_t most_pages = 0;
  for (int p = 0; p < static_cast<int>(parts.size()); ++p) {
    const Part& part = parts[static_cast<size_t>(p)];
    const int length = cache_.length(part.sequence);
    cache_.reserve(part.sequence, part.rows);
    auto& pages = pages_[static_cast<size_t>(p)];
    pages.clear();
    for (int i = 0; i * kPage < length + part.rows; ++i) pages.push_back(cache_.page(part.sequence, i));
    most_pages = std::max(most_pages, pages.size());
    first_row_.push_back(static_cast<int>(rows_.size()));
    attention_parts_.push_back({part.rows, length});
    for (int i = 0; i < part.rows; ++i) {
      if (i >= part.rows - part.logit_rows) logit_rows_.push_back(static_cast<int>(rows_.size()));
      rows_.push_back(row_of(p, length, i));
    }
  }
  plan_attention(attention_parts_, shape_.kv_heads, shape_.heads / shape_.kv_heads, attention_pieces_);
  for (size_t thread = 0; thread < scratch_.size(); ++thread) {  // here, because threads of the pool must not throw
    auto& scratch = scratch_[thread];
    scratch.keys.resize(most_pages);
    scratch.values.resize(most_pages);
    for (const AttentionPiece& piece : attention_pieces_[thread]) {
      auto& floats = partials(piece, static_cast<int>(thread)).floats;
      const int64_t size = static_cast<int64_t>(piece.chunks) * piece.count * partial_size(shape_.head);
      if (floats.size() < size) floats.resize(size);
    }
  }
  const int64_t wanted = shape_.rank ? 0 : static_cast<int64_t>(logit_rows_.size()) * padded(shape_.vocab);
  if (logits_->size() < wanted) {
    logits_ = std::make_shared<Buffer<float>>();
    logits_->resize(wanted);
  }
  if (collectives_) {
    const int64_t shares = static_cast<int64_t>(logit_rows_.size()) * share_stride() * (shape_.rank ? 1 : shape_.ranks);
    if (shares_.size() < shares) shares_.resize(shares);
    collective_error_ = nullptr;
  }
  pool_.run([this](int thread) { forward(thread); });
  if (collective_error_) std::rethrow_exception(collective_error_);
  for (const Part& part : parts_) cache_.advance(part.sequence, part.rows);
}

// Row i of a part whose sequence has `length` positions in the cache; the rows before it are there.
Decoder::Row Decoder::row_of(int p, int length, int i) {
  const Part& part = parts_[static_cast<size_t>(p)];
  const int root = part.rows - static_cast<int>(part.parents.size());  // rows before the tree
  if (i < root) return {p, length + i, length + i, length + i + 1, 0};
  const int parent = part.parents[static_cast<size_t>(i - root)], slots = static_cast<int>(tree_slots_.size());
  Row row{p, length + root, length + i, length + root, slots};
  if (parent >= 0) {
    const Row& above = rows_[static_cast<size_t>(first_row_.back() + root + parent)];
    row.position = above.position + 1;
    for (int d = 0; d < row.position - row.ordered; ++d) tree_slots_.push_back(tree_slots_[static_cast<size_t>(above.slots + d)]);
  }
  tree_slots_.push_back(row.slot);
  return row;
}

void Decoder::forward(int thread) {
  if (tokens_) embed(thread);
  else enter(thread);
  for (int i = 0; i < shape_.layers; ++i) {
    keep(i, thread);
    layer(i, thread);
  }
  keep(shape_.layers, thread);
  if (!logit_rows_.empty()) logits(thread);
}

// Between two barriers every thread works on its own rows, or on its own output blocks of all rows.
void Decoder::layer(int index, int thread) {
  const LayerWeights& w = weights_.layers[static_cast<size_t>(index)];
  const int rows = static_cast<int>(rows_.size());

  Activations& entering = index || tokens_ ? normed_ : entered_;
  if (&entering == &normed_) normalize(w.input_norm, thread);
  quantize(w.qkv, entering, rows, thread);
  pool_.barrier();
  linear(w.qkv, entering, rows, shape_.qkv(), {qkv_.get(), padded(shape_.qkv()), Epilogue::kStore}, thread);
  pool_.barrier();
  rotate(index, thread);
  pool_.barrier();
  attend(index, thread);
  pool_.barrier();
  add_to_residual(w.dense, attended_, thread);
  normalize(w.post_norm, thread);
  quantize(w.fc_gate, normed_, rows, thread);
  pool_.barrier();
  linear(w.fc_gate, normed_, rows, shape_.intermediate, {gated_.floats.get(), gated_.stride, Epilogue::kSiluMul}, thread);
  pool_.barrier();
  add_to_residual(w.proj, gated_, thread);
}

// Ends at a barrier.
void Decoder::add_to_residual(const Linear& reader, Activations& x, int thread) {
  if (collectives_) return add_all_to_residual(reader, x, thread);
  const int rows = static_cast<int>(rows_.size());
  if (reader.input != Input::kFloats) {
    quantize(reader, x, rows, thread);
    pool_.barrier();
  }
  linear(reader, x, rows, shape_.hidden, {hidden_.get(), padded(shape_.hidden), Epilogue::kAdd}, thread);
  pool_.barrier();
}

void Decoder::embed(int thread) {
  const int hidden = shape_.hidden, stride = padded(hidden);
  const auto [begin, end] = share(static_cast<int>(rows_.size()), thread, pool_.size());
  for (int row = begin; row < end; ++row) {
    const uint16_t* from = weights_.embedding + static_cast<int64_t>(tokens_[row]) * hidden;
    float* to = hidden_.get() + static_cast<int64_t>(row) * stride;
    for (int i = 0; i < hidden; ++i) to[i] = bf16_to_float(from[i]);
    for (int i = hidden; i < stride; ++i) to[i] = 0.0f;  // an earlier pass may have left NaN in this row's padding
  }
}

void Decoder::enter(int thread) {
  const int stride = padded(shape_.hidden);
  const auto [begin, end] = share(static_cast<int>(rows_.size()), thread, pool_.size());
  for (int64_t row = begin; row < end; ++row) {
    std::copy_n(given_.residual + row * stride, stride, hidden_.get() + row * stride);
    std::copy_n(given_.attention_input + row * entered_.stride, entered_.stride, entered_.floats.get() + row * entered_.stride);
  }
}

void Decoder::normalize(const float* weight, int thread) {
  const int stride = normed_.stride;
  const auto [begin, end] = share(static_cast<int>(rows_.size()), thread, pool_.size());
  for (int row = begin; row < end; ++row) {
    const int64_t at = static_cast<int64_t>(row) * stride;
    kernels_->rms_norm(hidden_.get() + at, weight, shape_.norm_epsilon, shape_.hidden, normed_.floats.get() + at);
  }
}

// The first rows of x become the codes that their reader wants, if it wants codes.
void Decoder::quantize(const Linear& reader, Activations& x, int rows, int thread) {
  if (reader.input == Input::kFloats) return;
  float* scratch = scratch_[static_cast<size_t>(thread)].floats.get();
  const auto [begin, end] = share(rows, thread, pool_.size());
  for (int row = begin; row < end; ++row) {
    const int64_t at = static_cast<int64_t>(row) * x.stride;
    const auto codes = [&](auto kernel, auto* to) {
      return kernel(x.floats.get() + at, reader.inverse_smoother, reader.hadamard, reader.weight.k, scratch, to + at);
    };
    scales_[static_cast<size_t>(row)] = reader.input == Input::kCodes8 ? codes(kernels_->quantize8, x.codes8.get())
                                                                       : codes(kernels_->quantize16, x.codes16.get());
  }
}

void Decoder::linear(const Linear& linear, const Activations& x, int rows, int n, Output out, int thread) {
  const Weight& weight = linear.weight;
  const auto [begin, end] = share(padded(n) / kBlock, thread, pool_.size());
  switch (linear.input) {
    case Input::kFloats: return kernels_->linear_bf16(weight, x.floats.get(), x.stride, rows, begin, end, out);
    case Input::kCodes8: return kernels_->linear_w8a8(weight, x.codes8.get(), x.stride, scales_.data(), rows, begin, end, out);
    case Input::kCodes16: return kernels_->linear_w8a16(weight, x.codes16.get(), x.stride, scales_.data(), rows, begin, end, out);
  }
}

// The norm over one head of q or k. A head that does not fill whole vectors is computed aside, padded with zeros, so that its
// neighbour is neither summed nor overwritten.
void Decoder::normalize_head(const float* weight, float* x, float* scratch) const {
  const int head = shape_.head, width = padded(head);
  if (width == head) {
    kernels_->rms_norm(x, weight, shape_.norm_epsilon, head, x);
    return;
  }
  std::copy_n(x, head, scratch);
  std::fill(scratch + head, scratch + width, 0.0f);
  kernels_->rms_norm(scratch, weight, shape_.norm_epsilon, head, scratch);
  std::copy_n(scratch, head, x);
}

// Norms over heads, where there are any, and RoPE on queries (which also take the 1 / sqrt(head) of attention) and keys; keys
// and values go to the cache as BF16. Threads share heads, not rows: positions of one head share cache lines.
void Decoder::rotate(int layer, int thread) {
  const int head = shape_.head, half = head / 2, group = shape_.heads / shape_.kv_heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(head));
  const LayerWeights& w = weights_.layers[static_cast<size_t>(layer)];
  float* scratch = scratch_[static_cast<size_t>(thread)].floats.get();
  // Each key/value head comes after the queries that read it.
  const auto [begin, end] = share(shape_.heads + shape_.kv_heads, thread, pool_.size());
  for (int row = 0; row < static_cast<int>(rows_.size()); ++row) {
    const Row& place = rows_[static_cast<size_t>(row)];
    const float* cos = weights_.cos + static_cast<int64_t>(place.position) * half;
    const float* sin = weights_.sin + static_cast<int64_t>(place.position) * half;
    float* qkv = qkv_.get() + static_cast<int64_t>(row) * padded(shape_.qkv());
    uint16_t* page = pages_[static_cast<size_t>(place.part)][static_cast<size_t>(place.slot / kPage)];
    const int slot = place.slot % kPage;
    for (int unit = begin; unit < end; ++unit) {
      const int kv_head = unit / (group + 1), query = unit % (group + 1);
      const bool is_query = query < group;
      float* x = qkv + (is_query ? kv_head * group + query : shape_.heads + kv_head) * head;
      if (w.q_norm) normalize_head(is_query ? w.q_norm : w.k_norm, x, scratch);
      const float factor = is_query ? scale : 1.0f;
      for (int i = 0; i < half; ++i) {
        const float a = x[i], b = x[i + half];
        x[i] = (a * cos[i] - b * sin[i]) * factor;
        x[i + half] = (b * cos[i] + a * sin[i]) * factor;
      }
      if (is_query) continue;
      uint16_t* key = page + cache_.keys_at(layer, kv_head) + slot / 16 * 16 * head + slot % 16 * 2;
      for (int i = 0; i < head; i += 2, key += 32) {
        key[0] = float_to_bf16(x[i]);
        key[1] = float_to_bf16(x[i + 1]);
      }
      const float* v = x + shape_.kv_heads * head;
      uint16_t* value = page + cache_.values_at(layer, kv_head) + slot * 32;
      for (int i = 0; i < head; ++i) value[i / 32 * kPage * 32 + i % 16 * 2 + i % 32 / 16] = float_to_bf16(v[i]);
    }
  }
}

// Whoever computes the last chunk of a task joins its chunks.
void Decoder::attend(int layer, int thread) {
  const int head = shape_.head, group = shape_.heads / shape_.kv_heads, size = partial_size(head);
  auto& scratch = scratch_[static_cast<size_t>(thread)];
  for (const AttentionPiece& piece : attention_pieces_[static_cast<size_t>(thread)]) {
    const auto& pages = pages_[static_cast<size_t>(piece.part)];
    for (size_t i = 0; i < pages.size(); ++i) {
      scratch.keys[i] = pages[i] + cache_.keys_at(layer, piece.kv_head);
      scratch.values[i] = pages[i] + cache_.values_at(layer, piece.kv_head);
    }
    AttentionQuery queries[kMaxQueries];
    float* out[kMaxQueries];
    for (int i = 0; i < piece.count; ++i) {
      const int64_t row = first_row_[static_cast<size_t>(piece.part)] + (piece.first + i) / group;
      const Row& place = rows_[static_cast<size_t>(row)];
      const int at = (piece.kv_head * group + (piece.first + i) % group) * head;
      queries[i] = {qkv_.get() + row * padded(shape_.qkv()) + at, place.position + 1, place.ordered, tree_slots_.data() + place.slots};
      out[i] = attended_.floats.get() + row * attended_.stride + at;
    }
    Partials& to = partials(piece, thread);
    float* floats = to.floats.get();
    kernels_->attend_chunks(queries, piece.count, scratch.keys.data(), scratch.values.data(), head, piece.begin, piece.end, floats,
                            scratch.floats.get());
    const int computed = piece.end - piece.begin;
    if (to.done.fetch_add(computed, std::memory_order_acq_rel) + computed < piece.chunks) continue;
    to.done.store(0, std::memory_order_relaxed);
    for (int i = 0; i < piece.count; ++i)
      kernels_->join_chunks(floats + i * size, piece.count * size, queries[i].length, head, out[i]);
  }
}

Decoder::Partials& Decoder::partials(const AttentionPiece& piece, int thread) {
  return piece.owner < 0 ? scratch_[static_cast<size_t>(thread)].own : scratch_[static_cast<size_t>(piece.owner)].shared;
}

// The final norm and the head, for the rows that want logits.
void Decoder::logits(int thread) {
  const int stride = normed_.stride, count = static_cast<int>(logit_rows_.size());
  const auto [begin, end] = share(count, thread, pool_.size());
  for (int i = begin; i < end; ++i) {
    float* to = normed_.floats.get() + static_cast<int64_t>(i) * stride;
    const float* from = hidden_.get() + static_cast<int64_t>(logit_rows_[static_cast<size_t>(i)]) * stride;
    kernels_->rms_norm(from, weights_.final_norm, shape_.norm_epsilon, shape_.hidden, to);
  }
  quantize(weights_.head, normed_, count, thread);
  pool_.barrier();
  const Output out = collectives_ ? Output{shares_.get(), share_stride(), Epilogue::kStore}
                                  : Output{logits_->get(), padded(shape_.vocab), Epilogue::kStore};
  linear(weights_.head, normed_, count, shape_.vocab_share, out, thread);
  if (weights_.head_rows) {
    pool_.barrier();
    for (int i = begin; i < end; ++i) rescore(i, out.y + static_cast<int64_t>(i) * out.stride, thread);
  }
  if (collectives_) collect_logits(thread);
}

// The best logits of a row become those of the BF16 head: its rows are packed for the kernel that computes them there. Of several
// ranks each puts its own aside, because only the first knows the best of all.
void Decoder::rescore(int row, float* logits, int thread) {
  auto& [floats, block, best, keys, values, own, shared] = scratch_[static_cast<size_t>(thread)];
  const int hidden = shape_.hidden;
  const float* x = normed_.floats.get() + static_cast<int64_t>(row) * normed_.stride;
  const int count = std::clamp(shape_.vocab - shape_.rank * shape_.vocab_share, 0, shape_.vocab_share);  // without padding
  best_logits(*kernels_, logits, count, shape_.rescored, best);
  // Their rows lie anywhere, so all are asked for before the first is needed.
  constexpr int kLine = 64 / sizeof(uint16_t);
  for (const int32_t id : best)
    for (int k = 0; k < hidden; k += kLine) __builtin_prefetch(weights_.head_rows + static_cast<int64_t>(id) * hidden + k);
  for (size_t first = 0; first < best.size(); first += kBlock) {
    const size_t last = std::min(first + kBlock, best.size());
    for (size_t c = first; c < last; ++c) {
      const uint16_t* from = weights_.head_rows + static_cast<int64_t>(best[c]) * hidden;
      uint16_t* to = block.get() + (c - first) * 2;
      for (int k = 0; k + 1 < hidden; k += 2, to += 2 * kBlock) std::memcpy(to, from + k, 2 * sizeof(uint16_t));
      if (hidden % 2) *to = from[hidden - 1];
    }
    float y[kBlock];
    kernels_->linear_bf16({block.get(), nullptr, nullptr, hidden}, x, normed_.stride, 1, 0, 1, {y, kBlock, Epilogue::kStore});
    for (size_t c = first; c < last; ++c)
      if (collectives_) rescored(logits)[c] = {best[c], y[c - first]};
      else logits[best[c]] = y[c - first];
  }
  if (collectives_)
    for (int c = static_cast<int>(best.size()); c < shape_.rescored; ++c) rescored(logits)[c].id = -1;
}

}  // namespace quasar
