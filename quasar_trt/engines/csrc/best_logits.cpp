#include "best_logits.h"

#include <algorithm>
#include <limits>

namespace quasar {

void best_logits(const Kernels& kernels, const float* logits, int n, int count, std::vector<int32_t>& ids) {
  ids.clear();
  float least = -std::numeric_limits<float>::infinity();  // what an id must exceed: of equal logits the earlier ids stay
  const auto keep_best = [&] {
    const auto better = [&](int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); };
    std::nth_element(ids.begin(), ids.begin() + count - 1, ids.end(), better);
    ids.resize(static_cast<size_t>(count));
    least = logits[ids.back()];
  };
  const size_t many = 2 * static_cast<size_t>(count);
  for (int block = 0; (block = kernels.find_above(logits, block, n, least)) < n; block += kBlock) {
    for (int32_t id = block; id < std::min(block + kBlock, n); ++id)
      if (logits[id] > least) ids.push_back(id);
    if (ids.size() >= many) keep_best();
  }
  if (ids.size() > static_cast<size_t>(count)) keep_best();
}

}  // namespace quasar
