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

// One warp a share. Shared memory: (depths + 1) * (ranks + 1) log-probabilities in f64, -inf where there is none.
extern "C" __global__ __launch_bounds__(32) void round_grow(Round r) {
  extern __shared__ double logprobs[];
  __shared__ uint32_t places[kMaxRows];  // of the rows taken
  __shared__ double weights[kMaxRows];
  int index = blockIdx.x, lane = threadIdx.x;
  if (index >= r.plan->shares) return;
  const Share share = r.plan->share[index];
  int depths = r.block > 1 && share.rows > 1 ? r.block - 1 : 0, ranks = share.rows - 1, width = ranks + 1;
  size_t from = size_t(index) * (r.block - 1) * kMaxRows;
  for (int i = lane; i < (depths + 1) * width; i += 32) {
    int depth = i / width, rank = i % width;
    float value = depth < depths && rank < ranks ? r.logprobs[from + depth * kMaxRows + rank] : -INFINITY;
    logprobs[i] = isfinite(value) ? value : -INFINITY;
  }
  uint32_t anchor = r.requests[share.request].anchor;
  __syncwarp();
  constexpr double kNever = -INFINITY;
  int rows = 1;

  if (share.chain) {
    double logprob = 0.0;
    for (int depth = 1; depth < share.rows && logprobs[(depth - 1) * width] > kNever; ++depth, ++rows) {
      logprob += logprobs[(depth - 1) * width];
      if (lane == 0) places[rows] = depth << 16 | (depth - 1) << 8, weights[rows] = logprob;
    }
  } else {
    Candidate held[2];  // slots lane and lane + 32 of the frontier
    int open = 0, used = 0;
    if (depths > 0 && logprobs[0] > kNever) {
      if (lane == 0) held[0] = candidate(logprobs[0], 1, 0, 0);
      open = used = 1;
    }
    for (; rows < share.rows && open > 0; ++rows) {
      bool second = held[1].order > held[0].order || (held[1].order == held[0].order && held[1].place < held[0].place);
      uint64_t order = second ? held[1].order : held[0].order;
      uint32_t place = second ? held[1].place : held[0].place;
      double logprob = second ? held[1].logprob : held[0].logprob;
      uint32_t high = __reduce_max_sync(~0u, uint32_t(order >> 32));
      bool first = uint32_t(order >> 32) == high;
      uint32_t tied = __ballot_sync(~0u, first);
      if (tied & (tied - 1)) {
        uint32_t low = __reduce_max_sync(~0u, first ? uint32_t(order) : 0u);
        first = first && uint32_t(order) == low;
        first = __reduce_min_sync(~0u, first ? place : kNone) == place && first;
        tied = __ballot_sync(~0u, first);
      }
      int winner = __ffs(tied) - 1;
      uint32_t taken = __shfl_sync(~0u, place, winner);
      double weight = __shfl_sync(~0u, logprob, winner);
      const double* at = logprobs + ((taken >> 16) - 1) * width + (taken & 255);
      double elder = at[0], own = at[1], below = logprobs[(taken >> 16) * width];
      if (lane == 0) places[rows] = taken, weights[rows] = weight;
      bool sibling = own > kNever, child = below > kNever;
      Candidate next{weight - elder + own, 0, taken + 1}, under{weight + below, 0, (taken & 0xff0000) + 0x10000 | rows << 8};
      next.order = order_of(next.logprob);
      under.order = order_of(under.logprob);
      // The sibling takes the place of the taken one, or else the child does.
      if (lane == winner) {
        Candidate into = sibling ? next : child ? under : Candidate{};
        if (second) held[1] = into; else held[0] = into;
      }
      if (sibling && child) {
        if (lane == used % 32) {
          if (used < 32) held[0] = under; else held[1] = under;
        }
        ++used;
      }
      open += int(sibling) + int(child) - 1;
    }
  }
  __syncwarp();
  Tree& out = r.trees[index];
  for (int row = lane; row < rows; row += 32) {
    uint32_t place = row ? places[row] : 0;
    uint64_t line = 1ull << row;
    for (int above = row; above > 0;) {
      above = places[above] >> 8 & 255;
      line |= 1ull << above;
    }
    int depth = place >> 16;
    out.token[row] = row ? r.ids[from + (depth - 1) * kMaxRows + (place & 255)] : anchor;
    out.parent[row] = place >> 8 & 255;
    out.depth[row] = depth;
    out.ancestors[row] = line;
    out.logprob[row] = row ? weights[row] : 0.0;
  }
  if (lane == 0) out.rows = rows;
}
