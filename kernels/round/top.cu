// The best k logits of a row and its log-sum-exp: the drafter's marginals, and reported log-probabilities. Ties to the lower id.
//
// Blocks take chunks of a row: each keeps at least the chunk's best k (at most kCap) by bisection on the value, and the exponentials'
// sum around the chunk's maximum. The block that ends last cuts the candidates the same way, sorts them and writes the result.
#include "adjust.cuh"

namespace {

constexpr int kThreads = 256, kLoads = 8, kEach = kLoads * 4, kChunk = kThreads * kEach;
constexpr int kCap = 128, kMaxChunks = 32, kKept = kMaxChunks * kCap / kThreads;

// Counts of a block; two sets, so that one barrier a count is enough.
struct Counter {
  int warps[2][kThreads / 32];
};

__device__ int block_count(Counter& counter, int& turn, int mine) {
  mine = __reduce_add_sync(~0u, mine);
  if (threadIdx.x % 32 == 0) counter.warps[turn][threadIdx.x / 32] = mine;
  __syncthreads();
  int sum = 0;
  for (int i = 0; i < kThreads / 32; ++i) sum += counter.warps[turn][i];
  turn ^= 1;
  return sum;
}

// Keys above `key`, and ids up to `id` at it.
struct Threshold {
  uint32_t key, id;
  __device__ bool holds(uint32_t key_, uint32_t id_) const { return key_ > key || (key_ == key && id_ <= id); }
};

// A threshold that between `least` and kCap of the entries reach; all of them where they are no more than kCap. Key 0 = no entry.
template <int N, class IdOf>
__device__ Threshold select(const uint32_t (&keys)[N], IdOf id_of, int least, Counter& counter) {
  constexpr int kWarps = kThreads / 32;
  __shared__ uint32_t floors[kWarps], ends[2];
  int turn = 0, lane = threadIdx.x % 32;
  uint32_t high = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) high = max(high, keys[i]);
  // A good guess: of each warp's threads, the largest entries; of these the one that every warp has its share of `least` above.
  int rank = 0;
#pragma unroll
  for (int step = 1; step < 32; ++step) {
    uint32_t other = __shfl_xor_sync(~0u, high, step);
    rank += other > high || (other == high && (lane ^ step) < lane);
  }
  if (rank == (least + kWarps - 1) / kWarps - 1) floors[threadIdx.x / 32] = high;
  if (threadIdx.x == 0) ends[0] = kNone, ends[1] = 0;
  __syncthreads();
  uint32_t low = floors[0];
  for (int i = 1; i < kWarps; ++i) low = min(low, floors[i]);
  int reach = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) reach += keys[i] >= max(low, 1u);
  // Without a share in some warp the floor is 1, which every entry reaches.
  if (block_count(counter, turn, reach) <= kCap) return {max(low, 1u), kNone};

  // More than kCap reach `low`; fewer than `least` reach `high`.
  if (low == 0) {
    low = kNone;
#pragma unroll
    for (int i = 0; i < N; ++i) low = min(low, keys[i] ? keys[i] : kNone);
    atomicMin(&ends[0], __reduce_min_sync(~0u, low));
  }
  high = __reduce_max_sync(~0u, high);
  if (lane == 0) atomicMax(&ends[1], high);
  __syncthreads();
  if (ends[0] != kNone) low = ends[0];
  high = ends[1] + 1;
  for (int step = 0; high - low > 1; ++step) {
    uint32_t middle = low + (high - low) / 2;
    // Halving values is faster than halving keys; keys settle what is left.
    if (step < 12) {
      uint32_t halved = key_of(0.5f * value_of(low) + 0.5f * value_of(high - 1));
      if (halved > low && halved < high) middle = halved;
    }
    reach = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) reach += keys[i] >= middle;
    reach = block_count(counter, turn, reach);
    if (reach > kCap) low = middle;
    else if (reach < least) high = middle;
    else return {middle, kNone};
  }
  // Too many stand at the key `low`: the lowest ids of them.
  uint32_t below = 0, enough = 1u << 30;
  while (enough - below > 1) {
    uint32_t middle = below + (enough - below) / 2;
    reach = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) reach += keys[i] > low || (keys[i] == low && id_of(i) < middle);
    if (block_count(counter, turn, reach) < least) below = middle; else enough = middle;
  }
  return {low, enough - 1};
}

// s + c gains x; the error of the addition goes to c.
__device__ void add(float& s, float& c, float x) {
  float t = __fadd_rn(s, x), z = __fsub_rn(t, s);
  c = __fadd_rn(c, __fadd_rn(__fsub_rn(s, __fsub_rn(t, z)), __fsub_rn(x, z)));
  s = t;
}

struct Shared {
  Counter counter;
  float maxima[kThreads / 32];
  double sums[kThreads / 32];
  uint32_t counts[kMaxChunks];  // candidates of each chunk
  unsigned long long cut[kCap];
  unsigned long long sorted[kCap];
  int filled;
};

// What is wanted of a row.
struct Row {
  const float* logits;
  int best;        // k
  uint32_t own;    // the token to rank
};

struct Found {
  double total;   // log-sum-exp
  int count;      // of the best
  uint32_t ahead;  // tokens before `own`
};

// True in the block that ends last, with the best entries in sh.sorted (key << 32 | ~id, best first) and `found` filled in.
template <bool kRanked>
__device__ bool best_of(const Round& r, int item, const Row& row, bool aligned, Shared& sh, Found& found) {
  int chunks = gridDim.x, base = blockIdx.x * kChunk + threadIdx.x * 4, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float own = kRanked ? (row.own < r.vocab ? row.logits[row.own] : -CUDART_INF_F) : 0.0f;
  uint32_t keys[kEach];
  float top = -CUDART_INF_F;
  bool bad = false;
  int ahead = 0;
  auto id_of = [&](int i) { return uint32_t(base + (i / 4) * kThreads * 4 + i % 4); };
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    float4 four = load_logits(row.logits, base + i * kThreads * 4, r.vocab, aligned);
    const float raw[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t id = id_of(i * 4 + j);
      float value = raw[j];
      keys[i * 4 + j] = id < r.vocab && !isnan(value) ? key_of(value) : 0;
      bad |= isnan(value) || value == CUDART_INF_F;
      top = fmaxf(top, value);
      if (kRanked) ahead += id < r.vocab && (value > own || (value == own && id < row.own));
    }
  }
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (lane == 0) sh.maxima[warp] = top;
  if (threadIdx.x == 0) sh.filled = 0;
  __syncthreads();
  for (int i = 0; i < kThreads / 32; ++i) top = fmaxf(top, sh.maxima[i]);
  float high = 0.0f, low = 0.0f;
  if (top != -CUDART_INF_F && top != CUDART_INF_F) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) add(high, low, keys[i] ? expf(value_of(keys[i]) - top) : 0.0f);
  }
  double sum = bad ? CUDART_NAN : double(high) + double(low);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) sh.sums[warp] = sum;

  uint64_t* candidates = r.candidates + (size_t(item) * chunks + blockIdx.x) * kCap;
  if (row.best > 0) {
    Threshold threshold = select(keys, id_of, row.best, sh.counter);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (keys[i] && threshold.holds(keys[i], id_of(i))) {
        candidates[atomicAdd(&sh.filled, 1)] = uint64_t(keys[i]) << 32 | uint32_t(~id_of(i));
      }
    }
  }
  int turn = 0;
  __syncthreads();
  if (kRanked) ahead = block_count(sh.counter, turn, ahead);
  TopPart* parts = r.top_parts + size_t(item) * chunks;
  if (threadIdx.x == 0) {
    sum = 0.0;
    for (int i = 0; i < kThreads / 32; ++i) sum += sh.sums[i];
    parts[blockIdx.x] = {sum, top, uint32_t(sh.filled), uint32_t(ahead), 0};
  }
  if (!last_of_row(r.arrivals, item, chunks)) return false;

  // Every warp adds the chunks in the same order, one a lane.
  bool mine = lane < chunks;
  const TopPart* part = parts + (mine ? lane : 0);
  float max = __ldcg(&part->max);
  sum = __ldcg(&part->sum);
  uint32_t count = __ldcg(&part->count), before = __ldcg(&part->ahead);
  top = max;
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
  if (max != -CUDART_INF_F && !isnan(sum)) sum *= exp(double(max) - double(top));
  if (!mine) sum = 0.0, before = count = 0;
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  found.ahead = __reduce_add_sync(~0u, before);
  found.total = isnan(sum) ? sum : top == -CUDART_INF_F ? -CUDART_INF : double(top) + log(sum);
  found.count = 0;
  if (row.best == 0) return true;

  if (warp == 0) sh.counts[lane] = count;
  if (threadIdx.x == 0) sh.filled = 0;
  __syncthreads();
  uint32_t kept[kKept], ids[kKept];
  candidates = r.candidates + size_t(item) * chunks * kCap;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    int at = i * kThreads + threadIdx.x;
    bool there = at % kCap < sh.counts[at / kCap];
    unsigned long long entry = there ? __ldcg(reinterpret_cast<const unsigned long long*>(candidates) + at) : 0;
    kept[i] = entry >> 32;
    ids[i] = ~uint32_t(entry);
  }
  Threshold threshold = select(kept, [&](int i) { return ids[i]; }, row.best, sh.counter);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (kept[i] && threshold.holds(kept[i], ids[i])) sh.cut[atomicAdd(&sh.filled, 1)] = uint64_t(kept[i]) << 32 | uint32_t(~ids[i]);
  }
  __syncthreads();
  // No two entries are equal: each belongs behind all that are larger.
  if (threadIdx.x < sh.filled) {
    unsigned long long own_entry = sh.cut[threadIdx.x];
    int rank = 0;
    for (int i = 0; i < sh.filled; ++i) rank += sh.cut[i] > own_entry;
    sh.sorted[rank] = own_entry;
  }
  __syncthreads();
  found.count = min(row.best, sh.filled);
  return true;
}

__device__ uint32_t id_at(const Shared& sh, int at) { return ~uint32_t(sh.sorted[at]); }
__device__ float logprob_at(const Shared& sh, int at, double total) {
  return float(double(value_of(uint32_t(sh.sorted[at] >> 32))) - total);
}

__device__ void put_report(const Shared& sh, const Row& row, const Found& found, int vocab, Report& out) {
  int at = threadIdx.x;
  if (at < found.count) {
    out.ids[at] = id_at(sh, at);
    out.logprobs[at] = logprob_at(sh, at, found.total);
  }
  if (at == 0) {
    float own = row.own < vocab ? row.logits[row.own] : -CUDART_INF_F;
    out.token = row.own;
    out.logprob = float(double(own) - found.total);
    out.rank = found.ahead + 1;
    out.found = found.count;
  }
}

}  // namespace

// Grid: chunks x (drafting shares * slots).
extern "C" __global__ __launch_bounds__(kThreads) void round_marginals(Round r, const float* logits, int64_t stride) {
  __shared__ Shared sh;
  int slots = r.block - 1, item = blockIdx.y, group = item / slots, slot = item % slots;
  if (group >= r.plan->drafting) return;
  uint32_t share = r.plan->drafters[group];
  int k = r.plan->share[share].rows - 1;
  Row row{logits + (int64_t(group) * r.block + slot + 1) * stride, k, 0};
  Found found;
  if (!best_of<false>(r, item, row, stride % 4 == 0, sh, found)) return;
  if (threadIdx.x >= kMaxRows) return;
  size_t at = (size_t(share) * slots + slot) * kMaxRows + threadIdx.x;
  bool there = threadIdx.x < found.count;
  r.ids[at] = there ? id_at(sh, threadIdx.x) : 0;
  r.logprobs[at] = there ? logprob_at(sh, threadIdx.x, found.total) : -CUDART_INF_F;
}

// Grid: chunks x verify rows.
extern "C" __global__ __launch_bounds__(kThreads) void round_report(Round r, const float* logits, int64_t stride) {
  __shared__ Shared sh;
  int item = blockIdx.y;
  if (item >= r.live->rows) return;
  const Request& q = r.requests[r.infos[item].request];
  const Pick pick = r.picks[item];
  if (q.reported < 0 || pick.fault != kFine) return;
  Row row{logits + item * stride, min(q.reported, kMaxReported), pick.token};
  Found found;
  if (best_of<true>(r, item, row, stride % 4 == 0, sh, found)) put_report(sh, row, found, r.vocab, reports(r)[item]);
}

// Grid: chunks x rows. Only the work areas and the vocabulary of `r` are used.
extern "C" __global__ __launch_bounds__(kThreads) void round_report_prompt(Round r, const float* logits, int64_t stride,
                                                                           const uint32_t* next, int top, Report* out) {
  __shared__ Shared sh;
  int item = blockIdx.y;
  Row row{logits + item * stride, top, next[item]};
  Found found;
  if (best_of<true>(r, item, row, stride % 4 == 0, sh, found)) put_report(sh, row, found, r.vocab, out[item]);
}
