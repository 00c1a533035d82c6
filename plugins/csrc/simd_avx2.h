// Sixteen lanes as two 256-bit registers; int8 products by AVX-VNNI where the file is compiled for it, else by AVX2.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct F { __m256 lo, hi; };
struct I { __m256i lo, hi; };

constexpr int kBlocksW8A8 = 1;
constexpr int kTileW8A8 = 4, kTileW8A16 = 3, kTileBf16 = 3, kTileAttention = 3;  // rows or queries whose accumulators fit in 16 registers

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F a) { _mm256_storeu_ps(p, a.lo); _mm256_storeu_ps(p + 8, a.hi); }
inline F set1(float x) { const __m256 v = _mm256_set1_ps(x); return {v, v}; }
inline F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline bool any_above(F a, F b) {  // NaN is not
  return _mm256_movemask_ps(_mm256_or_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))) != 0;
}
inline F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }

// Lane i gets lane i ^ H.
template <int H>
inline F swap_lanes(F a) {
  if constexpr (H == 8) return {a.hi, a.lo};
  else if constexpr (H == 4) return {_mm256_permute2f128_ps(a.lo, a.lo, 0x01), _mm256_permute2f128_ps(a.hi, a.hi, 0x01)};
  else return {_mm256_permute_ps(a.lo, H == 2 ? 0x4e : 0xb1), _mm256_permute_ps(a.hi, H == 2 ? 0x4e : 0xb1)};
}

inline I set1(int32_t x) { const __m256i v = _mm256_set1_epi32(x); return {v, v}; }
inline I add(I a, I b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline I max(I a, I b) { return {_mm256_max_epi32(a.lo, b.lo), _mm256_max_epi32(a.hi, b.hi)}; }
inline I to_int(F a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }  // half to even
inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline I abs_bits(F a) {
  const __m256i mask = _mm256_set1_epi32(0x7fffffff);
  return {_mm256_and_si256(_mm256_castps_si256(a.lo), mask), _mm256_and_si256(_mm256_castps_si256(a.hi), mask)};
}
inline F power_of_two(I n) {
  const __m256i bias = _mm256_set1_epi32(127);
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.lo, bias), 23)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n.hi, bias), 23))};
}
inline void store(int32_t* p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), a.hi);
}
inline __m256i to_int16(I a) { return _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8); }
inline void store(int16_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), to_int16(a)); }
inline void store(int8_t* p, I a) {
  const __m256i s = to_int16(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1)));
}

// 16 pairs (even k, odd k).
inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i a = _mm256_loadu_si256(q), b = _mm256_loadu_si256(q + 1);
  const __m256i mask = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, mask)), _mm256_castsi256_ps(_mm256_and_si256(b, mask))};
}

struct W8 { __m256i lo, hi; };
inline __m256i broadcast4(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return _mm256_set1_epi32(four);
}
#ifdef __AVXVNNI__
// vpdpbusd multiplies unsigned by signed: weights are shifted by 128, and the sum starts at -128 * (sum of the row's codes).
inline W8 load_w8(const int8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  const __m256i shift = _mm256_set1_epi8(static_cast<char>(0x80));
  return {_mm256_xor_si256(_mm256_loadu_si256(q), shift), _mm256_xor_si256(_mm256_loadu_si256(q + 1), shift)};
}
inline I dot4_start(int32_t sum) { return set1(-128 * sum); }
inline I dot4(I acc, W8 w, const int8_t* x) {
  const __m256i b = broadcast4(x);
  return {_mm256_dpbusd_avx_epi32(acc.lo, w.lo, b), _mm256_dpbusd_avx_epi32(acc.hi, w.hi, b)};
}
#else
// |w| * (x with the sign of w): a pair of products is at most 2 * 127 * 127, which int16 holds, because codes never reach -128.
inline W8 load_w8(const int8_t* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
inline I dot4_start(int32_t) { return set1(0); }
inline __m256i dot4_half(__m256i acc, __m256i w, __m256i b) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_sign_epi8(w, w), _mm256_sign_epi8(b, w));
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
inline I dot4(I acc, W8 w, const int8_t* x) {
  const __m256i b = broadcast4(x);
  return {dot4_half(acc.lo, w.lo, b), dot4_half(acc.hi, w.hi, b)};
}
#endif

// int16 activations: weights widened to int16; a half holds two partial sums for each of 8 output channels.
inline I load_w16(const int8_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtepi8_epi16(_mm_loadu_si128(q)), _mm256_cvtepi8_epi16(_mm_loadu_si128(q + 1))};
}
inline I dot4(I acc, I w, const int16_t* x) {
  int64_t four;
  std::memcpy(&four, x, 8);
  const __m256i b = _mm256_set1_epi64x(four);
  return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, b)), _mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, b))};
}
// total[i] += the two partial sums of channel i.
inline void add_pairs(double* total, __m256i a) {
  const __m256i sums = _mm256_add_epi32(a, _mm256_srli_epi64(a, 32));
  const __m256i even = _mm256_permutevar8x32_epi32(sums, _mm256_setr_epi32(0, 2, 4, 6, 0, 2, 4, 6));
  _mm256_storeu_pd(total, _mm256_add_pd(_mm256_loadu_pd(total), _mm256_cvtepi32_pd(_mm256_castsi256_si128(even))));
}
inline void add_pairs(double* total, I a) {
  add_pairs(total, a.lo);
  add_pairs(total + 4, a.hi);
}

// Lanes i and i + 8, then i and i + 4, i + 2, i + 1: the same tree on every instruction set.
inline float reduce_add(F a) {
  const __m256 s8 = _mm256_add_ps(a.lo, a.hi);
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
