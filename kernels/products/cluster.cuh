// Blocks of a cluster that sum for each other.
#pragma once
#include "../verify/ptx.cuh"

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
// Says that this block runs, and nothing else: an arrival that orders memory waits for all of a block's reads first.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// A word of this block's shared memory as block 0 of the cluster has it.
__device__ __forceinline__ uint32_t in_first(uint32_t at) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(at));
  return there;
}
// Counts what block 0 of a cluster is sent.
__device__ __forceinline__ uint32_t sent() {
  __shared__ uint64_t bar;
  return smem_addr(&bar);
}
// Before the blocks have met, by a thread of block 0: `bytes` will be sent.
__device__ __forceinline__ void expect_sent(uint32_t bytes) {
  mbarrier_init(sent(), 1);
  mbarrier_init_fence();
  mbarrier_expect(sent(), bytes);
}
// Stores in block 0; nobody waits for anything else.
__device__ __forceinline__ void send_to_first(uint32_t at, float4 v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(in_first(at)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(in_first(sent())) : "memory");
}
__device__ __forceinline__ void send_to_first(uint32_t at, float v) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(in_first(at)), "f"(v), "r"(in_first(sent())) : "memory");
}
__device__ __forceinline__ void wait_for_sent() {
  asm volatile(
      "{\n.reg .pred p;\n"
      "WAIT:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n"
      "@!p bra WAIT;\n}" ::"r"(sent()) : "memory");
}
