// The tree-verify kernel at 64 query rows in `fast` numerics: every warp has one role, and tiles pass through the roles as through a
// pipeline, so that scores, softmax, values and copies of different tiles run at the same time. tree.cuh does the same work, a tile
// at a time, with fewer rows or in `exact` numerics.
//
//   4 scorers     two for each half of the rows: each multiplies 32 rows by half of the columns of K and hands the sums over in f32; keeps
//                 its queries in registers, those of the rope columns in shared memory
//   4 keepers     two for each half of the rows: each adds the scorers' sums up for 16 rows, does their softmax and hands P over; and looks
//                 slots up and starts copies for one place of the ring
//   8 gatherers   four for each half of the rows: each keeps 32 rows x 128 columns of O in registers and adds P x V
//
// A scheduler has one scorer, a gatherer of each half and a keeper. Whatever passes from one role to another is told by mbarriers:
// `full` and `empty` of a place in the ring, `scored` and `read` of the scores, `ready` and `taken` of the two places for P. P travels as
// the A fragment that the gatherer needs. Gatherers read V of a tile whose `full` they have not seen themselves: its keepers had `scored`
// from scorers who had. For the same reason only gatherers say that a place is `empty`: the scorers had read the tile before they.
//
// Registers are what is scarce: what all lanes of a warp agree on is kept `uniform`, addresses in shared memory are numbers that differ
// by constants.
#pragma once
#include <cstddef>
#include "block.cuh"
#include "pieces.cuh"
#include "softmax.cuh"

namespace roles {

constexpr int kScorers = 4, kGatherers = 8, kKeepers = 4, kWarps = kScorers + kGatherers + kKeepers;
constexpr int kScoreSteps = 18;                     // k-steps of a scorer: two slices of 8, half of the rope columns
constexpr int kKeptSteps = 2;                       // of these, those of the rope columns, whose queries lie in shared memory
// What the warps have after the move: 4 x 168 + 8 x 152 + 4 x 40 = 16 x 128.
constexpr int kScorerRegisters = 168, kGathererRegisters = 152, kKeeperRegisters = 40;

// What 32 rows keep to themselves.
struct alignas(1024) Half {
  float4 scores[2][2][2][32];                       // of an m16 tile, tokens 0 to 7 and 8 to 15, by half of the columns
  uint4 probabilities[2][2][32];                    // of the even and of the odd tiles: A fragments of P, by m16 tile
  // Queries of the rope columns, by m16 tile and scorer, as the registers would hold them; while queries are loaded, where they are turned.
  uint4 query[kKeptSteps][2][2][32];
  uint4 keys[2][32];                                // where a scorer's lane finds its fragments of keys in the first tile: of two slices, of the rope columns
  float rescale[2][32];                             // what a row's O is multiplied by before that tile, where a note says so
  float inverse[4][32];                             // 1 / weight of the rows of a piece, by the number of its last tile
  int2 notes[2];                                    // last even and odd tile before which rows of the first and of the second m16 tile grew
  uint64_t scored, read;                            // scores of a tile are there; have been read
  uint64_t ready[2], taken[2];                      // P of a tile is there; has been read
};


struct Shared {
  uint8_t ring[kStages][kTileBytes];                // aligned to 1024 bytes, the period of the swizzle
  Half halves[2];
  Walk walks[kWarps];                               // the piece a warp is at
  int unit, member;                                 // the team this block is in, and its place there
  Plan plan;
  Fetch fetch[kKeepers];                            // where each keeper looks up next
  int info[kDescs];                                 // see layout.cuh
  uint64_t full[kStages], empty[kStages];
};

using Job = Block<64, false, Shared>;

// A keeper's next tile to fetch.
struct Next {
  Job::Ahead ahead;                                 // `left` is negative where there is none
  int slot;                                         // of the lane's token
};

// A value whose origin is hidden, so that it is kept and not worked out anew.
__device__ __forceinline__ uint32_t kept(uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}
// The assembler moves nothing over a read of the clock, and emits nothing for one that is not used. Without it each fragment would be loaded
// just before it is needed. (A branch does the same, but waits for all products under way.)
__device__ __forceinline__ void pin() {
  asm volatile("{\n.reg .u32 x;\nmov.u32 x, %clock;\n}" ::: "memory");
}

// Steps of a slice in the order in which they are walked. Columns 16 s of a slice lie at `from ^ 32 s` for s < 4 and at
// `from ^ 32 (s ^ 2) + 512` beyond, so four addresses, each the one before with a bit turned, serve eight steps.
__device__ __forceinline__ constexpr int walked(int n) {
  constexpr int order[8] = {0, 6, 1, 7, 3, 5, 2, 4};
  return order[n];
}
__device__ __forceinline__ constexpr uint32_t turned(int n) { return n == 2 || n == 6 ? 32 : n == 4 ? 64 : 0; }

__device__ __forceinline__ int row_tile(const Job& b, const Walk& w) { return b.sm.plan.team > 1 ? b.sm.member : w.stream; }

// Where the rows of a half lie in the launch's lists.
struct Rows {
  int present;                                      // rows of this half that the request has
  int64_t out;                                      // its first row in the outputs
  int64_t partial;                                  // and in the partials
  bool fits;                                        // whether the partials have that place
  __device__ Rows(const Job& b, const Walk& w, int pair) {
    const Request r = request_of(b.p, w.request);
    const int row0 = row_tile(b, w) * 64 + 32 * pair, slot = (b.sm.unit + w.id) * b.sm.plan.team + b.sm.member;
    present = (r.rows << b.p.heads_log2) - row0;
    out = (static_cast<int64_t>(r.q_begin) << b.p.heads_log2) + row0, partial = static_cast<int64_t>(slot) * 64 + 32 * pair;
    fits = w.direct || slot < b.p.partials;
  }
};

// What every consumer warp knows. What is rarely needed (its number, its piece) is found anew from the thread's number.
struct Worker {
  const Job& b;
  uint32_t base;                                    // address of `Shared`
  uint32_t mine;                                    // address of its `Half`, + 512 x side for a scorer, + 16 x lane

  __device__ uint32_t lane() const { return kept(mine) % 512 / 16; }
  __device__ uint32_t half() const { return kept(mine) / 1024 * 1024; }
  __device__ static int warp() { return static_cast<int>(Place::of(threadIdx.x).in_block()); }
  __device__ Walk& walk() const { return b.sm.walks[warp()]; }
  // Address in the first tile of 16-byte chunk `chunk` of column group `group` (64 columns) of token `r`: the 128-byte swizzle.
  __device__ uint32_t place_in_tile(uint32_t r, uint32_t group, uint32_t chunk) const {
    return base + r * kRowBytes + group * 128 + ((chunk ^ ((r + group) % 8)) << 4);
  }
  __device__ uint32_t full(int tile) const { return base + offsetof(Shared, full) + 8 * (tile & (kStages - 1)); }
  __device__ uint32_t empty(int tile) const { return base + offsetof(Shared, empty) + 8 * (tile & (kStages - 1)); }
  __device__ uint32_t ready(int tile) const { return half() + offsetof(Half, ready) + 8 * (tile & 1); }
  __device__ uint32_t taken(int tile) const { return half() + offsetof(Half, taken) + 8 * (tile & 1); }
  __device__ static uint32_t stage(int tile) { return (tile & (kStages - 1)) * kTileBytes; }
  // One lane tells for its warp.
  __device__ void arrive(uint32_t bar) const {
    __syncwarp();
    if (mine % 512 / 16 < kTakers) mbarrier_arrive(bar);
  }
  // The next piece of this warp's walk, which lies in shared memory. Tiles of it, 0 where there is none.
  __device__ int next_piece() const {
    Walk w = walk();
    __syncwarp();
    const bool more = b.next(w);
    if (lane() == 0) walk() = w;
    __syncwarp();
    return more ? w.end - w.begin : 0;
  }
};

struct Scorer : Worker {
  static constexpr int kInRegisters = kScoreSteps - kKeptSteps;
  uint32_t q[2][kInRegisters][4];
  float s[2][2][4];                                 // by m16 tile, by eight tokens
  uint32_t k[2][4];                                 // fragments of keys in flight
  uint32_t at, found;                               // where the next lies; where the next slice begins, in the first tile

  __device__ uint32_t side() const { return kept(mine) / 512 % 2; }
  __device__ int pair() const { return warp() / 2; }
  __device__ uint32_t kept_query(int step, int i) const { return mine + offsetof(Half, query) + 2048 * (step - kInRegisters) + 1024 * i; }
  __device__ uint32_t keys_at(int slice) const { return mine + offsetof(Half, keys) + 4 * slice; }

  __device__ __forceinline__ void load_queries() {
    const Rows to(b, walk(), pair());
    const __nv_bfloat16* from = b.p.q + to.out * kRow + 8 * (lane() % 4);
    auto column = [&](int window) {
      return window < 8 ? slice_column(2 * side() + window / 4, 2 * (window % 4)) : static_cast<uint32_t>(kLatent + 32 * side());
    };
    uint32_t x[2][kScoreSteps][4];
    // 16 bytes a lane, four lanes a row, into the registers they will end in.
#pragma unroll
    for (int octet = 0; octet < 4; ++octet) {
      const int row = static_cast<int>(8 * octet + lane() / 4);
      const bool present = row < to.present;
#pragma unroll
      for (int window = 0; window < 9; ++window) {
        const uint4 y = present ? __ldg(reinterpret_cast<const uint4*>(from + row * kRow + column(window))) : make_uint4(0, 0, 0, 0);
        uint32_t(&z)[4] = x[octet / 2][2 * window + octet % 2];
        z[0] = y.x, z[1] = y.y, z[2] = y.z, z[3] = y.w;
      }
    }
    // Then 16 rows x 32 columns at a time into the tensor cores' order, by way of two places in shared memory. Row r keeps its 16-byte
    // chunk j at chunk j ^ (r / 2 % 4), so that neither way meets a bank conflict.
    const uint32_t place = kept_query(kInRegisters, 0) - 16 * lane();
    auto chunk_at = [&](uint32_t r, uint32_t j) { return place + r / 8 * 1024 + r % 8 * 64 + ((j ^ (r / 2 % 4)) << 4); };
    const uint32_t in = chunk_at(lane() / 4, lane() % 4), out = chunk_at(lane() % 16, lane() / 16);
#pragma unroll
    for (int i = 0; i <= 18; ++i) {
      if (i < 18) {
        store_16(in + i % 2 * 2048, x[i / 9][2 * (i % 9)]);
        store_16(in + i % 2 * 2048 + 1024, x[i / 9][2 * (i % 9) + 1]);
      }
      if (i > 0) {
        ldmatrix_x4(x[(i - 1) / 9][2 * ((i - 1) % 9)], out + (i - 1) % 2 * 2048);
        ldmatrix_x4(x[(i - 1) / 9][2 * ((i - 1) % 9) + 1], (out ^ 32) + (i - 1) % 2 * 2048);
      }
      __syncwarp();
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int n = 0; n < kScoreSteps; ++n) {
        if (n >= kInRegisters) store_16(kept_query(n, i), x[i][n]);
        else
#pragma unroll
          for (int c = 0; c < 4; ++c) q[i][n][c] = x[i][n][c];
      }
    }
    __syncwarp();
  }

  // Fragment of keys for step `n`: tokens 0 to 7 and 8 to 15, two matrices of eight columns each. Steps 8 and 9 are the rope columns.
  __device__ __forceinline__ void fetch_keys(int tile, int n) {
    if (n == 0 || n == 8 || n == 10) at = stage(tile) + found;
    else if (n == 9) at ^= 32;
    else at ^= turned(n % 10);
    ldmatrix_x4(k[n % 2], at + (n == 8 || n == 9 ? 0 : 512 * (n % 2)));
    if (n == 6 || n == 8 || n == 16) found = load_4(keys_at(n == 6 ? 2 : n == 8 ? 1 : 0));
  }
  // Scores of a tile.
  __device__ __forceinline__ void multiply(int tile, bool& read, bool& arrived) {
    uint32_t x[2][4];                               // queries that lie in shared memory
    if (!arrived) mbarrier_wait(full(tile), (tile / kStages) & 1);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[i][0][c] = s[i][1][c] = 0.0f;
    fetch_keys(tile, 0), fetch_keys(tile, 1);
    pin();
#pragma unroll
    for (int n = 0; n < kScoreSteps; ++n) {
      const uint32_t(&kk)[4] = k[n % 2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t(&rows)[4] = n == 8 || n == 9 ? x[i] : q[i][n < 8 ? walked(n) : 8 + walked((n + 6) % 8)];
        mma(s[i][0], rows, kk[0], kk[1]), mma(s[i][1], rows, kk[2], kk[3]);
      }
      if (n + 2 < kScoreSteps) fetch_keys(tile, n + 2);
      if (n == 7 || n == 8)
#pragma unroll
        for (int i = 0; i < 2; ++i) load_16(x[i], kept_query(kInRegisters + n - 7, i));
      if (n == 12) read = tile == 0 || mbarrier_test(half() + offsetof(Half, read), (tile - 1) & 1);
      if (n == 14) arrived = mbarrier_test(full(tile + 1), ((tile + 1) / kStages) & 1);
      pin();
    }
  }

  __device__ __forceinline__ void run() {
    const uint32_t r = lane() % 8 + 8 * (lane() / 16), chunk = lane() / 8 % 2;
    store_4(keys_at(0), place_in_tile(r, 2 * side(), chunk)), store_4(keys_at(1), place_in_tile(r, 2 * side() + 1, chunk));
    store_4(keys_at(2), place_in_tile(r, 8, 4 * side() + chunk));
    __syncwarp();
    found = load_4(keys_at(0));
    int tile = 0;
    bool arrived = false;
#pragma unroll 1
    for (int tiles; (tiles = next_piece()) > 0;) {
      load_queries();
      const int end = kept(tile + tiles);
#pragma unroll 1
      for (; tile != end; ++tile) {
        bool read = false;
        multiply(tile, read, arrived);
        if (!read) mbarrier_wait(half() + offsetof(Half, read), (tile - 1) & 1);
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 2; ++j) store_floats(mine + 2048 * i + 1024 * j, s[i][j]);
        arrive(half() + offsetof(Half, scored));
      }
    }
  }
};

// Does the softmax of 16 rows, and keeps one place of the ring filled.
struct Keeper : Worker {
  float t[8];                                       // scores of rows lane / 4 (0 to 3: tokens 2 (lane % 4), + 1, + 8, + 9) and lane / 4 + 8; probabilities
  float m[2], l[2], weight[2];                      // of these two rows
  float top[2];                                     // their largest score in a tile

  __device__ uint32_t side() const { return kept(mine) / 512 % 2; }
  __device__ int pair() const { return kept(mine) >= base + static_cast<uint32_t>(offsetof(Shared, halves) + sizeof(Half)); }
  __device__ int number() const { return 2 * pair() + static_cast<int>(side()); }

  __device__ __forceinline__ int info_of(int tile) const { return static_cast<int>(load_4(base + offsetof(Shared, info) + 4 * (tile & (kDescs - 1)))); }
  // Which tokens of a tile that is not whole a row of this half may see, as 16 bits.
  __device__ __forceinline__ uint32_t visible(int info, int row) const {
    const int arg = info >> 8 & 255;
    if ((info & 255) == kPrefixEnd) return (1u << arg) - 1;
    const int draft_row = (row_tile(b, walk()) * 64 + 32 * pair() + row) >> b.p.heads_log2;
    pin();                                          // one thing after the other: registers
    const Request r = request_of(b.p, walk().request);
    if (draft_row >= r.rows) return 0;
    // Bits of absent rows are not trusted: the mask word is cut to the tile, the tile to the request.
    const uint32_t word = reinterpret_cast<const uint16_t*>(b.p.mask + r.q_begin + draft_row)[arg], left = r.rows - kTile * arg;
    return left >= kTile ? word : word & ((1u << left) - 1);
  }
  // Read anew for each row, since keepers have few registers.
  __device__ __forceinline__ void mask_out(int tile) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t seen = visible(info_of(tile), static_cast<int>(16 * side() + 8 * r + lane() / 4)) >> (2 * (lane() % 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) t[4 * r + i] = (seen >> (8 * (i / 2) + i % 2)) & 1 ? t[4 * r + i] : -INFINITY;
      pin();
    }
  }
  // Adds what the scorers found, and says what must be known of the tile.
  __device__ __forceinline__ int take(int tile) {
    mbarrier_wait(half() + offsetof(Half, scored), tile & 1);
    const int info = info_of(tile);
    const uint32_t from = (mine & ~512u) + 4 * (mine & 512);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float x[4], y[4];
      load_floats(x, from + 1024 * j), load_floats(y, from + 1024 * j + 512);
#pragma unroll
      for (int c = 0; c < 4; ++c) t[4 * (c / 2) + 2 * j + c % 2] = x[c] + y[c];
      pin();                                        // else all would be loaded at once, into registers that are not there
    }
    arrive(half() + offsetof(Half, read));
    return info;
  }
  __device__ __forceinline__ void find_top(int part) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (part == 0) top[r] = fmaxf(fmaxf(t[4 * r], t[4 * r + 1]), fmaxf(t[4 * r + 2], t[4 * r + 3]));
      else top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], part));
    }
  }
  // Scores to probabilities. Maxima are integers (softmax.cuh); where no key has been seen yet, 2^(-inf - m) is 0.
  __device__ __forceinline__ void exponentials(int tile) {
    const float old[2] = {m[0], m[1]};
#pragma unroll
    for (int r = 0; r < 2; ++r) m[r] = next_max(m[r], top[r] * b.p.scale_log2);
    if (__any_sync(~0u, m[0] != old[0] || m[1] != old[1])) rescale(tile, old);
#pragma unroll
    for (int i = 0; i < 8; ++i) t[i] = exp2_fast(fmaf(t[i], b.p.scale_log2, -m[i / 4]));
  }
  // Some row's maximum grew: sums are rescaled here, O by whoever has it.
  __device__ __forceinline__ void rescale(int tile, const float (&old)[2]) {
    if (tile > 1) mbarrier_wait(taken(tile), (tile / 2 - 1) & 1);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float f = exp2_fast(old[r] - m[r]);
      l[r] *= f, weight[r] *= f;
      store_4(half() + offsetof(Half, rescale) + 128 * (tile & 1) + 4 * (16 * side() + 8 * r + lane() / 4), __float_as_uint(f));
    }
    store_4(half() + offsetof(Half, notes) + 8 * (tile & 1) + 4 * side(), tile);
  }
  // Hands P of a tile over (but for `ready`) and adds to the rows' sums. `free`: the place for P has been seen free.
  __device__ __forceinline__ void deliver(int tile, bool free) {
    // Row lane / 4, tokens 0 to 7; row + 8; tokens 8 to 15; both.
    const uint32_t a[4] = {pack_bf16(t[0], t[1]), pack_bf16(t[4], t[5]), pack_bf16(t[2], t[3]), pack_bf16(t[6], t[7])};
    if (!free) mbarrier_wait(taken(tile), (tile / 2 - 1) & 1);
    store_16(mine + offsetof(Half, probabilities) + 1024 * (tile & 1), a);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      l[r] += (t[4 * r] + t[4 * r + 1]) + (t[4 * r + 2] + t[4 * r + 3]);
      weight[r] += sum_bf16(a[r]) + sum_bf16(a[r + 2]);
    }
  }

  // After the last tile of a piece, but before it is said to be ready: the rows' maxima and sums.
  __device__ __forceinline__ void finish(int tile) {
    const Walk w = walk();
    const Rows to(b, w, pair());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int d = 1; d < 4; d *= 2) l[r] += __shfl_xor_sync(~0u, l[r], d), weight[r] += __shfl_xor_sync(~0u, weight[r], d);
      const int row = static_cast<int>(16 * side() + 8 * r + lane() / 4);
      if (lane() % 4 == 0) {
        b.sm.halves[pair()].inverse[tile & 3][row] = weight[r] > 0.0f ? 1.0f / weight[r] : 0.0f;
        if (row < to.present && to.fits) {
          if (w.direct) b.p.lse[to.out + row] = natural_lse(m[r], l[r]);
          else b.p.partial_ml[to.partial + row] = make_float4(m[r], l[r], weight[r], 0.0f);
        }
      }
    }
  }

  // Looks up tile `n`, if there is one.
  __device__ __forceinline__ void look_up(int n, Next& next) const {
    if (next.ahead.left < 0) return;
    if (next.ahead.left > 0) {                       // nearly always
      next.slot = __ldg(b.p.kv_indices + next.ahead.place + lane() % kTile);
      next.ahead.place += 4 * kTile, --next.ahead.left;
      if (lane() == 0) b.sm.info[n & (kDescs - 1)] = kWhole;
    } else {
      if (!b.look_up(n, next.ahead, next.slot)) next.ahead.left = -1;
    }
    __syncwarp();
  }
  // Starts the copy of tile `n`, as `Block::fetch` does, but in a tenth of the time: one lane starts all copies, of slots that the
  // assembler knows to be the same in all lanes, else it would make a loop of each copy.
  __device__ __forceinline__ void fetch(int n, int slot) const {
    if (n >= kStages) mbarrier_wait(empty(n), (n / kStages - 1) & 1);
    const int first = slot - static_cast<int>(lane() % kTile);
    const bool block = __all_sync(~0u, first == __shfl_sync(~0u, first, 0));
    const uint32_t bar = full(n), to = base + stage(n);
    if (lane() == 0) mbarrier_expect(bar, kTileBytes);
    __syncwarp();
    const bool chosen = elect_one();
    if (block) {
      const int from = __reduce_min_sync(~0u, slot);
      if (chosen) copy_rows(to, b.tile_map, from, bar);
    } else {
      int row[kTile];
#pragma unroll
      for (int r = 0; r < kTile; ++r) row[r] = __reduce_max_sync(~0u, static_cast<int>(lane()) == r ? slot : -1);
      if (chosen)
#pragma unroll
        for (int r = 0; r < kTile; ++r) copy_rows(to + r * kRowBytes, b.rows_map, row[r], bar);
    }
    __syncwarp();
  }
  // The place of a tile is free, or nearly: fetches what comes there next and looks up what comes then.
  __device__ __forceinline__ void refill(int tile, Next& next) const {
    if (next.ahead.left >= 0) fetch(tile + kStages, next.slot);
    look_up(tile + 2 * kStages, next);
  }
  __device__ __forceinline__ void start_fetching(Next& next) const {
    Walk start = start_fast(b.p, SharedPlan{b.p, b.sm.plan}, b.sm.unit);
    start.tile = number() - kStages;
    if (lane() == 0) b.store_walk(number(), start), b.sm.fetch[number()].place = 0;
    __syncwarp();
    next = {{0, 0}, -1};
    look_up(number(), next);
    refill(number() - kStages, next);
  }

  __device__ __forceinline__ void run() {
    Next next;
    start_fetching(next);
    int tile = 0;
#pragma unroll 1
    for (int tiles; (tiles = next_piece()) > 0;) {
      m[0] = m[1] = kNoMax, l[0] = l[1] = weight[0] = weight[1] = 0.0f;
      const int end = kept(tile + tiles);
#pragma unroll 1
      for (; tile != end; ++tile) {
        if (take(tile) != kWhole) mask_out(tile);
        find_top(0), find_top(1), find_top(2);
        const bool free = tile < 2 || mbarrier_test(taken(tile), (tile / 2 - 1) & 1);
        exponentials(tile);
        deliver(tile, free);
        if (tile + 1 == end) finish(tile);
        arrive(ready(tile));
        if (tile > 0 && ((tile - 1) & (kStages - 1)) == number()) refill(tile - 1, next);
      }
    }
  }
};

struct Gatherer : Worker {
  float o[2][16][4];

  __device__ int slice() const { return warp() % 4; }   // which 128 columns
  __device__ int pair() const { return (warp() - kScorers) / 4; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int c = 0; c < 16; ++c)
#pragma unroll
        for (int k = 0; k < 4; ++k) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(o[i][c][k]));   // else zeros come from local memory
  }

  __device__ __forceinline__ void rescale(int tile, int i) {
    const uint32_t f = half() + offsetof(Half, rescale) + 128 * (tile & 1) + 64 * i + 4 * (lane() / 4);
    const float lo = __uint_as_float(load_4(f)), hi = __uint_as_float(load_4(f + 32));
#pragma unroll
    for (int c = 0; c < 16; ++c) o[i][c][0] *= lo, o[i][c][1] *= lo, o[i][c][2] *= hi, o[i][c][3] *= hi;
  }

  // O += P x V of one tile.
  __device__ __forceinline__ void add(int tile, uint32_t values) {
    mbarrier_wait(ready(tile), (tile / 2) & 1);
    const float2 note = load_8(half() + offsetof(Half, notes) + 8 * (tile & 1));
    uint32_t a[2][4], v[4], at = values + stage(tile);
#pragma unroll
    for (int i = 0; i < 2; ++i) load_16(a[i], mine + offsetof(Half, probabilities) + 1024 * (tile & 1) + 512 * i);
    if (__builtin_expect(__float_as_int(note.x) == tile || __float_as_int(note.y) == tile, 0)) {   // one branch where there is nothing to do
      if (__float_as_int(note.x) == tile) rescale(tile, 0);
      if (__float_as_int(note.y) == tile) rescale(tile, 1);
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      at ^= turned(n);
      ldmatrix_x4_trans(v, at + 512 * (n % 2));
      const int step = walked(n);
#pragma unroll
      for (int i = 0; i < 2; ++i) mma(o[i][2 * step], a[i], v[0], v[1]), mma(o[i][2 * step + 1], a[i], v[2], v[3]);
      if (n == 1) arrive(taken(tile));
    }
    arrive(empty(tile));
  }

  // An octet of rows to where it belongs. Written out in full: O is in registers, which no loop can index.
  template <int kOctet>
  __device__ __forceinline__ void write_octet(char* to, int present, bool direct, uint32_t inverse) {
    if (8 * kOctet >= present) return;
    const float scale = __uint_as_float(load_4(inverse + 32 * kOctet));
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      const float(&lo)[4] = o[kOctet / 2][2 * step], (&hi)[4] = o[kOctet / 2][2 * step + 1];
      constexpr int k = 2 * (kOctet % 2);
      if (direct) {
        uint32_t* at = reinterpret_cast<uint32_t*>(to + (8 * kOctet * kLatent + slice_column(0, step)) * sizeof(__nv_bfloat16));
        at[0] = pack_bf16(lo[k] * scale, lo[k + 1] * scale), at[4] = pack_bf16(hi[k] * scale, hi[k + 1] * scale);
      } else {
        *reinterpret_cast<float4*>(to + (partial_place(8 * kOctet, 0, step)) * sizeof(float4)) = make_float4(lo[k], lo[k + 1], hi[k], hi[k + 1]);
      }
    }
  }
  __device__ __forceinline__ void write(int last) {
    const Walk w = walk();
    const Rows rows(b, w, pair());
    const int row = static_cast<int>(lane() / 4), present = rows.fits ? rows.present - row : 0;
    char* to = w.direct ? reinterpret_cast<char*>(b.p.out + (rows.out + row) * kLatent + slice_column(slice(), 0) + 2 * (lane() % 4))
                        : reinterpret_cast<char*>(b.p.partial_o) + (partial_place(rows.partial, slice(), 0) + lane()) * sizeof(float4);
    const bool direct = w.direct != 0;
    const uint32_t inverse = half() + offsetof(Half, inverse) + 128 * (last & 3) + 4 * row;
    write_octet<0>(to, present, direct, inverse), write_octet<1>(to, present, direct, inverse);
    write_octet<2>(to, present, direct, inverse), write_octet<3>(to, present, direct, inverse);
  }

  __device__ __forceinline__ void run() {
    const uint32_t values = kept(place_in_tile(lane() % 16, slice(), lane() / 16));
    int tile = 0;
#pragma unroll 1
    for (int tiles; (tiles = next_piece()) > 0;) {
      clear();
      const int end = kept(tile + tiles);
#pragma unroll 1
      for (; tile != end; ++tile) add(tile, values);
      write(tile - 1);
    }
  }
};

__device__ inline void start_barriers(Shared& sm) {
  auto init = [](uint64_t& bar, int warps) { mbarrier_init(smem_addr(&bar), warps * kTakers); };
  for (int s = 0; s < kStages; ++s) mbarrier_init(smem_addr(&sm.full[s]), 1), init(sm.empty[s], kGatherers);
  for (Half& half : sm.halves) {
    init(half.scored, kScorers / 2), init(half.read, kKeepers / 2);
    for (int i = 0; i < 2; ++i) init(half.ready[i], kKeepers / 2), init(half.taken[i], kGatherers / 2), half.notes[i] = make_int2(-1, -1);
  }
  mbarrier_init_fence();
}

__device__ inline void verify(const VerifyParams& p, const CUtensorMap* rows_map, const CUtensorMap* tile_map) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared& sm = *reinterpret_cast<Shared*>(raw);
  static_assert(sizeof(Shared) <= kSmemLimit, "must fit the shared memory of sm_120");

  let_next_start();                                 // the merge, which then waits for all of this kernel
  if (threadIdx.x == 32 * kWarps - 1) start_barriers(sm), prefetch_map(rows_map), prefetch_map(tile_map);
  wait_for_previous();                              // whatever made the queries, and the merge before, whose partials this one writes over
  make_plan<64, false>(p, sm.plan, *reinterpret_cast<PlanScratch*>(sm.halves[0].scores), gridDim.x);
  const int unit = divide(blockIdx.x, sm.plan.team);
  if (threadIdx.x == 0) sm.unit = unit, sm.member = blockIdx.x - unit * sm.plan.team;
  if (blockIdx.x == gridDim.x - 1) write_pieces<64, false>(p, sm.plan);
  if (unit >= sm.plan.units) return;

  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  const Job b{p, rows_map, tile_map, sm};
  const uint32_t lane = threadIdx.x % 32, base = smem_addr(raw), halves = base + offsetof(Shared, halves);
  const bool scores = warp < kScorers, gathers = !scores && warp < kScorers + kGatherers;
  const int pair = scores ? warp / 2 : gathers ? (warp - kScorers) / 4 : (warp - kScorers - kGatherers) / 2;
  const uint32_t side = gathers ? 0 : warp % 2;
  // By way of memory that holds nothing yet: else the assembler would work it out anew, from a slow special register.
  const uint32_t mine = there_and_back(smem_addr(sm.halves[0].query) + 4 * threadIdx.x, halves + sizeof(Half) * pair + 512 * side + 16 * lane);
  if (lane == 0) sm.walks[warp] = start_fast(p, SharedPlan{p, sm.plan}, unit);
  __syncthreads();

  if (scores) {
    more_registers<kScorerRegisters>();
    Scorer{{b, base, mine}}.run();
  } else if (gathers) {
    more_registers<kGathererRegisters>();
    Gatherer{{b, base, mine}}.run();
  } else {
    fewer_registers<kKeeperRegisters>();
    Keeper{{b, base, mine}}.run();
  }
}

}  // namespace roles
