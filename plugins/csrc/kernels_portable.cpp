#include "simd_portable.h"
#include "kernels_body.h"

namespace quasar {
const Kernels* portable_kernels() {
  static const Kernels kernels = table("portable");
  return &kernels;
}
}  // namespace quasar
