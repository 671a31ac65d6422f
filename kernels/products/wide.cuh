// Parts of wide.cu: copies, words in the shared memory of a cluster, and what becomes of a block's sums.
#pragma once
#include "cluster.cuh"
#include "dense.cuh"

constexpr int MAX_STAGES = 16;

__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  cluster_wait();
}
// A place in shared memory as block `owner` of the cluster has it, and a store to one.
__device__ __forceinline__ uint32_t in_block(uint32_t at, int owner) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(owner));
  return there;
}
__device__ __forceinline__ void store_there(uint32_t at, float x) { asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
__device__ __forceinline__ float4 shared_floats(uint32_t at) {
  const uint4 v = shared16(at);
  return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}

// Adds `count` columns from `n` on of the weighted outputs of a row's choices, in their order.
__device__ __forceinline__ void add_outputs(float4& v, const Dense& p, const Job& job, int row, int n) {
  const Lists lists(p.list, p.places);
  constexpr int AT_ONCE = 8;  // choices whose outputs are on their way together
  for (int base = 0; base < p.top_k; base += AT_ONCE) {
    float weight[AT_ONCE];
    float4 y[AT_ONCE];
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {
      const int64_t place = row * p.top_k + min(base + i, static_cast<int>(p.top_k) - 1);
      weight[i] = base + i < p.top_k ? lists.weights[place] : 0.0f;
      y[i] = *reinterpret_cast<const float4*>(p.outer + place * job.n + n);
    }
    // A choice that was not made has weight 0 and no output.
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
      if (weight[i] != 0) v = {fmaf(weight[i], y[i].x, v.x), fmaf(weight[i], y[i].y, v.y), fmaf(weight[i], y[i].z, v.z), fmaf(weight[i], y[i].w, v.w)};
  }
}

__device__ __forceinline__ float4 scaled(float4 v, float factor) {
  return {__fmul_rn(v.x, factor), __fmul_rn(v.y, factor), __fmul_rn(v.z, factor), __fmul_rn(v.w, factor)};
}
// Rotates four columns of a row's queries from `n` on, if they are rotary.
__device__ __forceinline__ void rotate_columns(float4& v, const Latents& p, int row, int rows, int n) {
  const int column = n % kQuery - kNope;
  if (column < 0 || row >= min(static_cast<int>(p.counts[0]), rows)) return;
  const int64_t angle = static_cast<int64_t>(p.positions[row]) * (kRope / 2) + column / 2;
  const float c[2] = {p.cos[angle], p.cos[angle + 1]}, s[2] = {p.sin[angle], p.sin[angle + 1]};
  v = {turned(v.x, v.y, false, c[0], s[0]), turned(v.y, v.x, true, c[0], s[0]), turned(v.z, v.w, false, c[1], s[1]), turned(v.w, v.z, true, c[1], s[1])};
}

// Adds up `groups` parts [rows][width] of the sums in shared memory, in order, and writes them out: rows from `first_row` on of TILES
// tiles from `tile` on. A thread takes four columns.
template <int TILES, int THREADS>
__device__ __forceinline__ void write_rows(const Dense& p, const Job& job, uint32_t sums, int groups, int rows, int width, int tile, int first_row) {
  const auto total = [&](int row, int column) {
    uint32_t at = sums + (row * width + column) * 4;
    float4 v = shared_floats(at);
    for (int i = 1; i < groups; ++i) {
      const float4 more = shared_floats(at += rows * width * 4);
      v.x += more.x, v.y += more.y, v.z += more.z, v.w += more.w;
    }
    return v;
  };
  const int n_end = job.mode == SWIGLU ? job.n / 2 : job.n;
  const bool aligned = (job.out_stride | n_end) % 4 == 0 && reinterpret_cast<uintptr_t>(job.out) % 16 == 0;
  const int quads = job.mode == SWIGLU ? TILES * 2 : TILES * 4;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * quads; i += THREADS) {
    const int row = i / quads, quad = i % quads, to = first_row + row;
    if (to >= p.rows) break;
    const float factor = p.factors ? p.factors[to] : 1.0f;
    int n;
    float4 v;
    if (job.mode == SWIGLU) {
      n = tile * 8 + quad * 4;
      const float4 gate = scaled(total(row, quad / 2 * 16 + quad % 2 * 4), factor), up = scaled(total(row, quad / 2 * 16 + 8 + quad % 2 * 4), factor);
      v = {swiglu(gate.x, up.x), swiglu(gate.y, up.y), swiglu(gate.z, up.z), swiglu(gate.w, up.w)};
    } else {
      n = tile * 16 + quad * 4;
      v = scaled(total(row, quad * 4), factor);
    }
    if (n >= n_end) continue;
    if (job.mode == ROTATE) rotate_columns(v, p.latents, to, p.rows, n);
    if (job.mode == COMBINE) add_outputs(v, p, job, to, n);
    float* out = job.out + to * job.out_stride + n;
    if (aligned) {
      *reinterpret_cast<float4*>(out) = v;
      continue;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
    for (int j = 0; j < 4 && n + j < n_end; ++j) out[j] = values[j];
  }
}
