// The tree-verify kernel: KV split over the card, tensor cores, each KV byte fetched once for all heads and rows of a row tile.
//
// A block owns kRows (16, 32 or 64) query rows of one request (rows are draft row major, head minor) and walks 16-token tiles with 8
// warps, two a scheduler.
// Three things happen in every step, on three different tiles, so that one barrier a step is enough:
//
//   softmax(n + 1)   sums the four partial scores, writes probabilities       (eight rows a warp, by as many warps as it takes)
//   values(n)        O += P x V                                               (a warp: all rows, 512 / warps columns)
//   scores(n + 2)    partial scores over a quarter of the columns             (a warp: slice w % 4 of 16 rows, or of 8 tokens)
//
// Q and O live in registers. Shared memory holds a ring of four KV tiles, the score exchange and P. The exchange and P keep the
// tensor cores' own register layout, so they move as whole 16-byte words without bank conflicts.
#pragma once
#include "schedule.cuh"
#include "softmax.cuh"

constexpr int kWarps = 8;
constexpr int kStages = 4;        // KV tiles in the ring: three in use, one or more in flight
constexpr int kDescs = 2 * kWarps;   // ring of looked-up tiles; every eighth step these warps look up the eight tiles after next
static_assert(kStages <= kWarps / 2, "a tile's slots must be settled (fourth step after the look-up) before its copy is started");
constexpr int kSteps = 9;         // k-steps of a slice: 8 of latent columns, 1 of rope columns

template <int kRows>
struct Layout {
  static constexpr bool kTokenHalves = kRows == 16;               // scoring: warp / 4 picks 8 tokens, else a part of the rows
  static constexpr int kMTiles = kRows / 16, kGroups = kRows / 8, kColumns = kLatent / kWarps;
  static constexpr int kScoreMTiles = kTokenHalves ? 1 : kRows / (4 * kWarps);
  static constexpr int kScoreGroups = 2 * kScoreMTiles;           // row groups (8 rows) that a warp scores
  static constexpr int kScoreBlocks = kTokenHalves ? 1 : 2;
  static constexpr int kExchange = kGroups * 4 * 512;
};

constexpr int kBlock = 1 << 30;                    // in `info`: the tile's 16 slots are neighbours

template <int kRows>
struct alignas(1024) Shared {
  uint8_t ring[kStages][kTileBytes];
  uint8_t exchange[Layout<kRows>::kExchange];      // partial scores, [row group][slice][lane] of 16 bytes
  uint4 p[2][Layout<kRows>::kMTiles][32];          // probabilities as A fragments
  float rescale[2][kRows];
  float row_scale[kRows];                          // 1 / weight of a finished piece
  int slots[kDescs][kTile];
  int info[kDescs];                                // kind | valid or draft tile << 8 | draft row << 16 | kBlock
  Walk fetch[kWarps];                              // where each warp looks up next
  Walk item;                                       // what is being computed
  int first, last;                                 // its tiles, counted over all the block has done
  int more;                                        // whether there is a piece
  Plan plan;
  int unit, member;                                // the team this block is in, and its place there
  uint64_t full[kStages];                          // tile has arrived
  uint64_t taken;                                  // the exchange has been read
};

// Where a thread stands. `now` hides the thread number from the compiler, so that addresses made from it are worked out anew in
// each step instead of being kept (and, at 64 rows, spilled): registers are scarce, instructions are not.
struct Place {
  uint32_t lane, warp, slice, part;
  __device__ static Place now() {
    uint32_t t = threadIdx.x;
    asm volatile("" : "+r"(t));
    return {t % 32, t / 32, t / 32 % 4, t / 128};
  }
};

template <int kRows, bool kExact>
struct Block {
  const VerifyParams& p;
  const CUtensorMap* rows_map;                     // box of 1 row
  const CUtensorMap* tile_map;                     // box of 16 rows
  Shared<kRows>& sm;

  __device__ bool next(Walk& w) const {
    if constexpr (kExact) return next_exact<kRows>(p, sm.plan, w, gridDim.x);
    else return next_fast(p, sm.plan, w, sm.unit);
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

  // Looks up the slots of the tile that is `step` further on this warp's walk and notes them as tile `n`.
  __device__ void look_up(int n, int step) {
    const Place me = Place::now();
    Walk& w = sm.fetch[me.warp];
    const int desc = n & (kDescs - 1);
    bool more = true;
    if (w.tile + step < w.end) {                    // nearly always: the same piece goes on
      __syncwarp();
      if (me.lane == 0) w.tile += step;
    } else {
      Walk moved = w;
      __syncwarp();
      more = moved.end >= 0 && advance(moved, step);
      if (!more) moved.end = -1;
      if (me.lane == 0) w = moved;
    }
    __syncwarp();
    if (!more) {
      if (me.lane == 0) sm.info[desc] = kNone;
      return;
    }
    const Request& r = sm.plan.request[w.request];
    const int* src = nullptr;
    int info = kWhole;
    if constexpr (kExact) {
      const int end = split_begin(split_of(w.first) + 1);
      const int shared_tiles = max(min(r.prefix / kTile, end) - w.first, 0);
      if (w.tile < shared_tiles) {
        src = p.kv_indices + r.kv_begin + (w.first + w.tile) * kTile + me.lane;
      } else {
        int u;
        const int count = gathered_tiles<kRows>(p, r, w.stream, w.first, end, u);
        const int upto = warp_inclusive_sum(count), at = w.tile - shared_tiles;
        const int source = __ffs(__ballot_sync(~0u, upto > at)) - 1;
        const int before = __shfl_sync(~0u, upto - count, source);
        u = __shfl_sync(~0u, u, source);
        const int tile = max(r.prefix / kTile, w.first) + at - before;
        uint64_t mask = p.mask[r.q_begin + u] & (r.rows >= 64 ? ~0ull : (1ull << r.rows) - 1);
        const int keys = r.prefix + __popcll(mask), valid = min(keys - tile * kTile, kTile), key = tile * kTile + me.lane;
        info = kGathered | valid << 8 | u << 16;
        if (me.lane < valid) {
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
        const int key = tile * kTile + me.lane;
        if (key < r.prefix) src = p.kv_indices + r.kv_begin + key;
        if (r.prefix - tile * kTile < kTile) info = kPrefixEnd | (r.prefix - tile * kTile) << 8;
      } else {
        const int d = tile - prefix_tiles, row = d * kTile + me.lane;
        if (row < r.rows) src = p.draft_slots + r.q_begin + row;
        info = kDraft | d << 8;
      }
    }
    if (me.lane < kTile) {
      const uint32_t dst = smem_addr(&sm.slots[desc][me.lane]);
      if (src != nullptr) copy_word(dst, src);
      else sm.slots[desc][me.lane] = -1;
    }
    if (me.lane == 0) sm.info[desc] = info;
  }

  // Once the slots of tile `n`, looked up by this warp, have arrived: notes whether one copy can fetch them all.
  __device__ void settle(int n) {
    const Place me = Place::now();
    const int desc = n & (kDescs - 1);
    copy_word_wait();
    __syncwarp();
    const int row = me.lane & (kTile - 1), first = sm.slots[desc][row] - row;
    const bool block = __all_sync(~0u, first == __shfl_sync(~0u, first, 0));
    if (me.lane == 0 && block && sm.info[desc] != kNone) sm.info[desc] |= kBlock;
  }

  // Starts the copy of tile `n`, whose `info` is given: one copy where its slots are 16 neighbours, else two rows a warp.
  __device__ void issue(int n, int info) {
    const Place me = Place::now();
    const int desc = n & (kDescs - 1), stage = n & (kStages - 1), row = (me.lane + 2 * me.warp) & (kTile - 1);
    const int slot = sm.slots[desc][row];
    const bool block = info & kBlock, leads = me.warp == (n & (kWarps - 1)) && me.lane == 0;
    if (block ? leads : info != kNone && me.lane < 2) {
      const uint32_t bar = smem_addr(&sm.full[stage]), dst = smem_addr(sm.ring[stage]);
      if (leads) mbarrier_expect(bar, kTileBytes);
      copy_rows(block ? dst : dst + row * kRowBytes, block ? tile_map : rows_map, block ? slot - row : slot, bar);
    }
  }

  // Which tokens of the tile the row at `row` of the row tile may see, as 16 bits.
  __device__ uint32_t visible(int info, int row) const {
    const int kind = info & 255, arg = (info >> 8) & 255, u = (info >> 16) & 255;
    const Request& r = sm.plan.request[sm.item.request];
    const int draft_row = (row_tile() * kRows + row) >> p.heads_log2;
    if (kind == kPrefixEnd) return (1u << arg) - 1;
    if (kExact) return draft_row == u ? (1u << arg) - 1 : 0;
    if (draft_row >= r.rows) return 0;
    // Bits of absent rows are not trusted: the mask word is cut to the tile, the tile to the request.
    const uint32_t word = reinterpret_cast<const uint16_t*>(p.mask + r.q_begin + draft_row)[arg], left = r.rows - kTile * arg;
    return left >= kTile ? word : word & ((1u << left) - 1);
  }

  __device__ int row_tile() const { return sm.plan.team > 1 ? sm.member : sm.item.stream; }
};

// Where the merge finds the partials of every draft row; written by the last block, which has the least to do.
template <int kRows, bool kExact>
__device__ void write_pieces(const VerifyParams& p, const Plan& plan) {
  for (int request = threadIdx.x / 32; request < p.batch; request += blockDim.x / 32) {
    const Request& r = plan.request[request];
    for (int u = threadIdx.x % 32; u < r.rows; u += 32) {
      const int tile = (u << p.heads_log2) / kRows, offset = (u << p.heads_log2) % kRows;
      int4 piece;
      if constexpr (kExact) {
        piece = make_int4(plan.line[request] + tile, exact_splits(r), row_tiles(p, r.rows, kRows), offset);
      } else {
        const int stream = plan.team > 1 ? 0 : tile, lane = plan.team > 1 ? tile : 0, tiles = fast_tiles(r);
        const int start = plan.line[request] + stream * (tiles + p.item_cost) + p.item_cost;
        const int u0 = start / plan.payload, u1 = (start + tiles - 1) / plan.payload;
        piece = make_int4((u0 + plan.streams[request] + stream) * plan.team + lane, u1 - u0 + 1, plan.team, offset);
      }
      p.pieces[r.q_begin + u] = piece;
    }
  }
}

template <int kRows, bool kExact>
__device__ void verify_tree(const VerifyParams& p, const CUtensorMap* rows_map, const CUtensorMap* tile_map) {
  using L = Layout<kRows>;
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<kRows>& sm = *reinterpret_cast<Shared<kRows>*>(raw);
  static_assert(sizeof(Shared<kRows>) <= kSmemLimit, "must fit the shared memory of sm_120");
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  if (threadIdx.x == 32 * kWarps - 1) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(smem_addr(&sm.full[s]), 1);
    mbarrier_init(smem_addr(&sm.taken), L::kGroups);
    mbarrier_init_fence();
    prefetch_map(rows_map), prefetch_map(tile_map);
  }
  make_plan<kRows, kExact>(p, sm.plan, gridDim.x);
  const int unit = divide(blockIdx.x, sm.plan.team);
  if (threadIdx.x == 0) sm.unit = unit, sm.member = blockIdx.x - unit * sm.plan.team;
  if (blockIdx.x == gridDim.x - 1) write_pieces<kRows, kExact>(p, sm.plan);
  Block<kRows, kExact> b{p, rows_map, tile_map, sm};
  if (unit >= sm.plan.units) return;

  // Every warp starts its own walk over the block's tiles and looks up two of the first sixteen.
  Walk start{};
  if constexpr (kExact) start.id = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
  else start = start_fast(p, sm.plan, unit);
  if (threadIdx.x == 0) sm.item = start, sm.last = -1;
  if (lane == 0) sm.fetch[warp] = start;
  __syncthreads();
#pragma unroll 1
  for (int n = warp; n < kDescs; n += kWarps) b.look_up(n, n == warp ? warp : kWarps);

  // Addresses inside a tile. Row r keeps its 16-byte chunk j of column group g (64 columns) at chunk j ^ ((r + g) % 8).
  const uint32_t ring = smem_addr(sm.ring[0]);
  auto k_at = [&](const Place& me, int part) {      // part 0, 1: the slice's two latent groups; 2: its rope chunks
    const int r = L::kTokenHalves ? me.lane % 8 + 8 * me.part : me.lane % 8 + 8 * (me.lane / 16);
    const int j = !L::kTokenHalves || part == 2 ? (me.lane / 8) % 2 : me.lane / 8;
    const int group = part == 2 ? 8 : 2 * me.slice + part, chunk = part == 2 ? 2 * me.slice + j : j;
    return static_cast<uint32_t>(r * kRowBytes + group * 128 + ((chunk ^ ((r + group) % 8)) << 4));
  };
  auto v_at = [&](const Place& me) {
    const int r = me.lane % 16, chunk = me.warp * L::kColumns / 8 + me.lane / 16, group = chunk / 8;
    return static_cast<uint32_t>(r * kRowBytes + group * 128 + ((chunk % 8 ^ ((r + group) % 8)) << 4));
  };
  // Row group (8 rows) whose softmax a warp does, -1 for none: one of those it scores, spread evenly over the schedulers.
  auto group_of = [&](const Place& me) {
    if (L::kTokenHalves) return me.warp < L::kGroups ? static_cast<int>(me.warp) : -1;
    const int i = (me.slice - L::kScoreGroups * me.part) % 4;
    return i < L::kScoreGroups ? static_cast<int>(L::kScoreGroups * me.part + i) : -1;
  };
  const bool has_group = group_of(Place::now()) >= 0;
  const uint32_t taken = smem_addr(&sm.taken);

  uint32_t q[L::kScoreMTiles][kSteps][4];
  float o[L::kMTiles][L::kColumns / 8][4];
  float m, l, weight;                               // maximum, sum of probabilities, sum of them as rounded to bf16

  auto load_q = [&]() {
    const Place me = Place::now();
    const Request& r = sm.plan.request[sm.item.request];
    const int rows = r.rows << p.heads_log2, row0 = b.row_tile() * kRows;
    const __nv_bfloat16* base = p.q + ((static_cast<int64_t>(r.q_begin) << p.heads_log2) + row0) * kRow + 2 * (me.lane % 4);
#pragma unroll
    for (int i = 0; i < L::kScoreGroups; ++i) {
      const int row = 8 * ((L::kTokenHalves ? 0 : L::kScoreGroups * me.part) + i) + me.lane / 4;
      const bool present = row0 + row < rows;
      const __nv_bfloat16* src = base + row * kRow;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int column = step < 8 ? 128 * me.slice + 16 * step : kLatent + 16 * me.slice;
        q[i / 2][step][i % 2] = present ? *reinterpret_cast<const uint32_t*>(src + column) : 0;
        q[i / 2][step][i % 2 + 2] = present ? *reinterpret_cast<const uint32_t*>(src + column + 8) : 0;
      }
    }
  };

  auto scores = [&](int tile) {
    const uint32_t stage = ring + (tile & (kStages - 1)) * kTileBytes;
    mbarrier_wait(smem_addr(&sm.full[tile & (kStages - 1)]), (tile >> 2) & 1);
    const Place me = Place::now();
    float acc[L::kScoreMTiles][L::kScoreBlocks][4] = {};
    if constexpr (L::kTokenHalves) {
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t k[4];
        ldmatrix_x4(k, (stage + k_at(me, pair / 2)) ^ ((pair % 2) << 6));
        mma(acc[0][0], q[0][2 * pair], k[0], k[1]);
        mma(acc[0][0], q[0][2 * pair + 1], k[2], k[3]);
      }
      uint32_t k0, k1;
      ldmatrix_x2(k0, k1, stage + k_at(me, 2));
      mma(acc[0][0], q[0][8], k0, k1);
    } else {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t k[4];
        ldmatrix_x4(k, (stage + k_at(me, step / 4)) ^ ((step % 4) << 5));
#pragma unroll
        for (int i = 0; i < L::kScoreMTiles; ++i) {
          mma(acc[i][0], q[i][step], k[0], k[1]);
          mma(acc[i][L::kScoreBlocks - 1], q[i][step], k[2], k[3]);
        }
      }
    }
    mbarrier_wait(taken, (tile - 1) & 1);
#pragma unroll
    for (int i = 0; i < L::kScoreGroups; ++i) {
      const float(&lo)[4] = acc[i / 2][0], (&hi)[4] = acc[i / 2][L::kScoreBlocks - 1];
      const int c = 2 * (i % 2);
      if constexpr (L::kTokenHalves) {
        float2* dst = reinterpret_cast<float2*>(sm.exchange) + 2 * me.lane + me.part;
        dst[(i * 4 + me.slice) * 64] = make_float2(lo[c], lo[c + 1]);
      } else {
        float4* dst = reinterpret_cast<float4*>(sm.exchange) + me.lane;
        dst[((L::kScoreGroups * me.part + i) * 4 + me.slice) * 32] = make_float4(lo[c], lo[c + 1], hi[c], hi[c + 1]);
      }
    }
  };

  // Scores of `tile` to probabilities, 8 rows a warp. True if a row's maximum grew, so that what was accumulated must be rescaled.
  auto softmax = [&](int tile) {
    const Place me = Place::now();
    const int group = group_of(me);
    float t[4];
    const float4* src = reinterpret_cast<const float4*>(sm.exchange) + group * 4 * 32 + me.lane;
    const int info = sm.info[tile & (kDescs - 1)] & ~kBlock;
    // (0 + 1) + (2 + 3), one pair after the other: registers are scarce.
    const float4 s0 = src[0], s1 = src[32];
    t[0] = s0.x + s1.x, t[1] = s0.y + s1.y, t[2] = s0.z + s1.z, t[3] = s0.w + s1.w;
    asm volatile("" : "+f"(t[0]), "+f"(t[1]), "+f"(t[2]), "+f"(t[3])::"memory");
    const float4 s2 = src[64], s3 = src[96];
    t[0] += s2.x + s3.x, t[1] += s2.y + s3.y, t[2] += s2.z + s3.z, t[3] += s2.w + s3.w;
    __syncwarp();
    if (me.lane == 0) mbarrier_arrive(taken);
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] *= p.scale_log2;
    if (info != kWhole) {
      const uint32_t seen = b.visible(info, 8 * group + me.lane / 4) >> (2 * (me.lane % 4));
#pragma unroll
      for (int i = 0; i < 4; ++i) t[i] = (seen >> (8 * (i / 2) + i % 2)) & 1 ? t[i] : -INFINITY;
    }
    float top = fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float grown = next_max(m, top);
    const float f = exp2_fast(m - grown);
    const bool changed = grown != m;
    m = grown;
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float x = exp2_scaled(t[i], m);
      e[i] = t[i] == -INFINITY ? 0.0f : x;
    }
    l = l * f + ((e[0] + e[1]) + (e[2] + e[3]));
    const uint32_t lo = pack_bf16(e[0], e[1]), hi = pack_bf16(e[2], e[3]);
    weight = weight * f + (sum_bf16(lo) + sum_bf16(hi));
    uint32_t* dst = reinterpret_cast<uint32_t*>(&sm.p[tile & 1][group / 2][me.lane]) + group % 2;
    dst[0] = lo, dst[2] = hi;
    if (me.lane % 4 == 0) sm.rescale[tile & 1][8 * group + me.lane / 4] = f;
    return changed;
  };

  auto values = [&](int tile) {
    const Place me = Place::now();
    const uint32_t from = ring + (tile & (kStages - 1)) * kTileBytes + v_at(me);
    const uint4* p = &sm.p[tile & 1][0][me.lane];
    constexpr int kParts = L::kColumns / 16, kAtOnce = kParts % 2 == 0 ? 2 : 1;
#pragma unroll
    for (int first = 0; first < kParts; first += kAtOnce) {
      uint32_t v[kAtOnce][4];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) ldmatrix_x4_trans(v[k], from ^ ((first + k) << 5));
#pragma unroll
      for (int i = 0; i < L::kMTiles; ++i) {
        const uint4 x = p[32 * i];
        const uint32_t a[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          mma(o[i][2 * (first + k)], a, v[k][0], v[k][1]);
          mma(o[i][2 * (first + k) + 1], a, v[k][2], v[k][3]);
        }
      }
    }
  };
  auto rescale = [&](int tile) {
    const Place me = Place::now();
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i) {
      const float lo = sm.rescale[tile & 1][16 * i + me.lane / 4], hi = sm.rescale[tile & 1][16 * i + 8 + me.lane / 4];
#pragma unroll
      for (int c = 0; c < L::kColumns / 8; ++c) o[i][c][0] *= lo, o[i][c][1] *= lo, o[i][c][2] *= hi, o[i][c][3] *= hi;
    }
  };
  // Every eighth step the slots of the eight tiles after next are looked up; four steps later they have arrived.
  auto look_ahead = [&](int tile) {
    const int warp = Place::now().warp;
    if (tile % kWarps == 0) b.look_up(tile + kWarps + warp, kWarps);
    else b.settle(tile + kWarps / 2 + warp);
  };

  // The next piece of work, for the whole block. False when there is none.
  auto next_piece = [&]() {
    if (Place::now().warp == 0) {
      Walk w = sm.item;
      __syncwarp();
      const bool more = b.next(w);
      if (Place::now().lane == 0) {
        sm.item = w, sm.more = more;
        sm.first = sm.last + 1, sm.last += w.end - w.begin;
      }
    }
    __syncthreads();
    return sm.more != 0;
  };

  for (bool fresh = true; next_piece(); fresh = false) {
    load_q();
    if (fresh) {                                    // behind the query loads, for it waits for slots
      b.settle(warp), b.settle(warp + kWarps);
      __syncthreads();
#pragma unroll 1
      for (int n = 0; n < kStages; ++n) b.issue(n, sm.info[n]);
    }
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i)
#pragma unroll
      for (int c = 0; c < L::kColumns / 8; ++c)
#pragma unroll
        for (int k = 0; k < 4; ++k) o[i][c][k] = 0.0f;
    m = kNoMax, l = weight = 0.0f;

    const int first = sm.first, last = sm.last;

    // Fill the pipeline: scores of two tiles, probabilities of one.
    if (first <= last) {
      scores(first);
      __syncthreads();
      if (has_group) softmax(first);
      if (first < last) scores(first + 1);
    }
    __syncthreads();

    // One step a tile.
    bool changed = false;
#pragma unroll 1
    for (int step = first; step <= last; ++step) {
      bool grown = false;
      b.issue(step + kStages - 1, step > 0 ? sm.info[(step + kStages - 1) & (kDescs - 1)] : kNone);
      if (changed) rescale(step);
      if (has_group && step < last) grown = softmax(step + 1);
      values(step);
      if (step % (kWarps / 2) == 0 && step >= kWarps) look_ahead(step);
      if (step + 2 <= last) scores(step + 2);
      changed = __syncthreads_or(grown);
    }

    // The piece is done: share each row's (m, l), then write either the output or a partial.
    const Place me = Place::now();
    const Walk item = sm.item;
    const Request r = sm.plan.request[item.request];
    const int rows = r.rows << p.heads_log2, row0 = b.row_tile() * kRows;
    const int64_t out_row = (static_cast<int64_t>(r.q_begin) << p.heads_log2) + row0;
    const int slot = kExact ? item.id : (sm.unit + item.id) * sm.plan.team + sm.member;
    const bool fits = item.direct || slot < p.partials;
    const int64_t partial_row = static_cast<int64_t>(slot) * kRows;
    if (has_group) {
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      weight += __shfl_xor_sync(~0u, weight, 1);
      weight += __shfl_xor_sync(~0u, weight, 2);
      const int row = 8 * group_of(me) + me.lane / 4;
      if (me.lane % 4 == 0) {
        sm.row_scale[row] = weight > 0.0f ? 1.0f / weight : 0.0f;
        if (fits && row0 + row < rows) {
          if (item.direct) p.lse[out_row + row] = natural_lse(m, l);
          else p.partial_ml[partial_row + row] = make_float4(m, l, weight, 0.0f);
        }
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * L::kMTiles; ++i) {
      const int row = 8 * i + me.lane / 4;
      if (!fits || row0 + row >= rows) continue;
      const float scale = sm.row_scale[row];
#pragma unroll
      for (int c = 0; c < L::kColumns / 8; ++c) {
        const int column = L::kColumns * me.warp + 8 * c + 2 * (me.lane % 4);
        const float x = o[i / 2][c][2 * (i % 2)], y = o[i / 2][c][2 * (i % 2) + 1];
        if (item.direct) *reinterpret_cast<uint32_t*>(p.out + (out_row + row) * kLatent + column) = pack_bf16(x * scale, y * scale);
        else *reinterpret_cast<float2*>(p.partial_o + (partial_row + row) * kLatent + column) = make_float2(x, y);
      }
    }
  }
}
