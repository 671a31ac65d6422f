// The two small products around absorbed attention, one per head: queries into the latent space (times W_UK) and latent outputs to
// values (times W_UV). kv_b_proj is read as it is stored, [head][128 W_UK | 128 W_UV][512].
//
// Every element is summed in an order that does not depend on how many rows there are, so these serve `exact` and `fast` alike.
#include <cuda_bf16.h>

#include "copy.cuh"
#include "dependents.cuh"
#include "shape.cuh"

namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 64;       // latent columns of a block of `absorb`
constexpr int kValues = 16;        // value columns of a block of `expand`
constexpr int kQuarter = kLatent / 4;

// Queries of one head, 16 x kMTiles rows, times 64 columns of its W_UK [128][512]; also carries the rotated part over.
template <int kMTiles>
__device__ void absorb(const float* q, const __nv_bfloat16* kv_b, const uint32_t* counts, int rows, int heads, __nv_bfloat16* out) {
  constexpr int kRows = 16 * kMTiles;
  __shared__ __align__(16) __nv_bfloat16 w[kNope][kColumns + 8];
  __shared__ __align__(16) __nv_bfloat16 a[kRows][kNope + 8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
  const int column0 = kColumns * blockIdx.x, row0 = kRows * blockIdx.z;

  for (int i = threadIdx.x; i < kNope * kColumns / 8; i += kThreads) {
    const int row = i / (kColumns / 8), chunk = i % (kColumns / 8);
    copy_weights16(smem_addr(&w[row][8 * chunk]), kv_b + static_cast<int64_t>(head * kHeadRows + row) * kLatent + column0 + 8 * chunk);
  }
  copy_commit();
  let_successor_start();
  wait_for_predecessor();
  // Everything is asked for at once: rows that are not live are loaded too, and taken as zeros.
  const int live = min(static_cast<int>(counts[0]), rows);
  constexpr int kTurned = kRows * kRope / 2 / kThreads;  // rotated pairs of a thread
  const auto turned_row = [&](int i) { return row0 + (i * kThreads + static_cast<int>(threadIdx.x)) / (kRope / 2); };
  float2 turned[kTurned] = {};
#pragma unroll
  for (int i = 0; i < kTurned; ++i)
    if (blockIdx.x == 0 && turned_row(i) < rows)
      turned[i] = reinterpret_cast<const float2*>(q + (static_cast<int64_t>(turned_row(i)) * heads + head) * kQuery + kNope)[threadIdx.x % (kRope / 2)];
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kNope / 4; i += kThreads) {
    const int row = i / (kNope / 4), column = 4 * (i % (kNope / 4));
    float4 x = make_float4(0, 0, 0, 0);
    if (row0 + row < rows) x = *reinterpret_cast<const float4*>(q + (static_cast<int64_t>(row0 + row) * heads + head) * kQuery + column);
    if (row0 + row >= live) x = make_float4(0, 0, 0, 0);
    *reinterpret_cast<uint2*>(&a[row][column]) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
  }
#pragma unroll
  for (int i = 0; i < kTurned; ++i)
    if (blockIdx.x == 0 && turned_row(i) < rows)
      reinterpret_cast<uint32_t*>(out + (static_cast<int64_t>(turned_row(i)) * heads + head) * kRow + kLatent)[threadIdx.x % (kRope / 2)] =
          turned_row(i) < live ? pack_bf16(turned[i].x, turned[i].y) : 0;
  copy_wait<0>();
  __syncthreads();

  float acc[kMTiles][2][4] = {};
#pragma unroll
  for (int k = 0; k < kNope; k += 16) {
    uint32_t b[4];
    ldmatrix_x4_trans(b, smem_addr(&w[k + lane % 16][16 * warp + 8 * (lane / 16)]));
#pragma unroll
    for (int m = 0; m < kMTiles; ++m) {
      uint32_t x[4];
      ldmatrix_x4(x, smem_addr(&a[16 * m + lane % 16][k + 8 * (lane / 16)]));
      mma(acc[m][0], x, b[0], b[1]);
      mma(acc[m][1], x, b[2], b[3]);
    }
  }
#pragma unroll
  for (int m = 0; m < kMTiles; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + 16 * m + lane / 4 + 8 * half;
      if (row >= rows) continue;
      __nv_bfloat16* to = out + (static_cast<int64_t>(row) * heads + head) * kRow + column0 + 16 * warp + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < 2; ++n) *reinterpret_cast<uint32_t*>(to + 8 * n) = pack_bf16(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
    }
}

}  // namespace

// Grid (8, heads, row tiles).
extern "C" __global__ void __launch_bounds__(kThreads)
    absorb_few(const float* q, const __nv_bfloat16* kv_b, const uint32_t* counts, int rows, int heads, __nv_bfloat16* out) {
  absorb<1>(q, kv_b, counts, rows, heads, out);
}
extern "C" __global__ void __launch_bounds__(kThreads)
    absorb_many(const float* q, const __nv_bfloat16* kv_b, const uint32_t* counts, int rows, int heads, __nv_bfloat16* out) {
  absorb<4>(q, kv_b, counts, rows, heads, out);
}

// Latent outputs of one head, 16 rows, times 16 rows of its W_UV [128][512]. Each warp sums a quarter of the 512 columns; the
// quarters are added as (0 + 1) + (2 + 3). Grid (8, heads, row tiles).
extern "C" __global__ void __launch_bounds__(kThreads)
    expand_outputs(const __nv_bfloat16* latents, const __nv_bfloat16* kv_b, const uint32_t* counts, int rows, int heads, float* out) {
  __shared__ __align__(16) __nv_bfloat16 w[kValues][kLatent + 8];
  __shared__ __align__(16) __nv_bfloat16 a[16][kLatent + 8];
  __shared__ float parts[4][16][kValues + 1];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
  const int value0 = kValues * blockIdx.x, row0 = 16 * blockIdx.z;
  for (int i = threadIdx.x; i < kValues * kLatent / 8; i += kThreads) {
    const int row = i / (kLatent / 8), chunk = i % (kLatent / 8);
    copy_weights16(smem_addr(&w[row][8 * chunk]), kv_b + static_cast<int64_t>(head * kHeadRows + kNope + value0 + row) * kLatent + 8 * chunk);
  }
  let_successor_start();
  wait_for_predecessor();
  const int live = min(static_cast<int>(counts[0]), rows);  // asked for together with the rows
  for (int i = threadIdx.x; i < 16 * kLatent / 8; i += kThreads) {
    const int row = i / (kLatent / 8), chunk = i % (kLatent / 8);
    const bool present = row0 + row < rows;
    const int64_t from = static_cast<int64_t>(present ? row0 + row : 0) * heads + head;
    copy16(smem_addr(&a[row][8 * chunk]), latents + from * kLatent + 8 * chunk, present);
  }
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  float acc[2][4] = {};
#pragma unroll
  for (int k = 0; k < kQuarter; k += 16) {
    uint32_t x[4], b[4];
    const int column = kQuarter * warp + k;
    ldmatrix_x4(x, smem_addr(&a[lane % 16][column + 8 * (lane / 16)]));
    ldmatrix_x4(b, smem_addr(&w[lane % 8 + 8 * (lane / 16)][column + 8 * (lane / 8 % 2)]));
    mma(acc[0], x, b[0], b[1]);
    mma(acc[1], x, b[2], b[3]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) parts[warp][lane / 4 + 8 * (i / 2)][8 * n + 2 * (lane % 4) + i % 2] = acc[n][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * kValues; i += kThreads) {
    const int row = i / kValues, value = i % kValues;
    if (row0 + row >= rows) continue;
    const float sum = (parts[0][row][value] + parts[1][row][value]) + (parts[2][row][value] + parts[3][row][value]);
    out[(static_cast<int64_t>(row0 + row) * heads + head) * kValue + value0 + value] = row0 + row < live ? sum : 0;
  }
}

// The same for many rows: 64 rows x 64 values a block, one quarter of the columns a step. A warp has 16 values and sums the quarters
// as above, so the bits are the same. Grid (2, heads, row tiles).
namespace {

constexpr int kManyRows = 64, kManyValues = 64;
struct ManyShared {
  __nv_bfloat16 a[2][kManyRows][kQuarter + 8];
  __nv_bfloat16 w[2][kManyValues][kQuarter + 8];
};
static_assert(sizeof(ManyShared) == 69632, "reserved by src/device/cuda/attention/absorbed.rs");

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    expand_outputs_many(const __nv_bfloat16* latents, const __nv_bfloat16* kv_b, const uint32_t* counts, int rows, int heads, float* out) {
  extern __shared__ __align__(16) uint8_t memory[];
  ManyShared& sm = *reinterpret_cast<ManyShared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
  const int value0 = kManyValues * blockIdx.x, row0 = kManyRows * blockIdx.z;
  let_successor_start();
  wait_for_predecessor();
  const int live = min(static_cast<int>(counts[0]), rows);
  const auto fetch = [&](int quarter) {
    constexpr int kChunks = kQuarter / 8;
    for (int i = threadIdx.x; i < kManyRows * kChunks; i += kThreads) {
      const int row = i / kChunks, chunk = i % kChunks;
      const int64_t weight = head * kHeadRows + kNope + value0 + row;
      copy_weights16(smem_addr(&sm.w[quarter % 2][row][8 * chunk]), kv_b + weight * kLatent + kQuarter * quarter + 8 * chunk);
      const bool present = row0 + row < live;
      const int64_t from = static_cast<int64_t>(present ? row0 + row : 0) * heads + head;
      copy16(smem_addr(&sm.a[quarter % 2][row][8 * chunk]), latents + from * kLatent + kQuarter * quarter + 8 * chunk, present);
    }
    copy_commit();
  };
  float halves[2][4][2][4] = {};
  fetch(0);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    copy_wait<0>();
    __syncthreads();
    if (quarter < 3) fetch(quarter + 1);
    float acc[4][2][4] = {};
#pragma unroll
    for (int k = 0; k < kQuarter; k += 16) {
      uint32_t b[4];
      ldmatrix_x4(b, smem_addr(&sm.w[quarter % 2][16 * warp + lane % 8 + 8 * (lane / 16)][k + 8 * (lane / 8 % 2)]));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        uint32_t x[4];
        ldmatrix_x4(x, smem_addr(&sm.a[quarter % 2][16 * m + lane % 16][k + 8 * (lane / 16)]));
        mma(acc[m][0], x, b[0], b[1]);
        mma(acc[m][1], x, b[2], b[3]);
      }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) halves[quarter / 2][m][n][i] += acc[m][n][i];
  }
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = row0 + 16 * m + lane / 4 + 8 * half;
      if (row >= rows) continue;
      float* to = out + (static_cast<int64_t>(row) * heads + head) * kValue + value0 + 16 * warp + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < 2; ++n)
        *reinterpret_cast<float2*>(to + 8 * n) =
            make_float2(halves[0][m][n][2 * half] + halves[1][m][n][2 * half], halves[0][m][n][2 * half + 1] + halves[1][m][n][2 * half + 1]);
    }
}
