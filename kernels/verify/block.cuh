// What every warp of a block of the tree kernel can do: move along the block's walk, fetch tiles (the four producers), and say which
// tokens of a tile a row sees.
//
// Producer `w` fetches tiles w, w + 4, ... of the block's walk, each into place w of the ring, and tells nobody but the barrier of that
// place. So copies cost the warps that multiply nothing, whether a tile is one copy of 16 neighbours or 16 copies of a row.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"
#include "start.cuh"

template <int kRows, bool kExact, class S = Shared<kRows>>
struct Block {
  using L = Layout<kRows>;
  const VerifyParams& p;
  const CUtensorMap* rows_map;                     // box of 1 row
  const CUtensorMap* tile_map;                     // box of 16 rows
  S& sm;

  __device__ int quad() const { return L::kQuads == 1 ? 0 : Place::now().quad; }
  __device__ QuadShared<kRows>& own() const { return sm.quads[quad()]; }
  __device__ bool next(Walk& w) const {
    if constexpr (kExact) return next_exact<kRows>(p, sm.plan, w, sm.plan.units);
    else return next_fast(p, SharedPlan{p, sm.plan}, w, sm.unit);
  }

  // Moves by `n` tiles, over the ends of pieces. False past the block's last tile.
  __device__ bool advance(Walk& w, int n) const {
    w.tile += n;
    while (w.tile >= w.end) {
      const int over = w.tile - w.end;
      if (!next(w)) return false;
      w.tile = w.begin + over;
    }
    return true;
  }

  // Tiles at the start of a piece that are whole and read by every row alike, counted as `w.tile` is.
  __device__ int whole_tiles(const Walk& w, const Request& r) const {
    if constexpr (!kExact) return r.prefix / kTile;
    return max(min(r.prefix / kTile, split_begin(split_of(w.first) + 1)) - w.first, 0);
  }

  // Slot of the token of the warp's tile that lane % 16 stands for, -1 where there is none; and what the consumers must know of the tile.
  __device__ int look_up_one(const Walk& w, const Request& r, int& info) const {
    const int token = static_cast<int>(Place::now().lane % kTile);
    const int* src = nullptr;
    info = kWhole;
    if constexpr (kExact) {
      const int shared_tiles = whole_tiles(w, r);
      if (w.tile < shared_tiles) {
        src = p.kv_indices + r.kv_begin + (w.first + w.tile) * kTile + token;
      } else {
        int u;
        const int count = gathered_tiles<kRows>(p, r, w.stream, w.first, split_begin(split_of(w.first) + 1), u);
        const int upto = warp_inclusive_sum(count), at = w.tile - shared_tiles;
        const int source = __ffs(__ballot_sync(~0u, upto > at)) - 1;
        const int before = __shfl_sync(~0u, upto - count, source);
        u = __shfl_sync(~0u, u, source);
        const int tile = max(r.prefix / kTile, w.first) + at - before;
        uint64_t mask = p.mask[r.q_begin + u] << (kMaxRows - r.rows) >> (kMaxRows - r.rows);   // bits of rows that are there
        const int keys = r.prefix + __popcll(mask), valid = min(keys - tile * kTile, kTile), key = tile * kTile + token;
        info = kGathered | valid << 8 | u << 16;
        if (token < valid) {
          if (key < r.prefix) {
            src = p.kv_indices + r.kv_begin + key;
          } else {
            for (int skip = key - r.prefix; skip > 0; --skip) mask &= mask - 1;
            src = p.draft_slots + r.q_begin + __ffsll(static_cast<long long>(mask)) - 1;
          }
        }
      }
    } else {
      const int tile = w.tile, prefix_tiles = ceil_div(r.prefix, kTile);
      if (tile < prefix_tiles) {
        const int key = tile * kTile + token;
        if (key < r.prefix) src = p.kv_indices + r.kv_begin + key;
        if (r.prefix - tile * kTile < kTile) info = kPrefixEnd | (r.prefix - tile * kTile) << 8;
      } else {
        const int d = tile - prefix_tiles, row = d * kTile + token;
        if (row < r.rows) src = p.draft_slots + r.q_begin + row;
        info = kDraft | d << 8;
      }
    }
    return src != nullptr ? __ldg(src) : -1;
  }

  // How far a producer has looked up: `left` more of its tiles lie in the same piece and are whole; the next of them at `place` in
  // kv_indices.
  struct Ahead {
    int place, left;
  };

  // A producer's walk is kept in shared memory, as much of it as is needed: producers have few registers.
  __device__ Walk load_walk(int warp) const {
    const Fetch& f = sm.fetch[warp];
    Walk w{};
    w.request = f.request, w.stream = f.stream, w.tile = f.tile, w.end = f.end;
    if constexpr (kExact) w.first = f.first, w.id = f.id;
    return w;
  }
  __device__ void store_walk(int warp, const Walk& w) const {
    Fetch& f = sm.fetch[warp];
    f.request = w.request, f.stream = w.stream, f.tile = w.tile, f.end = w.end;
    if constexpr (kExact) f.first = w.first, f.id = w.id;
  }

  // Slots of this warp's next tile, number `n` of the block; false past the last. Nothing waits for them here.
  __device__ bool look_up(int n, Ahead& ahead, int& slot) const {
    const Place me = Place::now();
    if (ahead.left > 0) {                            // nearly always
      slot = __ldg(p.kv_indices + ahead.place + me.lane % kTile);
      ahead.place += 4 * kTile, --ahead.left;
      if (me.lane == 0) sm.info[n & (kDescs - 1)] = kWhole;
      return true;
    }
    Walk w = load_walk(me.warp);
    const int passed = (ahead.place - sm.fetch[me.warp].place) / kTile;   // tiles since the walk in shared memory was last moved
    __syncwarp();
    if (!advance(w, 4 + passed)) return false;
    slot = take(n, w, request_of(p, w.request), ahead);
    return true;
  }

  // Slots of the tile that a producer's walk has come to, number `n` of the block.
  __device__ int take(int n, const Walk& w, const Request& r, Ahead& ahead) const {
    const Place me = Place::now();
    int info;
    const int slot = look_up_one(w, r, info), whole = min(whole_tiles(w, r), w.end);
    ahead.place = r.kv_begin + ((kExact ? w.first : 0) + w.tile + 4) * kTile, ahead.left = max(whole - w.tile - 1, 0) / 4;
    if (me.lane == 0) store_walk(me.warp, w), sm.info[n & (kDescs - 1)] = info, sm.fetch[me.warp].place = ahead.place;
    __syncwarp();
    return slot;
  }

  // Starts the copy of tile `n`: one where its slots are 16 neighbours, else one a row.
  __device__ void fetch(int n, int slot) const {
    const int stage = n & (kStages - 1);
    if (n >= kStages) mbarrier_wait(smem_addr(&sm.empty[stage]), (n / kStages - 1) & 1);
    const int lane = static_cast<int>(Place::now().lane), first = slot - lane % kTile;
    const bool block = __all_sync(~0u, first == __shfl_sync(~0u, first, 0));
    const uint32_t bar = smem_addr(&sm.full[stage]), to = smem_addr(sm.ring[stage]);
    if (lane == 0) mbarrier_expect(bar, kTileBytes);
    __syncwarp();
    if (block) {
      if (lane == 0) copy_rows(to, tile_map, slot, bar);
    } else if (lane < kTile) {
      copy_rows(to + lane * kRowBytes, rows_map, slot, bar);
    }
    __syncwarp();
  }

  __device__ void produce() const {
    const int me = static_cast<int>(Place::now().warp);
    Walk start{};
    if constexpr (kExact) start.id = static_cast<int>(blockIdx.x) - sm.plan.units;
    else start = start_fast(p, SharedPlan{p, sm.plan}, sm.unit);
    start.tile = me - 4;
    if (Place::now().lane == 0) store_walk(me, start), sm.fetch[me].place = 0;
    __syncwarp();
    // A tile is looked up as soon as the one before is under way, four tiles ahead: its slots arrive while its place is waited for.
    Ahead ahead{};
    int slot;
#pragma unroll 1
    for (int n = me; look_up(n, ahead, slot); n += 4) fetch(n, slot);
  }

  // As `produce`, in a block whose first piece is known before the plan lies in shared memory: `met` is where the block meets when it does.
  template <typename Meet>
  __device__ void produce_from(const Start& start, Meet met) const {
    const int me = static_cast<int>(Place::now().warp);
    Walk w = start.walk;
    w.tile = w.begin + me;
    Ahead ahead{};
    int n = me, slot = -1;
    bool some = start.some && w.tile < w.end;
    if (some) {
      slot = take(n, w, start.request, ahead);
    } else {
      w.tile -= 4;
      if (Place::now().lane == 0) store_walk(me, w), sm.fetch[me].place = 0;
    }
    met();
    if (!some) some = look_up(n, ahead, slot);
#pragma unroll 1
    for (; some; some = look_up(n, ahead, slot)) fetch(n, slot), n += 4;
  }

  // Which tokens of the tile the row at `row` of the row tile may see, as 16 bits.
  __device__ uint32_t visible(int info, int row) const {
    const int kind = info & 255, arg = (info >> 8) & 255, u = (info >> 16) & 255;
    const Request r = request_of(p, own().item.request);
    const int draft_row = (row_tile() * kRows + row) >> p.heads_log2;
    if (kind == kPrefixEnd) return (1u << arg) - 1;
    if (kExact) return draft_row == u ? (1u << arg) - 1 : 0;
    if (draft_row >= r.rows) return 0;
    // Bits of absent rows are not trusted: the mask word is cut to the tile, the tile to the request.
    const uint32_t word = reinterpret_cast<const uint16_t*>(p.mask + r.q_begin + draft_row)[arg], left = r.rows - kTile * arg;
    return left >= kTile ? word : word & ((1u << left) - 1);
  }

  __device__ int row_tile() const { return sm.plan.team > 1 ? sm.member : own().item.stream; }
};
