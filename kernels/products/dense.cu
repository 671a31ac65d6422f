// Dense products out[row][n] = sum_k x[row][k] W[n][k] for few rows: bf16 weights, f32 activations rounded to bf16 on the way in.
//
// A block works on one or two tiles of 16 weight rows; its eight warps have one slice of k each, and where a matrix has too few tiles for
// the card the blocks of a cluster share a tile, one group of slices each. Weights stream through a ring in shared memory; the first
// ones are on their way before the predecessor's results are waited for. Activations come from L2, some units ahead.
#include "cluster.cuh"
#include "dense.cuh"

constexpr int RING_BYTES = 8192;  // of a warp

// Adds up a block's sums of its slices, and the cluster's groups, in order, and stores them.
template <int NT, int MT, bool COMBINES> __device__ __forceinline__ void finish(const Dense& p, const Job& job, float (&d)[MT][NT][4], uint8_t* shared, int tile, int first_row) {
  constexpr int SUMS = MT * NT;
  static_assert(SUMS <= SLICES, "a warp adds one sum");
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, cluster = gridDim.x, group = cluster > 1 ? cluster_rank() : 0;
  __syncthreads();
  float4* sums = reinterpret_cast<float4*>(shared);
#pragma unroll
  for (int m = 0; m < MT; ++m)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      sums[((warp * MT + m) * NT + nt) * 32 + lane] = {d[m][nt][0], d[m][nt][1], d[m][nt][2], d[m][nt][3]};
  __syncthreads();
  float sum[4];
  if (warp < SUMS) {
    const float4* from = sums + warp * 32 + lane;
    const float4 s = *from;
    sum[0] = s.x, sum[1] = s.y, sum[2] = s.z, sum[3] = s.w;
#pragma unroll
    for (int w = 1; w < SLICES; ++w) {
      const float4 s = from[w * SUMS * 32];
      sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
    }
  }
  if (cluster > 1) {
    float4* others = reinterpret_cast<float4*>(shared + SLICES * RING_BYTES);
    cluster_wait();  // every block of the cluster runs
    if (group > 0 && warp < SUMS) store_in_first(smem_addr(others + ((group - 1) * SUMS + warp) * 32 + lane), {sum[0], sum[1], sum[2], sum[3]});
    cluster_arrive();
    cluster_wait();
    if (group > 0) return;
    if (warp < SUMS)
      for (int i = 1; i < cluster; ++i) {
        const float4 s = others[((i - 1) * SUMS + warp) * 32 + lane];
        sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
      }
  }
  if (warp < SUMS && tile + warp / NT < job.tiles) store<COMBINES>(p, job, sum, tile + warp / NT, first_row + warp % NT * 8, lane, p.factors);
}

// MT tiles of 16 weight rows x NT tiles of 8 activation rows. grid (cluster, chunks of 8 NT rows, MT tiles each of the jobs)
template <int NT, int MT, bool COMBINES = false> __device__ __forceinline__ void dense(const Dense& p) {
  constexpr int UNIT_BYTES = MT * 1024, DEPTH = RING_BYTES / UNIT_BYTES;
  extern __shared__ uint8_t shared[];  // the warps' rings, then in their place sums [warp][MT * NT][32]; sums of the cluster [cluster - 1][MT * NT][32]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int cluster = gridDim.x, group = cluster > 1 ? cluster_rank() : 0;
  const int first_row = blockIdx.y * 8 * NT, first_places = (p.job[0].tiles + MT - 1) / MT;
  const bool second = static_cast<int>(blockIdx.z) >= first_places;
  const Job& job = p.job[second];
  const int tile = (blockIdx.z - (second ? first_places : 0)) * MT;
  const int begin = (group * SLICES + warp) * p.slice, count = max(0, min(p.slice, p.units - begin));
  const uint8_t* at[2 * MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const int held = min(tile + m, job.tiles - 1);
    at[2 * m] = half_tile(job, low_half(job, held), p.units, lane) + begin * 512;
    at[2 * m + 1] = half_tile(job, high_half(job, held), p.units, lane) + begin * 512;
  }
  const uint32_t ring = smem_addr(shared) + warp * RING_BYTES + lane * 16;
  const auto copy = [&](int unit) {
#pragma unroll
    for (int h = 0; h < 2 * MT; ++h) copy16(ring + unit % DEPTH * UNIT_BYTES + h * 512, at[h] + unit * 512);
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    if (i < count) copy(i);
    copies_end_group();
  }
  if (cluster > 1) cluster_arrive();
  wait_for_predecessor();
  let_successor_start();

  const float* x_at[NT];
  bool has[NT];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const int row = first_row + nt * 8 + g;
    has[nt] = row < p.rows;
    x_at[nt] = p.x + (has[nt] ? row : 0) * p.x_stride + begin * UNIT + t * 8;
  }
  // Activations are AHEAD units ahead in registers: their way from L2 is as long as several units of work.
  constexpr int AHEAD = NT == 1 ? 4 : NT == 2 ? 2 : 1;
  float d[MT][NT][4] = {};
  float next[AHEAD][NT][8] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      if (has[nt] && i < count) load8(next[i][nt], x_at[nt] + i * UNIT);
  const bool writes = p.rounded && tile == 0 && !second, precise = job.mode == PRECISE;
  for (int base = 0; base < count; base += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int u = base + i;
      if (u >= count) break;
      uint4 x[NT];
      const auto reload = [&] {
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          if (has[nt] && u + AHEAD < count) load8(next[i][nt], x_at[nt] + (u + AHEAD) * UNIT);
      };
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) x[nt] = round8(next[i][nt]);
      if (!precise) reload();
      copies_wait<DEPTH - 1>();
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint32_t slot = ring + u % DEPTH * UNIT_BYTES + m * 1024;
        const uint4 low = shared16(slot), high = shared16(slot + 512);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) multiply(d[m][nt], low, high, x[nt]);
        if (precise)
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) multiply(d[m][nt], low, high, rest8(next[i][nt], x[nt]));
      }
      if (precise) reload();
      if (writes)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          if (has[nt])
            *reinterpret_cast<uint4*>(p.rounded + (first_row + nt * 8 + g) * static_cast<int64_t>(p.units * UNIT) + (begin + u) * UNIT + t * 8) = x[nt];
      if (u + DEPTH < count) copy(u + DEPTH);
      copies_end_group();
    }
  finish<NT, MT, COMBINES>(p, job, d, shared, tile, first_row);
}

// A lane's bf16 activations of its rows; where there is no row, the last row: its product is never stored. PAIRS: with second terms.
template <int NT, bool PAIRS> struct Activations {
  struct Unit {
    uint4 x[NT], rest[PAIRS ? NT : 1];
  };
  int at[NT];
  const uint16_t *x, *rest;
  __device__ __forceinline__ Activations(const Dense& p, int first_row, int begin, int g, int t) : x(p.half), rest(p.rest) {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) at[nt] = min(first_row + nt * 8 + g, p.rows - 1) * p.units * UNIT + begin * UNIT + t * 8;
  }
  __device__ __forceinline__ void load(Unit& unit, int u) const {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) unit.x[nt] = *reinterpret_cast<const uint4*>(x + at[nt] + u * UNIT);
  }
  __device__ __forceinline__ void load_rest(Unit& unit, int u) const {
    if (PAIRS)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) unit.rest[nt] = *reinterpret_cast<const uint4*>(rest + at[nt] + u * UNIT);
  }
};

// The same of bf16 activations, which a launch before this one has left (norm.cu).
template <int NT, int MT, bool PAIRS> __device__ __forceinline__ void dense_half(const Dense& p) {
  constexpr int UNIT_BYTES = MT * 1024, DEPTH = RING_BYTES / UNIT_BYTES;
  extern __shared__ uint8_t shared[];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int cluster = gridDim.x, group = cluster > 1 ? cluster_rank() : 0;
  const int first_row = blockIdx.y * 8 * NT, first_places = (p.job[0].tiles + MT - 1) / MT;
  const bool second = static_cast<int>(blockIdx.z) >= first_places;
  const Job& job = p.job[second];
  const int tile = (blockIdx.z - (second ? first_places : 0)) * MT;
  const int begin = (group * SLICES + warp) * p.slice, count = max(0, min(p.slice, p.units - begin));
  const uint8_t* at[2 * MT];
#pragma unroll
  for (int m = 0; m < MT; ++m) {
    const int held = min(tile + m, job.tiles - 1);
    at[2 * m] = half_tile(job, low_half(job, held), p.units, lane) + begin * 512;
    at[2 * m + 1] = half_tile(job, high_half(job, held), p.units, lane) + begin * 512;
  }
  const uint32_t ring = smem_addr(shared) + warp * RING_BYTES + lane * 16;
  const auto copy = [&](int unit) {
#pragma unroll
    for (int h = 0; h < 2 * MT; ++h) copy16_if(unit < count, ring + unit % DEPTH * UNIT_BYTES + h * 512, at[h] + unit * 512);
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    copy(i);
    copies_end_group();
  }
  if (cluster > 1) cluster_arrive();
  let_successor_start();
  wait_for_predecessor();

  const bool precise = PAIRS && job.mode == PRECISE;
  const Activations<NT, PAIRS> x_of(p, first_row, begin, g, t);
  // Activations are AHEAD units ahead in registers: their way from L2 is as long as several units of work.
  constexpr int AHEAD = NT * MT == 8 ? 1 : (PAIRS ? 4 : 8) / NT;
  float d[MT][NT][4] = {};
  typename Activations<NT, PAIRS>::Unit next[AHEAD] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
    if (i < count) {
      x_of.load(next[i], i);
      if (precise) x_of.load_rest(next[i], i);
    }
  for (int base = 0; base < count; base += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int u = base + i;
      if (u >= count) break;
      uint4 x[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) x[nt] = next[i].x[nt];
      if (u + AHEAD < count) x_of.load(next[i], u + AHEAD);
      copies_wait<DEPTH - 1>();
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint32_t slot = ring + u % DEPTH * UNIT_BYTES + m * 1024;
        const uint4 low = shared16(slot), high = shared16(slot + 512);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) multiply(d[m][nt], low, high, x[nt]);
        if (precise)
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) multiply(d[m][nt], low, high, next[i].rest[nt]);
      }
      if (precise && u + AHEAD < count) x_of.load_rest(next[i], u + AHEAD);
      copy(u + DEPTH);
      copies_end_group();
    }
  finish<NT, MT, false>(p, job, d, shared, tile, first_row);
}

#define DENSE(name, ...) \
  extern "C" __global__ void __launch_bounds__(256, 2) name(const __grid_constant__ Dense p) { __VA_ARGS__(p); }

DENSE(dense_8, dense<1, 1>)
DENSE(dense_16, dense<2, 1>)
DENSE(dense_32, dense<4, 1>)
DENSE(dense_combine_8, dense<1, 1, true>)
DENSE(dense_combine_16, dense<2, 1, true>)
DENSE(dense_combine_32, dense<4, 1, true>)
DENSE(dense_8_two, dense<1, 2>)
DENSE(dense_16_two, dense<2, 2>)
DENSE(dense_32_two, dense<4, 2>)
DENSE(dense_half_8, dense_half<1, 1, false>)
DENSE(dense_half_16, dense_half<2, 1, false>)
DENSE(dense_half_32, dense_half<4, 1, false>)
DENSE(dense_half_8_two, dense_half<1, 2, false>)
DENSE(dense_half_16_two, dense_half<2, 2, false>)
DENSE(dense_half_32_two, dense_half<4, 2, false>)
DENSE(dense_pairs_8, dense_half<1, 1, true>)
DENSE(dense_pairs_16, dense_half<2, 1, true>)
DENSE(dense_pairs_32, dense_half<4, 1, true>)
DENSE(dense_pairs_8_two, dense_half<1, 2, true>)
DENSE(dense_pairs_16_two, dense_half<2, 2, true>)
DENSE(dense_pairs_32_two, dense_half<4, 2, true>)
