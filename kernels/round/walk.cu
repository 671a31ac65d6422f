// The walk down the trees, and what it commits: lengths, anchors, counts, the accepted rows, their latents.
#include "../common/rows.cuh"
#include "state.cuh"

namespace {

// One warp walks one share: how far the target's own tokens lead (src/speculate/walk.rs).
__device__ void walk(const Round& r, int index) {
  int lane = threadIdx.x % 32;
  const Share share = r.plan->share[index];
  const Tree& tree = r.trees[index];
  Request& q = r.requests[share.request];
  Walked& out = r.walked[index];
  uint32_t first = r.live->firsts[index], rows = tree.rows;
  RowResult* records = row_results(r) + share.first;
  Pick pick[2];
  uint32_t token[2];
  int parent[2];
  for (int i = 0; i < 2; ++i) {
    int row = lane + 32 * i;
    bool there = row < rows;
    pick[i] = there ? r.picks[first + row] : Pick{kNone, kFine, 0, 0.0f, 0.0f};
    if (pick[i].fault != kFine) pick[i].token = kNone;
    token[i] = there ? tree.token[row] : 0;
    parent[i] = there && row > 0 ? tree.parent[row] : -1;
    if (there) {
      records[row].logprob = tree.logprob[row];
      records[row].tree_token = token[i];
      records[row].parent = tree.parent[row];
    }
  }
  uint32_t accepted = 0, wanted = 0;
  int at = 0;
  ShareResult result{0, kFine, 0, 0.0f, rows, first, {0, 0}};
  while (true) {
    int half = at / 32;
    uint32_t fault = __shfl_sync(~0u, half ? pick[1].fault : pick[0].fault, at % 32);
    if (fault != kFine) {
      result.fault = fault;
      result.fault_token = __shfl_sync(~0u, half ? pick[1].fault_token : pick[0].fault_token, at % 32);
      result.fault_value = __shfl_sync(~0u, half ? pick[1].value : pick[0].value, at % 32);
      break;
    }
    wanted = __shfl_sync(~0u, half ? pick[1].token : pick[0].token, at % 32);
    if (lane == 0) {
      out.path[accepted] = at;
      records[accepted].path = at;
      records[accepted].token = wanted;
    }
    ++accepted;
    uint32_t low = __ballot_sync(~0u, parent[0] == at && token[0] == wanted);
    uint32_t high = __ballot_sync(~0u, parent[1] == at && token[1] == wanted);
    if (!(low | high)) break;
    at = low ? __ffs(low) - 1 : 31 + __ffs(high);
  }
  // A fault on the path ends the request: nothing of the round is kept.
  bool fine = result.fault == kFine;
  result.accepted = fine ? accepted : 0;
  __syncwarp();
  if (fine && q.seen) {
    for (int i = lane; i < accepted; i += 32) {
      uint32_t emitted = records[i].token;
      if (emitted < r.vocab) {
        atomicOr(&q.seen[emitted], kListed);
        atomicAdd(&q.seen[emitted], 1u);
      }
    }
  }
  if (lane == 0) {
    out.before = q.length;
    out.accepted = result.accepted;
    // After a prompt the length is the prompt's, whatever became of the first token.
    q.length += r.plan->begin ? 1 : result.accepted;
    if (fine) q.anchor = wanted;
    share_results(r)[index] = result;
  }
  if (lane == 0) out.kept = q.drafts ? result.accepted : 0;
}

}  // namespace

// One warp a share; the block that ends last describes the accepted rows. `bound` 0: none are wanted (the first token after a
// prompt).
extern "C" __global__ __launch_bounds__(128) void round_walk(Round r, Rows out, int bound, int group_bound) {
  __shared__ uint32_t counts[kMaxShares], firsts[kMaxShares + 1];
  int shares = r.plan->shares, share = blockIdx.x * 4 + threadIdx.x / 32;
  if (share < shares) walk(r, share);
  if (bound == 0 || !last_of_row(r.arrivals, 0, gridDim.x)) return;
  if (threadIdx.x < shares) counts[threadIdx.x] = __ldcg(&r.walked[threadIdx.x].kept);
  __syncthreads();
  if (threadIdx.x < 32) {
    uint32_t own[4], sum = 0;
    for (int i = 0; i < 4; ++i) {
      int share = threadIdx.x * 4 + i;
      own[i] = sum;
      sum += share < shares ? counts[share] : 0;
    }
    uint32_t upto = sum;
    for (int step = 1; step < 32; step *= 2) {
      uint32_t other = __shfl_up_sync(~0u, upto, step);
      if (threadIdx.x >= step) upto += other;
    }
    for (int i = 0; i < 4; ++i) firsts[threadIdx.x * 4 + i] = upto - sum + own[i];
    if (threadIdx.x == 31) firsts[kMaxShares] = upto;
  }
  __syncthreads();
  uint32_t total = firsts[shares];
  // One thread a row: which share is it of?
  for (int row = threadIdx.x; row < total; row += blockDim.x) {
    int low = 0, high = shares;
    while (high - low > 1) {
      int middle = (low + high) / 2;
      if (firsts[middle] <= row) low = middle; else high = middle;
    }
    int share = low, j = row - firsts[low];
    const Walked& walked = r.walked[share];
    int position = __ldcg(&walked.before) + j;
    const int32_t* table = r.tables + size_t(r.plan->share[share].request) * r.table_stride;
    out.tokens[row] = 0;
    out.positions[row] = position;
    out.slots[row] = position < r.table_stride ? table[position] : -1;
    out.groups[row] = share;
    out.ancestors[row] = 0;
    out.sources[row] = r.live->firsts[share] + __ldcg(&walked.path[j]);
  }
  for (int row = total + threadIdx.x; row < bound; row += blockDim.x) {
    out.tokens[row] = 0;
    out.positions[row] = 0;
    out.slots[row] = -1;
    out.groups[row] = 0;
    out.ancestors[row] = 0;
    out.sources[row] = 0;
  }
  for (int group = threadIdx.x; group < group_bound; group += blockDim.x) {
    bool live = group < shares;
    out.firsts[group] = live ? firsts[group] : total;
    out.table_begins[group] = live ? r.plan->share[group].request * r.table_stride : 0;
    out.prefixes[group] = live ? __ldcg(&r.walked[group].before) : 0;
  }
  if (threadIdx.x == 0) {
    out.counts[0] = total;
    out.counts[1] = shares;
    out.firsts[group_bound] = total;
  }
}

// Latents of the accepted rows to the slots of their positions. Grid: layers x shares; a thread moves 16 bytes of every row.
extern "C" __global__ __launch_bounds__(96) void round_move(Round r, unsigned char* latents, int64_t layer_bytes, int row_bytes) {
  int index = blockIdx.y, column = threadIdx.x * 16;
  if (index >= r.plan->shares || column >= row_bytes) return;
  const Walked& walked = r.walked[index];
  const int32_t* table = r.tables + size_t(r.plan->share[index].request) * r.table_stride + walked.before;
  unsigned char* layer = latents + blockIdx.x * layer_bytes + column;
  int accepted = walked.accepted;
  // Rising j never overwrites a later source, because path[j] >= j; so a batch may be read before any of it is written.
  constexpr int kBatch = 8;
  for (int start = 1; start < accepted; start += kBatch) {
    uint4 held[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int j = start + i;
      if (j < accepted) held[i] = *reinterpret_cast<const uint4*>(layer + int64_t(table[walked.path[j]]) * row_bytes);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      int j = start + i;
      if (j < accepted && walked.path[j] != j) *reinterpret_cast<uint4*>(layer + int64_t(table[j]) * row_bytes) = held[i];
    }
  }
}
