// Sixteen lanes as plain arrays: any processor, and the same bits as the vector instruction sets.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

struct F { float v[16]; };
struct I { int32_t v[16]; };

constexpr int kBlocksW8A8 = 1;
constexpr int kTileW8A8 = 2, kTileW8A16 = 2, kTileBf16 = 2, kTileAttention = 2;

#define QUASAR_LANES for (int i = 0; i < 16; ++i)
inline F load(const float* p) { F r; std::memcpy(r.v, p, sizeof r.v); return r; }
inline void store(float* p, F a) { std::memcpy(p, a.v, sizeof a.v); }
inline F set1(float x) { F r; QUASAR_LANES r.v[i] = x; return r; }
inline F add(F a, F b) { QUASAR_LANES a.v[i] += b.v[i]; return a; }
inline F sub(F a, F b) { QUASAR_LANES a.v[i] -= b.v[i]; return a; }
inline F mul(F a, F b) { QUASAR_LANES a.v[i] *= b.v[i]; return a; }
inline F div(F a, F b) { QUASAR_LANES a.v[i] /= b.v[i]; return a; }
inline F fma(F a, F b, F c) { QUASAR_LANES a.v[i] = std::fma(a.v[i], b.v[i], c.v[i]); return a; }
inline F max(F a, F b) { QUASAR_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline bool any_above(F a, F b) { bool any = false; QUASAR_LANES any |= a.v[i] > b.v[i]; return any; }
inline F min(F a, F b) { QUASAR_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }

// Lane i gets lane i ^ H.
template <int H>
inline F swap_lanes(F a) { F r; QUASAR_LANES r.v[i] = a.v[i ^ H]; return r; }

inline I set1(int32_t x) { I r; QUASAR_LANES r.v[i] = x; return r; }
inline I add(I a, I b) { QUASAR_LANES a.v[i] += b.v[i]; return a; }
inline I max(I a, I b) { QUASAR_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline I to_int(F a) {  // half to even; what is no int32 becomes its minimum, as on x86
  I r;
  QUASAR_LANES {
    const float x = std::nearbyint(a.v[i]);
    r.v[i] = x >= -2147483648.0f && x < 2147483648.0f ? static_cast<int32_t>(x) : INT32_MIN;
  }
  return r;
}
inline F to_float(I a) { F r; QUASAR_LANES r.v[i] = static_cast<float>(a.v[i]); return r; }
inline I abs_bits(F a) { I r; std::memcpy(r.v, a.v, sizeof r.v); QUASAR_LANES r.v[i] &= 0x7fffffff; return r; }
inline F power_of_two(I n) {
  QUASAR_LANES n.v[i] = (n.v[i] + 127) << 23;
  F r; std::memcpy(r.v, n.v, sizeof r.v); return r;
}
inline void store(int32_t* p, I a) { std::memcpy(p, a.v, sizeof a.v); }
inline void store(int8_t* p, I a) { QUASAR_LANES p[i] = static_cast<int8_t>(a.v[i]); }
inline void store(int16_t* p, I a) { QUASAR_LANES p[i] = static_cast<int16_t>(a.v[i]); }

// 16 pairs (even k, odd k).
inline void load_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  uint32_t a[16], b[16];
  QUASAR_LANES { a[i] = static_cast<uint32_t>(p[2 * i]) << 16; b[i] = static_cast<uint32_t>(p[2 * i + 1]) << 16; }
  std::memcpy(even.v, a, sizeof a);
  std::memcpy(odd.v, b, sizeof b);
}

struct W8 { const int8_t* p; };
inline W8 load_w8(const int8_t* p) { return {p}; }
inline I dot4_start(int32_t) { return set1(0); }
inline I dot4(I acc, W8 w, const int8_t* x) {
  QUASAR_LANES for (int j = 0; j < 4; ++j) acc.v[i] += int32_t{w.p[4 * i + j]} * x[j];
  return acc;
}

// int16 activations: a half holds two partial sums for each of 8 output channels, as in the vector instruction sets.
struct W16 { const int8_t* p; };
inline W16 load_w16(const int8_t* p) { return {p}; }
inline I dot4(I acc, W16 w, const int16_t* x) {
  QUASAR_LANES acc.v[i] += int32_t{w.p[2 * i]} * x[2 * (i % 2)] + int32_t{w.p[2 * i + 1]} * x[2 * (i % 2) + 1];
  return acc;
}
// total[i] += the two partial sums of channel i.
inline void add_pairs(double* total, I a) {
  for (int i = 0; i < 8; ++i) total[i] += static_cast<double>(a.v[2 * i] + a.v[2 * i + 1]);
}

// Lanes i and i + 8, then i and i + 4, i + 2, i + 1: the same tree on every instruction set.
inline float reduce_add(F a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] += a.v[i + half];
  return a.v[0];
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
#undef QUASAR_LANES

}  // namespace
