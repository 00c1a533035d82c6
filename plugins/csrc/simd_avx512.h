// Sixteen lanes as one 512-bit register; int8 products by AVX-512 VNNI.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace {

struct F { __m512 v; };
struct I { __m512i v; };

constexpr int kBlocksW8A8 = 2;
constexpr int kTileW8A8 = 8, kTileW8A16 = 8, kTileBf16 = 8, kTileAttention = 12;  // rows or queries whose accumulators fit in registers

inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline F set1(float x) { return {_mm512_set1_ps(x)}; }
inline F add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline bool any_above(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ) != 0; }  // NaN is not
inline F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }

// Lane i gets lane i ^ H.
template <int H>
inline F swap_lanes(F a) {
  if constexpr (H == 8) return {_mm512_shuffle_f32x4(a.v, a.v, 0x4e)};
  else if constexpr (H == 4) return {_mm512_shuffle_f32x4(a.v, a.v, 0xb1)};
  else return {_mm512_permute_ps(a.v, H == 2 ? 0x4e : 0xb1)};
}

inline I set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I add(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
inline I to_int(F a) { return {_mm512_cvtps_epi32(a.v)}; }  // half to even
inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline I abs_bits(F a) { return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7fffffff))}; }
inline F power_of_two(I n) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))}; }
inline void store(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
inline void store(int8_t* p, I a) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v)); }
inline void store(int16_t* p, I a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v)); }

// 16 pairs (even k, odd k).
inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const __m512i w = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(static_cast<int32_t>(0xffff0000u))));
}

// vpdpbusd multiplies unsigned by signed: weights are shifted by 128, and the sum starts at -128 * (sum of the row's codes).
struct W8 { __m512i v; };
inline W8 load_w8(const int8_t* p) { return {_mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(static_cast<char>(0x80)))}; }
inline I dot4_start(int32_t sum) { return set1(-128 * sum); }
inline I dot4(I acc, W8 w, const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, 4);
  return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(four))};
}

// int16 activations: weights widened to int16; a half holds two partial sums for each of 8 output channels.
inline I load_w16(const int8_t* p) { return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))}; }
inline I dot4(I acc, I w, const int16_t* x) {
  int64_t four;
  std::memcpy(&four, x, 8);
  return {_mm512_dpwssd_epi32(acc.v, w.v, _mm512_set1_epi64(four))};
}
// total[i] += the two partial sums of channel i.
inline void add_pairs(double* total, I a) {
  const __m512i sums = _mm512_add_epi32(a.v, _mm512_srli_epi64(a.v, 32));
  _mm512_storeu_pd(total, _mm512_add_pd(_mm512_loadu_pd(total), _mm512_cvtepi32_pd(_mm512_cvtepi64_epi32(sums))));
}

// Lanes i and i + 8, then i and i + 4, i + 2, i + 1: the same tree on every instruction set.
inline float reduce_add(F a) {
  const __m256 s8 = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 s4 = _mm_add_ps(_mm256_castps256_ps128(s8), _mm256_extractf128_ps(s8, 1));
  const __m128 s2 = _mm_add_ps(s4, _mm_movehl_ps(s4, s4));
  return _mm_cvtss_f32(_mm_add_ss(s2, _mm_shuffle_ps(s2, s2, 1)));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

}  // namespace
