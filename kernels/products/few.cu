// Dense products for up to FEW rows, where everything is latency: the sums of dense.cu in the same order.
//
// A block has one tile of 16 weight rows and as much of its weights in shared memory as fits before it waits for its predecessor. Then
// each warp takes its slice of the rows in one go: adds what is still to be added, multiplies by the norm's weight, sums the squares,
// and leaves bf16 rows in shared memory. The factor of the norm multiplies the sums at the end.
#include "cluster.cuh"
#include "dense.cuh"

constexpr int FEW = 4, DEPTH = 4;  // rows; units of a warp's ring: more on their way only stand in the way of activations

// grid (cluster, 1, tiles of the jobs; beyond them, as many as it takes, blocks that store latents)
template <bool NORM, bool LATENTS, int ROWS, bool COMBINES = false> __device__ __forceinline__ void few(const Dense& p) {
  constexpr int QUADS = 4, TOGETHER = ROWS > 1 ? 2 : 1;  // four columns each, of a lane at once; rows
  // The warps' rings; their activations [warp][high, rest][row][stride]; sums of the cluster [cluster - 1][32] and squares [..][FEW]. The
  // block's sums take the place of the rings.
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ float squares[SLICES][FEW], factors[FEW];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, t = lane & 3;
  const int cluster = gridDim.x, group = cluster > 1 ? cluster_rank() : 0;
  const int block = blockIdx.z, blocks = p.job[0].tiles + p.job[1].tiles;
  if (LATENTS && block >= blocks) {
    const float2 norm = latent_norm(p.latents);
    let_successor_start();
    wait_for_predecessor();
    const int row = (block - blocks) * cluster + group;
    if (row < p.rows) store_latent(p.latents, row, norm);
    return;
  }
  const bool second = block >= p.job[0].tiles, adds = p.norm.added;
  const Job& job = p.job[second];
  const int tile = second ? block - p.job[0].tiles : block;
  const int begin = (group * SLICES + warp) * p.slice, count = max(0, min(p.slice, p.units - begin));
  const int ring_bytes = min(p.slice, DEPTH) * 1024, stride = (p.slice | 1) * 64, terms = p.job[0].mode == PRECISE ? 2 : 1;
  const uint8_t* low_at = half_tile(job, low_half(job, tile), p.units, lane) + begin * 512;
  const uint8_t* high_at = half_tile(job, high_half(job, tile), p.units, lane) + begin * 512;
  const uint32_t ring = smem_addr(shared) + warp * ring_bytes + lane * 16;
  const auto copy = [&](int unit) {
    copy_weights16_if(unit < count, ring + unit % DEPTH * 1024, low_at + unit * 512);
    copy_weights16_if(unit < count, ring + unit % DEPTH * 1024 + 512, high_at + unit * 512);
  };
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    copy(i);
    copies_end_group();
  }
  if (cluster > 1) {
    if (group == 0 && threadIdx.x == 0) expect_sent((cluster - 1) * (512 + (NORM ? p.rows * 4 : 0)));
    cluster_arrive();
  }
  const int quads = count * (UNIT / 4), from = begin * (UNIT / 4) + lane;
  const float4* weights = reinterpret_cast<const float4*>(p.norm.weight) + from;
  float4 w[QUADS];
  if (NORM && ROWS == 1)
#pragma unroll
    for (int i = 0; i < QUADS; ++i)
      if (quads - lane > 32 * i) w[i] = weights[32 * i];
  let_successor_start();
  wait_for_predecessor();

  // `TOGETHER` rows at a time; where rows are odd, the last one twice.
  const bool precise = job.mode == PRECISE, writes = NORM && block == 0;
  uint8_t* activations = shared + SLICES * ring_bytes + warp * terms * p.rows * stride;
  const int rest_at = p.rows * stride;
#pragma unroll 1
  for (int row = 0; row < p.rows; row += TOGETHER) {
    const float4 *x[TOGETHER], *added[TOGETHER], *weight = weights;
    uint8_t* to[TOGETHER];
    int at[TOGETHER];
    float square[TOGETHER] = {};
#pragma unroll
    for (int r = 0; r < TOGETHER; ++r) {
      at[r] = ROWS == 1 ? 0 : min(row + r, p.rows - 1);
      x[r] = reinterpret_cast<const float4*>(p.x + at[r] * p.x_stride) + from;
      added[r] = reinterpret_cast<const float4*>(p.norm.added + at[r] * p.norm.added_stride) + from;
      to[r] = activations + at[r] * stride + lane * 8;
    }
#pragma unroll 1
    for (int left = quads - lane, done = 0; left > 0; left -= 32 * QUADS, done += 32 * QUADS) {
      float4 v[TOGETHER][QUADS], a[TOGETHER][QUADS];
#pragma unroll
      for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
          if (left > 32 * i) v[r][i] = x[r][done + 32 * i];
          if (NORM && adds && left > 32 * i) a[r][i] = added[r][done + 32 * i];
        }
      if (NORM && (ROWS > 1 || done > 0))
#pragma unroll
        for (int i = 0; i < QUADS; ++i)
          if (left > 32 * i) w[i] = weight[done + 32 * i];
#pragma unroll
      for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
        for (int i = 0; i < QUADS; ++i)
          if (left > 32 * i) {
            if (NORM && adds) v[r][i] = plus(v[r][i], a[r][i]);
            if (NORM) square[r] = add_squares(square[r], v[r][i]);
            const float4 y = NORM ? times(v[r][i], w[i]) : v[r][i];
            const uint2 rounded = round4(y);
            *reinterpret_cast<uint2*>(to[r] + (done + 32 * i) * 8) = rounded;
            if (precise) *reinterpret_cast<uint2*>(to[r] + (done + 32 * i) * 8 + rest_at) = rest4(y, rounded);
          }
      if (writes || (!NORM && block == 0 && p.rounded))
#pragma unroll
        for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
          for (int i = 0; i < QUADS; ++i)
            if (left > 32 * i) {
              if (NORM && p.norm.sum) reinterpret_cast<float4*>(p.norm.sum + at[r] * p.norm.sum_stride)[from + done + 32 * i] = v[r][i];
              if (p.rounded)
                reinterpret_cast<uint2*>(p.rounded + at[r] * static_cast<int64_t>(p.units * UNIT))[from + done + 32 * i] =
                    *reinterpret_cast<const uint2*>(to[r] + (done + 32 * i) * 8);
            }
    }
    if (NORM)
#pragma unroll
      for (int r = 0; r < TOGETHER; ++r) {
        const float sum = sum_of_lanes(square[r]);
        if (lane == 0) squares[warp][at[r]] = sum;
      }
  }
  __syncwarp();

  // A lane without a row multiplies row 0: columns of a product do not touch each other.
  const uint32_t x_at = smem_addr(activations) + ((lane >> 2) < p.rows ? (lane >> 2) * stride : 0) + t * 16;
  float d[4] = {};
#pragma unroll 1
  for (int u = 0; u < count; ++u) {
    copies_wait<DEPTH - 1>();
    const uint32_t slot = ring + u % DEPTH * 1024;
    const uint4 low = shared16(slot), high = shared16(slot + 512);
    multiply(d, low, high, shared16(x_at + u * 64));
    if (precise) multiply(d, low, high, shared16(x_at + rest_at + u * 64));
    copy(u + DEPTH);
    copies_end_group();
  }

  __syncthreads();
  float4* sums = reinterpret_cast<float4*>(shared);
  sums[warp * 32 + lane] = {d[0], d[1], d[2], d[3]};
  __syncthreads();
  float sum[4] = {}, square = 0;
  if (warp == 0) {
#pragma unroll
    for (int w = 0; w < SLICES; ++w) {
      const float4 s = sums[w * 32 + lane];
      if (w == 0) sum[0] = s.x, sum[1] = s.y, sum[2] = s.z, sum[3] = s.w;
      else sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
      if (NORM && lane < p.rows) square = w ? square + squares[w][lane] : squares[w][lane];
    }
  }
  if (cluster > 1) {
    float4* others = reinterpret_cast<float4*>(shared + SLICES * (ring_bytes + terms * p.rows * stride));
    float* other_squares = reinterpret_cast<float*>(others + (cluster - 1) * 32);
    cluster_wait();  // every block of the cluster runs
    if (warp > 0) return;
    if (group > 0) {
      send_to_first(smem_addr(others + (group - 1) * 32 + lane), {sum[0], sum[1], sum[2], sum[3]});
      if (NORM && lane < p.rows) send_to_first(smem_addr(other_squares + (group - 1) * FEW + lane), square);
      return;
    }
    wait_for_sent();
#pragma unroll 1
    for (int i = 1; i < cluster; ++i) {
      const float4 s = others[(i - 1) * 32 + lane];
      sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
      if (NORM && lane < p.rows) square += other_squares[(i - 1) * FEW + lane];
    }
  }
  if (warp > 0) return;
  if (NORM) {
    if (lane < p.rows) {
      factors[lane] = rms_factor(square, p.units * UNIT, p.norm.eps);
      if (block == 0 && p.norm.factors) p.norm.factors[lane] = factors[lane];
    }
    __syncwarp();
  }
  store<COMBINES>(p, job, sum, tile, 0, lane, NORM ? factors : nullptr);
}

extern "C" __global__ void __launch_bounds__(256, 4) one_plain(const __grid_constant__ Dense p) { few<false, false, 1>(p); }
extern "C" __global__ void __launch_bounds__(256, 4) one_combine(const __grid_constant__ Dense p) { few<false, false, 1, true>(p); }
extern "C" __global__ void __launch_bounds__(256, 3) one_norm(const __grid_constant__ Dense p) { few<true, false, 1>(p); }
extern "C" __global__ void __launch_bounds__(256, 3) one_latents(const __grid_constant__ Dense p) { few<true, true, 1>(p); }
extern "C" __global__ void __launch_bounds__(256, 4) few_plain(const __grid_constant__ Dense p) { few<false, false, FEW>(p); }
extern "C" __global__ void __launch_bounds__(256, 4) few_combine(const __grid_constant__ Dense p) { few<false, false, FEW, true>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) few_norm(const __grid_constant__ Dense p) { few<true, false, FEW>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) few_latents(const __grid_constant__ Dense p) { few<true, true, FEW>(p); }
