// Rows of the passes of a round, from the requests' lengths, anchors and trees.
#include "../common/rows.cuh"
#include "state.cuh"

namespace {

__device__ void put_padding(const Rows& out, int row) {
  out.tokens[row] = 0;
  out.positions[row] = 0;
  out.slots[row] = -1;
  out.groups[row] = 0;
  out.ancestors[row] = 0;
  out.sources[row] = 0;
}

__device__ void put_group(const Rows& out, int group, bool live, int first, int begin, int prefix) {
  out.firsts[group] = first;
  out.table_begins[group] = live ? begin : 0;
  out.prefixes[group] = live ? prefix : 0;
}

__device__ void put_end(const Rows& out, int rows, int groups, int group_bound) {
  if (threadIdx.x == 0) {
    out.counts[0] = rows;
    out.counts[1] = groups;
    out.firsts[group_bound] = rows;
  }
}

}  // namespace

// `count` prompt tokens (in pinned host memory) at positions `start ..` of a request: one group.
extern "C" __global__ __launch_bounds__(256) void round_place_chunk(Round r, Rows out, const uint32_t* tokens, int request,
                                                                    int start, int count) {
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (blockIdx.x == 0) put_end(out, count, 1, 1);
  if (row == 0) put_group(out, 0, true, 0, request * r.table_stride, start);
  if (row >= count) return;
  out.tokens[row] = tokens[row];
  out.positions[row] = start + row;
  out.slots[row] = start + row < r.table_stride ? r.tables[size_t(request) * r.table_stride + start + row] : -1;
  out.groups[row] = 0;
  out.ancestors[row] = 0;
  out.sources[row] = row;
}

// A prompt is in the cache: the round is the single row of its last token.
extern "C" __global__ void round_open_prompt(Round r, int request, int prompt) {
  if (threadIdx.x != 0) return;
  r.requests[request].length = prompt - 1;
  Tree& tree = r.trees[0];
  tree.rows = 1;
  tree.token[0] = 0;
  tree.parent[0] = 0;
  tree.depth[0] = 0;
  tree.ancestors[0] = 1;
  tree.logprob[0] = 0.0;
  r.live->rows = 1;
  r.live->firsts[0] = 0;
  r.infos[0] = {uint32_t(request), uint32_t(prompt), 0, 0};
}

// Blocks [anchor, mask ...] of the drafting shares. One block.
extern "C" __global__ __launch_bounds__(1024) void round_place_blocks(Round r, Rows out, uint32_t mask_token, int bound,
                                                                      int group_bound) {
  const Plan& plan = *r.plan;
  int drafting = plan.drafting;
  for (int row = threadIdx.x; row < bound; row += blockDim.x) {
    int group = row / r.block, at = row % r.block;
    if (group >= drafting) {
      put_padding(out, row);
      continue;
    }
    const Request& q = r.requests[plan.share[plan.drafters[group]].request];
    out.tokens[row] = at == 0 ? q.anchor : mask_token;
    out.positions[row] = q.length + at;
    out.slots[row] = -1;
    out.groups[row] = group;
    out.ancestors[row] = 0;
    out.sources[row] = row;
  }
  for (int group = threadIdx.x; group < group_bound; group += blockDim.x) {
    bool live = group < drafting;
    uint32_t request = live ? plan.share[plan.drafters[group]].request : 0;
    put_group(out, group, live, (live ? group : drafting) * r.block, request * r.table_stride, r.requests[request].length);
  }
  put_end(out, drafting * r.block, drafting, group_bound);
}

// Verify rows of every share. One block of 1024.
extern "C" __global__ __launch_bounds__(1024) void round_place_trees(Round r, Rows out, int bound, int group_bound) {
  const Plan& plan = *r.plan;
  int shares = plan.shares;
  __shared__ int firsts[kMaxShares + 1];
  if (threadIdx.x < 32) {
    int own[4], sum = 0;
    for (int i = 0; i < 4; ++i) {
      int share = threadIdx.x * 4 + i;
      own[i] = sum;
      sum += share < shares ? r.trees[share].rows : 0;
    }
    int before = sum;
    for (int step = 1; step < 32; step *= 2) {
      int other = __shfl_up_sync(~0u, before, step);
      if (threadIdx.x >= step) before += other;
    }
    for (int i = 0; i < 4; ++i) firsts[threadIdx.x * 4 + i] = before - sum + own[i];
    if (threadIdx.x == 31) firsts[kMaxShares] = before;
  }
  __syncthreads();
  int total = firsts[shares];
  for (int row = threadIdx.x; row < total; row += blockDim.x) {
    int low = 0, high = shares;  // the last share that begins at or before the row; no tree is empty
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (firsts[middle] <= row) low = middle; else high = middle;
    }
    int share = low, at = row - firsts[low];
    const Tree& tree = r.trees[share];
    uint32_t request = plan.share[share].request;
    int length = r.requests[request].length;
    out.tokens[row] = tree.token[at];
    out.positions[row] = length + tree.depth[at];
    // Row i writes to the slot of position length + i; accepted rows move to their own position at commit.
    out.slots[row] = length + at < r.table_stride ? r.tables[size_t(request) * r.table_stride + length + at] : -1;
    out.groups[row] = share;
    out.ancestors[row] = tree.ancestors[at];
    out.sources[row] = row;
    r.infos[row] = {request, uint32_t(length + tree.depth[at] + 1), uint32_t(share << 8 | at), plan.share[share].first + at};
  }
  for (int row = total + threadIdx.x; row < bound; row += blockDim.x) put_padding(out, row);
  for (int group = threadIdx.x; group < group_bound; group += blockDim.x) {
    bool live = group < shares;
    uint32_t request = live ? plan.share[group].request : 0;
    put_group(out, group, live, live ? firsts[group] : total, request * r.table_stride, r.requests[request].length);
    if (live) r.live->firsts[group] = firsts[group];
  }
  if (threadIdx.x == 0) r.live->rows = total;
  put_end(out, total, shares, group_bound);
}
