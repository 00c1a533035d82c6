// Attention, over sixteen lanes; as kernels_body.h.
//
// A query's positions are cut into chunks at absolute positions. Each chunk is a softmax of its own, and the chunks are joined
// in order, so a result depends neither on which queries share the reading of keys and values nor on who computed which chunk.
// What a query sees is summed by position, wherever it lies: a path through a tree gives the bits of the same path as a chain.
#pragma once
#include "exp_body.h"
#include "kernels.h"

namespace {

template <int G>
struct Tile { static constexpr int kQueries = G; };

// Calls run(Tile<count>()).
template <int G = kTileAttention, class Run>
inline void with_tile(int count, const Run& run) {
  if constexpr (G > 0) {
    if (count == G) run(Tile<G>());
    else with_tile<G - 1>(count, run);
  }
}

// q[d * G + g] = channel d of query g: what the scores read is then one stream.
void pack_queries(const AttentionQuery* queries, int count, int head, float* q) {
  for (int d = 0; d < head; ++d)
    for (int g = 0; g < count; ++g) *q++ = queries[g].q[d];
}

// Scores of G queries against 16 keys: sums over the head run over even and odd channels apart, like the BF16 linear.
template <int G>
void score_keys(const float* q, const uint16_t* keys, const uint16_t* ahead, int head, float* scores) {
  F even[G], odd[G];
  for (int g = 0; g < G; ++g) even[g] = odd[g] = set1(0.0f);
  for (int d = 0; d < head; d += 2, q += 2 * G) {
    prefetch(ahead + d * 16);
    F k_even, k_odd;
    load_bf16_pairs(keys + d * 16, k_even, k_odd);
    for (int g = 0; g < G; ++g) {
      even[g] = fma(set1(q[g]), k_even, even[g]);
      odd[g] = fma(set1(q[G + g]), k_odd, odd[g]);
    }
  }
  for (int g = 0; g < G; ++g) store(scores + g * kChunk, add(even[g], odd[g]));
}

// In place: scores -> exp(score - largest), zero beyond `count`. partial gets the largest score and the sum.
void softmax_numerators(float* scores, int count, float* partial) {
  const int end = padded(count);
  for (int j = count; j < end; ++j) scores[j] = -__builtin_inff();
  F top = set1(-__builtin_inff());
  for (int j = 0; j < end; j += 16) top = max(load(scores + j), top);
  float lanes[16];
  store(lanes, top);
  float largest = lanes[0];
  for (int i = 1; i < 16; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
  for (int j = 0; j < end; j += 16) store(scores + j, exp(sub(load(scores + j), set1(largest))));
  for (int j = count; j < end; ++j) scores[j] = 0.0f;
  F sum = set1(0.0f);
  for (int j = 0; j < end; j += 16) sum = add(sum, load(scores + j));
  partial[0] = largest;
  partial[1] = reduce_add(sum);
}

// y += sum over slots [from, to) of a page of p[slot - from] * value[slot], slots in order.
template <int G>
void weigh_values(const float* p, const uint16_t* values, const uint16_t* ahead, int from, int to, int head, float* y) {
  if (from >= to) return;
  const int size = partial_size(head);
  for (int d = 0; d < head; d += 32, values += kPage * 32, ahead += kPage * 32) {
    F low[G], high[G];
    for (int g = 0; g < G; ++g) {
      low[g] = load(y + g * size + d);
      high[g] = load(y + g * size + d + 16);
    }
    for (int j = from; j < to; ++j) {
      prefetch(ahead + j * 32);
      F v_low, v_high;
      load_bf16_pairs(values + j * 32, v_low, v_high);
      for (int g = 0; g < G; ++g) {
        const F weight = set1(p[g * kChunk + j - from]);
        low[g] = fma(weight, v_low, low[g]);
        high[g] = fma(weight, v_high, high[g]);
      }
    }
    for (int g = 0; g < G; ++g) {
      store(y + g * size + d, low[g]);
      store(y + g * size + d + 16, high[g]);
    }
  }
}

inline int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }

void attend_chunks(const AttentionQuery* queries, int count, const uint16_t* const* keys, const uint16_t* const* values, int head,
                   int begin, int end, float* partials, float* scratch) {
  const int size = partial_size(head), tiles = (count + kTileAttention - 1) / kTileAttention;
  float *scores = scratch, *elsewhere = scores + kMaxQueries * kChunk, *packed = elsewhere + kMaxQueries * kChunk;
  int first[kMaxQueries + 1], longest = 0;
  int from = 0, to = 0;  // slots that some query does not see at the position of their number
  for (int t = 0; t <= tiles; ++t) first[t] = count * t / tiles;
  for (int t = 0; t < tiles; ++t) pack_queries(queries + first[t], first[t + 1] - first[t], head, packed + first[t] * head);
  for (int g = 0; g < count; ++g) {
    const auto [q, length, ordered, slots] = queries[g];
    longest = ordered > longest ? ordered : longest;
    if (ordered == length) continue;
    const int last = slots[length - ordered - 1];
    from = to && from < ordered ? from : ordered;
    to = last < to ? to : last + 1;
  }
  const int pages = clamp((longest + kPage - 1) / kPage, 0, end * kChunk / kPage);
  const auto each_tile = [&](const auto& run) {
    for (int t = 0; t < tiles; ++t) with_tile(first[t + 1] - first[t], [&](auto tile) { run(tile, first[t]); });
  };

  for (int chunk = begin; chunk < end; ++chunk) {
    float* partial = partials + static_cast<int64_t>(chunk) * count * size;
    const int start = chunk * kChunk, from_page = start / kPage, to_page = clamp(pages, 0, from_page + kChunk / kPage);
    int visible[kMaxQueries], ordered[kMaxQueries];
    for (int g = 0; g < count; ++g) {
      visible[g] = clamp(queries[g].length - start, 0, kChunk);
      ordered[g] = clamp(queries[g].ordered - start, 0, kChunk);
    }

    for (int page = from_page; page < to_page; ++page) {
      const uint16_t* ahead = page + 1 < to_page ? keys[page + 1] : values[from_page];
      for (int slot = 0; slot < kPage && page * kPage + slot < longest; slot += 16)
        each_tile([&](auto tile, int g) {
          score_keys<tile.kQueries>(packed + g * head, keys[page] + slot * head, ahead + slot * head, head,
                                    scores + g * kChunk + page * kPage - start + slot);
        });
    }
    // Keys out of order are scored where they lie, for all queries together; then each query takes what it sees.
    for (int strip = from / kBlock * kBlock; strip < to && start + kChunk > from; strip += kChunk) {
      for (int slot = strip; slot < to && slot < strip + kChunk; slot += kBlock) {
        const uint16_t* block = keys[slot / kPage] + slot % kPage * head;
        each_tile([&](auto tile, int g) {
          score_keys<tile.kQueries>(packed + g * head, block, block, head, elsewhere + g * kChunk + slot - strip);
        });
      }
      for (int g = 0; g < count; ++g)
        for (int i = ordered[g]; i < visible[g]; ++i) {
          const int slot = queries[g].slots[start + i - queries[g].ordered] - strip;
          if (slot >= 0 && slot < kChunk) scores[g * kChunk + i] = elsewhere[g * kChunk + slot];
        }
    }
    for (int g = 0; g < count; ++g) {
      float* y = partial + g * size;
      for (int d = 0; d < size; d += 16) store(y + d, set1(0.0f));
      if (visible[g]) softmax_numerators(scores + g * kChunk, visible[g], y + size - 16);
    }
    for (int page = from_page; page < to_page; ++page) {
      const uint16_t* ahead = page + 1 < to_page ? values[page + 1] : to_page < pages ? keys[to_page] : values[page];
      const int at = page * kPage - start;  // in the chunk
      each_tile([&](auto tile, int g) {
        constexpr int G = tile.kQueries;
        int common = kPage;
        for (int i = g; i < g + G; ++i) common = clamp(ordered[i] - at, 0, common);
        const float* p = scores + g * kChunk + at;
        weigh_values<G>(p, values[page], ahead, 0, common, head, partial + g * size);
        for (int i = 0; i < G; ++i) {  // what only some queries see is read for those alone
          const int own = clamp(ordered[g + i] - at, 0, kPage);
          weigh_values<1>(p + i * kChunk + common, values[page], ahead, common, own, head, partial + (g + i) * size);
        }
      });
    }
    for (int g = 0; g < count; ++g)
      for (int i = ordered[g]; i < visible[g]; ++i) {
        const int slot = queries[g].slots[start + i - queries[g].ordered];
        const uint16_t* page = values[slot / kPage];
        weigh_values<1>(scores + g * kChunk + i, page, page, slot % kPage, slot % kPage + 1, head, partial + g * size);
      }
  }
}

void join_chunks(float* partials, int stride, int length, int head, float* out) {
  const int chunks = (length + kChunk - 1) / kChunk, at = partial_size(head) - 16;
  float largest = partials[at];
  for (int c = 1; c < chunks; ++c) {
    const float top = partials[c * stride + at];
    largest = top > largest ? top : largest;
  }
  F total = set1(0.0f);
  for (int c = 0; c < chunks; ++c) {
    float* top_and_sum = partials + c * stride + at;
    const F weight = exp(set1(top_and_sum[0] - largest));
    total = fma(weight, set1(top_and_sum[1]), total);
    store(top_and_sum, weight);
  }
  const F inverse = div(set1(1.0f), total);
  for (int d = 0; d < head; d += 16) {
    F y = set1(0.0f);
    for (int c = 0; c < chunks; ++c) y = fma(load(partials + c * stride + at), load(partials + c * stride + d), y);
    y = mul(y, inverse);
    if (d + 16 <= head) {
      store(out + d, y);
    } else {  // the next head's values follow
      float lanes[16];
      store(lanes, y);
      std::memcpy(out + d, lanes, static_cast<size_t>(head - d) * sizeof(float));
    }
  }
}

}  // namespace
