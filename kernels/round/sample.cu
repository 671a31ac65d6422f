// The largest adjusted logit of every verify row, and what is wrong with a row: all there is to a greedy token, and the first half
// of a drawn one (draw.cu).
#include "adjust.cuh"

namespace {

constexpr int kThreads = 256, kLoads = 4, kChunk = kThreads * kLoads * 4;

struct Best {
  uint32_t key, id, raw, adjusted;
};

__device__ Best reduce(Best mine) {
  __shared__ Best warps[kThreads / 32];
  auto of_warp = [](Best b) {
    uint32_t key = __reduce_max_sync(~0u, b.key);
    uint32_t id = __reduce_min_sync(~0u, b.key == key ? b.id : kNone);
    return Best{key, id, __reduce_min_sync(~0u, b.raw), __reduce_min_sync(~0u, b.adjusted)};
  };
  mine = of_warp(mine);
  __syncthreads();
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = mine;
  __syncthreads();
  int lane = threadIdx.x % 32;
  return of_warp(lane < kThreads / 32 ? warps[lane] : Best{0, kNone, kNone, kNone});
}

__device__ bool bad(float value) { return isnan(value) || value == CUDART_INF_F; }

}  // namespace

// Grid: runs of `loops` chunks of 4096 logits x rows.
extern "C" __global__ __launch_bounds__(kThreads) void round_scan(Round r, const float* logits, int64_t stride,
                                                                          int loops) {
  __shared__ Rule rule;
  int row = blockIdx.y;
  const float* line = logits + row * stride;
  bool aligned = stride % 4 == 0;
  const RowInfo info = r.infos[row];
  if (row >= r.live->rows) return;
  const Request& q = r.requests[info.request];
  float4 values[kLoads], coming[kLoads];
  int base = blockIdx.x * loops * kChunk + threadIdx.x * 4;
  auto load = [&](float4 (&into)[kLoads]) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) into[i] = load_logits(line, base + i * kThreads * 4, r.vocab, aligned);
  };
  load(values);
  load_rule(r, info, q, rule);
  bool any = rule.any;
  Best best{key_of(-CUDART_INF_F), kNone, kNone, kNone};
  auto look = [&](float raw, int id) {
    if (id >= r.vocab) return;
    if (bad(raw)) best.raw = min(best.raw, id);
    float value = raw;
    if (any) {
      value = adjusted(rule, id, raw);
      if (bad(value)) best.adjusted = min(best.adjusted, id);
    }
    uint32_t key = key_of(value);
    if (key > best.key) best.key = key, best.id = id;
  };
  auto look_at = [&](const float4& four, int id) {
    look(four.x, id);
    look(four.y, id + 1);
    look(four.z, id + 2);
    look(four.w, id + 3);
  };
  // Plain rows: the largest of each four, and only whether anything is not finite; what and where is looked up afterwards.
  float top = -CUDART_INF_F;
  int top_at = -1;
  bool finite = true;
  int first = base;
  for (int loop = 0; loop < loops; ++loop) {
    int at = base;
    base += kChunk;
    if (loop + 1 < loops) load(coming);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const float4 four = values[i];
      int id = at + i * kThreads * 4;
      if (any) {
        look_at(four, id);
      } else {
        finite = finite && four.x < CUDART_INF_F && four.y < CUDART_INF_F && four.z < CUDART_INF_F && four.w < CUDART_INF_F;
        float high = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
        if (high > top) top = high, top_at = id;
      }
      values[i] = coming[i];
    }
  }
  if (!any && finite && top_at >= 0) look_at(load_logits(line, top_at, r.vocab, aligned), top_at);
  if (!any && !finite) {
    for (int at = first; at < base; at += kThreads * 4) look_at(load_logits(line, at, r.vocab, aligned), at);
  }
  best = reduce(best);
  ScanPart* parts = r.scans + size_t(row) * gridDim.x;
  if (threadIdx.x == 0) parts[blockIdx.x] = {best.key, best.id, best.raw, best.adjusted};
  if (!last_of_row(r.arrivals, row, gridDim.x)) return;

  best = {0, kNone, kNone, kNone};
  if (threadIdx.x < gridDim.x) {
    const ScanPart& part = parts[threadIdx.x];
    best = {__ldcg(&part.key), __ldcg(&part.id), __ldcg(&part.raw), __ldcg(&part.adjusted)};
  }
  best = reduce(best);
  if (threadIdx.x != 0) return;
  uint32_t outside = q.bias_outside;
  Pick pick{best.id, kFine, 0, 0.0f, value_of(best.key)};
  // The model's own faults are judged before a mask can hide them.
  if (best.raw != kNone) {
    pick.fault = kNotFinite, pick.fault_token = best.raw, pick.value = line[best.raw];
  } else if (outside != kNone) {
    pick.fault = kBiasOutside, pick.fault_token = outside;
  } else if (best.adjusted != kNone) {
    pick.fault = kNotFinite, pick.fault_token = best.adjusted, pick.value = adjusted(rule, best.adjusted, line[best.adjusted]);
  } else if (best.id == kNone) {
    pick.fault = kNothingAllowed;
  }
  r.picks[row] = pick;
}
