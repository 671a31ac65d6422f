// Arithmetic that every verify kernel shares, so that they round alike.
//
// The running maximum m of a row is an integer (scores are in log2 units) and grows only when a score exceeds it by more than
// 8. Probabilities are therefore scaled by exact powers of two: the bf16 rounding of 2^(t - m) does not depend on m, hence not
// on how the KV was split, and rescaling an accumulator loses nothing.
#pragma once
#include "ptx.cuh"

constexpr float kNoMax = -1.0e30f;        // m of a row that has seen no key; finite, so that no inf - inf appears
constexpr float kMaxSlack = 8.0f;         // p stays at or below 2^8
constexpr float kRound = 12582912.0f;     // 1.5 x 2^23: adding it rounds to an integer held in the low mantissa bits

// The maximum to use after seeing a score of `top`.
__device__ __forceinline__ float next_max(float m, float top) { return top > m + kMaxSlack ? (top + kRound) - kRound : m; }

// 2^(t - m) for integer m: fraction by the special unit, integer part straight into the exponent. The fraction's part does not need m, so
// it can be under way while m is being found. Below 2^-120 it stays there, which vanishes in any sum that holds the row's largest
// probability.
struct Exp {
  float fraction;                         // 2^(t - rounded t)
  float rounded;                          // t + kRound
};
__device__ __forceinline__ Exp exp2_begin(float t) {
  t = fmaxf(t, -4.0e6f);                  // beyond, kRound would not round to integers
  const float r = t + kRound;
  return {exp2_fast(t - (r - kRound)), r};
}
__device__ __forceinline__ float exp2_end(Exp x, float m) {
  const int power = max(__float_as_int(x.rounded) - __float_as_int(m + kRound), -120);
  return __int_as_float(__float_as_int(x.fraction) + (power << 23));
}

// The four latent slices of a score are summed as (0 + 1) + (2 + 3) everywhere.
__device__ __forceinline__ float sum_slices(float s0, float s1, float s2, float s3) { return (s0 + s1) + (s2 + s3); }

// Sum of two packed bf16. Outputs are normalised by the sum of the probabilities as the tensor cores see them, rounded to bf16: with
// few keys that halves the error. The LSE uses the unrounded sum.
__device__ __forceinline__ float sum_bf16(uint32_t pair) { return __uint_as_float(pair << 16) + __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float natural_lse(float m, float l) {
  return l > 0.0f ? (m + log2f(l)) * 0.69314718055994531f : __int_as_float(0xff800000);
}
