// What stands between the projections of latent attention: the norm of the low-rank query, then rotation of the queries and the
// norm, rotation and cache write of the latents. Called by project_latents (src/device/cuda/attention/project.rs).
#include <cuda_bf16.h>

#include "dependents.cuh"
#include "reduce.cuh"
#include "shape.cuh"

constexpr int kThreads = 256;

// out = x / sqrt(mean(x^2) + eps) * weight, one block a row of up to 8 x 256 values (a multiple of 4); padding rows become zeros.
// Everything is loaded before the sum is known, because at one row this is all latency.
extern "C" __global__ void __launch_bounds__(kThreads)
    norm_low_rank(const float* x, const float* weight, float eps, int width, const uint32_t* counts, float* out) {
  __shared__ float sums[kThreads / 32];
  const float4* from = reinterpret_cast<const float4*>(x + static_cast<int64_t>(blockIdx.x) * width);
  float4* to = reinterpret_cast<float4*>(out + static_cast<int64_t>(blockIdx.x) * width);
  const float4 zero = make_float4(0, 0, 0, 0);
  float4 value[2], factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = threadIdx.x + i * kThreads;
    factor[i] = at < width / 4 ? reinterpret_cast<const float4*>(weight)[at] : zero;
  }
  let_successor_start();
  wait_for_predecessor();
  const bool live = blockIdx.x < counts[0];
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = threadIdx.x + i * kThreads;
    value[i] = live && at < width / 4 ? from[at] : zero;
    square += (value[i].x * value[i].x + value[i].y * value[i].y) + (value[i].z * value[i].z + value[i].w * value[i].w);
  }
  const float scale = 1.0f / sqrtf(block_sum<kThreads / 32>(square, sums) / width + eps);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = threadIdx.x + i * kThreads;
    const float4 v = value[i], f = factor[i];
    if (at < width / 4) to[at] = make_float4(v.x * scale * f.x, v.y * scale * f.y, v.z * scale * f.z, v.w * scale * f.w);
  }
}

// Pair (2i, 2i + 1) by the angle of pair i.
__device__ __forceinline__ float2 rotate(float2 x, float cos, float sin) { return make_float2(x.x * cos - x.y * sin, x.y * cos + x.x * sin); }

// One block a row: rotates the last 64 of every query head in place; norms the latent, rotates its key part, and writes both to the
// row's slot of this layer's cache. Padding rows touch nothing.
extern "C" __global__ void __launch_bounds__(kThreads)
    rotate_and_store(float* q, int heads, const float* latents, const float* weight, float eps, const float* cos, const float* sin,
                     const uint32_t* counts, const uint32_t* positions, const int32_t* slots, __nv_bfloat16* cache) {
  __shared__ float sums[kThreads / 32];
  const int row = blockIdx.x, t = threadIdx.x;
  const float2 norm = reinterpret_cast<const float2*>(weight)[t];
  let_successor_start();
  wait_for_predecessor();
  if (row >= counts[0]) return;
  const int64_t angle = static_cast<int64_t>(positions[row]) * (kRope / 2);
  float* queries = q + static_cast<int64_t>(row) * heads * kQuery;
  for (int i = t; i < heads * (kRope / 2); i += kThreads) {
    const int pair = i % (kRope / 2);
    float2* at = reinterpret_cast<float2*>(queries + i / (kRope / 2) * kQuery + kNope) + pair;
    *at = rotate(*at, cos[angle + pair], sin[angle + pair]);
  }
  static_assert(kLatent == 2 * kThreads, "a thread has two latent columns");
  const float2* latent = reinterpret_cast<const float2*>(latents + static_cast<int64_t>(row) * kRow);
  const float2 x = latent[t];
  const int slot = slots[row];
  const float factor = 1.0f / sqrtf(block_sum<kThreads / 32>(x.x * x.x + x.y * x.y, sums) / kLatent + eps);
  if (slot < 0) return;
  __nv_bfloat162* to = reinterpret_cast<__nv_bfloat162*>(cache + static_cast<int64_t>(slot) * kRow);
  to[t] = __floats2bfloat162_rn(x.x * factor * norm.x, x.y * factor * norm.y);
  if (t < kRope / 2) {
    const float2 key = rotate(latent[kLatent / 2 + t], cos[angle + t], sin[angle + t]);
    to[kLatent / 2 + t] = __floats2bfloat162_rn(key.x, key.y);
  }
}
