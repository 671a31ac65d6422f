// 16-byte copies from global to shared memory in the background.
#pragma once
#include "../common/passing.cuh"
#include "../verify/ptx.cuh"

// Zeros where `present` is false; nothing is then read.
__device__ __forceinline__ void copy16(uint32_t dst, const void* src, bool present = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(present ? 16 : 0) : "memory");
}
// Weights.
__device__ __forceinline__ void copy_weights16(uint32_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "l"(PASSING) : "memory");
}
__device__ __forceinline__ void copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most `kPending` groups of this thread are still under way.
template <int kPending>
__device__ __forceinline__ void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
