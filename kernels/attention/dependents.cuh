// Kernels launched as programmatic dependents start while their predecessor still drains: what they load before waiting must be
// constant (weights), and everything else comes after.
#pragma once

// The predecessor is done and its writes are visible.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
