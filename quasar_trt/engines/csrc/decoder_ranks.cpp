// What differs where the model is shared among ranks. Whatever the number of rows, a value is summed in one order: whole numbers
// exactly, floats from the first rank to the last.
#include <algorithm>
#include <chrono>

#include "best_logits.h"
#include "decoder.h"

namespace quasar {

void Decoder::prepare_ranks() {
  const int64_t size = static_cast<int64_t>(shape_.max_rows) * padded(shape_.hidden);
  largest_.resize(shape_.max_rows);
  for (const LayerWeights& layer : weights_.layers)
    for (const Linear* linear : {&layer.dense, &layer.proj}) {
      if (linear->input == Input::kFloats && !float_sums_.size()) float_sums_.resize(size * shape_.ranks);
      if (linear->input == Input::kCodes8 && !sums8_.size()) sums8_.resize(size);
      if (linear->input == Input::kCodes16 && !sums16_.size()) sums16_.resize(size);
    }
}

// One thread calls, once all have come; all go on when it is done.
template <class Collective>
void Decoder::together(int thread, Collective collective) {
  pool_.barrier();
  if (thread == 0 && !collective_error_) {
    const auto began = std::chrono::steady_clock::now();
    progress_.fetch_add(1, std::memory_order_relaxed);
    try {
      collective(*collectives_);
    } catch (...) {  // threads of the pool must not throw
      collective_error_ = std::current_exception();
    }
    progress_.fetch_add(1, std::memory_order_relaxed);
    collective_seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }
  pool_.barrier();
}

// A linear whose columns lie with all ranks. Codes have the scale that the whole row has, so that their sums are those of one rank.
void Decoder::add_all_to_residual(const Linear& reader, Activations& x, int thread) {
  const int rows = static_cast<int>(rows_.size()), stride = padded(shape_.hidden), k = reader.weight.k;
  const int64_t size = static_cast<int64_t>(rows) * stride;
  const auto [first, last] = share(rows, thread, pool_.size());
  const auto [begin, end] = share(stride / kBlock, thread, pool_.size());
  if (reader.input != Input::kFloats) {
    for (int row = first; row < last; ++row) {
      const float absmax = kernels_->smooth_in_place(x.floats.get() + static_cast<int64_t>(row) * x.stride, reader.inverse_smoother,
                                                     reader.hadamard, k);
      std::memcpy(largest_.get() + row, &absmax, sizeof absmax);  // positive floats and NaN are in the order of their bits
    }
    together(thread, [&](Collectives& ranks) { ranks.largest(largest_.get(), rows); });
    for (int row = first; row < last; ++row) {
      float absmax;
      std::memcpy(&absmax, largest_.get() + row, sizeof absmax);
      const int64_t at = static_cast<int64_t>(row) * x.stride;
      const float* from = x.floats.get() + at;
      scales_[static_cast<size_t>(row)] = reader.input == Input::kCodes8
                                              ? kernels_->codes8(from, absmax, k, x.codes8.get() + at)
                                              : kernels_->codes16(from, absmax, k, x.codes16.get() + at);
    }
    pool_.barrier();
  }
  const float *scale = reader.weight.scale, *bias = reader.weight.bias;
  const auto add = [&](auto value) {  // value(index, row scale, n), as the kernels compute it from the sum at that index
    for (int row = first; row < last; ++row) {
      const int64_t at = static_cast<int64_t>(row) * stride;
      const float row_scale = scales_[static_cast<size_t>(row)].scale;
      for (int n = 0; n < shape_.hidden; ++n) {
        float y = value(at + n, row_scale, n);
        if (bias) y += bias[n];
        hidden_.get()[at + n] += y;
      }
    }
  };
  switch (reader.input) {
    case Input::kFloats: {
      float* sums = float_sums_.get();
      const Weight weight{reader.weight.data, nullptr, nullptr, k};
      kernels_->linear_bf16(weight, x.floats.get(), x.stride, rows, begin, end, {sums + shape_.rank * size, stride, Epilogue::kStore});
      together(thread, [&](Collectives& ranks) { ranks.gather(sums, size); });
      add([&](int64_t at, float, int) {
        float y = sums[at];
        for (int rank = 1; rank < shape_.ranks; ++rank) y += sums[rank * size + at];
        return y;
      });
      break;
    }
    case Input::kCodes8: {
      int32_t* sums = sums8_.get();
      kernels_->sums_w8a8(reader.weight, x.codes8.get(), x.stride, scales_.data(), rows, begin, end, sums, stride);
      together(thread, [&](Collectives& ranks) { ranks.add(sums, size); });
      add([&](int64_t at, float row_scale, int n) { return static_cast<float>(sums[at]) * row_scale * scale[n]; });
      break;
    }
    case Input::kCodes16: {
      double* sums = sums16_.get();
      kernels_->sums_w8a16(reader.weight, x.codes16.get(), x.stride, scales_.data(), rows, begin, end, sums, stride);
      together(thread, [&](Collectives& ranks) { ranks.add(sums, size); });
      add([&](int64_t at, float row_scale, int n) { return static_cast<float>(sums[at]) * row_scale * scale[n]; });
      break;
    }
  }
  pool_.barrier();
}

// Of a row: this rank's logits, then its rescored ones, if there are any.
int Decoder::share_stride() const {
  const int pairs = weights_.head_rows ? shape_.rescored : 0;
  return padded(shape_.vocab_share) + padded(pairs * static_cast<int>(sizeof(Rescored) / sizeof(float)));
}

// The first rank joins the shares of each row, leaves out padding, and takes over the rescored logits of those that are best of all.
void Decoder::collect_logits(int thread) {
  const int count = static_cast<int>(logit_rows_.size()), own = shape_.vocab_share, stride = share_stride();
  together(thread, [&](Collectives& ranks) { ranks.collect(shares_.get(), static_cast<int64_t>(count) * stride); });
  if (shape_.rank) return;
  auto& best = scratch_[static_cast<size_t>(thread)].best;
  const auto [begin, end] = share(count, thread, pool_.size());
  for (int row = begin; row < end; ++row) {
    float* logits = logits_->get() + static_cast<int64_t>(row) * padded(shape_.vocab);
    const auto part = [&](int rank) { return shares_.get() + (static_cast<int64_t>(rank) * count + row) * stride; };
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      const int first = std::min(rank * own, shape_.vocab);
      std::copy_n(part(rank), std::min(own, shape_.vocab - first), logits + first);
    }
    if (!weights_.head_rows) continue;
    best_logits(*kernels_, logits, shape_.vocab, shape_.rescored, best);
    std::sort(best.begin(), best.end());
    for (int rank = 0; rank < shape_.ranks; ++rank) {
      const Rescored* of_rank = rescored(part(rank));
      for (int c = 0; c < shape_.rescored && of_rank[c].id >= 0; ++c) {
        const int32_t id = rank * own + of_rank[c].id;
        if (std::binary_search(best.begin(), best.end(), id)) logits[id] = of_rank[c].logit;
      }
    }
  }
}

}  // namespace quasar
