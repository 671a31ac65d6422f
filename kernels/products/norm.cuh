// RMSNorm in front of a product: x + added, times the norm's weight, and the factor 1 / rms that is left for later. The sum of squares
// follows the product's own slices of k, one warp a slice, so that it has the same bits wherever it is taken.
#pragma once
#include "fragments.cuh"

constexpr int SLICES = 8;  // of a group

// Mirrored in src/device/cuda/products/linear.rs.
struct Norm {
  const float* added;  // rows to be added to x first, or null
  int64_t added_stride;
  float* sum;          // where x + added goes, or null
  int64_t sum_stride;
  const float* weight;
  float* factors;      // [rows] where the factors go, or null
  float eps;
  int unused;
};
static_assert(sizeof(Norm) == 56, "mirrored in Rust");

__device__ __forceinline__ float rms_factor(float squares, int width, float eps) { return 1.0f / sqrtf(squares / width + eps); }
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int s = 16; s; s /= 2) x += __shfl_xor_sync(~0u, x, s);
  return x;
}
__device__ __forceinline__ float4 plus(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }
__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w)};  // not fused with what follows
}
__device__ __forceinline__ float add_squares(float sum, float4 v) { return fmaf(v.w, v.w, fmaf(v.z, v.z, fmaf(v.y, v.y, fmaf(v.x, v.x, sum)))); }

// Four f32 as bf16, and what rounding took away.
__device__ __forceinline__ uint2 round4(float4 v) { return {pack_bf16(v.x, v.y), pack_bf16(v.z, v.w)}; }
__device__ __forceinline__ uint2 rest4(float4 v, uint2 high) {
  return {pack_bf16(v.x - __uint_as_float(high.x << 16), v.y - __uint_as_float(high.x & 0xffff0000u)),
          pack_bf16(v.z - __uint_as_float(high.y << 16), v.w - __uint_as_float(high.y & 0xffff0000u))};
}

// One row on its way into a product. Mirrored in src/device/cuda/products/norm.rs.
struct Prepare {
  const float* x;
  int64_t x_stride;
  Norm norm;
  float* out;          // f32 rows, or null:
  uint16_t* half;      // bf16 rows
  uint16_t* rest;      // and their second terms, or null
  int units, slice;    // of k, as the product cuts it
  int groups, unused;
};
static_assert(sizeof(Prepare) == 112, "mirrored in Rust");

// A block of a warp a slice.
__device__ __forceinline__ void prepare_row(const Prepare& p, int row) {
  __shared__ float squares[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, begin = warp * p.slice, quads = max(0, min(p.slice, p.units - begin)) * (UNIT / 4);
  const float4* from = reinterpret_cast<const float4*>(p.x + row * p.x_stride) + begin * (UNIT / 4);
  const float4* added = reinterpret_cast<const float4*>(p.norm.added + row * p.norm.added_stride) + begin * (UNIT / 4);
  const float4* weight = reinterpret_cast<const float4*>(p.norm.weight) + begin * (UNIT / 4);
  float4* sum = reinterpret_cast<float4*>(p.norm.sum + row * p.norm.sum_stride) + begin * (UNIT / 4);
  const int64_t to = row * static_cast<int64_t>(p.units * (UNIT / 4)) + begin * (UNIT / 4);
  constexpr int QUADS = 2;
  float square = 0;
  for (int base = lane; base < quads; base += 32 * QUADS) {
    float4 v[QUADS], a[QUADS], w[QUADS];
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int at = base + 32 * i;
      if (at >= quads) continue;
      v[i] = from[at], w[i] = weight[at];
      if (p.norm.added) a[i] = added[at];
    }
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
      const int at = base + 32 * i;
      if (at >= quads) continue;
      float4 x = v[i];
      if (p.norm.added) x = plus(x, a[i]);
      if (p.norm.sum) sum[at] = x;
      square = add_squares(square, x);
      x = times(x, w[i]);
      if (p.out) reinterpret_cast<float4*>(p.out)[to + at] = x;
      if (!p.half) continue;
      const uint2 rounded = round4(x);
      reinterpret_cast<uint2*>(p.half)[to + at] = rounded;
      if (p.rest) reinterpret_cast<uint2*>(p.rest)[to + at] = rest4(x, rounded);
    }
  }
  const float own = sum_of_lanes(square);
  if (lane == 0) squares[warp] = own;
  __syncthreads();
  if (threadIdx.x > 0) return;
  float total = 0;
  for (int group = 0; group < p.groups; ++group) {
    float part = squares[group * SLICES];
    for (int i = 1; i < SLICES; ++i) part += squares[group * SLICES + i];
    total = group ? total + part : part;
  }
  p.norm.factors[row] = rms_factor(total, p.units * UNIT, p.norm.eps);
}
