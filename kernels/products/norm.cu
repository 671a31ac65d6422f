// The norm in front of a product for more rows than few.cu takes: a launch of its own, a block a row.
#include "../attention/latent.cuh"
#include "norm.cuh"

extern "C" __global__ void __launch_bounds__(1024) prepare_rows(const __grid_constant__ Prepare p) {
  let_successor_start();
  wait_for_predecessor();
  prepare_row(p, blockIdx.x);
}

// The same, and beside it the latents go into the cache. grid (rows, 2)
extern "C" __global__ void __launch_bounds__(1024) prepare_and_store(const __grid_constant__ Prepare p, const __grid_constant__ Latents latents) {
  const float2 norm = latent_norm(latents);
  let_successor_start();
  wait_for_predecessor();
  if (blockIdx.y == 0) prepare_row(p, blockIdx.x);
  else store_latent(latents, blockIdx.x, norm);
}
