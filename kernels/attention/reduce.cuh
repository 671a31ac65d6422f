// Sums over a block, in an order that depends on nothing but the number of threads.
#pragma once

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

// Every thread gets the sum. `shared` holds one float a warp; all threads must call.
template <int kWarps>
__device__ __forceinline__ float block_sum(float x, float* shared) {
  x = warp_sum(x);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += shared[warp];
  return sum;
}
