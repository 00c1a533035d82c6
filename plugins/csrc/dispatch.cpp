// Which instruction sets were compiled in and can run on this processor.
#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace quasar {

#if defined(__x86_64__)
namespace {

struct Processor {
  bool avx2 = false, avxvnni = false, avx512 = false;

  Processor() {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d)) return;
    const bool fma = c & (1u << 12), f16c = c & (1u << 29), xsave = c & (1u << 27);
    if (!fma || !f16c || !xsave) return;
    unsigned low, high;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & 0x6u) != 0x6u || !__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;  // the system saves ymm registers
    avx2 = b & (1u << 5);
    const bool foundation = (b & (1u << 16)) && (b & (1u << 17)) && (b & (1u << 30)) && (b & (1u << 31));  // F, DQ, BW, VL
    avx512 = avx2 && (low & 0xe6u) == 0xe6u && foundation && (c & (1u << 11));                                // and VNNI
    unsigned a1, b1, c1, d1;
    avxvnni = avx2 && a >= 1 && __get_cpuid_count(7, 1, &a1, &b1, &c1, &d1) && (a1 & (1u << 4));
  }
};

}  // namespace
#endif

const Kernels* const* runnable_kernels() {
  struct Tables {
    const Kernels* best_first[5] = {};

    Tables() {
      const Kernels** next = best_first;
#if defined(__x86_64__)
      const Processor processor;
      (void)processor;
#ifdef QUASAR_KERNELS_AVX512
      if (processor.avx512) *next++ = avx512_kernels();
#endif
#ifdef QUASAR_KERNELS_AVXVNNI
      if (processor.avxvnni) *next++ = avxvnni_kernels();
#endif
#ifdef QUASAR_KERNELS_AVX2
      if (processor.avx2) *next++ = avx2_kernels();
#endif
#endif
      *next = portable_kernels();
    }
  };
  static const Tables tables;
  return tables.best_first;
}

}  // namespace quasar
