// Dense products out[row][n] = sum_k x[row][k] W[n][k]: bf16 weights, f32 activations rounded to bf16 on the way in, f32 sums.
//
// A block of 8 warps works on 4 tiles of 16 weight rows and one stretch of k: warp w has tile w % 4 and half w / 4 of the stretch.
// Activations of the stretch lie in shared memory for all 4 tiles; weights stream from memory into registers, DEPTH units ahead.
// Where a matrix is cut along k into several stretches, blocks leave partial sums and the last one to arrive adds them in order
// of k. Which k are summed in which order depends on the matrix alone: a row has the same bits among 1 or 512 rows.
#include "fragments.cuh"

constexpr int TILES = 4, HALVES = 2, WARPS = TILES * HALVES, DEPTH = 4;

enum Mode : int { STORE = 0, SWIGLU = 1, PRECISE = 2 };

// One matrix of a launch. Mirrored in src/device/cuda/products/linear.rs.
struct Job {
  const uint8_t* weights;
  float* out;
  int64_t out_stride;
  int n;            // rows of the matrix
  int mode;
  int first_group;  // its first group of 4 tiles in the launch
  int tiles;        // tiles of 16 rows (SWIGLU: 8 gate rows and their 8 up rows)
};
struct Dense {
  const float* x;
  int64_t x_stride;
  float* partial;
  uint32_t* arrived;
  int rows;
  int units;         // k / 32
  int slice;         // units of one warp
  int piece;         // units of a slice that lie in shared memory at a time, a multiple of DEPTH
  int terms;         // 2: activations as the sum of two bf16 (PRECISE)
  int jobs;
  Job job[2];
};
static_assert(sizeof(Job) == 40 && sizeof(Dense) == 136, "mirrored in Rust");

__device__ __forceinline__ void store(const Job& job, const float (&d)[4], int tile, int row, int rows, int lane) {
  const int g = lane >> 2;
  row += 2 * (lane & 3);
  if (job.mode == SWIGLU) {
    float* out = job.out + row * job.out_stride + tile * 8 + g;
    if (row < rows) out[0] = swiglu(d[0], d[2]);
    if (row + 1 < rows) out[job.out_stride] = swiglu(d[1], d[3]);
    return;
  }
  const int n = tile * 16 + g;
  float* out = job.out + row * job.out_stride + n;
  if (row < rows) {
    if (n < job.n) out[0] = d[0];
    if (n + 8 < job.n) out[8] = d[2];
  }
  if (row + 1 < rows) {
    if (n < job.n) out[job.out_stride] = d[1];
    if (n + 8 < job.n) out[job.out_stride + 8] = d[3];
  }
}

// grid (chunks of 8 NT rows, groups of 4 tiles, stretches of k)
template <int NT> __device__ __forceinline__ void dense(const Dense& p) {
  extern __shared__ uint4 xs[];  // [terms][half][piece][NT][32]
  __shared__ uint32_t turn;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % TILES, wk = warp / TILES;
  const int first_row = blockIdx.x * 8 * NT, group = blockIdx.y, stretch = blockIdx.z, stretches = gridDim.z;
  const Job& job = p.job[p.jobs > 1 && group >= p.job[1].first_group];
  const int tile = (group - job.first_group) * TILES + wm;
  const int begin = (stretch * HALVES + wk) * p.slice, count = max(0, min(p.slice, p.units - begin));
  const bool works = tile < job.tiles && count > 0;
  const int pairs = (job.n + 15) / 16;
  const int low_half = job.mode == SWIGLU ? tile : 2 * tile, high_half = job.mode == SWIGLU ? pairs + tile : 2 * tile + 1;
  const uint8_t* low_at = job.weights + ((static_cast<int64_t>(low_half) * p.units + begin) * 32 + lane) * 16;
  const uint8_t* high_at = job.weights + ((static_cast<int64_t>(high_half) * p.units + begin) * 32 + lane) * 16;
  uint4 low[DEPTH], high[DEPTH];
#pragma unroll
  for (int i = 0; i < DEPTH; ++i)
    if (works && i < count) low[i] = load_weights(low_at + i * 512), high[i] = load_weights(high_at + i * 512);
  wait_for_predecessor();
  let_successor_start();

  float d[NT][4] = {};
  const int per_half = p.piece * NT * 32;
  for (int base = 0; base < p.slice; base += DEPTH) {
    if (base % p.piece == 0) {
      if (base) __syncthreads();
      const int here = min(p.piece, p.slice - base);
      for (int i = threadIdx.x; i < HALVES * here * NT * 32; i += WARPS * 32) {
        const int half = i / (here * NT * 32), rest = i % (here * NT * 32), unit = rest / (NT * 32), at = rest % (NT * 32);
        const int row = first_row + at / 4, from = (stretch * HALVES + half) * p.slice + base + unit;
        if (row >= p.rows || from >= p.units) continue;
        float x[8];
        load8(x, p.x + row * p.x_stride + from * UNIT + (at & 3) * 8);
        const uint4 rounded = round8(x);
        xs[half * per_half + unit * NT * 32 + at] = rounded;
        if (p.terms == 2) xs[(HALVES + half) * per_half + unit * NT * 32 + at] = rest8(x, rounded);
      }
      __syncthreads();
    }
    const uint4* at = xs + wk * per_half + (base % p.piece) * NT * 32 + lane;
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const int unit = base + i;
      if (!works || unit >= count) break;
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) multiply(d[nt], low[i], high[i], at[(i * NT + nt) * 32]);
      if (job.mode == PRECISE)
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) multiply(d[nt], low[i], high[i], at[HALVES * per_half + (i * NT + nt) * 32]);
      if (unit + DEPTH < count) {
        low[i] = load_weights(low_at + (unit + DEPTH) * 512);
        high[i] = load_weights(high_at + (unit + DEPTH) * 512);
      }
    }
  }

  // The two halves of the stretch, in order.
  __syncthreads();
  float4* sums = reinterpret_cast<float4*>(xs);
  if (wk == 1)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) sums[(nt * TILES + wm) * 32 + lane] = {d[nt][0], d[nt][1], d[nt][2], d[nt][3]};
  __syncthreads();
  const bool live = tile < job.tiles;
  if (wk == 0)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) {
      const float4 other = sums[(nt * TILES + wm) * 32 + lane];
      d[nt][0] += other.x, d[nt][1] += other.y, d[nt][2] += other.z, d[nt][3] += other.w;
      if (stretches == 1 && live) store(job, d[nt], tile, first_row + nt * 8, p.rows, lane);
    }
  if (stretches == 1) return;

  // The stretches, in order, by whoever comes last.
  const int place = group * gridDim.x + blockIdx.x;
  float4* partial = reinterpret_cast<float4*>(p.partial) + static_cast<int64_t>(place) * stretches * NT * TILES * 32;
  if (wk == 0)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      partial[((stretch * NT + nt) * TILES + wm) * 32 + lane] = {d[nt][0], d[nt][1], d[nt][2], d[nt][3]};
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) turn = atomicAdd(p.arrived + place, 1);
  __syncthreads();
  if (turn != stretches - 1) return;
  __threadfence();
  if (threadIdx.x == 0) p.arrived[place] = 0;
  for (int nt = wk; nt < NT; nt += HALVES) {
    float sum[4] = {};
#pragma unroll 4
    for (int s = 0; s < stretches; ++s) {
      const float4 part = __ldcg(partial + ((s * NT + nt) * TILES + wm) * 32 + lane);
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    }
    if (live) store(job, sum, tile, first_row + nt * 8, p.rows, lane);
  }
}

extern "C" __global__ void __launch_bounds__(256, 3) dense_8(const __grid_constant__ Dense p) { dense<1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) dense_16(const __grid_constant__ Dense p) { dense<2>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) dense_32(const __grid_constant__ Dense p) { dense<4>(p); }
