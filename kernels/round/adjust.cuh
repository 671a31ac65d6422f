// What changes a row's logits before a token is chosen, in the order of src/speculate/sampling.rs: bias, penalties, allowed
// tokens, banned tokens.
#pragma once
#include <math_constants.h>

#include "state.cuh"

struct Rule {
  const uint32_t* seen;
  const float* bias;
  const uint32_t* mask;
  const uint32_t* suppressed;
  uint32_t suppressed_count;
  float frequency, presence, repetition;
  int path_length;
  uint32_t path[kMaxRows];  // draft tokens from below the anchor down to the row
  bool any;                 // anything at all, an illegal bias included
};

// Fills `rule` (in shared memory) for a live row; the whole block calls it.
inline __device__ void load_rule(const Round& r, const RowInfo& info, const Request& q, Rule& rule) {
  uint32_t share = info.place >> 8, at = info.place & 255;
  if (threadIdx.x == 0) {
    rule.seen = q.seen;
    rule.bias = q.bias;
    rule.mask = at < r.plan->share[share].masked ? r.masks + size_t(info.planned) * r.words : nullptr;
    rule.suppressed = q.suppressed;
    rule.suppressed_count = info.position < q.free_from ? q.suppressed_count : 0;
    rule.frequency = q.frequency;
    rule.presence = q.presence;
    rule.repetition = q.repetition;
    rule.path_length = q.seen ? r.trees[share].depth[at] : 0;
    rule.any = rule.seen || rule.bias || rule.mask || rule.suppressed_count || q.bias_outside != kNone;
  }
  if (q.seen && threadIdx.x >= 1 && threadIdx.x < kMaxRows) {
    const Tree& tree = r.trees[share];
    uint64_t line = tree.ancestors[at];
    if (line >> threadIdx.x & 1) {
      int above = __popcll(line & ((1ull << threadIdx.x) - 1)) - 1;  // the anchor is not on the path
      rule.path[above] = tree.token[threadIdx.x];
    }
  }
  __syncthreads();
}

inline __device__ float adjusted(const Rule& rule, uint32_t id, float logit) {
  if (rule.bias) logit = __fadd_rn(logit, rule.bias[id]);
  if (rule.seen) {
    uint32_t word = rule.seen[id], on_path = 0;
    for (int i = 0; i < rule.path_length; ++i) on_path += rule.path[i] == id;
    if (word | on_path) {
      uint32_t count = (word & ~kListed) + on_path;
      logit = logit > 0.0f ? __fdiv_rn(logit, rule.repetition) : __fmul_rn(logit, rule.repetition);
      logit = __fsub_rn(logit, __fmul_rn(rule.frequency, float(count)));
      logit = __fsub_rn(logit, count > 0 ? rule.presence : 0.0f);
    }
  }
  if (rule.mask && !(rule.mask[id >> 5] >> (id & 31) & 1)) logit = -CUDART_INF_F;
  for (uint32_t i = 0; i < rule.suppressed_count; ++i) {
    if (rule.suppressed[i] == id) logit = -CUDART_INF_F;
  }
  return logit;
}
