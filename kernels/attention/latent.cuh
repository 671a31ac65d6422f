// Rotation by position, and how a row's latent goes into the cache. Used by project.cu and by the product that makes the queries.
#pragma once
#include <cuda_bf16.h>

#include "reduce.cuh"
#include "shape.cuh"

// Mirrored in src/device/cuda/products/linear.rs.
struct Latents {
  const float* rows;  // [rows][576] f32: latents before their norm, rotary key part last
  const float* weight;
  const float* cos;  // [positions][32]
  const float* sin;
  const uint32_t* counts;
  const uint32_t* positions;
  const int32_t* slots;
  __nv_bfloat16* cache;  // of this layer, or null
  float eps;
  int unused;
};
static_assert(sizeof(Latents) == 72, "mirrored in Rust");

// Element (2i or 2i + 1, `odd`) of a pair turned by the pair's angle; in words, so that the bits are the same everywhere.
__device__ __forceinline__ float turned(float own, float other, bool odd, float cos, float sin) {
  const float across = __fmul_rn(other, sin);
  return __fmaf_rn(own, cos, odd ? across : -across);
}

// This thread's part of the norm's weights: constant, so it may be loaded early.
__device__ __forceinline__ float2 latent_norm(const Latents& p) {
  return threadIdx.x < kLatent / 2 ? reinterpret_cast<const float2*>(p.weight)[threadIdx.x] : float2{};
}
// Norms the latent of `row`, rotates its key part, and writes both to the row's slot. 256 threads from 0 on; others return.
__device__ __forceinline__ void store_latent(const Latents& p, int row, float2 norm) {
  constexpr int kStoring = kLatent / 2;
  __shared__ float sums[kStoring / 32];
  const int t = threadIdx.x;
  if (t >= kStoring || row >= p.counts[0]) return;
  const float2* latent = reinterpret_cast<const float2*>(p.rows + static_cast<int64_t>(row) * kRow);
  const float2 x = latent[t];
  const int slot = p.slots[row];
  float2 key = {}, angle = {};
  if (t < kRope / 2) {
    const int64_t at = static_cast<int64_t>(p.positions[row]) * (kRope / 2) + t;
    key = latent[kLatent / 2 + t], angle = {p.cos[at], p.sin[at]};
  }
  const float own = warp_sum(__fmaf_rn(x.x, x.x, __fmul_rn(x.y, x.y)));
  if (t % 32 == 0) sums[t / 32] = own;
  asm volatile("barrier.cta.sync 1, 256;" ::: "memory");
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kStoring / 32; ++warp) sum += sums[warp];
  if (slot < 0) return;
  const float factor = 1.0f / sqrtf(sum / kLatent + p.eps);
  __nv_bfloat162* to = reinterpret_cast<__nv_bfloat162*>(p.cache + static_cast<int64_t>(slot) * kRow);
  to[t] = __floats2bfloat162_rn(x.x * factor * norm.x, x.y * factor * norm.y);
  if (t < kRope / 2)
    to[kLatent / 2 + t] = __floats2bfloat162_rn(turned(key.x, key.y, false, angle.x, angle.y), turned(key.y, key.x, true, angle.x, angle.y));
}
