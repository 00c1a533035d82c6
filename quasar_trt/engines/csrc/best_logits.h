// The largest logits of a row.
#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"

namespace quasar {

// Fills `ids` with those of the `count` largest of n logits, in no order; of equal ones the lower ids. NaN and minus infinity
// are never among them. Logits can be read up to padded(n), and `ids` has room for best_logits_room(count).
void best_logits(const Kernels& kernels, const float* logits, int n, int count, std::vector<int32_t>& ids);

inline size_t best_logits_room(int count) { return 2 * static_cast<size_t>(count) + kBlock; }

}  // namespace quasar
