// How a block of a joining kernel (fast, 16 or 32 rows) begins: with at most 32 requests every warp makes the plan for itself, in its
// registers, and knows the block's first piece before any barrier; so copies and query loads are under way one read of the lengths
// after the launch before has ended. Used by tree.cuh.
#pragma once
#include "schedule.cuh"

constexpr int kFewTiles = 40;                       // a block; at more, row tiles of 32 are faster than of 16

// The plan of up to 32 requests: lane r of each warp holds request r. All lanes must ask together.
struct WarpPlan {
  Request own;
  int first, streams, begins;         // streams before request r; its streams; where they start on the line
  int team, units, tiles_a_unit, item_cost;

  __device__ int payload() const { return tiles_a_unit; }
  __device__ int cost() const { return item_cost; }
  __device__ int line(int r) const { return __shfl_sync(~0u, begins, r); }
  __device__ int before(int r) const { return __shfl_sync(~0u, first, r); }
  __device__ int count(int r) const { return __shfl_sync(~0u, streams, r); }
  __device__ Request request(int r) const {
    return {__shfl_sync(~0u, own.kv_begin, r), __shfl_sync(~0u, own.prefix, r), __shfl_sync(~0u, own.q_begin, r), __shfl_sync(~0u, own.rows, r)};
  }
  __device__ int at(int a) const {
    const bool before_a = static_cast<int>(threadIdx.x % 32) == 0 || begins <= a;
    return min(31 - __clz(__ballot_sync(~0u, before_a)), 31);
  }

  // For the pieces after the first, and for the other questions of a block; by one warp.
  __device__ void store(Plan& plan) const {
    const int r = threadIdx.x % 32;
    plan.line[r] = begins, plan.streams[r] = first;
    if (r == 31) plan.streams[32] = first + streams;
    if (r == 0) plan.team = team, plan.units = units, plan.payload = tiles_a_unit, plan.item_cost = item_cost;
  }
};

// The request that a lane holds: its own, or the only one.
__device__ inline Request own_request(const VerifyParams& p) {
  const int r = p.batch == 1 ? 0 : threadIdx.x % 32;
  return r < p.batch ? request_of(p, r) : Request{0, 0, 0, 0};
}

// Whether a block of row tiles of `tile_rows` would have few tiles to walk.
__device__ inline bool few_tiles(const VerifyParams& p, const Request& own, int tile_rows, int blocks) {
  const int tiles = own.rows > 0 ? row_tiles(p, own.rows, tile_rows) * min(fast_tiles(own), 1 << 16) : 0;
  return (p.batch == 1 ? tiles : static_cast<int>(__reduce_add_sync(~0u, tiles))) <= kFewTiles * blocks;
}

template <int kTileRows>
__device__ WarpPlan warp_plan(const VerifyParams& p, const Request& own, int blocks) {
  const int tiles = own.rows > 0 ? row_tiles(p, own.rows, kTileRows) : 0, length = own.rows > 0 ? fast_tiles(own) : 0;
  const int low = __reduce_min_sync(~0u, tiles > 0 ? tiles : 1 << 30), high = __reduce_max_sync(~0u, tiles);
  const int longest = __reduce_max_sync(~0u, length);
  WarpPlan plan{};
  plan.own = own;
  plan.team = team_size(low, high, blocks), plan.units = plan.team > 1 ? divide(blocks, plan.team) : blocks;
  plan.streams = plan.team > 1 ? min(tiles, 1) : tiles;
  int streams_upto = __shfl_sync(~0u, plan.streams, 0);
  if (p.batch > 1) streams_upto = warp_inclusive_sum(plan.streams);
  plan.first = streams_upto - plan.streams;
  const int all = __shfl_sync(~0u, streams_upto, 31);
  plan.item_cost = p.item_cost;
  const int total = __reduce_add_sync(~0u, plan.streams * (length + p.item_cost));
  plan.tiles_a_unit = payload_of(p, total, plan.units, longest);
  // Where all streams are equally long and hardly more tiles a unit allow it, each is cut into as many whole stretches, so that no unit
  // starts twice.
  const int shortest = __reduce_min_sync(~0u, plan.streams > 0 ? length : 1 << 30);
  if (shortest == longest && all > 0 && all <= plan.units) {
    const int most = divide(plan.units, all), pieces = min(most, divide(longest + p.item_cost + plan.tiles_a_unit - 1, plan.tiles_a_unit));
    const int whole = max(divide(longest + p.item_cost + pieces - 1, pieces), plan.tiles_a_unit);
    if (whole <= plan.tiles_a_unit + 3) plan.tiles_a_unit = whole, plan.item_cost = pieces * whole - longest;
  }
  const int cost = plan.streams * (length + plan.item_cost);
  int cost_upto = __shfl_sync(~0u, cost, 0);
  if (p.batch > 1) cost_upto = warp_inclusive_sum(cost);
  plan.begins = cost_upto - cost;
  return plan;
}

// The same for a launch of one request: nobody needs to be asked.
struct LonePlan {
  Request own;
  int streams, team, units, tiles_a_unit, item_cost;
  __device__ int payload() const { return tiles_a_unit; }
  __device__ int cost() const { return item_cost; }
  __device__ int line(int) const { return 0; }
  __device__ int before(int) const { return 0; }
  __device__ int count(int) const { return streams; }
  __device__ Request request(int) const { return own; }
  __device__ int at(int) const { return 0; }
  __device__ void store(Plan& plan) const {
    if (threadIdx.x % 32 != 0) return;
    plan.line[0] = 0, plan.streams[0] = 0, plan.streams[1] = streams;
    plan.team = team, plan.units = units, plan.payload = tiles_a_unit, plan.item_cost = item_cost;
  }
};
template <int kTileRows>
__device__ LonePlan lone_plan(const VerifyParams& p, const Request& own, int blocks) {
  LonePlan plan{};
  const int tiles = own.rows > 0 ? row_tiles(p, own.rows, kTileRows) : 0, length = fast_tiles(own);
  plan.own = own;
  plan.team = team_size(tiles, tiles, blocks), plan.units = plan.team > 1 ? divide(blocks, plan.team) : blocks;
  plan.streams = plan.team > 1 ? 1 : tiles;
  plan.item_cost = p.item_cost;
  plan.tiles_a_unit = payload_of(p, plan.streams * (length + p.item_cost), plan.units, length);
  return plan;
}

// What a block does first. `some`: whether it has anything to do at all.
struct Start {
  Walk walk;
  Request request;
  int unit, member;
  bool some;
  __device__ int row_tile(const int team) const { return team > 1 ? member : walk.stream; }
};

template <typename AnyPlan>
__device__ Start first_piece(const VerifyParams& p, const AnyPlan& plan, int team, int units) {
  Start s{};
  s.unit = divide(blockIdx.x, team), s.member = blockIdx.x - s.unit * team;
  if (s.unit >= units) return s;
  s.walk = start_fast(p, plan, s.unit);
  s.some = next_fast(p, plan, s.walk, s.unit);
  if (s.some) s.request = plan.request(s.walk.request);
  return s;
}
