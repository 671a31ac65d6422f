// Second node of a tree-verify launch: adds a row's partials in the order of their place in the prefix and normalises.
//
// Maxima are integers, so weights are exact powers of two and the merge is plain addition; an empty partial (l = 0) is never
// read. `wide` and `mid` spread one row x head over four blocks of 16 or 4 warps, `narrow` gives it one warp: many pieces and few
// rows want parallelism, many rows and few pieces want small blocks. `exact` always uses `mid`, so that its order of addition
// never depends on the launch.
#include "schedule.cuh"
#include "softmax.cuh"

namespace {

__device__ void add(float4& acc, float4 v, float w) {
  acc.x += w * v.x, acc.y += w * v.y, acc.z += w * v.z, acc.w += w * v.w;
}

// What lane `lane` adds up of a slice: step lane / 4, quarter lane % 4.
__device__ void store(__nv_bfloat16* row, int slice, int lane, float4 v, float scale) {
  uint32_t* dst = reinterpret_cast<uint32_t*>(row + slice_column(slice, lane / 4) + 2 * (lane % 4));
  dst[0] = pack_bf16(v.x * scale, v.y * scale), dst[4] = pack_bf16(v.z * scale, v.w * scale);
}
__device__ float4 read_part(const VerifyParams& p, int64_t row, int slice, int lane) {
  return __ldcs(reinterpret_cast<const float4*>(p.partial_o) + partial_place(row, slice, lane / 4) + lane % 4);
}

// What one warp knows about 128 pieces: four a lane. Pieces without a key have weight 0.
struct Weights {
  float m[4], l[4], weight[4];
};

__device__ Weights load(const float4* ml, int first, int count, int64_t step) {
  Weights w;
  for (int k = 0; k < 4; ++k) {
    const int i = first + 32 * k + static_cast<int>(threadIdx.x % 32);
    const float4 x = i < count ? ml[i * step] : make_float4(kNoMax, 0.0f, 0.0f, 0.0f);
    w.m[k] = x.y > 0.0f ? x.x : kNoMax, w.l[k] = x.y, w.weight[k] = x.z;
  }
  return w;
}

// Largest m and the sums over all pieces, by one warp, lane by lane in a fixed pattern.
struct Totals {
  float m, l, weight;
};
__device__ Totals totals(const Weights& head, const float4* ml, int count, int64_t step) {
  Totals t = {fmaxf(fmaxf(head.m[0], head.m[1]), fmaxf(head.m[2], head.m[3])), 0.0f, 0.0f};
  for (int first = 128; first < count; first += 128) {
    const Weights w = load(ml, first, count, step);
    t.m = fmaxf(t.m, fmaxf(fmaxf(w.m[0], w.m[1]), fmaxf(w.m[2], w.m[3])));
  }
  for (int d = 1; d < 32; d *= 2) t.m = fmaxf(t.m, __shfl_xor_sync(~0u, t.m, d));
  auto sum = [&](const Weights& w) {
    for (int k = 0; k < 4; ++k) {
      const float scale = exp2_fast(w.m[k] - t.m);
      t.l += w.l[k] * scale, t.weight += w.weight[k] * scale;
    }
  };
  sum(head);
  for (int first = 128; first < count; first += 128) sum(load(ml, first, count, step));
  for (int d = 1; d < 32; d *= 2) t.l += __shfl_xor_sync(~0u, t.l, d), t.weight += __shfl_xor_sync(~0u, t.weight, d);
  return t;
}

// Finds the pieces of this block's row and head. False: padding, or the tree kernel wrote the output itself.
struct Row {
  int64_t at, first, step;
  int count;
};
__device__ bool find(const VerifyParams& p, int tile_rows, Row& r) {
  const int heads = 1 << p.heads_log2, row = blockIdx.x >> p.heads_log2, head = blockIdx.x & (heads - 1);
  const int4 piece = p.pieces[row];
  if (row < p.qo_indptr[0] || row >= p.qo_indptr[p.batch] || piece.y <= 1) return false;
  r.at = (static_cast<int64_t>(row) << p.heads_log2) + head;
  r.count = min(piece.y, ceil_div(p.partials - piece.x, piece.z));
  r.step = static_cast<int64_t>(piece.z) * tile_rows;
  r.first = static_cast<int64_t>(piece.x) * tile_rows + piece.w + head;
  return true;
}

}  // namespace

// `tile_rows`: rows of a row tile in the launch that wrote the partials. A block has one row x head and one slice of its columns.
template <int kWarps>
__device__ __forceinline__ void merge_spread(const VerifyParams& p, int tile_rows) {
  constexpr int kAtOnce = 8, kRound = kWarps * kAtOnce;
  static_assert(kRound <= 128 && 128 % kRound == 0, "a lane holds the weights of 128 pieces");
  __shared__ float4 part[kWarps][32];
  let_next_start();
  wait_for_previous();
  Row r;
  if (!find(p, tile_rows, r)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, slice = blockIdx.y;
  const float4* ml = p.partial_ml + r.first;
  Weights w = load(ml, 0, r.count, r.step);
  const Totals total = totals(w, ml, r.count, r.step);

  // Warp w adds pieces w, w + kWarps, ...; eight loads at a time are in flight.
  float4 acc = {};
  for (int base = 0; base < r.count; base += 128) {
    if (base > 0) w = load(ml, base, r.count, r.step);
#pragma unroll
    for (int round = 0; round < 128; round += kRound) {
      if (base + round >= r.count) break;
      float4 v[kAtOnce];
      float scale[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int in_round = warp + kWarps * k, i = round + in_round;
        const float l = __shfl_sync(~0u, w.l[(round + kWarps * k) / 32], i % 32), m = __shfl_sync(~0u, w.m[(round + kWarps * k) / 32], i % 32);
        scale[k] = exp2_fast(m - total.m);
        v[k] = make_float4(0, 0, 0, 0);
        if (l > 0.0f) v[k] = read_part(p, r.first + (base + i) * r.step, slice, lane);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) add(acc, v[k], scale[k]);
    }
  }
  part[warp][lane] = acc;
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int k = 1; k < kWarps; ++k) add(acc, part[k][lane], 1.0f);
  store(p.out + r.at * kLatent, slice, lane, acc, total.weight > 0.0f ? 1.0f / total.weight : 0.0f);
  if (lane == 0 && blockIdx.y == 0) p.lse[r.at] = natural_lse(total.m, total.l);
}

extern "C" __global__ void __launch_bounds__(512) verify_merge_wide(const __grid_constant__ VerifyParams p, int tile_rows) {
  merge_spread<16>(p, tile_rows);
}
extern "C" __global__ void __launch_bounds__(128) verify_merge_mid(const __grid_constant__ VerifyParams p, int tile_rows) {
  merge_spread<4>(p, tile_rows);
}

extern "C" __global__ void __launch_bounds__(32, 16) verify_merge_narrow(const __grid_constant__ VerifyParams p, int tile_rows) {
  let_next_start();
  wait_for_previous();
  Row r;
  if (!find(p, tile_rows, r)) return;
  const int lane = threadIdx.x % 32;
  const float4* ml = p.partial_ml + r.first;
  const Totals total = totals(load(ml, 0, r.count, r.step), ml, r.count, r.step);
  float4 acc[4] = {};
#pragma unroll 2
  for (int i = 0; i < r.count; ++i) {
    const float4 x = ml[i * r.step];
    const float scale = x.y > 0.0f ? exp2_fast(x.x - total.m) : 0.0f;
#pragma unroll
    for (int k = 0; k < 4; ++k) add(acc[k], x.y > 0.0f ? read_part(p, r.first + i * r.step, k, lane) : make_float4(0, 0, 0, 0), scale);
  }
  const float scale = total.weight > 0.0f ? 1.0f / total.weight : 0.0f;
#pragma unroll
  for (int k = 0; k < 4; ++k) store(p.out + r.at * kLatent, k, lane, acc[k], scale);
  if (lane == 0) p.lse[r.at] = natural_lse(total.m, total.l);
}
