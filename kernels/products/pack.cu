// Activations for the kernel of many rows: f32 rows rounded to bf16 once, in the order that its copies want.
#include "packed.cuh"

// grid (units / 8 rounded up, tiles of 8 rows, a multiple of 4); a warp a unit, a thread one 16-byte word
extern "C" __global__ void __launch_bounds__(256) pack(const __grid_constant__ Pack p) {
  wait_for_predecessor();
  let_successor_start();
  const int lane = threadIdx.x & 31, unit = blockIdx.x * 8 + (threadIdx.x >> 5), row = blockIdx.y * 8 + (lane >> 2);
  if (unit >= p.units) return;
  float x[8] = {};
  const int column = unit * UNIT + (lane & 3) * 8;
  if (row < p.rows) load8(x, p.x + row * p.x_stride + column);
  const uint4 high = round8(x);
  const int64_t at = (static_cast<int64_t>(blockIdx.y / 4) * p.units + unit) * 128 + blockIdx.y % 4 * 32 + lane;
  p.packed[at] = high;
  if (p.rest) p.rest[at] = rest8(x, high);
  if (p.rounded && row < p.rows) *reinterpret_cast<uint4*>(p.rounded + row * static_cast<int64_t>(p.units) * UNIT + column) = high;
}
