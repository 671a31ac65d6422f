// Dense products out[row][n] = sum_k x[row][k] W[n][k] for few rows: bf16 weights, f32 activations rounded to bf16 on the way in.
//
// A block works on one tile of 16 weight rows; its eight warps have one slice of k each, and where a matrix has too few tiles for
// the card the blocks of a cluster share a tile, one group of slices each. Weights stream through a ring in shared memory; the first
// ones are on their way before the predecessor's results are waited for. Activations come from L2, one unit ahead.
#include "dense.cuh"

constexpr int DEPTH = 8, UNIT_BYTES = 1024;

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
// A word of this block's shared memory as block 0 of the cluster has it.
__device__ __forceinline__ void store_in_first(uint32_t at, float4 v) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, 0;" : "=r"(there) : "r"(at));
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(there), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

// grid (cluster, chunks of 8 NT rows, tiles)
template <int NT> __device__ __forceinline__ void dense(const Dense& p) {
  extern __shared__ uint8_t shared[];  // the warps' rings, then sums [warp][NT][32], then other blocks' sums [cluster - 1][NT][32]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int cluster = gridDim.x, group = cluster > 1 ? cluster_rank() : 0;
  const int first_row = blockIdx.y * 8 * NT;
  const Job& job = p.job[p.jobs > 1 && static_cast<int>(blockIdx.z) >= p.job[1].first_tile];
  const int tile = blockIdx.z - job.first_tile;
  const int begin = (group * SLICES + warp) * p.slice, count = max(0, min(p.slice, p.units - begin));
  const uint8_t* low_at = half_tile(job, low_half(job, tile), p.units, lane) + begin * 512;
  const uint8_t* high_at = half_tile(job, high_half(job, tile), p.units, lane) + begin * 512;
  const uint32_t ring = smem_addr(shared) + warp * DEPTH * UNIT_BYTES + lane * 16;
#pragma unroll
  for (int i = 0; i < DEPTH; ++i) {
    if (i < count) copy16(ring + i * UNIT_BYTES, low_at + i * 512), copy16(ring + i * UNIT_BYTES + 512, high_at + i * 512);
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
  float d[NT][4] = {};
  float next[AHEAD][NT][8] = {};
#pragma unroll
  for (int i = 0; i < AHEAD; ++i)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      if (has[nt] && i < count) load8(next[i][nt], x_at[nt] + i * UNIT);
  const bool writes = p.rounded && tile == 0 && job.first_tile == 0, precise = job.mode == PRECISE;
  for (int base = 0; base < count; base += AHEAD)
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const int u = base + i;
      if (u >= count) break;
      uint4 x[NT], rest[NT];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        x[nt] = round8(next[i][nt]);
        if (precise) rest[nt] = rest8(next[i][nt], x[nt]);
        if (has[nt] && u + AHEAD < count) load8(next[i][nt], x_at[nt] + (u + AHEAD) * UNIT);
      }
      copies_wait<DEPTH - 1>();
      const uint32_t slot = ring + u % DEPTH * UNIT_BYTES;
      const uint4 low = shared16(slot), high = shared16(slot + 512);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) multiply(d[nt], low, high, x[nt]);
      if (precise)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) multiply(d[nt], low, high, rest[nt]);
      if (writes)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
          if (has[nt])
            *reinterpret_cast<uint4*>(p.rounded + (first_row + nt * 8 + g) * static_cast<int64_t>(p.units * UNIT) + (begin + u) * UNIT + t * 8) = x[nt];
      if (u + DEPTH < count) {
        copy16(slot, low_at + (u + DEPTH) * 512);
        copy16(slot + 512, high_at + (u + DEPTH) * 512);
      }
      copies_end_group();
    }

  float4* sums = reinterpret_cast<float4*>(shared + SLICES * DEPTH * UNIT_BYTES);
#pragma unroll
  for (int nt = 0; nt < NT; ++nt) sums[(warp * NT + nt) * 32 + lane] = {d[nt][0], d[nt][1], d[nt][2], d[nt][3]};
  __syncthreads();
  float sum[4];
  if (warp < NT) {
    const float4* from = sums + warp * 32 + lane;
    const float4 s = *from;
    sum[0] = s.x, sum[1] = s.y, sum[2] = s.z, sum[3] = s.w;
#pragma unroll
    for (int w = 1; w < SLICES; ++w) {
      const float4 s = from[w * NT * 32];
      sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
    }
  }
  if (cluster > 1) {
    float4* others = sums + SLICES * NT * 32;
    cluster_wait();  // every block of the cluster runs
    if (group > 0 && warp < NT) store_in_first(smem_addr(others + ((group - 1) * NT + warp) * 32 + lane), {sum[0], sum[1], sum[2], sum[3]});
    cluster_arrive();
    cluster_wait();
    if (group > 0) return;
    if (warp < NT)
      for (int i = 1; i < cluster; ++i) {
        const float4 s = others[((i - 1) * NT + warp) * 32 + lane];
        sum[0] += s.x, sum[1] += s.y, sum[2] += s.z, sum[3] += s.w;
      }
  }
  if (warp < NT) store(p, job, sum, tile, first_row + warp * 8, lane);
}

extern "C" __global__ void __launch_bounds__(256, 2) dense_8(const __grid_constant__ Dense p) { dense<1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) dense_16(const __grid_constant__ Dense p) { dense<2>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) dense_32(const __grid_constant__ Dense p) { dense<4>(p); }
