// The exponential, over sixteen lanes; as kernels_body.h.
#pragma once
#include "kernels.h"

namespace {

using namespace quasar;

// e^x. Range reduction x = n ln 2 + r, |r| <= ln 2 / 2, then the Taylor polynomial of degree 7 (relative error below 2e-7).
inline F exp(F x) {
  x = max(set1(-87.0f), min(set1(88.0f), x));  // in this order NaN stays NaN
  const I n = to_int(mul(x, set1(1.44269504f)));
  const F nf = to_float(n);
  F r = fma(nf, set1(-0.693359375f), x);
  r = fma(nf, set1(2.12194440e-4f), r);
  F y = set1(1.0f / 5040);
  const float coefficients[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (float c : coefficients) y = fma(y, r, set1(c));
  return mul(y, power_of_two(n));
}

inline F silu(F x) { return div(x, add(set1(1.0f), exp(sub(set1(0.0f), x)))); }

}  // namespace
