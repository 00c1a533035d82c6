#include "simd_avx512.h"
#include "kernels_body.h"

namespace quasar {
const Kernels* avx512_kernels() {
  static const Kernels kernels = table("avx512");
  return &kernels;
}
}  // namespace quasar
