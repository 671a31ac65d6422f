// Who computes what, decided on the device from the lengths in this launch; every block derives the same plan, so there is no host
// plan, no metadata kernel and no synchronisation.
//
// A request's rows x heads are cut into row tiles. A *stream* is what walks a request's KV once: one row tile, or, when all
// requests have the same number of row tiles, all of them at the same time (a *team* of blocks that share the KV through L2).
//
// fast:  the streams are laid end to end on a line measured in tiles; each unit (team) takes an equal stretch. The piece of
//        unit u on stream s is partial u + s, unique because both only grow along the line.
// exact: every stream is cut at fixed positions, whatever else is in the batch. A row's last tiles are gathered row by row in
//        position order, committed keys and draft ancestors alike, so a result depends on the row's own keys and nothing else.
#pragma once
#include "params.h"
#include "ptx.cuh"

struct Request {
  int kv_begin, prefix, q_begin, rows;
};

struct Plan {
  int line[kMaxBatch + 1];            // fast: where a request's streams start on the line; exact: its first item
  uint16_t streams[kMaxBatch + 1];    // streams before this request
  int team, units, payload;           // blocks a team (1 in exact), teams, tiles a unit (fast only)
  int item_cost;                      // what starting a piece counts for on the line, in tiles (fast only)
};

// What 128 planning threads tell each other, 32 requests a group.
struct PlanScratch {
  int low[4], high[4], longest[4], cost[4], streams[4];
};

// A request's lengths, from the lists; after the first time they are in the nearest cache.
__device__ inline Request request_of(const VerifyParams& p, int r) {
  const int begin = __ldg(p.kv_begin + r), prefix = __ldg(p.kv_len + r), q0 = __ldg(p.qo_indptr + r), q1 = __ldg(p.qo_indptr + r + 1);
  return {begin, max(prefix, 0), q0, min(max(q1 - q0, 0), kMaxRows)};
}

enum TileKind { kWhole = 0, kPrefixEnd = 1, kDraft = 2, kGathered = 3, kNone = 4 };

// A piece of work and the place of a walker inside it. In fast mode tiles are numbered from the start of the request (prefix,
// then draft); in exact mode from the start of the item (shared tiles, then the gathered tiles of one draft row after another).
struct Walk {
  int request, stream, tile, end;
  int begin;        // fast: first tile of this piece; exact: 0
  int first;        // exact: absolute first tile of the split
  int id;           // exact: item number; fast: stream number over all requests
  int direct;       // the piece is the whole stream: write the output, not a partial
};

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// exact: splits of 8 tiles (128 tokens) up to 512 tiles, then 32 splits an octave.
constexpr int kBaseTiles = 512, kBaseSplits = 64;
__host__ __device__ inline int split_begin(int k) {
  if (k < kBaseSplits) return k * (kBaseTiles / kBaseSplits);
  const int octave = (k - kBaseSplits) / 32, i = (k - kBaseSplits) % 32;
  return (kBaseTiles << octave) + i * ((kBaseTiles / 32) << octave);
}
__device__ inline int split_of(int tile) {
  if (tile < kBaseTiles) return tile / (kBaseTiles / kBaseSplits);
  const int octave = 31 - __clz(tile) - 9;
  return kBaseSplits + 32 * octave + (tile - (kBaseTiles << octave)) / ((kBaseTiles / 32) << octave);
}

__device__ inline int row_tiles(const VerifyParams& p, int rows, int tile_rows) { return ceil_div(rows << p.heads_log2, tile_rows); }
__device__ inline int fast_tiles(const Request& r) { return ceil_div(r.prefix, kTile) + ceil_div(r.rows, kTile); }
// Splits a request may need: as if it were a chain. A tree is shallower; its last splits may turn out empty.
__device__ inline int exact_splits(const Request& r) { return split_of((r.prefix + r.rows - 1) / kTile) + 1; }

__device__ inline int warp_inclusive_sum(int v) {
  const int lane = threadIdx.x % 32;
  for (int d = 1; d < 32; d *= 2) {
    const int up = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += up;
  }
  return v;
}

// a / b for 0 <= a < 2^28, b > 0, where a / b < 2^21: one reciprocal instead of an integer division.
__device__ inline int divide(int a, int b) {
  int q = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  const int left = a - q * b;
  if (left < 0) --q;
  if (left >= b) ++q;
  return q;
}

// Teams only when everybody has the same number of row tiles and little of the card is left over.
__device__ inline int team_size(int low, int high, int blocks) {
  if (low != high || high <= 1 || high > blocks) return 1;
  return (blocks - divide(blocks, high) * high) * 16 <= blocks ? high : 1;
}
// Tiles a unit.
__device__ inline int payload_of(const VerifyParams& p, int total, int units, int longest) {
  const int root = static_cast<int>(ceilf(sqrt_fast(static_cast<float>(longest)) * __fdividef(0.25f, p.split_root)));
  return max(max(divide(total + units - 1, units), p.min_tiles), root);
}

// Called by the whole block (at least 128 threads), one thread a request; ends with a block-wide barrier. It stands before
// everything else a launch does, so it is kept short.
template <int kTileRows, bool kExact>
__device__ void make_plan(const VerifyParams& p, Plan& plan, PlanScratch& scratch, int blocks) {
  const int r = threadIdx.x, group = r / 32;
  const bool planner = r < kMaxBatch;
  const Request own = r < p.batch ? request_of(p, r) : Request{0, 0, 0, 0};
  const int tiles = own.rows > 0 ? row_tiles(p, own.rows, kTileRows) : 0, length = own.rows > 0 ? fast_tiles(own) : 0;
  if (planner) {
    const int low = __reduce_min_sync(~0u, tiles > 0 ? tiles : 1 << 30), high = __reduce_max_sync(~0u, tiles);
    const int longest = __reduce_max_sync(~0u, length);
    if (r % 32 == 0) scratch.low[group] = low, scratch.high[group] = high, scratch.longest[group] = longest;
  }
  __syncthreads();
  int low = scratch.low[0], high = scratch.high[0], longest = scratch.longest[0];
  for (int g = 1; g < 4; ++g)
    low = min(low, scratch.low[g]), high = max(high, scratch.high[g]), longest = max(longest, scratch.longest[g]);

  const int team = kExact ? 1 : team_size(low, high, blocks), units = team > 1 ? divide(blocks, team) : blocks;
  const int streams = team > 1 ? min(tiles, 1) : tiles;
  const int cost = own.rows == 0 ? 0 : kExact ? exact_splits(own) * tiles : streams * (length + p.item_cost);
  int cost_upto = 0, streams_upto = 0;
  if (planner) {
    cost_upto = warp_inclusive_sum(cost), streams_upto = warp_inclusive_sum(streams);
    if (r % 32 == 31) scratch.cost[group] = cost_upto, scratch.streams[group] = streams_upto;
  }
  __syncthreads();
  if (planner) {
    int cost_before = 0, streams_before = 0;
    for (int g = 0; g < group; ++g) cost_before += scratch.cost[g], streams_before += scratch.streams[g];
    plan.line[r] = cost_before + cost_upto - cost, plan.streams[r] = streams_before + streams_upto - streams;
    if (r == kMaxBatch - 1) plan.line[kMaxBatch] = cost_before + cost_upto, plan.streams[kMaxBatch] = streams_before + streams_upto;
  }
  if (r == 0) {
    const int total = scratch.cost[0] + scratch.cost[1] + scratch.cost[2] + scratch.cost[3];
    plan.team = team, plan.units = units, plan.payload = payload_of(p, total, units, longest), plan.item_cost = p.item_cost;
  }
  __syncthreads();
}

// The plan of `fast` as it lies in shared memory. `WarpPlan` (start.cuh) answers the same questions out of a warp's registers.
struct SharedPlan {
  const VerifyParams& p;
  const Plan& plan;
  __device__ int payload() const { return plan.payload; }
  __device__ int cost() const { return plan.item_cost; }
  __device__ int line(int r) const { return plan.line[r]; }
  __device__ int before(int r) const { return plan.streams[r]; }
  __device__ int count(int r) const { return plan.streams[r + 1] - plan.streams[r]; }
  __device__ Request request(int r) const { return request_of(p, r); }
  // The last request whose streams start at or before `a`.
  __device__ int at(int a) const {
    int low = 0, high = a == 0 ? 1 : p.batch;
    while (high - low > 1) {
      const int mid = (low + high) / 2;
      if (plan.line[mid] <= a) low = mid;
      else high = mid;
    }
    return low;
  }
};

// Moves `w` to the next piece of this unit (fast) or block (exact). False when there is none.
template <typename AnyPlan>
__device__ inline bool next_fast(const VerifyParams& p, const AnyPlan& plan, Walk& w, int unit) {
  const int a = unit * plan.payload(), b = a + plan.payload();
  for (;;) {
    ++w.stream;
    while (w.request < p.batch && w.stream >= plan.count(w.request)) ++w.request, w.stream = 0;
    if (w.request >= p.batch) return false;
    asm volatile("" : "+r"(w.request));             // else pointers into every list are carried along, in registers that are not there
    const int tiles = fast_tiles(plan.request(w.request));
    const int start = plan.line(w.request) + w.stream * (tiles + plan.cost());
    if (start >= b) return false;
    w.begin = max(a - start - plan.cost(), 0), w.end = min(b - start - plan.cost(), tiles);
    if (w.begin >= w.end) continue;
    w.tile = w.begin;
    w.id = plan.before(w.request) + w.stream;
    w.direct = w.begin == 0 && w.end == tiles;
    return true;
  }
}

// Before the first piece of this unit's stretch, so that walking does not start at request 0.
template <typename AnyPlan>
__device__ inline Walk start_fast(const VerifyParams& p, const AnyPlan& plan, int unit) {
  Walk w{};
  const int a = unit * plan.payload();
  w.request = plan.at(a);
  const int start = plan.line(w.request), per = fast_tiles(plan.request(w.request)) + plan.cost();
  w.stream = max(min(divide(a - start, per), plan.count(w.request)), 0) - 1;
  return w;
}

// Draft row `u` of a request sees `prefix + ancestors` keys; this is the last absolute tile that holds one.
__device__ inline int last_tile(const VerifyParams& p, const Request& r, int u) {
  const uint64_t in_request = r.rows >= 64 ? ~0ull : (1ull << r.rows) - 1;
  return (r.prefix + __popcll(p.mask[r.q_begin + u] & in_request) - 1) / kTile;
}

// exact, called by a whole warp: gathered tiles of draft row u = first + lane in the split [begin, end), 0 for other lanes.
template <int kTileRows>
__device__ int gathered_tiles(const VerifyParams& p, const Request& r, int row_tile, int begin, int end, int& u) {
  const int first = (row_tile * kTileRows) >> p.heads_log2, count = max(kTileRows >> p.heads_log2, 1);
  u = first + static_cast<int>(threadIdx.x % 32);
  if (static_cast<int>(threadIdx.x % 32) >= count || u >= r.rows) return 0;
  return max(min(last_tile(p, r, u) + 1, end) - max(r.prefix / kTile, begin), 0);
}

template <int kTileRows>
__device__ bool next_exact(const VerifyParams& p, const Plan& plan, Walk& w, int blocks) {
  for (w.id += blocks; w.id < plan.line[kMaxBatch]; w.id += blocks) {
    while (plan.line[w.request + 1] <= w.id) ++w.request;
    const Request r = request_of(p, w.request);
    const int tiles = row_tiles(p, r.rows, kTileRows), local = w.id - plan.line[w.request];
    const int split = local / tiles;
    w.stream = local % tiles;
    w.first = split_begin(split);
    const int end = split_begin(split + 1);
    int u, gathered = gathered_tiles<kTileRows>(p, r, w.stream, w.first, end, u);
    gathered = __reduce_add_sync(~0u, gathered);
    w.begin = w.tile = 0;
    w.end = max(min(r.prefix / kTile, end) - w.first, 0) + gathered;
    w.direct = exact_splits(r) == 1;
    return true;
  }
  return false;
}
