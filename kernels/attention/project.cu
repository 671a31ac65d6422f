// What stands between the projections of latent attention: the norm of the low-rank query, then rotation of the queries and the
// norm, rotation and cache write of the latents. Called by project_latents (src/device/cuda/attention/project.rs).
#include <cuda_bf16.h>

#include "reduce.cuh"
#include "shape.cuh"

constexpr int kThreads = 256;

// out = x / sqrt(mean(x^2) + eps) * weight, one block a row; padding rows become zeros.
extern "C" __global__ void __launch_bounds__(kThreads)
    norm_low_rank(const float* x, const float* weight, float eps, int width, const uint32_t* counts, float* out) {
  __shared__ float sums[kThreads / 32];
  const int64_t at = static_cast<int64_t>(blockIdx.x) * width;
  if (blockIdx.x >= counts[0]) {
    for (int i = threadIdx.x; i < width; i += kThreads) out[at + i] = 0.0f;
    return;
  }
  float square = 0.0f;
  for (int i = threadIdx.x; i < width; i += kThreads) square += x[at + i] * x[at + i];
  const float factor = 1.0f / sqrtf(block_sum<kThreads / 32>(square, sums) / width + eps);
  for (int i = threadIdx.x; i < width; i += kThreads) out[at + i] = x[at + i] * factor * weight[i];
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
  const float factor = 1.0f / sqrtf(block_sum<kThreads / 32>(x.x * x.x + x.y * x.y, sums) / kLatent + eps);
  if (slots[row] < 0) return;
  __nv_bfloat162* to = reinterpret_cast<__nv_bfloat162*>(cache + static_cast<int64_t>(slots[row]) * kRow);
  to[t] = __floats2bfloat162_rn(x.x * factor * weight[2 * t], x.y * factor * weight[2 * t + 1]);
  if (t < kRope / 2) {
    const float2 key = rotate(latent[kLatent / 2 + t], cos[angle + t], sin[angle + t]);
    to[kLatent / 2 + t] = __floats2bfloat162_rn(key.x, key.y);
  }
}
