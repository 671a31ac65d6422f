// Draft trees from marginals: the growth of src/speculate/tree.rs, node for node, in f64.
#include "state.cuh"

namespace {

__device__ uint64_t order_of(double value) {
  uint64_t bits = __double_as_longlong(value + 0.0);
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

// A prefix that may enter the tree next. Its place orders equal candidates: depth, parent, rank.
struct Candidate {
  double logprob = 0.0;
  uint64_t order = 0;  // 0 = none
  uint32_t place = kNone;
};

__device__ Candidate candidate(double logprob, int depth, int parent, int rank) {
  return {logprob, order_of(logprob), uint32_t(depth << 16 | parent << 8 | rank)};
}

}  // namespace

// One warp a share. Shared memory: depths * ranks ids and as many log-probabilities.
extern "C" __global__ __launch_bounds__(32) void round_grow(Round r) {
  extern __shared__ uint32_t memory[];
  __shared__ Tree tree;
  int index = blockIdx.x, lane = threadIdx.x;
  if (index >= r.plan->shares) return;
  const Share share = r.plan->share[index];
  int depths = r.block > 1 && share.rows > 1 ? r.block - 1 : 0, ranks = share.rows - 1;
  uint32_t* ids = memory;
  float* logprobs = reinterpret_cast<float*>(memory + depths * ranks);
  for (int i = lane; i < depths * ranks; i += 32) {
    size_t from = (size_t(index) * depths + i / ranks) * kMaxRows + i % ranks;
    ids[i] = r.ids[from];
    logprobs[i] = r.logprobs[from];
  }
  if (lane == 0) {
    tree.token[0] = r.requests[share.request].anchor;
    tree.parent[0] = 0;
    tree.depth[0] = 0;
    tree.ancestors[0] = 1;
    tree.logprob[0] = 0.0;
  }
  __syncwarp();
  auto known = [&](int depth, int rank, double& value) {
    if (depth > depths || rank >= ranks) return false;
    value = logprobs[(depth - 1) * ranks + rank];
    return isfinite(value);
  };
  int rows = 1;
  auto push = [&](int parent, int depth, int rank, double logprob) {
    if (lane == 0) {
      tree.token[rows] = ids[(depth - 1) * ranks + rank];
      tree.parent[rows] = parent;
      tree.depth[rows] = depth;
      tree.ancestors[rows] = tree.ancestors[parent] | 1ull << rows;
      tree.logprob[rows] = logprob;
    }
    return rows++;
  };

  double own;
  if (share.chain) {
    double logprob = 0.0;
    for (int depth = 1; depth < share.rows && known(depth, 0, own); ++depth) {
      logprob += own;
      push(depth - 1, depth, 0, logprob);
    }
  } else {
    Candidate held[2];  // slots lane and lane + 32 of the frontier
    int open = 0, used = 0;
    if (known(1, 0, own)) {
      if (lane == 0) held[0] = candidate(own, 1, 0, 0);
      open = used = 1;
    }
    while (rows < share.rows && open > 0) {
      int better = held[1].order > held[0].order || (held[1].order == held[0].order && held[1].place < held[0].place);
      uint64_t order = better ? held[1].order : held[0].order;
      uint32_t place = better ? held[1].place : held[0].place;
      double logprob = better ? held[1].logprob : held[0].logprob;
      uint32_t high = __reduce_max_sync(~0u, uint32_t(order >> 32));
      bool first = uint32_t(order >> 32) == high;
      uint32_t low = __reduce_max_sync(~0u, first ? uint32_t(order) : 0u);
      first = first && uint32_t(order) == low;
      uint32_t taken = __reduce_min_sync(~0u, first ? place : kNone);
      bool winner = first && place == taken;
      int from = __ffs(__ballot_sync(~0u, winner)) - 1;
      logprob = __shfl_sync(~0u, logprob, from);
      int depth = taken >> 16, parent = taken >> 8 & 255, rank = taken & 255;
      int row = push(parent, depth, rank, logprob);

      double elder, child;
      bool sibling = known(depth, rank + 1, own) && known(depth, rank, elder), below = known(depth + 1, 0, child);
      Candidate next, under;
      if (sibling) next = candidate(logprob - elder + own, depth, parent, rank + 1);
      if (below) under = candidate(logprob + child, depth + 1, row, 0);
      // The sibling takes the place of the taken one, or else the child does.
      if (winner) {
        const Candidate& into = sibling ? next : under;
        if (better) held[1] = into; else held[0] = into;
      }
      if (sibling && below) {
        if (lane == used % 32) {
          if (used < 32) held[0] = under; else held[1] = under;
        }
        ++used;
      }
      open += int(sibling) + int(below) - 1;
    }
  }
  __syncwarp();
  Tree& out = r.trees[index];
  for (int i = lane; i < rows; i += 32) {
    out.token[i] = tree.token[i];
    out.parent[i] = tree.parent[i];
    out.depth[i] = tree.depth[i];
    out.ancestors[i] = tree.ancestors[i];
    out.logprob[i] = tree.logprob[i];
  }
  if (lane == 0) out.rows = rows;
}
