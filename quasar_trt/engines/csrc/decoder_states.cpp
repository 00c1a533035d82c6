// Hidden states that a pass keeps for those who asked.
#include "decoder.h"

#include <algorithm>
#include <stdexcept>

namespace quasar {

// A thread keeps the rows that it alone wrote or that were complete at the last barrier.
void Decoder::keep(int layer, int thread) {
  const int stride = padded(shape_.hidden);
  const auto [begin, end] = share(static_cast<int>(rows_.size()), thread, pool_.size());
  for (size_t place = 0; place < kept_layers_.size(); ++place) {
    if (kept_layers_[place] != layer) continue;
    float* states = states_.get() + static_cast<int64_t>(place) * shape_.max_rows * stride;
    for (int row = begin; row < end; ++row) {
      const int64_t at = static_cast<int64_t>(row) * stride;
      if (layer < shape_.layers) std::copy_n(hidden_.get() + at, stride, states + at);
      else kernels_->rms_norm(hidden_.get() + at, weights_.final_norm, shape_.norm_epsilon, shape_.hidden, states + at);
    }
  }
}

void Decoder::keep_states(std::vector<int> layers) {
  for (const int layer : layers)
    if (layer < 0 || layer > shape_.layers) throw std::invalid_argument("there is no layer " + std::to_string(layer));
  states_.resize(static_cast<int64_t>(layers.size()) * shape_.max_rows * padded(shape_.hidden));
  kept_layers_ = std::move(layers);
}

const float* Decoder::state(int place, int row) const {
  if (place < 0 || place >= static_cast<int>(kept_layers_.size()) || row < 0 || row >= static_cast<int>(rows_.size()))
    throw std::invalid_argument("no state " + std::to_string(place) + " of row " + std::to_string(row) + " was kept");
  return states_.get() + (static_cast<int64_t>(place) * shape_.max_rows + row) * padded(shape_.hidden);
}

}  // namespace quasar
