// What the ranks of a tensor parallel engine do together in a pass.
#pragma once
#include <cstdint>

namespace quasar {

// Every rank calls the same ones with the same counts in the same order, from one thread. May throw; the ranks then no longer fit together.
class Collectives {
 public:
  virtual ~Collectives() = default;
  // In place, elementwise over ranks; exact, so that no order shows: the largest of whole numbers, and sums of whole numbers.
  virtual void largest(int32_t* x, int64_t count) = 0;
  virtual void add(int32_t* x, int64_t count) = 0;
  virtual void add(double* x, int64_t count) = 0;
  // x [ranks, count], where each rank has filled its own part, becomes whole on every rank.
  virtual void gather(float* x, int64_t count) = 0;
  // The same on rank 0, whose own part is the first; on the others x [count] is their part.
  virtual void collect(float* x, int64_t count) = 0;
};

}  // namespace quasar
