// Dense products out[row][n] = sum_k x[row][k] W[n][k] for few rows: bf16 weights, f32 activations rounded to bf16 on the way in.
//
// A block works on one or two tiles of 16 weight rows; its eight warps have one slice of k each, and where a matrix has too few tiles for
// the card the blocks of a cluster share a tile, one group of slices each. Weights stream through a ring in shared memory; the first
// ones are on their way before the predecessor's results are waited for. Activations come from L2, some units ahead.
#include "cluster.cuh"
#include "dense.cuh"

// What a block works on: MT tiles of 16 weight rows x NT tiles of 8 activation rows; a warp of it has a slice of k, and a ring in shared
// memory. grid (cluster, chunks of 8 NT rows, MT tiles each of the jobs)
template <int NT, int MT> struct Block {
  // A warp's ring: more weights on their way only stand in the way of activations. (The largest block has one register too few for less.)
  static constexpr int UNIT_BYTES = MT * 1024, RING_BYTES = MT * NT == 8 ? 8192 : 4096, DEPTH = RING_BYTES / UNIT_BYTES;
  const Job& job;
  int lane, warp, cluster, group, first_row, tile, begin, count;
  uint32_t ring;
  const uint8_t* at[2 * MT];

  // Finds its place and sends for the first weights, which no predecessor writes.
  __device__ __forceinline__ Block(const Dense& p, const uint8_t* shared) : Block(p, shared, (p.job[0].tiles + MT - 1) / MT) {}
  __device__ __forceinline__ Block(const Dense& p, const uint8_t* shared, int first_places) : job(p.job[is_second(first_places)]) {
    lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    cluster = gridDim.x, group = cluster > 1 ? cluster_rank() : 0;
    first_row = blockIdx.y * 8 * NT, tile = (blockIdx.z - (is_second(first_places) ? first_places : 0)) * MT;
    begin = (group * SLICES + warp) * p.slice, count = max(0, min(p.slice, p.units - begin));
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      const int held = min(tile + m, job.tiles - 1);
      at[2 * m] = half_tile(job, low_half(job, held), p.units, lane) + begin * 512;
      at[2 * m + 1] = half_tile(job, high_half(job, held), p.units, lane) + begin * 512;
    }
    ring = smem_addr(shared) + warp * RING_BYTES + lane * 16;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) bring(i);
    if (cluster > 1) {
      if (group == 0 && threadIdx.x == 0) expect_sent((cluster - 1) * NT * MT * 512);
      cluster_arrive();
    }
  }
  static __device__ __forceinline__ bool is_second(int first_places) { return static_cast<int>(blockIdx.z) >= first_places; }

  // Sends for a unit of weights, if the slice has one more.
  __device__ __forceinline__ void bring(int unit) const {
#pragma unroll
    for (int h = 0; h < 2 * MT; ++h) copy_weights16_if(unit < count, ring + unit % DEPTH * UNIT_BYTES + h * 512, at[h] + unit * 512);
    copies_end_group();
  }
  // Where unit `unit` of tile `m` lies once it is there.
  __device__ __forceinline__ uint32_t slot(int unit, int m) const { return ring + unit % DEPTH * UNIT_BYTES + m * 1024; }

  // Adds up the sums of its slices, and the cluster's groups, in order, and stores them.
  template <bool COMBINES> __device__ __forceinline__ void finish(const Dense& p, float (&d)[MT][NT][4], uint8_t* shared) const {
    constexpr int SUMS = MT * NT;
    static_assert(SUMS <= SLICES, "a warp adds one sum");
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
      if (warp >= SUMS) return;
      if (group > 0) {
        send_to_first(smem_addr(others + ((group - 1) * SUMS + warp) * 32 + lane), {sum[0], sum[1], sum[2], sum[3]});
        return;
      }
      wait_for_sent();
#pragma unroll 2
      for (int i = 1; i < cluster; ++i) {
        const float4 s = others[((i - 1) * SUMS + warp) * 32 + lane];
        sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
      }
    }
    if (warp < SUMS && tile + warp / NT < job.tiles) store<COMBINES>(p, job, sum, tile + warp / NT, first_row + warp % NT * 8, lane, p.factors);
  }
};

template <int NT, int MT, bool COMBINES = false> __device__ __forceinline__ void dense(const Dense& p) {
  extern __shared__ __align__(128) uint8_t shared[];  // the warps' rings, then in their place sums [warp][MT * NT][32]; sums of the cluster [cluster - 1][MT * NT][32]
  const Block<NT, MT> block(p, shared);
  wait_for_predecessor();
  let_successor_start();

  const int g = block.lane >> 2, t = block.lane & 3, begin = block.begin, count = block.count;
  const float* x_at[NT];
  bool has[NT];
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) {
    const int row = block.first_row + nt * 8 + g;
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
  const bool writes = p.rounded && blockIdx.z == 0, precise = block.job.mode == PRECISE;
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
      copies_wait<Block<NT, MT>::DEPTH - 1>();
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint32_t slot = block.slot(u, m);
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
            *reinterpret_cast<uint4*>(p.rounded + (block.first_row + nt * 8 + g) * static_cast<int64_t>(p.units * UNIT) + (begin + u) * UNIT + t * 8) = x[nt];
      block.bring(u + Block<NT, MT>::DEPTH);
    }
  block.template finish<COMBINES>(p, d, shared);
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
  extern __shared__ __align__(128) uint8_t shared[];
  const Block<NT, MT> block(p, shared);
  let_successor_start();
  wait_for_predecessor();

  const int count = block.count;
  const bool precise = PAIRS && block.job.mode == PRECISE;
  const Activations<NT, PAIRS> x_of(p, block.first_row, block.begin, block.lane >> 2, block.lane & 3);
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
      copies_wait<Block<NT, MT>::DEPTH - 1>();
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        const uint32_t slot = block.slot(u, m);
        const uint4 low = shared16(slot), high = shared16(slot + 512);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) multiply(d[m][nt], low, high, x[nt]);
        if (precise)
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) multiply(d[m][nt], low, high, next[i].rest[nt]);
      }
      if (precise && u + AHEAD < count) x_of.load_rest(next[i], u + AHEAD);
      block.bring(u + Block<NT, MT>::DEPTH);
    }
  block.template finish<false>(p, d, shared);
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
