// The operations every instruction set implements, as one table of functions.
//
// Row invariance: a row's results depend on that row alone. Integer sums are exact in any order; float sums run over k in one
// fixed order (even and odd k apart, then added) in every kernel, for every number of rows, on every instruction set. Work is
// split over rows or output blocks, never over k.
#pragma once
#include <cstdint>

namespace quasar {

constexpr int kBlock = 16;  // output channels per packed block, positions per key block, floats per vector

inline int padded(int size, int multiple = kBlock) { return (size + multiple - 1) / multiple * multiple; }

// What quantizing a row leaves besides its codes: the scale, and the sum of the codes (for kernels that shift weights to unsigned).
struct RowScale {
  float scale;
  int32_t sum;
};

enum class Epilogue { kStore, kAdd, kSiluMul };

// Where a linear's rows go: y[row * stride + n]. kAdd adds to what is there; kSiluMul expects blocks that alternate (gate, up)
// and writes silu(gate) * up, so its n counts pairs of blocks.
struct Output {
  float* y;
  int stride;
  Epilogue epilogue;
};

// A packed weight, layout as in quasar_trt/engines/cpu_layout.py. scale and bias may be null.
struct Weight {
  const void* data;
  const float* scale;
  const float* bias;
  int k;
};

// One query of one head; those computed together share a key/value head of one sequence.
struct AttentionQuery {
  const float* q;    // [head], already scaled by 1 / sqrt(head)
  int length;        // positions 0 .. length - 1 are visible
  int ordered;       // of these, positions below this have their key and value in the slot of their own number
  const int* slots;  // and position ordered + i in slots[i], ascending
};

constexpr int kMaxQueries = 32;  // computed together
constexpr int kChunk = 256;      // positions whose softmax is computed apart

// A page of one layer and key/value head, bfloat16 bits: keys [kPage / 16][head / 2][16][2], a pair being two channels of an
// even head size, and values [padded(head, 32) / 32][kPage][16][2], a pair being channels 16 apart.
constexpr int kPage = 64;

// A query's result for one chunk: values [padded(head, 32)] weighed by exp(score - largest), then the largest score and the sum
// of the weights, padded.
inline int partial_size(int head) { return padded(head, 32) + 16; }

// Of each query: the scores of a chunk, those of as many slots out of order, and itself.
inline int attention_scratch(int head) { return kMaxQueries * (2 * kChunk + head); }

struct Kernels {
  const char* name;
  // y = x / rms(x) * weight; all [n], padded entries are zero; y may be x.
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y);
  // y = silu(gate) * up, as the kSiluMul epilogue computes it.
  void (*silu_mul)(const float* gate, const float* up, int n, float* y);
  // q = round_half_even(x / scale), scale = max|x| / 127 (or 32767); 1 for a row of zeros, or so small that its scale would be
  // subnormal. NaN anywhere makes the scale NaN.
  // x is [n], q is written up to padded(n). What is quantized is x, or with an inverse smoother x * inverse_smoother in scratch,
  // each block of `hadamard` columns of which (0: none; a power of two that divides n) is multiplied by the orthonormal
  // Hadamard matrix of Sylvester's construction.
  RowScale (*quantize8)(const float* x, const float* inverse_smoother, int hadamard, int n, float* scratch, int8_t* q);
  RowScale (*quantize16)(const float* x, const float* inverse_smoother, int hadamard, int n, float* scratch, int16_t* q);
  // The same in two parts, for a row whose columns lie with several ranks: smooths (the smoother is not null) and transforms x and
  // returns its absmax; then the codes by the absmax of the whole row.
  float (*smooth_in_place)(float* x, const float* inverse_smoother, int hadamard, int n);
  RowScale (*codes8)(const float* x, float absmax, int n, int8_t* q);
  RowScale (*codes16)(const float* x, float absmax, int n, int16_t* q);
  // Linears over blocks [begin, end) of the weight and all `rows`; x rows are `stride` elements apart.
  void (*linear_w8a8)(const Weight&, const int8_t* x, int stride, const RowScale*, int rows, int begin, int end, Output);
  void (*linear_w8a16)(const Weight&, const int16_t* x, int stride, const RowScale*, int rows, int begin, int end, Output);
  void (*linear_bf16)(const Weight&, const float* x, int stride, int rows, int begin, int end, Output);
  // Their sums of codes, exact whole numbers, without scales and bias: y[row * y_stride + n].
  void (*sums_w8a8)(const Weight&, const int8_t* x, int stride, const RowScale*, int rows, int begin, int end, int32_t* y, int y_stride);
  void (*sums_w8a16)(const Weight&, const int16_t* x, int stride, const RowScale*, int rows, int begin, int end, double* y, int y_stride);
  // Softmax attention of up to kMaxQueries queries over one key/value head, each of the chunks [begin, end) apart: writes those
  // of partials [chunk][count][partial_size(head)]. keys[i] and values[i] are the pages of slots i * kPage ...;
  // scratch: attention_scratch(head) floats.
  void (*attend_chunks)(const AttentionQuery* queries, int count, const uint16_t* const* keys, const uint16_t* const* values,
                        int head, int begin, int end, float* partials, float* scratch);
  // out [head] = the attention of one query from its partials, which lie `stride` floats apart and are overwritten.
  void (*join_chunks)(float* partials, int stride, int length, int head, float* out);
  // The first of the blocks of 16 from `from` on, below n, that holds a number above `least`; n or more if there is none.
  int (*find_above)(const float* x, int from, int n, float least);
};

const Kernels* portable_kernels();
const Kernels* avx2_kernels();
const Kernels* avxvnni_kernels();
const Kernels* avx512_kernels();

// Tables that were compiled in and that this processor can run, best first; ends with null.
const Kernels* const* runnable_kernels();

inline float bf16_to_float(uint16_t bits) {
  union { uint32_t u; float f; } value = {static_cast<uint32_t>(bits) << 16};
  return value.f;
}

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t float_to_bf16(float x) {
  union { float f; uint32_t u; } value = {x};
  if ((value.u & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((value.u >> 16) | 0x40u);
  return static_cast<uint16_t>((value.u + 0x7fffu + ((value.u >> 16) & 1u)) >> 16);
}

}  // namespace quasar
