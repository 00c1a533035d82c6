// The kernels, written once over sixteen lanes. Included by one file per instruction set, after its simd header; everything is
// in an unnamed namespace (and no inline function of the standard library is used), so no code compiled for one instruction
// set can be linked in place of another's.
#pragma once
#include "attention_body.h"
#include "exp_body.h"
#include "kernels.h"

namespace {

constexpr float kSmallestNormal = 1.17549435e-38f;
constexpr int kPrefetchBytes = 8192;  // ahead in the sequential weight stream: the latency of memory at its full bandwidth

void silu_mul(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < padded(n); i += 16) store(y + i, mul(silu(load(gate + i)), load(up + i)));
}

inline float reduce_max_bits(I a) {
  int32_t lanes[16];
  store(lanes, a);
  int32_t best = 0;
  for (int i = 0; i < 16; ++i) best = lanes[i] > best ? lanes[i] : best;
  float value;
  std::memcpy(&value, &best, 4);
  return value;
}

void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  const int end = padded(n);
  F squares = set1(0.0f);
  for (int i = 0; i < end; i += 16) { const F v = load(x + i); squares = fma(v, v, squares); }
  const float inverse = 1.0f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + eps);
  for (int i = 0; i < end; i += 16) store(y + i, mul(mul(load(x + i), set1(inverse)), load(weight + i)));
}

// A butterfly within each vector: lanes i and i + H become their sum and their difference.
template <int H>
inline F butterfly(F x) {
  float signs[16];
  for (int i = 0; i < 16; ++i) signs[i] = i & H ? -1.0f : 1.0f;
  return fma(x, load(signs), swap_lanes<H>(x));
}

// y = x * inverse_smoother, then the fast Walsh-Hadamard transform of each block: first within vectors, then between them.
void smooth(const float* x, const float* inverse_smoother, int hadamard, int n, float* y) {
  const int end = padded(n);
  const F norm = set1(hadamard ? 1.0f / __builtin_sqrtf(static_cast<float>(hadamard)) : 1.0f);
  for (int i = 0; i < end; i += 16) {
    F v = mul(mul(load(x + i), load(inverse_smoother + i)), norm);
    if (hadamard > 1) v = butterfly<1>(v);
    if (hadamard > 2) v = butterfly<2>(v);
    if (hadamard > 4) v = butterfly<4>(v);
    if (hadamard > 8) v = butterfly<8>(v);
    store(y + i, v);
  }
  for (int half = 16; half < hadamard; half *= 2)
    for (int block = 0; block < end; block += 2 * half)
      for (int i = block; i < block + half; i += 16) {
        const F a = load(y + i), b = load(y + i + half);
        store(y + i, add(a, b));
        store(y + i + half, sub(a, b));
      }
}

// The absolute maximum is taken over bit patterns as integers: there NaN is larger than every number, so it is not lost.
inline float absmax(const float* x, int n) {
  I largest = set1(int32_t{0});
  for (int i = 0; i < padded(n); i += 16) largest = max(largest, abs_bits(load(x + i)));
  return reduce_max_bits(largest);
}

template <class Code>
RowScale codes(const float* x, float absmax, int n, Code* q) {
  const float limit = sizeof(Code) == 1 ? 127.0f : 32767.0f;
  const float scale = absmax < limit * kSmallestNormal ? 1.0f : absmax / limit;
  I sum = set1(int32_t{0});
  for (int i = 0; i < padded(n); i += 16) {
    const I codes = to_int(div(load(x + i), set1(scale)));  // |x| <= absmax, so no clipping is needed
    store(q + i, codes);
    sum = add(sum, codes);
  }
  int32_t lanes[16], total = 0;
  store(lanes, sum);
  for (int i = 0; i < 16; ++i) total += lanes[i];
  return {scale, total};
}

template <class Code>
RowScale quantize(const float* x, const float* inverse_smoother, int hadamard, int n, float* scratch, Code* q) {
  if (inverse_smoother) {
    smooth(x, inverse_smoother, hadamard, n, scratch);
    x = scratch;
  }
  return codes(x, absmax(x, n), n, q);
}

float smooth_in_place(float* x, const float* inverse_smoother, int hadamard, int n) {
  smooth(x, inverse_smoother, hadamard, n, x);
  return absmax(x, n);
}

RowScale codes8(const float* x, float absmax, int n, int8_t* q) { return codes(x, absmax, n, q); }
RowScale codes16(const float* x, float absmax, int n, int16_t* q) { return codes(x, absmax, n, q); }
RowScale quantize8(const float* x, const float* smoother, int hadamard, int n, float* scratch, int8_t* q) {
  return quantize(x, smoother, hadamard, n, scratch, q);
}
RowScale quantize16(const float* x, const float* smoother, int hadamard, int n, float* scratch, int16_t* q) {
  return quantize(x, smoother, hadamard, n, scratch, q);
}

// A tile: R rows against one block of 16 output channels, or kBlocks of them, which share what is read of the rows.

struct TileW8A8 {
  static constexpr int kMaxRows = kTileW8A8, kBlocks = kBlocksW8A8;
  const Weight& weight;
  const int8_t* x;
  int stride;
  const RowScale* rows;

  using Sum = int32_t;

  // y [B][R]; with kSums it takes the sums themselves.
  template <int R, int B = 1, bool kSums = false, class Y>
  void run(int block, int row, Y* y) const {
    // Few rows alone would wait for the latency of their sums: they keep several, which integers may do.
    constexpr int U = R == 1 ? 4 : R <= 3 ? 2 : 1;
    constexpr int kAtATime = U == 1 ? 2 : U;  // groups; one at a time compilers copy registers
    const int groups = (weight.k + 3) / 4;
    const int8_t* w[B];
    for (int b = 0; b < B; ++b) w[b] = static_cast<const int8_t*>(weight.data) + static_cast<int64_t>(block + b) * groups * 64;
    const int8_t* xr[R];
    I acc[B][R][U];
    for (int r = 0; r < R; ++r) {
      xr[r] = x + static_cast<int64_t>(row + r) * stride;
      for (int b = 0; b < B; ++b)
        for (int u = 0; u < U; ++u) acc[b][r][u] = u ? set1(int32_t{0}) : dot4_start(rows[row + r].sum);
    }
    const auto add_group = [&](int g, int u) {
      W8 wv[B];
      for (int b = 0; b < B; ++b) wv[b] = load_w8(w[b] + g * 64);
      for (int r = 0; r < R; ++r)
        for (int b = 0; b < B; ++b) acc[b][r][u] = dot4(acc[b][r][u], wv[b], xr[r] + g * 4);
    };
    int g = 0;
    for (; g + kAtATime <= groups; g += kAtATime)
      for (int i = 0; i < kAtATime; ++i) {
        for (int b = 0; b < B; ++b) prefetch(w[b] + (g + i) * 64 + kPrefetchBytes);
        add_group(g + i, i % U);
      }
    for (; g < groups; ++g) add_group(g, 0);
    for (int b = 0; b < B; ++b)
      for (int r = 0; r < R; ++r) {
        I total = acc[b][r][0];
        for (int u = 1; u < U; ++u) total = add(total, acc[b][r][u]);
        if constexpr (kSums) y[b * R + r] = total;
        else y[b * R + r] = mul(mul(to_float(total), set1(rows[row + r].scale)), load(weight.scale + (block + b) * 16));
      }
  }

  template <int R>
  void sums(int block, int row, int32_t* y, int y_stride) const {
    I total[R];
    run<R, 1, true>(block, row, total);
    for (int r = 0; r < R; ++r) store(y + static_cast<int64_t>(r) * y_stride, total[r]);
  }
};

struct TileW8A16 {
  static constexpr int kMaxRows = kTileW8A16, kBlocks = 1;
  static constexpr int kFlushGroups = 128;  // 512 products of 127 * 32767 fit in an int32 (516 do); then the sum moves to double
  const Weight& weight;
  const int16_t* x;
  int stride;
  const RowScale* rows;

  using Sum = double;

  template <int R>
  void accumulate(int block, int row, double (&total)[R][16]) const {
    const int groups = (weight.k + 3) / 4;
    const int8_t* w = static_cast<const int8_t*>(weight.data) + static_cast<int64_t>(block) * groups * 64;
    const int16_t* xr[R];
    for (int r = 0; r < R; ++r) xr[r] = x + static_cast<int64_t>(row + r) * stride;
    for (int begin = 0; begin < groups; begin += kFlushGroups) {
      const int end = begin + kFlushGroups < groups ? begin + kFlushGroups : groups;
      I acc[R][2];
      for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = set1(int32_t{0});
      const auto add_group = [&](int g) {
        prefetch(w + g * 64 + kPrefetchBytes);
        const auto w0 = load_w16(w + g * 64), w1 = load_w16(w + g * 64 + 32);
        for (int r = 0; r < R; ++r) {
          acc[r][0] = dot4(acc[r][0], w0, xr[r] + g * 4);
          acc[r][1] = dot4(acc[r][1], w1, xr[r] + g * 4);
        }
      };
      int g = begin;
      for (; g + 2 <= end; g += 2) {  // two at a time: compilers then copy fewer registers
        add_group(g);
        add_group(g + 1);
      }
      for (; g < end; ++g) add_group(g);
      for (int r = 0; r < R; ++r) {
        add_pairs(total[r], acc[r][0]);
        add_pairs(total[r] + 8, acc[r][1]);
      }
    }
  }

  template <int R>
  void run(int block, int row, F* y) const {
    double total[R][16] = {};
    accumulate(block, row, total);
    for (int r = 0; r < R; ++r) {
      float lanes[16];
      for (int i = 0; i < 16; ++i) lanes[i] = static_cast<float>(total[r][i]);
      y[r] = mul(mul(load(lanes), set1(rows[row + r].scale)), load(weight.scale + block * 16));
    }
  }

  template <int R>
  void sums(int block, int row, double* y, int y_stride) const {
    double total[R][16] = {};
    accumulate(block, row, total);
    for (int r = 0; r < R; ++r) std::memcpy(y + static_cast<int64_t>(r) * y_stride, total[r], sizeof(total[r]));
  }
};

struct TileBf16 {
  static constexpr int kMaxRows = kTileBf16, kBlocks = 1;
  const Weight& weight;
  const float* x;
  int stride;

  template <int R>
  void run(int block, int row, F* y) const {
    const int pairs = (weight.k + 1) / 2;
    const uint16_t* w = static_cast<const uint16_t*>(weight.data) + static_cast<int64_t>(block) * pairs * 32;
    const float* xr[R];
    F even[R], odd[R];
    for (int r = 0; r < R; ++r) {
      xr[r] = x + static_cast<int64_t>(row + r) * stride;
      even[r] = odd[r] = set1(0.0f);
    }
    for (int p = 0; p < pairs; ++p) {
      prefetch(w + p * 32 + kPrefetchBytes / 2);
      F w_even, w_odd;
      load_bf16_pairs(w + p * 32, w_even, w_odd);
      for (int r = 0; r < R; ++r) {
        even[r] = fma(set1(xr[r][2 * p]), w_even, even[r]);
        odd[r] = fma(set1(xr[r][2 * p + 1]), w_odd, odd[r]);
      }
    }
    for (int r = 0; r < R; ++r) y[r] = add(even[r], odd[r]);
  }
};

// y [B][R]. One copy for all that call it: inlined twice, as in SiluMul, its accumulators may no longer stay in registers.
template <int R, int B, class Tile>
__attribute__((noinline)) void tile(const Tile& t, int block, int row, F* y) {
  if constexpr (B == 1) t.template run<R>(block, row, y);
  else t.template run<R, B>(block, row, y);
  if (!t.weight.bias) return;
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) y[b * R + r] = add(y[b * R + r], load(t.weight.bias + (block + b) * 16));
}

template <int R, int B, class Tile>
void finish(const Tile& t, int block, int row, const Output& out) {
  F y[B * R];
  float* to = out.y + static_cast<int64_t>(row) * out.stride + block * 16;
  const auto at = [&](int b, int r) { return to + static_cast<int64_t>(r) * out.stride + b * 16; };
  if (out.epilogue == Epilogue::kSiluMul) {
    for (int b = 0; b < B; ++b) {
      F both[2 * R];  // gate, then up
      for (int half = 0; half < 2; half += B) tile<R, B>(t, 2 * (block + b) + half, row, both + half * R);
      for (int r = 0; r < R; ++r) y[b * R + r] = mul(silu(both[r]), both[R + r]);
    }
  } else {
    tile<R, B>(t, block, row, y);
    if (out.epilogue == Epilogue::kAdd)
      for (int b = 0; b < B; ++b)
        for (int r = 0; r < R; ++r) y[b * R + r] = add(load(at(b, r)), y[b * R + r]);
  }
  for (int b = 0; b < B; ++b)
    for (int r = 0; r < R; ++r) store(at(b, r), y[b * R + r]);
}

// Before anything is scaled or added to it.
template <class Sum>
struct Sums {
  Sum* y;
  int stride;
};

template <int R, int B, class Tile>
void finish(const Tile& t, int block, int row, const Sums<typename Tile::Sum>& out) {
  for (int b = block; b < block + B; ++b)
    t.template sums<R>(b, row, out.y + static_cast<int64_t>(row) * out.stride + b * 16, out.stride);
}

// The last `rows` (< kMaxRows) rows of a block.
template <int R, class Tile, class Out>
void finish_rest(const Tile& t, int block, int row, int rows, const Out& out) {
  if constexpr (R > 0) {
    if (rows == R) finish<R, 1>(t, block, row, out);
    else finish_rest<R - 1>(t, block, row, rows, out);
  }
}

// B blocks, all rows.
template <int B, class Tile, class Out>
void finish_all(const Tile& t, int block, int rows, const Out& out) {
  int row = 0;
  for (; row + Tile::kMaxRows <= rows; row += Tile::kMaxRows) finish<Tile::kMaxRows, B>(t, block, row, out);
  for (int b = 0; b < B; ++b) finish_rest<Tile::kMaxRows - 1>(t, block + b, row, rows - row, out);
}

template <class Tile, class Out>
void linear(const Tile& t, int rows, int begin, int end, const Out& out) {
  int block = begin;
  if (rows >= 4 * Tile::kMaxRows)  // fewer wait for memory, which one stream reads best
    for (; block + Tile::kBlocks <= end; block += Tile::kBlocks) finish_all<Tile::kBlocks>(t, block, rows, out);
  for (; block < end; ++block) finish_all<1>(t, block, rows, out);
}

void linear_w8a8(const Weight& w, const int8_t* x, int stride, const RowScale* scales, int rows, int begin, int end, Output out) {
  linear(TileW8A8{w, x, stride, scales}, rows, begin, end, out);
}
void linear_w8a16(const Weight& w, const int16_t* x, int stride, const RowScale* scales, int rows, int begin, int end, Output out) {
  linear(TileW8A16{w, x, stride, scales}, rows, begin, end, out);
}
void sums_w8a8(const Weight& w, const int8_t* x, int stride, const RowScale* scales, int rows, int begin, int end, int32_t* y, int y_stride) {
  linear(TileW8A8{w, x, stride, scales}, rows, begin, end, Sums<int32_t>{y, y_stride});
}
void sums_w8a16(const Weight& w, const int16_t* x, int stride, const RowScale* scales, int rows, int begin, int end, double* y, int y_stride) {
  linear(TileW8A16{w, x, stride, scales}, rows, begin, end, Sums<double>{y, y_stride});
}
void linear_bf16(const Weight& w, const float* x, int stride, int rows, int begin, int end, Output out) {
  linear(TileBf16{w, x, stride}, rows, begin, end, out);
}

int find_above(const float* x, int from, int n, float least) {
  while (from < n && !any_above(load(x + from), set1(least))) from += 16;
  return from;
}

constexpr Kernels table(const char* name) {
  return {name,         rms_norm,     silu_mul,    quantize8, quantize16,  smooth_in_place, codes8,      codes16,
          linear_w8a8, linear_w8a16, linear_bf16, sums_w8a8, sums_w8a16, attend_chunks,   join_chunks, find_above};
}

}  // namespace
