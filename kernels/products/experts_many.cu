// Routed experts for many rows of each: the sums of experts.cu in the same order, bit for bit, with a tile of weights unpacked once for
// up to 64 rows, whose activations all warps of a block read from shared memory.
#include "experts.cuh"

constexpr int WARPS = 8, UNITS = STEP / UNIT, TILES = 2, ROW_TILES = 8;  // a warp: 2 tiles of 16 weight rows x up to 64 rows
constexpr int UNIT_BYTES = ROW_TILES * 512;                              // a unit of the rows, in fragments

// One 16-byte word of a row, which other blocks read as well, into its fragment; zeros beyond k.
__device__ __forceinline__ void copy_part(uint32_t to, const uint16_t* row, int column, int k) {
  if (column < k) asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(row + column) : "memory");
  else store_16(to, {0, 0, 0, 0});
}

// Products of one step of a warp's tiles with NT tiles of rows.
template <int NT> __device__ __forceinline__ void step_products(float (&d)[TILES][ROW_TILES][4], uint32_t weights, uint32_t rows, int lane) {
  Step s[TILES];
#pragma unroll
  for (int m = 0; m < TILES; ++m) s[m] = read_step(weights + m * STEP_BYTES, lane);
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    uint4 x[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) x[n] = shared16(rows + unit * UNIT_BYTES + n * 512 + lane * 16);
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
      uint4 low, high;
      unpack_unit(s[m], unit, low, high);
      const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
#pragma unroll
      for (int n = 0; n < NT; ++n) mma(d[m][n], first, x[n].x, x[n].y);
#pragma unroll
      for (int n = 0; n < NT; ++n) mma(d[m][n], second, x[n].z, x[n].w);
    }
  }
}
__device__ __forceinline__ void step_products_of(int row_tiles, float (&d)[TILES][ROW_TILES][4], uint32_t weights, uint32_t rows, int lane) {
  if (row_tiles <= 1) step_products<1>(d, weights, rows, lane);
  else if (row_tiles <= 2) step_products<2>(d, weights, rows, lane);
  else if (row_tiles <= 4) step_products<4>(d, weights, rows, lane);
  else if (row_tiles <= 6) step_products<6>(d, weights, rows, lane);
  else step_products<8>(d, weights, rows, lane);
}

extern __shared__ __align__(128) uint8_t shared[];

// grid (tiles / 16 rounded up, entries). A stage: a step of the block's 16 tiles, and of the rows.
template <int DEPTH> __device__ __forceinline__ void gate_up_many(const GateUp& p) {
  constexpr int STAGE_BYTES = WARPS * TILES * STEP_BYTES + UNITS * UNIT_BYTES;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  wait_for_predecessor();
  let_successor_start();
  const Lists lists(p.list, p.places);
  if (static_cast<int>(blockIdx.y) >= *lists.entries) return;
  const Entry entry = lists.entry[blockIdx.y];
  const int tile = (blockIdx.x * WARPS + warp) * TILES, row_tiles = (entry.count + 7) / 8, mine = warp * 8 + g;
  const uint8_t* from[TILES];
#pragma unroll
  for (int m = 0; m < TILES; ++m)
    from[m] = p.weights + (static_cast<int64_t>(entry.expert) * p.tiles + min(tile + m, p.tiles - 1)) * p.steps * STEP_BYTES;
  // Warp w brings rows 8 w .. 8 w + 7 of the entry.
  const uint16_t* row = p.x + static_cast<int64_t>(lists.order[entry.first + (mine < entry.count ? mine : 0)] / p.top_k) * p.k;
  const uint32_t ring = smem_addr(shared);
  const auto bring = [&](int step) {
    if (step < p.steps) {
      const uint32_t stage = ring + step % DEPTH * STAGE_BYTES;
#pragma unroll
      for (int m = 0; m < TILES; ++m) copy_step(stage + (warp * TILES + m) * STEP_BYTES, from[m] + static_cast<int64_t>(step) * STEP_BYTES, lane);
      if (warp < row_tiles)
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit)
          copy_part(stage + WARPS * TILES * STEP_BYTES + unit * UNIT_BYTES + warp * 512 + lane * 16, row, step * STEP + unit * UNIT + t * 8, p.k);
    }
    copies_end_group();
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) bring(i);
  // Tiles of rows that no copy fills are multiplied too, up to three of them, and never stored.
  float slice[TILES][ROW_TILES][4] = {}, sum[TILES][ROW_TILES][4] = {};
  const auto fold = [&] {
#pragma unroll
    for (int m = 0; m < TILES; ++m)
#pragma unroll
      for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) sum[m][n][j] += slice[m][n][j], slice[m][n][j] = 0;
  };
  int left = p.slice;
  for (int step = 0; step < p.steps; ++step) {
    copies_wait<DEPTH - 2>();
    __syncthreads();
    bring(step + DEPTH - 1);
    const uint32_t stage = ring + step % DEPTH * STAGE_BYTES;
    step_products_of(row_tiles, slice, stage + warp * TILES * STEP_BYTES, stage + WARPS * TILES * STEP_BYTES, lane);
    if (--left == 0) fold(), left = p.slice;
  }
  fold();
#pragma unroll
  for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int at = n * 8 + 2 * t + c;
      if (at >= entry.count) continue;
      const float factor = p.factors ? p.factors[lists.order[entry.first + at] / p.top_k] * SCALED : SCALED;
      uint16_t* to = p.inner + (static_cast<int64_t>(entry.first) + at) * p.tiles * 8 + g;
#pragma unroll
      for (int m = 0; m < TILES; ++m)
        if (tile + m < p.tiles)
          to[(tile + m) * 8] = static_cast<uint16_t>(pack_bf16(swiglu(sum[m][n][c] * factor, sum[m][n][2 + c] * factor), 0.0f));
    }
}

// grid (parts of an expert's tiles, entries): a warp has TILES tiles at a time, all of k.
extern "C" __global__ void __launch_bounds__(256, 1) down_many(const __grid_constant__ Down p) {
  constexpr int DEPTH = 3, SLOT = TILES * STEP_BYTES;  // shared: the warps' rings, then the rows [unit of k][8 tiles][512]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  wait_for_predecessor();
  let_successor_start();
  const Lists lists(p.list, p.places);
  if (static_cast<int>(blockIdx.y) >= *lists.entries) return;
  const Entry entry = lists.entry[blockIdx.y];
  const int row_tiles = (entry.count + 7) / 8, mine = warp * 8 + g;
  const uint32_t ring = smem_addr(shared) + warp * DEPTH * SLOT, rows = smem_addr(shared) + WARPS * DEPTH * SLOT;
  if (warp < row_tiles) {
    const uint16_t* row = p.inner + static_cast<int64_t>(entry.first + (mine < entry.count ? mine : 0)) * p.k;
    for (int unit = 0; unit < p.steps * UNITS; ++unit) copy_part(rows + unit * UNIT_BYTES + warp * 512 + lane * 16, row, unit * UNIT + t * 8, p.k);
  }
  copies_end_group();
  const int pairs = (p.tiles + TILES - 1) / TILES, stride = gridDim.x * WARPS, first = blockIdx.x * WARPS + warp;
  const int count = first < pairs ? (pairs - 1 - first) / stride + 1 : 0;
  const uint8_t* weights = p.weights + static_cast<int64_t>(entry.expert) * p.tiles * p.steps * STEP_BYTES;
  int next_pair = first, next_step = 0;
  const auto bring = [&](int slot) {
    if (next_pair < pairs) {
#pragma unroll
      for (int m = 0; m < TILES; ++m)
        copy_step(ring + slot * SLOT + m * STEP_BYTES, weights + (static_cast<int64_t>(min(next_pair * TILES + m, p.tiles - 1)) * p.steps + next_step) * STEP_BYTES, lane);
      if (++next_step == p.steps) next_step = 0, next_pair += stride;
    }
    copies_end_group();
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) bring(i);
  copies_wait<DEPTH - 1>();
  __syncthreads();
  int slot = 0;
  for (int i = 0; i < count; ++i) {
    float d[TILES][ROW_TILES][4] = {};
    for (int step = 0; step < p.steps; ++step) {
      copies_wait<DEPTH - 2>();
      __syncwarp();
      bring(slot ? slot - 1 : DEPTH - 1);  // read in the round before
      step_products_of(row_tiles, d, ring + slot * SLOT, rows + step * UNITS * UNIT_BYTES, lane);
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
    }
    const int tile = (first + i * stride) * TILES;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int at = n * 8 + 2 * t + c;
        if (at >= entry.count) continue;
        float* to = p.outer + static_cast<int64_t>(lists.order[entry.first + at]) * p.tiles * 16 + tile * 16 + g;
#pragma unroll
        for (int m = 0; m < TILES; ++m)
          if (tile + m < p.tiles) to[m * 16] = d[m][n][c] * SCALED, to[m * 16 + 8] = d[m][n][2 + c] * SCALED;
      }
  }
}

extern "C" __global__ void __launch_bounds__(256, 1) gate_up_many_2(const __grid_constant__ GateUp p) { gate_up_many<2>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) gate_up_many_5(const __grid_constant__ GateUp p) { gate_up_many<5>(p); }
