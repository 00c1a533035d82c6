#include "bandwidth.h"

namespace quasar {

// Widest vectors of the processor where the loader can choose between functions (glibc); narrow ones come close to the
// bandwidth of a core, but not everywhere to all of it.
#if defined(__x86_64__) && defined(__GLIBC__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
uint64_t sum_words(const uint64_t* words, int64_t begin, int64_t end) {
  // Four streams: prefetchers follow each by itself, so that more of memory's answers are awaited at once.
  const int64_t quarter = (end - begin) / 4;
  const uint64_t *a = words + begin, *b = a + quarter, *c = b + quarter, *d = c + quarter;
  uint64_t sum_a = 0, sum_b = 0, sum_c = 0, sum_d = 0;
  for (int64_t i = 0; i < quarter; ++i) {
    sum_a += a[i];
    sum_b += b[i];
    sum_c += c[i];
    sum_d += d[i];
  }
  for (const uint64_t* rest = d + quarter; rest < words + end; ++rest) sum_d += *rest;
  return sum_a + sum_b + sum_c + sum_d;
}

}  // namespace quasar
