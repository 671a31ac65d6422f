// Dense products for many rows: batches beyond 64 rows and prompt chunks. The sums of dense.cu in the same order.
//
// A block of 8 warps has 4 tiles of 16 weight rows x 128 activation rows: warp w tile w % 4 and rows 64 (w / 4) .. + 63. Activations
// of two units at a time lie in shared memory as bf16, double-buffered; weights come through L1, where the two warps of a tile meet.
#include "dense.cuh"

constexpr int TILES = 4, ROW_TILES = 8, ROWS = 128, WARPS = 8, BATCH = 2;  // BATCH units a step

// grid (chunks of 128 rows, groups of 4 tiles of all jobs)
extern "C" __global__ void __launch_bounds__(256, 1) dense_wide(const __grid_constant__ Dense p) {
  extern __shared__ uint4 xs[];  // [buffer][high, rest][unit][tile of 8 rows][lane]
  constexpr int PART = BATCH * (ROWS / 8) * 32;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % TILES, wn = warp / TILES;
  wait_for_predecessor();
  let_successor_start();
  const int first_groups = (p.job[0].tiles + TILES - 1) / TILES, group = blockIdx.y;
  const Job& job = p.job[group >= first_groups];
  const int tile = (group >= first_groups ? group - first_groups : group) * TILES + wm, first_row = blockIdx.x * ROWS;
  const bool live = tile < job.tiles, precise = job.mode == PRECISE;
  const uint8_t* low_at = half_tile(job, low_half(job, live ? tile : 0), p.units, lane);
  const uint8_t* high_at = half_tile(job, high_half(job, live ? tile : 0), p.units, lane);

  // Thread i stages the words i, i + 256, ... of a step: unit, row tile, lane.
  constexpr int WORDS = BATCH * (ROWS / 8) * 32 / (WARPS * 32);
  float staged[WORDS][8];
  const auto fetch = [&](int base) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const int at = i * 256 + threadIdx.x, unit = base + at / 512, row = first_row + at % 512 / 4;
#pragma unroll
      for (int j = 0; j < 8; ++j) staged[i][j] = 0;
      if (row < p.rows && unit < p.units) load8(staged[i], p.x + row * p.x_stride + unit * UNIT + (at & 3) * 8);
    }
  };
  const auto put = [&](int base, int buffer) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      const int at = i * 256 + threadIdx.x;
      const uint4 rounded = round8(staged[i]);
      xs[2 * buffer * PART + at] = rounded;
      if (precise) xs[(2 * buffer + 1) * PART + at] = rest8(staged[i], rounded);
      const int unit = base + at / 512, row = first_row + at % 512 / 4;
      if (p.rounded && group == 0 && row < p.rows && unit < p.units)
        *reinterpret_cast<uint4*>(p.rounded + row * static_cast<int64_t>(p.units * UNIT) + unit * UNIT + (at & 3) * 8) = rounded;
    }
  };

  float slice[ROW_TILES][4] = {}, sum[ROW_TILES][4] = {}, total[ROW_TILES][4] = {};
  const auto fold = [&](float (&into)[ROW_TILES][4], float (&from)[ROW_TILES][4], bool first) {
#pragma unroll
    for (int i = 0; i < ROW_TILES; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) into[i][j] = first ? from[i][j] : into[i][j] + from[i][j], from[i][j] = 0;
  };
  uint4 low[BATCH], high[BATCH];
  const auto weights = [&](int base) {
#pragma unroll
    for (int i = 0; i < BATCH; ++i)
      if (base + i < p.units) {
        low[i] = __ldg(reinterpret_cast<const uint4*>(low_at + static_cast<int64_t>(base + i) * 512));
        high[i] = __ldg(reinterpret_cast<const uint4*>(high_at + static_cast<int64_t>(base + i) * 512));
      }
  };
  fetch(0);
  put(0, 0);
  weights(0);
  __syncthreads();
  int in_slice = 0, slices = 0;
  for (int base = 0, buffer = 0; base < p.units; base += BATCH, buffer ^= 1) {
    uint4 a[BATCH], b[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; ++i) a[i] = low[i], b[i] = high[i];
    const bool more = base + BATCH < p.units;
    if (more) fetch(base + BATCH), weights(base + BATCH);
#pragma unroll
    for (int i = 0; i < BATCH; ++i) {
      if (base + i >= p.units) break;
      const uint4* x = xs + 2 * buffer * PART + (i * (ROWS / 8) + wn * ROW_TILES) * 32 + lane;
#pragma unroll
      for (int nt = 0; nt < ROW_TILES; ++nt) multiply(slice[nt], a[i], b[i], x[nt * 32]);
      if (precise)
#pragma unroll
        for (int nt = 0; nt < ROW_TILES; ++nt) multiply(slice[nt], a[i], b[i], x[PART + nt * 32]);
      if (++in_slice == p.slice || base + i + 1 == p.units) {
        fold(sum, slice, slices % SLICES == 0);
        in_slice = 0, ++slices;
        if (slices % SLICES == 0 || base + i + 1 == p.units) fold(total, sum, slices <= SLICES);
      }
    }
    if (more) put(base + BATCH, buffer ^ 1);
    __syncthreads();
  }
  if (live)
#pragma unroll
    for (int nt = 0; nt < ROW_TILES; ++nt) store(p, job, total[nt], tile, first_row + (wn * ROW_TILES + nt) * 8, lane);
}
