#include "simd_avx2.h"
#include "kernels_body.h"

namespace quasar {
const Kernels* avxvnni_kernels() {
  static const Kernels kernels = table("avxvnni");
  return &kernels;
}
}  // namespace quasar
