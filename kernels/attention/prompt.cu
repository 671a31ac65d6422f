// Direct attention of a prompt chunk: keys and values are expanded from the latents, a segment of the context at a time, then
// attended to causally. What was seen of earlier segments is carried over as (output, maximum, sum) per row and head.
// Called by attend_direct (src/device/cuda/attention/prompt.rs): for every segment expand_segment, attend_segment; then finish_prompt.
#include <cuda_bf16.h>

#include "copy.cuh"
#include "flash.cuh"
#include "shape.cuh"

namespace {

constexpr int kThreads = 256;

// Slot of position `p`: of the committed prefix by the request's table, of the chunk by its own rows.
struct Places {
  const int32_t* table;
  const int32_t* own;
  int prefix, keys;
  __device__ int slot(int p) const { return p >= keys ? -1 : p < prefix ? table[p] : own[p - prefix]; }
};

// Expansion: 128 tokens x 128 rows of kv_b_proj a block, 64 of the 512 latent columns a step.
constexpr int kTokens = 128, kOutputs = 128, kStep = 64, kStepStride = kStep + 8;
struct ExpandShared {
  __nv_bfloat16 a[2][kTokens][kStepStride];
  __nv_bfloat16 b[2][kOutputs][kStepStride];
};

// Attention: eight warps with 16 query rows each of one head.
constexpr int kQueries = 128;
using Warp = Flash<kQuery, kValue>;
struct AttendShared {
  __nv_bfloat16 keys[2][kKeys][Warp::kKeyStride];
  __nv_bfloat16 values[2][kKeys][Warp::kValueStride];
};

static_assert(sizeof(ExpandShared) == 73728 && sizeof(AttendShared) == 86016, "reserved by src/device/cuda/attention/prompt.rs");

}  // namespace

// Keys and values of positions first .. first + tokens: `expanded` [token][head][128 key | 128 value] and `rope` [token][64].
// Grid (heads x 2, token tiles). Positions past the last key become zeros.
extern "C" __global__ void __launch_bounds__(kThreads)
    expand_segment(const __nv_bfloat16* cache, const __nv_bfloat16* kv_b, const int32_t* tables, const int32_t* begins, const int32_t* own,
                   int prefix, int keys, int first, int heads, __nv_bfloat16* expanded, __nv_bfloat16* rope) {
  extern __shared__ __align__(16) uint8_t expand_memory[];
  ExpandShared& sm = *reinterpret_cast<ExpandShared*>(expand_memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token0 = kTokens * blockIdx.y, output0 = kOutputs * blockIdx.x;
  const Places places{tables + begins[0], own, prefix, keys};

  // A thread fetches the same 16-byte chunk of four tokens and of four weight rows in every step.
  const int chunk = threadIdx.x % 8, line = threadIdx.x / 8;
  const __nv_bfloat16* token_at[4];
  bool present[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int slot = places.slot(first + token0 + line + 32 * i);
    present[i] = slot >= 0;
    token_at[i] = cache + static_cast<int64_t>(max(slot, 0)) * kRow;
  }
  const auto fetch = [&](int step) {
    const int stage = step % 2, column = kStep * step + 8 * chunk;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      copy16(smem_addr(&sm.a[stage][line + 32 * i][8 * chunk]), token_at[i] + column, present[i]);
      copy16(smem_addr(&sm.b[stage][line + 32 * i][8 * chunk]), kv_b + static_cast<int64_t>(output0 + line + 32 * i) * kLatent + column);
    }
    copy_commit();
  };
  fetch(0);
  if (blockIdx.x == 0) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint4 part = present[i] ? *reinterpret_cast<const uint4*>(token_at[i] + kLatent + 8 * chunk) : make_uint4(0, 0, 0, 0);
      *reinterpret_cast<uint4*>(rope + static_cast<int64_t>(token0 + line + 32 * i) * kRope + 8 * chunk) = part;
    }
  }

  // Warps stand 2 x 4: 64 tokens x 32 outputs each.
  const int row0 = 64 * (warp / 4), column0 = 32 * (warp % 4);
  float acc[4][4][4] = {};
#pragma unroll 1
  for (int step = 0; step < kLatent / kStep; ++step) {
    copy_wait<0>();
    __syncthreads();
    if (step + 1 < kLatent / kStep) fetch(step + 1);
    const int stage = step % 2;
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32_t a[4][4], b[2][4];
#pragma unroll
      for (int m = 0; m < 4; ++m) ldmatrix_x4(a[m], smem_addr(&sm.a[stage][row0 + 16 * m + lane % 16][k + 8 * (lane / 16)]));
#pragma unroll
      for (int n = 0; n < 2; ++n)
        ldmatrix_x4(b[n], smem_addr(&sm.b[stage][column0 + 16 * n + lane % 8 + 8 * (lane / 16)][k + 8 * (lane / 8 % 2)]));
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n) mma(acc[m][n], a[m], b[n / 2][2 * (n % 2)], b[n / 2][2 * (n % 2) + 1]);
    }
  }
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t token = token0 + row0 + 16 * m + lane / 4 + 8 * half;
      __nv_bfloat16* to = expanded + token * heads * kHeadRows + output0 + column0 + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < 4; ++n) *reinterpret_cast<uint32_t*>(to + 8 * n) = pack_bf16(acc[m][n][2 * half], acc[m][n][2 * half + 1]);
    }
}

// 128 rows of one head over their share of a segment: positions first + split x per .. (at most `per`, and below `keys`).
// Grid (row tiles, heads, splits); the tiles that see most come first. State: `outputs` [split][head][row][128], `sums`
// [split][head][row] of (maximum, sum).
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    attend_segment(const float* q, const __nv_bfloat16* expanded, const __nv_bfloat16* rope, int rows, int heads, int prefix, int first,
                   int tokens, int per, float scale_log2, float* outputs, float2* sums) {
  extern __shared__ __align__(16) uint8_t attend_memory[];
  AttendShared& sm = *reinterpret_cast<AttendShared*>(attend_memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y;
  const int tile0 = (gridDim.x - 1 - blockIdx.x) * kQueries;
  const int row = tile0 + 16 * warp + lane / 4;                          // and row + 8
  // Keys of the segment that this block looks at: up to what its last row sees.
  const int begin = min(per * static_cast<int>(blockIdx.z), tokens);
  const int end = min(min(begin + per, tokens), prefix + min(tile0 + kQueries, rows) - first);
  const int64_t state = (static_cast<int64_t>(blockIdx.z) * heads + head) * rows;

  // Four threads fetch a token, 64 bytes of it at a time.
  const int token = threadIdx.x / 4, chunk = 8 * (threadIdx.x % 4);
  const auto fetch_keys = [&](int at, int stage) {
    const __nv_bfloat16* plain = expanded + (static_cast<int64_t>(at + token) * heads + head) * kHeadRows + chunk;
    const __nv_bfloat16* rotated = rope + static_cast<int64_t>(at + token) * kRope + chunk;
    const uint32_t to = smem_addr(&sm.keys[stage][token][chunk]);
#pragma unroll
    for (int i = 0; i < kQuery / 32; ++i) copy16(to + 64 * i, i < kNope / 32 ? plain + 32 * i : rotated + 32 * i - kNope);
  };
  const auto fetch_values = [&](int at, int stage) {
    const __nv_bfloat16* from = expanded + (static_cast<int64_t>(at + token) * heads + head) * kHeadRows + kNope + chunk;
    const uint32_t to = smem_addr(&sm.values[stage][token][chunk]);
#pragma unroll
    for (int i = 0; i < kValue / 32; ++i) copy16(to + 64 * i, from + 32 * i);
  };
  static_assert(kThreads == 4 * kKeys, "four threads a token");
  if (begin < end) {
    fetch_keys(begin, 0);
    if (begin + kKeys < end) fetch_keys(begin + kKeys, 1);
    fetch_values(begin, 0);
    copy_commit();
  }

  Warp w;
#pragma unroll
  for (int k = 0; k < Warp::kSteps; ++k)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = row + 8 * (i % 2), column = 16 * k + 2 * (lane % 4) + 8 * (i / 2);
      const float2 x = at < rows ? *reinterpret_cast<const float2*>(q + (static_cast<int64_t>(at) * heads + head) * kQuery + column) : make_float2(0, 0);
      w.q[k][i] = pack_bf16(x.x, x.y);
    }
  w.clear();
  if (first > 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (row + 8 * h >= rows) continue;
      const float2 sum = sums[state + row + 8 * h];
      w.m[h] = sum.x, w.l[h] = lane % 4 == 0 ? sum.y : 0.0f;
      const float* from = outputs + (state + row + 8 * h) * kValue + 2 * (lane % 4);
#pragma unroll
      for (int n = 0; n < kValue / 8; ++n) {
        const float2 x = *reinterpret_cast<const float2*>(from + 8 * n);
        w.o[n][2 * h] = x.x, w.o[n][2 * h + 1] = x.y;
      }
    }
  }

  // Row r of the chunk sees positions up to prefix + r; and no key of another split.
  const auto hide = [&](typename Warp::Scores& s, int at) {
    if (min(prefix + tile0 + 16 * warp + 1 - first, end) >= at + kKeys) return;
    const int seen = prefix + row + 1 - first - at;
    const int none[2] = {0, 0}, last[2] = {min(seen, end - at), min(seen + 8, end - at)};
    Warp::hide(s, none, last);
  };
  // The next tile's scores are begun before this one's softmax, in one stretch of code, so that the tensor cores have work meanwhile.
  typename Warp::Scores even, odd;
  const auto step = [&](int at, int stage, typename Warp::Scores& now, typename Warp::Scores& next) {
    copy_wait<0>();
    __syncthreads();
    if (at + 2 * kKeys < end) fetch_keys(at + 2 * kKeys, stage);
    fetch_values(at + kKeys, stage ^ 1);
    copy_commit();
    w.score(&sm.keys[stage ^ 1][0][0], next);
    w.soften(now, scale_log2);
    w.add(now, &sm.values[stage][0][0]);
    hide(next, at + kKeys);
  };
  const auto finish = [&](int stage, typename Warp::Scores& now) {
    copy_wait<0>();
    __syncthreads();
    w.soften(now, scale_log2);
    w.add(now, &sm.values[stage][0][0]);
  };
  if (begin < end) {
    copy_wait<0>();
    __syncthreads();
    w.score(&sm.keys[0][0][0], even);
    hide(even, begin);
    int at = begin;
#pragma unroll 1
    for (; at + 2 * kKeys < end; at += 2 * kKeys) {
      step(at, 0, even, odd);
      step(at + kKeys, 1, odd, even);
    }
    if (at + kKeys < end) {
      step(at, 0, even, odd);
      finish(1, odd);
    } else {
      finish(0, even);
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = w.total(h);
    if (row + 8 * h >= rows) continue;
    if (lane % 4 == 0) sums[state + row + 8 * h] = make_float2(w.m[h], sum);
    float* to = outputs + (state + row + 8 * h) * kValue + 2 * (lane % 4);
#pragma unroll
    for (int n = 0; n < kValue / 8; ++n) *reinterpret_cast<float2*>(to + 8 * n) = make_float2(w.o[n][2 * h], w.o[n][2 * h + 1]);
  }
}

// Joins the splits, in order, and normalises: out [row][head][128]. Grid (rows, heads), 128 threads.
extern "C" __global__ void __launch_bounds__(kValue)
    finish_prompt(const float* outputs, const float2* sums, int rows, int heads, int splits, float* out) {
  const int row = blockIdx.x, head = blockIdx.y;
  float m = -INFINITY;
  for (int s = 0; s < splits; ++s) m = fmaxf(m, sums[(static_cast<int64_t>(s) * heads + head) * rows + row].x);
  float total = 0.0f, value = 0.0f;
  for (int s = 0; s < splits; ++s) {
    const int64_t at = (static_cast<int64_t>(s) * heads + head) * rows + row;
    const float weight = exp2_fast(sums[at].x - m);
    total += weight * sums[at].y;
    value += weight * outputs[at * kValue + threadIdx.x];
  }
  out[(static_cast<int64_t>(row) * heads + head) * kValue + threadIdx.x] = value / total;
}
