// What stands between the products: embeddings, norms, sums, copies of rows. One block works on one row unless it says otherwise.
#include "../common/rows.cuh"
#include "fragments.cuh"

// Element (row, column) of a matrix in half tiles.
__device__ __forceinline__ int64_t half_tile_index(int64_t row, int column, int columns) {
  return ((row / 8 * (columns / UNIT) + column / UNIT) * 32 + row % 8 * 4 + column % UNIT / 8) * 8 + column % 8;
}

// out[row] = table[token - first]; zeros where another rank holds the token.
extern "C" __global__ void __launch_bounds__(256) embed(const uint16_t* table, int64_t held, int width, uint32_t first, Rows rows, float* out, int64_t stride) {
  wait_for_predecessor();
  let_successor_start();
  const int row = blockIdx.x;
  const int64_t at = row < rows.counts[0] ? static_cast<int64_t>(rows.tokens[row]) - first : -1;
  for (int c = threadIdx.x * 8; c < width; c += blockDim.x * 8) {
    uint4 word = {};
    if (at >= 0 && at < held) word = *reinterpret_cast<const uint4*>(table + half_tile_index(at, c, width));
    float4* to = reinterpret_cast<float4*>(out + row * stride + c);
    to[0] = {__uint_as_float(word.x << 16), __uint_as_float(word.x & 0xffff0000u), __uint_as_float(word.y << 16), __uint_as_float(word.y & 0xffff0000u)};
    to[1] = {__uint_as_float(word.z << 16), __uint_as_float(word.z & 0xffff0000u), __uint_as_float(word.w << 16), __uint_as_float(word.w & 0xffff0000u)};
  }
}

// Sum over a block of up to 1024 threads, the same order every time.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float sums[32];
#pragma unroll
  for (int s = 16; s; s /= 2) x += __shfl_xor_sync(~0u, x, s);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  x = threadIdx.x % 32 < blockDim.x / 32 ? sums[threadIdx.x % 32] : 0.0f;
#pragma unroll
  for (int s = 16; s; s /= 2) x += __shfl_xor_sync(~0u, x, s);
  return x;
}

// out = x / sqrt(mean(x^2) + eps) * weight, `width` a multiple of 4.
extern "C" __global__ void __launch_bounds__(1024) rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int width, float* out, int64_t stride) {
  wait_for_predecessor();
  let_successor_start();
  constexpr int KEPT = 4;  // values of up to 16384 columns stay in registers
  const float4* from = reinterpret_cast<const float4*>(x + blockIdx.x * x_stride);
  const float4* scale = reinterpret_cast<const float4*>(weight);
  float4* to = reinterpret_cast<float4*>(out + blockIdx.x * stride);
  float4 kept[KEPT];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int c = i * blockDim.x + threadIdx.x;
    if (c < width / 4) {
      kept[i] = from[c];
      sum += kept[i].x * kept[i].x + kept[i].y * kept[i].y + kept[i].z * kept[i].z + kept[i].w * kept[i].w;
    }
  }
  for (int c = KEPT * blockDim.x + threadIdx.x; c < width / 4; c += blockDim.x) {
    const float4 v = from[c];
    sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  const float factor = 1.0f / sqrtf(block_sum(sum) / width + eps);
#pragma unroll
  for (int i = 0; i < KEPT; ++i) {
    const int c = i * blockDim.x + threadIdx.x;
    if (c < width / 4) {
      const float4 s = scale[c];
      to[c] = {kept[i].x * factor * s.x, kept[i].y * factor * s.y, kept[i].z * factor * s.z, kept[i].w * factor * s.w};
    }
  }
  for (int c = KEPT * blockDim.x + threadIdx.x; c < width / 4; c += blockDim.x) {
    const float4 v = from[c], s = scale[c];
    to[c] = {v.x * factor * s.x, v.y * factor * s.y, v.z * factor * s.z, v.w * factor * s.w};
  }
}

// x += y.
extern "C" __global__ void __launch_bounds__(256) add_rows(float* x, int64_t x_stride, const float* y, int64_t y_stride, int width) {
  wait_for_predecessor();
  let_successor_start();
  float4* to = reinterpret_cast<float4*>(x + blockIdx.y * x_stride);
  const float4* from = reinterpret_cast<const float4*>(y + blockIdx.y * y_stride);
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= width / 4) return;
  const float4 a = to[c], b = from[c];
  to[c] = {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// out[row] = x[source of row]; `sources` may be null: the row itself. A source is clamped, so that padding reads something valid.
extern "C" __global__ void __launch_bounds__(256) copy_rows(const float* x, int64_t x_stride, int x_rows, const uint32_t* sources, int width, float* out, int64_t stride) {
  wait_for_predecessor();
  let_successor_start();
  const int row = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= width / 4) return;
  const int64_t source = sources ? min(sources[row], static_cast<uint32_t>(x_rows - 1)) : row;
  reinterpret_cast<float4*>(out + row * stride)[c] = reinterpret_cast<const float4*>(x + source * x_stride)[c];
}

// Places that the host chose, in the launch itself. Mirrored in src/device/cuda/products/rows.rs.
struct Moves {
  uint32_t from[128], to[128];
};
// out[to] = x[from] for every move. grid (columns / 1024, moves)
extern "C" __global__ void __launch_bounds__(256) scatter_rows(const float* x, int64_t x_stride, int width, const __grid_constant__ Moves moves, float* out, int64_t stride) {
  wait_for_predecessor();
  let_successor_start();
  const int c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= width / 4) return;
  reinterpret_cast<float4*>(out + moves.to[blockIdx.y] * stride)[c] = reinterpret_cast<const float4*>(x + moves.from[blockIdx.y] * x_stride)[c];
}

// Row 0 of out = the last live row of x; `last` describes that row alone. One block.
extern "C" __global__ void __launch_bounds__(1024) keep_last(const float* x, int64_t x_stride, int width, Rows rows, float* out, Rows last) {
  wait_for_predecessor();
  let_successor_start();
  const uint32_t row = max(rows.counts[0], 1u) - 1;
  for (int c = threadIdx.x; c < width; c += blockDim.x) out[c] = x[row * x_stride + c];
  if (threadIdx.x == 0) {
    last.tokens[0] = rows.tokens[row];
    last.positions[0] = rows.positions[row];
    last.slots[0] = rows.slots[row];
    last.groups[0] = 0;
    last.ancestors[0] = 1;
    last.sources[0] = row;
    last.counts[0] = 1;
    last.counts[1] = 0;
    last.firsts[0] = 0;
    last.firsts[1] = 0;
  }
}

// Row-major [n, k] weights into half tiles; rows n .. up to a multiple of 16 become zeros. One thread a 16-byte word.
extern "C" __global__ void __launch_bounds__(256) tile_weights(const uint16_t* from, int64_t n, int k, uint4* to, int64_t words) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < words; i += gridDim.x * int64_t{256}) {
    const int lane = i % 32;
    const int64_t unit = i / 32 % (k / UNIT), row = i / 32 / (k / UNIT) * 8 + lane / 4;
    to[i] = row < n ? *reinterpret_cast<const uint4*>(from + row * k + unit * UNIT + lane % 4 * 8) : uint4{};
  }
}
// Back again: for tests.
extern "C" __global__ void __launch_bounds__(256) untile_weights(const uint16_t* from, int64_t n, int k, uint16_t* to) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < n * k; i += gridDim.x * int64_t{256}) to[i] = from[half_tile_index(i / k, i % k, k)];
}

__device__ __forceinline__ uint32_t hash(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((x ^ x >> 31) >> 16);
}
// bf16 weights uniform in -scale .. scale.
extern "C" __global__ void __launch_bounds__(256) random_weights(uint16_t* to, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < count; i += gridDim.x * int64_t{256}) {
    const float x = (static_cast<int32_t>(hash(seed * 0x100000001b3ull + i)) * 0x1p-31f) * scale;
    to[i] = static_cast<uint16_t>(pack_bf16(x, 0) & 0xffff);
  }
}
