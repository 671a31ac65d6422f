// One draw per row above temperature 0: what min-p, top-k and top-p let pass, then the inverse of the cumulative distribution in id
// order, as src/speculate/sampling.rs defines it. A cluster of eight blocks holds one row, each block a run of ids.
//
// The kept tokens are a head of the order (logit falling, id rising). Its end is found by histograms of mass or count: first over
// equal widths of logit, then over ever smaller ranges of keys, at last among equal logits by id. Masses are whole numbers, so the
// order of additions does not matter.
#include <cooperative_groups.h>

#include "adjust.cuh"

namespace cg = cooperative_groups;

namespace {

constexpr int kBlocks = 8, kThreads = 512, kWarps = kThreads / 32, kTile = kThreads * 4;
constexpr int kBins = 1024, kMine = kBins / kBlocks;
constexpr int kMaxTiles = 16;  // 262144 ids
constexpr int kFew = 256;       // entries of one bin that are ordered by comparing each with each
// Masses are weights times 2^33, added as two limbs: the 2^15 of a block fit 32 bits.
constexpr int kLimb = 17;
constexpr float kOne = float(1ull << 33);
constexpr float kGreedyBelow = 1e-5f;
// Linear bins reach this far below the best, in units of the exponent.
constexpr float kReach = 40.0f;

struct Shared {
  uint32_t low_bins[kBins], high_bins[kBins];
  unsigned long long merged[kMine];
  unsigned long long scan[kWarps];
  unsigned long long above;  // mass before the bin that crosses
  unsigned long long width;  // mass of that bin
  uint32_t crossing;
  uint32_t listed;           // entries of the crossing bin in the first block's list
  unsigned long long list[kFew];  // key << 32 | ~id
  unsigned long long masses[kFew];
  unsigned long long cut;    // the last kept entry
  uint32_t low, high;        // keys seen in a bin
  uint32_t ties, cut_id;
  double sums[kMaxTiles][kWarps];  // up to and including each warp of a tile
  double tiles[kMaxTiles];         // up to and including each tile
  double total;
  Rule rule;
};

// Exponents above this are taken in f64; at and below it the error of f32 is less than 1e-8 of the best token's weight.
constexpr float kPrecise = -4.0f;

__device__ uint64_t whole(float weight) { return __float2ull_rn(weight * kOne); }

// `x` is the exponent in f32, which falls with the logit.
__device__ uint32_t linear_bin(float x) { return min(uint32_t(-x * (kBins / kReach)), uint32_t(kBins - 1)); }

struct Draw {
  const Round& r;
  Shared& sh;
  cg::cluster_group cluster;
  const float* line;
  bool aligned, any;
  int from, until;
  float top, scale;
  double precise_scale;
  // Kept: keys above `cut_key`, and ids up to `cut_id` at it.
  uint32_t cut_key = 0, cut_id = kNone;

  __device__ bool kept(uint32_t key, uint32_t id) const { return key > cut_key || (key == cut_key && id <= cut_id); }
  __device__ float exponent(float logit) const { return (logit - top) * scale; }
  __device__ double precise(float logit) const { return (double(logit) - double(top)) * precise_scale; }
  __device__ double weight(float logit) const {
    float x = exponent(logit);
    return x > kPrecise ? exp(precise(logit)) : double(expf(x));
  }
  // Whole: the same for every use of a logit.
  __device__ uint64_t mass(float logit, bool count) const {
    if (count) return 1;
    float x = exponent(logit);
    return x > kPrecise ? __double2ull_rn(exp(precise(logit)) * double(kOne)) : whole(expf(x));
  }

  // Keeps only weights of at least `least`, the best one's being 1: the last key whose exponent is not below its logarithm.
  __device__ void keep_from(double least) {
    double floor = log(least);
    uint32_t below = key_of(-CUDART_INF_F), enough = key_of(top);
    while (enough - below > 1) {
      uint32_t middle = below + (enough - below) / 2;
      if (precise(value_of(middle)) >= floor) enough = middle; else below = middle;
    }
    cut_key = enough;
  }

  __device__ float logit(uint32_t id, float raw) const { return any ? adjusted(sh.rule, id, raw) : raw; }

  // `visit(id, key, logit)` for every kept token of this block's run.
  template <class Visit>
  __device__ void each(Visit visit) const {
    int at = from + threadIdx.x * 4;
    float4 four = load_logits(line, at, r.vocab, aligned), coming = four;
    for (; at < until; at += kTile, four = coming) {
      if (at + kTile < until) coming = load_logits(line, at + kTile, r.vocab, aligned);
      const float raw[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (at + i >= until) break;
        float value = logit(at + i, raw[i]);
        uint32_t key = key_of(value);
        if (kept(key, at + i)) visit(uint32_t(at + i), key, value);
      }
    }
  }

  // Adds the bins of all blocks, and finds the first bin at which the mass (after `above`) reaches the goal: `share` of the whole
  // mass, or `share` itself. Leaves it in sh.crossing (kNone = never), sh.above, sh.width. Returns the goal.
  __device__ double cross(double share, bool relative, unsigned long long above) {
    cluster.sync();
    uint32_t rank = cluster.block_rank();
    if (threadIdx.x < kMine) {
      unsigned long long sum = 0;
      uint32_t bin = rank * kMine + threadIdx.x;
      for (int other = 0; other < kBlocks; ++other) {
        sum += uint64_t(cluster.map_shared_rank(sh.high_bins, other)[bin]) << kLimb;
        sum += cluster.map_shared_rank(sh.low_bins, other)[bin];
      }
      sh.merged[threadIdx.x] = sum;
    }
    if (threadIdx.x == 0) sh.crossing = kNone;
    cluster.sync();
    unsigned long long two[2], sum = 0;
    for (int i = 0; i < 2; ++i) {
      int bin = threadIdx.x * 2 + i;
      two[i] = cluster.map_shared_rank(sh.merged, bin / kMine)[bin % kMine];
      sum += two[i];
    }
    unsigned long long upto = sum;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
      unsigned long long other = __shfl_up_sync(~0u, upto, step);
      if (lane >= step) upto += other;
    }
    if (lane == 31) sh.scan[warp] = upto;
    __syncthreads();
    unsigned long long whole_mass = 0;
    for (int i = 0; i < kWarps; ++i) {
      if (i < warp) upto += sh.scan[i];
      whole_mass += sh.scan[i];
    }
    double goal = relative ? share * double(whole_mass) : share;
    unsigned long long before = above + upto - sum;
    for (int i = 0; i < 2; ++i) {
      if (two[i] && double(before + two[i]) >= goal) {
        atomicMin(&sh.crossing, threadIdx.x * 2 + i);
        break;
      }
      before += two[i];
    }
    __syncthreads();
    if (sh.crossing / 2 == threadIdx.x) {
      unsigned long long first = above + upto - sum;
      if (sh.crossing % 2) first += two[0];
      sh.above = first;
      sh.width = two[sh.crossing % 2];
    }
    __syncthreads();
    return goal;
  }

  __device__ void clear() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) sh.low_bins[i] = sh.high_bins[i] = 0;
    __syncthreads();
  }

  __device__ void gain(uint32_t bin, uint64_t mass) {
    uint32_t low = mass & ((1u << kLimb) - 1), high = mass >> kLimb;
    if (low) atomicAdd(&sh.low_bins[bin], low);
    if (high) atomicAdd(&sh.high_bins[bin], high);
  }

  // Cuts the kept tokens to the shortest head whose mass reaches `goal` (a share of the whole, where `relative`); `count`: every
  // token has mass 1.
  __device__ void cut(double goal, bool relative, bool count) {
    clear();
    each([&](uint32_t, uint32_t, float logit) { gain(linear_bin(exponent(logit)), mass(logit, count)); });
    goal = cross(goal, relative, 0);
    uint32_t bin = sh.crossing;
    if (bin == kNone) return;
    unsigned long long above = sh.above;
    if (cut_few(bin, goal, above, count)) return;

    // The keys in that bin.
    if (threadIdx.x == 0) sh.low = kNone, sh.high = 0;
    __syncthreads();
    uint32_t low = kNone, high = 0;
    each([&](uint32_t, uint32_t key, float logit) {
      if (linear_bin(exponent(logit)) == bin) low = min(low, key), high = max(high, key);
    });
    low = __reduce_min_sync(~0u, low);
    high = __reduce_max_sync(~0u, high);
    if (threadIdx.x % 32 == 0) atomicMin(&sh.low, low), atomicMax(&sh.high, high);
    cluster.sync();
    low = kNone, high = 0;
    for (int other = 0; other < kBlocks; ++other) {
      low = min(low, *cluster.map_shared_rank(&sh.low, other));
      high = max(high, *cluster.map_shared_rank(&sh.high, other));
    }

    while (low < high) {
      int shift = max(0, 22 - __clz(high - low));
      clear();
      each([&](uint32_t, uint32_t key, float logit) {
        if (key >= low && key <= high) gain((high - key) >> shift, mass(logit, count));
      });
      cross(goal, false, above);
      if (sh.crossing == kNone) return;
      above = sh.above;
      high -= sh.crossing << shift;
      low = max(low, high - ((1u << shift) - 1));
    }
    among_equals(high, goal, above, count);
  }

  // Where few tokens lie in the bin, the first block lists them and every block orders the list. False: there are too many.
  __device__ bool cut_few(uint32_t bin, double goal, unsigned long long above, bool count) {
    Shared* first = cluster.map_shared_rank(&sh, 0);
    each([&](uint32_t id, uint32_t key, float logit) {
      if (linear_bin(exponent(logit)) != bin) return;
      uint32_t at = atomicAdd(&first->listed, 1u);
      if (at < kFew) first->list[at] = uint64_t(key) << 32 | uint32_t(~id);
    });
    cluster.sync();
    uint32_t listed = first->listed;
    unsigned long long own = 0, own_mass = 0;
    if (threadIdx.x < min(listed, kFew)) {
      own = first->list[threadIdx.x];
      own_mass = mass(value_of(uint32_t(own >> 32)), count);
    }
    // Nobody reads the list any more.
    cluster.sync();
    if (threadIdx.x == 0) sh.listed = 0;
    if (listed > kFew) return false;
    if (threadIdx.x < listed) {
      sh.list[threadIdx.x] = own;
      sh.masses[threadIdx.x] = own_mass;
    }
    __syncthreads();
    if (threadIdx.x < listed) {
      unsigned long long before = above;
      for (int i = 0; i < listed; ++i) before += sh.list[i] > own ? sh.masses[i] : 0;
      if (own_mass && double(before + own_mass) >= goal && (before == above || double(before) < goal)) sh.cut = own;
    }
    __syncthreads();
    cut_key = sh.cut >> 32;
    cut_id = ~uint32_t(sh.cut);
    return true;
  }

  // All that is left to decide lies at one key: how many of its tokens belong to the head, lowest ids first.
  __device__ void among_equals(uint32_t key, double goal, unsigned long long above, bool count) {
    if (threadIdx.x == 0) sh.ties = 0, sh.cut_id = kNone;
    __syncthreads();
    uint32_t mine = 0;
    each([&](uint32_t, uint32_t other, float) { mine += other == key; });
    mine = __reduce_add_sync(~0u, mine);
    if (threadIdx.x % 32 == 0 && mine) atomicAdd(&sh.ties, mine);
    cluster.sync();
    double unit = double(mass(value_of(key), count));
    double wanted = ceil((goal - double(above)) / unit);
    uint32_t left = wanted < 1.0 ? 1 : wanted < double(kNone) ? uint32_t(wanted) : kNone, before = 0, all = 0;
    for (int other = 0; other < kBlocks; ++other) {
      uint32_t ties = *cluster.map_shared_rank(&sh.ties, other);
      if (other < cluster.block_rank()) before += ties;
      all += ties;
    }
    uint32_t own = sh.ties;
    if (left < all && before < left && left <= before + own) find_tie(key, left - before);
    cluster.sync();
    uint32_t id = key == cut_key ? cut_id : kNone;
    if (left < all) {
      id = kNone;
      for (int other = 0; other < kBlocks; ++other) id = min(id, *cluster.map_shared_rank(&sh.cut_id, other));
    }
    cluster.sync();
    cut_key = key;
    cut_id = id;
  }

  // The id of this block's `nth` kept token at `key`, from 1.
  __device__ void find_tie(uint32_t key, uint32_t nth) {
    uint32_t before = 0;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int tile = from; tile < until; tile += kTile) {
      int at = tile + threadIdx.x * 4;
      float4 four = load_logits(line, at, r.vocab, aligned);
      const float raw[4] = {four.x, four.y, four.z, four.w};
      uint32_t bits = 0;
      for (int i = 0; i < 4; ++i) {
        if (at + i >= until) break;
        float value = logit(at + i, raw[i]);
        if (key_of(value) == key && kept(key, at + i)) bits |= 1u << i;
      }
      uint32_t own = __popc(bits), upto = own;
      for (int step = 1; step < 32; step *= 2) {
        uint32_t other = __shfl_up_sync(~0u, upto, step);
        if (lane >= step) upto += other;
      }
      if (lane == 31) sh.scan[warp] = upto;
      __syncthreads();
      uint32_t all = 0;
      for (int i = 0; i < kWarps; ++i) {
        if (i < warp) upto += uint32_t(sh.scan[i]);
        all += uint32_t(sh.scan[i]);
      }
      uint32_t first = before + upto - own;
      for (int i = 0; i < 4; ++i) {
        if (bits >> i & 1 && ++first == nth) sh.cut_id = at + i;
      }
      before += all;
      __syncthreads();
      if (before >= nth) return;
    }
  }

  __device__ void weights_at(int at, double (&out)[4]) const {
    weights_of(at < until ? load_logits(line, at, r.vocab, aligned) : float4{}, at, out);
  }

  __device__ void weights_of(const float4& four, int at, double (&out)[4]) const {
    out[0] = out[1] = out[2] = out[3] = 0.0;
    const float raw[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (at + i >= until) break;
      float value = logit(at + i, raw[i]);
      if (kept(key_of(value), at + i)) out[i] = weight(value);
    }
  }

  // The first id at which the kept mass exceeds `uniform` of its whole. Sums in id order, in f64, the same for any grid.
  __device__ void draw(double uniform, uint32_t* token) {
    int tiles = (until - from + kTile - 1) / kTile, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int at = from + threadIdx.x * 4;
    float4 four = load_logits(line, at, r.vocab, aligned), coming = four;
    for (int tile = 0; tile < tiles; ++tile, at += kTile, four = coming) {
      if (at + kTile < until) coming = load_logits(line, at + kTile, r.vocab, aligned);
      double w[4];
      weights_of(four, at, w);
      double sum = ((w[0] + w[1]) + w[2]) + w[3];
      for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
      if (lane == 0) sh.sums[tile][warp] = sum;
    }
    __syncthreads();
    if (warp < tiles) {
      double upto = scan(lane < kWarps ? sh.sums[warp][lane] : 0.0);
      if (lane < kWarps) sh.sums[warp][lane] = upto;
    }
    __syncthreads();
    if (warp == 0) {
      double upto = scan(lane < tiles ? sh.sums[lane][kWarps - 1] : 0.0);
      if (lane < tiles) sh.tiles[lane] = upto;
      if (lane == 31) sh.total = upto;
    }
    cluster.sync();
    double totals[kBlocks], whole_mass = 0.0;
    for (int other = 0; other < kBlocks; ++other) {
      totals[other] = *cluster.map_shared_rank(&sh.total, other);
      whole_mass += totals[other];
    }
    double goal = uniform * whole_mass, mass = 0.0, start = 0.0;
    int owner = 0;
    for (int other = 0; other < kBlocks; ++other) {
      if (totals[other] <= 0.0) continue;
      owner = other, start = mass;
      mass += totals[other];
      if (mass > goal) break;
    }
    if (owner == cluster.block_rank() && warp == 0) fall(goal, start, tiles, token);
    // Other blocks may still read this one's memory.
    cluster.sync();
  }

  // Sums of the lanes up to and including this one.
  __device__ static double scan(double value) {
    for (int step = 1; step < 32; step *= 2) {
      double other = __shfl_up_sync(~0u, value, step);
      if (threadIdx.x % 32 >= step) value += other;
    }
    return value;
  }

  // The first lane whose running mass exceeds the goal, or the last that has any where rounding let none.
  __device__ static int cross_lane(bool has, bool exceeds) {
    uint32_t crossed = __ballot_sync(~0u, has && exceeds), some = __ballot_sync(~0u, has);
    return crossed ? __ffs(crossed) - 1 : 31 - __clz(some);
  }

  // One warp of the block in which the mass crosses: tile, warp of the tile, lane, token.
  __device__ void fall(double goal, double start, int tiles, uint32_t* token) {
    int lane = threadIdx.x % 32;
    double upto = lane < tiles ? sh.tiles[lane] : 0.0, before = __shfl_up_sync(~0u, upto, 1);
    int tile = cross_lane(lane < tiles && upto > (lane ? before : 0.0), start + upto > goal);
    if (tile > 0) start += sh.tiles[tile - 1];
    upto = lane < kWarps ? sh.sums[tile][lane] : 0.0, before = __shfl_up_sync(~0u, upto, 1);
    int run = cross_lane(lane < kWarps && upto > (lane ? before : 0.0), start + upto > goal);
    if (run > 0) start += sh.sums[tile][run - 1];
    double w[4];
    int at = from + tile * kTile + run * 128 + lane * 4;
    weights_at(at, w);
    double sum = ((w[0] + w[1]) + w[2]) + w[3];
    upto = scan(sum);
    if (lane != cross_lane(sum > 0.0, start + upto > goal)) return;
    double reached = start + (upto - sum);
    uint32_t last = at;
    for (int i = 0; i < 4; ++i) {
      if (w[i] <= 0.0) continue;
      last = at + i;
      reached += w[i];
      if (reached > goal) break;
    }
    *token = last;
  }
};

// Philox4x32-10, as src/speculate/uniform.rs.
__device__ double uniform_of(uint64_t seed, uint64_t position) {
  uint32_t c0 = position, c1 = position >> 32, c2 = 0, c3 = 0, k0 = seed, k1 = seed >> 32;
  for (int i = 0; i < 10; ++i) {
    uint64_t a = uint64_t(c0) * 0xD2511F53u, b = uint64_t(c2) * 0xCD9E8D57u;
    uint32_t n0 = uint32_t(b >> 32) ^ c1 ^ k0, n2 = uint32_t(a >> 32) ^ c3 ^ k1;
    c1 = uint32_t(b), c3 = uint32_t(a), c0 = n0, c2 = n2;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  uint64_t bits = uint64_t(c0) << 32 | c1;
  return double(bits >> 11) / double(1ull << 53);
}

}  // namespace

// Grid: 8 x rows.
extern "C" __global__ __cluster_dims__(kBlocks, 1, 1) __launch_bounds__(kThreads, 2) void round_draw(Round r, const float* logits,
                                                                                                   int64_t stride) {
  __shared__ Shared sh;
  int row = blockIdx.y;
  if (row >= r.live->rows) return;
  const RowInfo info = r.infos[row];
  const Request& q = r.requests[info.request];
  const Pick pick = r.picks[row];
  // The same for the whole cluster: nobody is left waiting.
  if (!(q.temperature >= kGreedyBelow) || pick.fault != kFine) return;
  if (threadIdx.x == 0) sh.listed = 0;
  load_rule(r, info, q, sh.rule);
  cg::cluster_group cluster = cg::this_cluster();
  int run = ((r.vocab + kBlocks - 1) / kBlocks + 3) / 4 * 4, from = min(run * int(cluster.block_rank()), r.vocab);
  double scale = 1.0 / double(q.temperature);
  Draw draw{r, sh, cluster, logits + row * stride, stride % 4 == 0, sh.rule.any, from, min(from + run, r.vocab), pick.best, float(scale), scale};
  if (q.min_p > 0.0f) draw.keep_from(fmin(double(q.min_p), 1.0));
  if (q.top_k > 0) draw.cut(double(q.top_k), false, true);
  if (q.top_p < 1.0f) draw.cut(double(q.top_p), true, false);
  draw.draw(uniform_of(q.seed, info.position), &r.picks[row].token);
}
