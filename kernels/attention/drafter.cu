// The drafter's attention: context rows into its cache, and grouped-query attention of block rows over the context and their own block.
// Called by store_context and attend_block (src/device/cuda/attention/drafter.rs); kernels for heads of 64 and of 128.
//
// A context row of a layer is [keys of all key heads | values of all key heads], so that one slot is one stretch of memory.
#include <cuda_bf16.h>

#include "copy.cuh"
#include "dependents.cuh"
#include "flash.cuh"
#include "reduce.cuh"

// Mirror of `Shape` in src/device/cuda/attention/drafter.rs: what a pass over blocks works on.
struct Shape {
  const __nv_bfloat16* block;      // prepared rows [row][queries | keys | values]
  const __nv_bfloat16* cache;      // this layer's context rows
  const uint32_t* counts;
  const uint32_t* groups;
  const int32_t* firsts;
  const int32_t* begins;
  const int32_t* prefixes;
  const int32_t* tables;
  float* outputs;                  // partials [group][key head][piece][query row][head]
  float2* sums;                    // their (maximum, sum)
  int32_t heads, kv_heads;
  int32_t window;                  // keys at query - key >= window are hidden; 0 = none is
  int32_t causal;                  // inside the block a row sees itself and rows before it
  int32_t most_pieces;             // capacity of the partials
  int32_t query_rows;              // capacity: a multiple of 64
};
static_assert(sizeof(Shape) == 104, "mirrored in Rust");

namespace {

constexpr int kThreads = 128;
constexpr int kQueryRows = 64;         // a block of attend_block: 16 a warp
constexpr int kShortest = 128;         // keys a piece has at least
constexpr int kSlotTiles = 4;

// One head vector, by a warp: RMSNorm and half-split rotation where `weight` is given, else a copy.
template <int kHead>
__device__ void head_vector(const float* x, const float* weight, float eps, const float* cos, const float* sin, __nv_bfloat16* to) {
  constexpr int kPairs = kHead / 64;
  const int lane = threadIdx.x % 32;
  float low[kPairs], high[kPairs], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    low[i] = x[lane + 32 * i], high[i] = x[kHead / 2 + lane + 32 * i];
    square += low[i] * low[i] + high[i] * high[i];
  }
  if (weight) {
    const float factor = 1.0f / sqrtf(warp_sum(square) / kHead + eps);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int at = lane + 32 * i;
      const float a = low[i] * factor * weight[at], b = high[i] * factor * weight[kHead / 2 + at];
      low[i] = a * cos[at] - b * sin[at], high[i] = b * cos[at] + a * sin[at];
    }
  }
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    to[lane + 32 * i] = __float2bfloat16_rn(low[i]);
    to[kHead / 2 + lane + 32 * i] = __float2bfloat16_rn(high[i]);
  }
}

// Head vectors of one row, a warp each; grid (rows, heads / 4 rounded up). With `slots`, rows go to their slot, else to their own place.
template <int kHead>
__device__ void prepare(const float* x, int queries, int keys, const float* q_norm, const float* k_norm, float eps, const float* cos,
                        const float* sin, const uint32_t* counts, const uint32_t* positions, const int32_t* slots, __nv_bfloat16* to) {
  const int row = blockIdx.x, head = blockIdx.y * (kThreads / 32) + threadIdx.x / 32, heads = queries + 2 * keys;
  let_successor_start();
  wait_for_predecessor();
  if (head >= heads || row >= counts[0]) return;
  const int place = slots ? slots[row] : row;
  if (place < 0) return;
  const int64_t angle = static_cast<int64_t>(positions[row]) * (kHead / 2);
  const float* weight = head < queries ? q_norm : head < queries + keys ? k_norm : nullptr;
  head_vector<kHead>(x + (static_cast<int64_t>(row) * heads + head) * kHead, weight, eps, cos + angle, sin + angle,
                     to + (static_cast<int64_t>(place) * heads + head) * kHead);
}

// What one request's block looks at: keys 0 .. context are context positions oldest .. prefix, then come the block's own rows.
struct Block {
  int first, rows, prefix, oldest, context, keys, per, pieces;
  __device__ Block(const Shape& s, int group) {
    first = s.firsts[group], rows = s.firsts[group + 1] - first, prefix = s.prefixes[group];
    oldest = visible_from(s, 0);
    context = prefix - oldest, keys = rows > 0 ? context + rows : 0;
    // Cut by the request's own length, so that no other request changes where.
    per = max(kShortest, (keys + s.most_pieces * kKeys - 1) / (s.most_pieces * kKeys) * kKeys);
    pieces = (keys + per - 1) / per;
  }
  // First context position that block row `row` sees.
  __device__ int visible_from(const Shape& s, int row) const { return s.window ? min(max(prefix + row + 1 - s.window, 0), prefix) : 0; }
};

template <int kHead>
struct Shared {
  __nv_bfloat16 keys[2][kKeys][kHead + 8];
  __nv_bfloat16 values[2][kKeys][kHead + 8];
  int slots[kSlotTiles][kKeys];
};
static_assert(sizeof(Shared<64>) == 37888 && sizeof(Shared<128>) == 70656, "reserved by src/device/cuda/attention/drafter.rs");

// 64 query rows (block row major, head of the group minor) of one key head over one piece. Grid (query tiles, groups x key heads, pieces).
template <int kHead>
__device__ void attend(const Shape& s) {
  extern __shared__ __align__(16) uint8_t memory[];
  Shared<kHead>& sm = *reinterpret_cast<Shared<kHead>*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = blockIdx.y / s.kv_heads, kv_head = blockIdx.y % s.kv_heads, piece = blockIdx.z;
  let_successor_start();
  wait_for_predecessor();
  if (group >= s.counts[1]) return;
  const Block b(s, group);
  const int per_kv = s.heads / s.kv_heads, tile0 = kQueryRows * blockIdx.x;
  if (piece >= b.pieces || tile0 >= b.rows * per_kv) return;
  const int begin = piece * b.per, end = min(begin + b.per, b.keys), tiles = (end - begin + kKeys - 1) / kKeys;
  const int64_t width = (s.heads + 2 * s.kv_heads) * kHead;
  const int32_t* table = s.tables + s.begins[group] + b.oldest;

  const auto look_up = [&](int tile) {
    if (threadIdx.x >= kKeys) return;
    const int key = begin + tile * kKeys + threadIdx.x;
    if (tile < tiles && key < b.context) copy_word(smem_addr(&sm.slots[tile % kSlotTiles][threadIdx.x]), table + key);
  };
  const auto fetch = [&](int tile) {
    constexpr int kChunks = kHead / 8;
    if (tile < tiles) {
#pragma unroll 4
      for (int i = threadIdx.x; i < kKeys * kChunks; i += kThreads) {
        const int place = i / kChunks, chunk = i % kChunks, key = begin + tile * kKeys + place;
        const __nv_bfloat16 *k = s.cache, *v = s.cache;
        if (key < b.context) {
          k += (static_cast<int64_t>(sm.slots[tile % kSlotTiles][place]) * 2 * s.kv_heads + kv_head) * kHead + 8 * chunk;
          v = k + s.kv_heads * kHead;
        } else if (key < b.keys) {
          k = s.block + (b.first + key - b.context) * width + (s.heads + kv_head) * kHead + 8 * chunk;
          v = k + s.kv_heads * kHead;
        }
        copy16(smem_addr(&sm.keys[tile % 2][place][8 * chunk]), k, key < b.keys);
        copy16(smem_addr(&sm.values[tile % 2][place][8 * chunk]), v, key < b.keys);
      }
    }
    copy_commit();
  };
  look_up(0), look_up(1);
  copy_commit();
  copy_wait<0>();
  __syncthreads();
  fetch(0);

  Flash<kHead, kHead> w;
  const int q0 = tile0 + 16 * warp + lane / 4;
  int first_key[2], last_key[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int place = q0 + 8 * h, row = min(place / per_kv, b.rows - 1);
    first_key[h] = b.visible_from(s, row) - b.oldest;
    last_key[h] = s.causal ? b.context + row + 1 : b.keys;
    const __nv_bfloat16* from = s.block + (b.first + row) * width + (kv_head * per_kv + place % per_kv) * kHead + 2 * (lane % 4);
#pragma unroll
    for (int k = 0; k < kHead / 16; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) w.q[k][h + 2 * i] = *reinterpret_cast<const uint32_t*>(from + 16 * k + 8 * i);
  }
  w.clear();
  const float scale_log2 = 1.4426950408889634f / sqrtf(static_cast<float>(kHead));
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    copy_wait<0>();
    __syncthreads();
    look_up(tile + 2);
    fetch(tile + 1);
    const int at = begin + tile * kKeys;
    const int from[2] = {first_key[0] - at, first_key[1] - at};
    const int until[2] = {min(last_key[0], end) - at, min(last_key[1], end) - at};
    typename Flash<kHead, kHead>::Scores scores;
    w.score(&sm.keys[tile % 2][0][0], scores);
    w.hide(scores, from, until);
    w.soften(scores, scale_log2);
    w.add(scores, &sm.values[tile % 2][0][0]);
  }
  const int64_t state = (static_cast<int64_t>(blockIdx.y) * s.most_pieces + piece) * s.query_rows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = w.total(h);
    if (lane % 4 == 0) s.sums[state + q0 + 8 * h] = make_float2(w.m[h], sum);
    float* to = s.outputs + (state + q0 + 8 * h) * kHead + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kHead / 8; ++n) *reinterpret_cast<float2*>(to + 8 * n) = make_float2(w.o[n][2 * h], w.o[n][2 * h + 1]);
  }
}

// Joins the pieces of one row and head: four groups of threads add every fourth piece, then the four sums are added in order. Grid
// (rows, heads), kHead threads with four columns each; padding rows become zeros.
template <int kHead>
__device__ void merge(const Shape& s, float* out) {
  constexpr int kPhases = 4, kColumns = kHead / 4;       // threads a phase
  __shared__ float4 parts[kPhases][kColumns];
  __shared__ float2 totals[kPhases];
  const int row = blockIdx.x, head = blockIdx.y, per_kv = s.heads / s.kv_heads;
  const int column = threadIdx.x % kColumns, phase = threadIdx.x / kColumns;
  float4* to = reinterpret_cast<float4*>(out + (static_cast<int64_t>(row) * s.heads + head) * kHead) + column;
  let_successor_start();
  wait_for_predecessor();
  if (row >= s.counts[0]) {
    if (phase == 0) *to = make_float4(0, 0, 0, 0);
    return;
  }
  const int group = s.groups[row];
  const Block b(s, group);
  const int64_t state = (static_cast<int64_t>(group) * s.kv_heads + head / per_kv) * s.most_pieces * s.query_rows + (row - b.first) * per_kv + head % per_kv;
  float m = -INFINITY, total = 0.0f;
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
  for (int piece = phase; piece < b.pieces; piece += kPhases) {
    const int64_t at = state + static_cast<int64_t>(piece) * s.query_rows;
    const float2 stats = s.sums[at];
    const float4 x = reinterpret_cast<const float4*>(s.outputs + at * kHead)[column];
    const float top = fmaxf(m, stats.x), base = top == -INFINITY ? 0.0f : top;
    const float old = exp2_fast(m - base), weight = exp2_fast(stats.x - base);
    m = top, total = total * old + weight * stats.y;
    sum = make_float4(sum.x * old + weight * x.x, sum.y * old + weight * x.y, sum.z * old + weight * x.z, sum.w * old + weight * x.w);
  }
  parts[phase][column] = sum;
  if (column == 0) totals[phase] = make_float2(m, total);
  __syncthreads();
  if (phase > 0) return;
  float top = totals[0].x;
#pragma unroll
  for (int i = 1; i < kPhases; ++i) top = fmaxf(top, totals[i].x);
  total = 0.0f, sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kPhases; ++i) {
    const float weight = exp2_fast(totals[i].x - top);
    const float4 x = parts[i][column];
    total += weight * totals[i].y;
    sum = make_float4(sum.x + weight * x.x, sum.y + weight * x.y, sum.z + weight * x.z, sum.w + weight * x.w);
  }
  *to = make_float4(sum.x / total, sum.y / total, sum.z / total, sum.w / total);
}

}  // namespace

#define DRAFTER(head)                                                                                                                     \
  extern "C" __global__ void __launch_bounds__(kThreads) prepare_heads_##head(                                                            \
      const float* x, int queries, int keys, const float* q_norm, const float* k_norm, float eps, const float* cos, const float* sin,     \
      const uint32_t* counts, const uint32_t* positions, const int32_t* slots, __nv_bfloat16* to) {                                       \
    prepare<head>(x, queries, keys, q_norm, k_norm, eps, cos, sin, counts, positions, slots, to);                                         \
  }                                                                                                                                       \
  extern "C" __global__ void __launch_bounds__(kThreads) attend_block_##head(const __grid_constant__ Shape s) { attend<head>(s); }        \
  extern "C" __global__ void __launch_bounds__(head) merge_block_##head(const __grid_constant__ Shape s, float* out) { merge<head>(s, out); }

DRAFTER(64)
DRAFTER(128)
