// Blocks of a cluster that sum for each other.
#pragma once
#include <cstdint>

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// A word of this block's shared memory as block 0 of the cluster has it.
__device__ __forceinline__ uint32_t in_first(uint32_t at) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(at));
  return there;
}
__device__ __forceinline__ void store_in_first(uint32_t at, float4 v) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(in_first(at)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
__device__ __forceinline__ void store_in_first(uint32_t at, float v) {
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(in_first(at)), "f"(v) : "memory");
}
