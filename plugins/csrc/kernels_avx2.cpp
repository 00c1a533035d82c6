#include "simd_avx2.h"
#include "kernels_body.h"

namespace quasar {
const Kernels* avx2_kernels() {
  static const Kernels kernels = table("avx2");
  return &kernels;
}
}  // namespace quasar
