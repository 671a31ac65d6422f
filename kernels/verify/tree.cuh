// The tree-verify kernel: KV split over the card, tensor cores, each KV byte fetched once for all heads and rows of a row tile.
//
// A block owns kRows (16, 32 or 64) query rows of one request (rows are draft row major, head minor) and walks 16-token tiles two at
// a time with 8 warps, two a scheduler. What bounds it is the chain of latencies between barriers, not instructions or bytes, so a
// step is made long: 32 tokens, three barriers.
//
//   values    O += P x V                                  (a warp: all rows, 64 columns)
//   -- barrier: this pair's tiles are free, the copies of the pair after next start
//   scores    partial scores of the next pair             (a warp: slice w % 4 of the columns, half the rows or half the tokens)
//   -- barrier
//   softmax   sums the four slices, writes probabilities  (eight rows a warp)
//   -- barrier
//
// Q and O live in registers: at 64 rows 72 + 128 of 255. Shared memory holds a ring of four KV tiles, the score exchange, and, in the
// same place once it has been read, P. Both keep the tensor cores' own register layout, so no access meets a bank conflict.
#pragma once
#include "schedule.cuh"
#include "softmax.cuh"

constexpr int kWarps = 8;
constexpr int kStages = 4;           // KV tiles in the ring: a pair in use, a pair in flight
constexpr int kDescs = 2 * kWarps;   // ring of looked-up tiles, in two blocks of eight
constexpr int kSteps = 9;            // k-steps of a slice: 8 of latent columns, 1 of rope columns

template <int kRows>
struct Layout {
  static constexpr bool kTokenHalves = kRows == 16;               // scoring: warp / 4 picks 8 tokens, else a part of the rows
  static constexpr int kMTiles = kRows / 16, kGroups = kRows / 8, kColumns = kLatent / kWarps;
  static constexpr int kScoreMTiles = kTokenHalves ? 1 : kRows / (4 * kWarps);
  static constexpr int kScoreGroups = 2 * kScoreMTiles;           // row groups (8 rows) that a warp scores
  static constexpr int kScoreBlocks = kTokenHalves ? 1 : 2;
  static constexpr bool kKeepOwn = kRows == 64;                   // every warp has a group; its part of that group's scores stays put
  static constexpr int kSources = kKeepOwn ? 3 : 4;               // partial scores that arrive through shared memory
  static constexpr int kRegion = 2 * kSources * 512;              // bytes a row group has in the exchange
};

constexpr int kBlock = 1 << 30;                    // in `info`: the tile's 16 slots are neighbours

template <int kRows>
struct Shared {
  uint8_t ring[kStages][kTileBytes];               // aligned to 1024 bytes, the period of the swizzle
  uint8_t exchange[Layout<kRows>::kGroups][Layout<kRows>::kRegion];   // [tile of the pair][source][lane] of 16 bytes; then
                                                   // P: [tile of the pair][token half][lane] of 4 bytes
  float rescale[kRows];                            // what a row's O is multiplied by; at the end 1 / weight
  float row_m[kRows];                              // maximum in use; registers are scarce
  int slots[kDescs][kTile];
  int info[kDescs];                                // kind | valid or draft tile << 8 | draft row << 16 | kBlock
  Walk fetch[kWarps];                              // where each warp looks up next
  Walk item;                                       // what is being computed
  int first, last;                                 // its tiles, counted over all the block has done
  int more;                                        // whether there is a piece
  int unit, member;                                // the team this block is in, and its place there
  Plan plan;
  uint64_t full[kStages];                          // tile has arrived
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
    const Request r = request_of(p, w.request);
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

  // Starts the copies of tiles `n` and, if `two`, `n + 1`: one copy where a tile's slots are 16 neighbours, else two rows a warp.
  __device__ void issue(int n, bool two) {
    const Place me = Place::now();
    const int info0 = sm.info[n & (kDescs - 1)], info1 = two ? sm.info[(n + 1) & (kDescs - 1)] : kNone;
    if (info0 & info1 & kBlock) {                   // the rule in a long prefix: two lanes of one warp do it all
      if (me.warp == (n & (kWarps - 1)) && me.lane < 2) start(n + me.lane, 0, tile_map, true);
      return;
    }
    const int row = (me.lane + 2 * me.warp) & (kTile - 1);
    for (int i = 0; i < 2; ++i) {
      const int info = i == 0 ? info0 : info1;
      const bool block = info & kBlock, leads = me.warp == ((n + i) & (kWarps - 1)) && me.lane == 0;
      if (block ? leads : info != kNone && me.lane < 2) start(n + i, block ? 0 : row, block ? tile_map : rows_map, leads);
    }
  }

  // One copy into tile `n` from row `row` on, out of the slot looked up for that row.
  __device__ void start(int n, int row, const CUtensorMap* map, bool leads) {
    const int stage = n & (kStages - 1);
    const uint32_t bar = smem_addr(&sm.full[stage]);
    if (leads) mbarrier_expect(bar, kTileBytes);
    copy_rows(smem_addr(sm.ring[stage]) + row * kRowBytes, map, sm.slots[n & (kDescs - 1)][row], bar);
  }

  // Which tokens of the tile the row at `row` of the row tile may see, as 16 bits.
  __device__ uint32_t visible(int info, int row) const {
    const int kind = info & 255, arg = (info >> 8) & 255, u = (info >> 16) & 255;
    const Request r = request_of(p, sm.item.request);
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
    const Request r = request_of(p, request);
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
    mbarrier_init_fence();
    prefetch_map(rows_map), prefetch_map(tile_map);
  }
  make_plan<kRows, kExact>(p, sm.plan, *reinterpret_cast<PlanScratch*>(sm.ring[0]), gridDim.x);
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
  // Row group (8 rows) whose softmax a warp does, -1 for none. At 64 rows warp w has group w; fewer are spread over the schedulers.
  auto group_of = [&](const Place& me) {
    if (L::kTokenHalves) return me.warp < L::kGroups ? static_cast<int>(me.warp) : -1;
    const int i = (me.slice - L::kScoreGroups * me.part) % 4;
    return i < L::kScoreGroups ? static_cast<int>(L::kScoreGroups * me.part + i) : -1;
  };
  // Row group at position `i` of a warp's score fragments; at 64 rows its own group comes first.
  auto group_at = [&](const Place& me, int i) {
    return L::kTokenHalves ? i : static_cast<int>(L::kScoreGroups * me.part) + (L::kKeepOwn ? i ^ static_cast<int>(me.slice) : i);
  };
  const bool has_group = L::kKeepOwn || group_of(Place::now()) >= 0;

  uint32_t q[L::kScoreMTiles][kSteps][4];
  float o[L::kMTiles][L::kColumns / 8][4];
  float own[2][4] = {};                             // this warp's part of its own row group's scores (64 rows only)
  float l = 0.0f, weight = 0.0f;                    // sum of probabilities, sum of them as rounded to bf16

  auto load_q = [&]() {
    const Place me = Place::now();
    const Request r = request_of(p, sm.item.request);
    const int rows = r.rows << p.heads_log2, row0 = b.row_tile() * kRows;
    const __nv_bfloat16* base = p.q + ((static_cast<int64_t>(r.q_begin) << p.heads_log2) + row0) * kRow + 2 * (me.lane % 4);
#pragma unroll
    for (int i = 0; i < L::kScoreGroups; ++i) {
      const int row = 8 * group_at(me, i) + me.lane / 4;
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

  // `half`: which tile of the pair.
  auto scores = [&](int tile, int half) {
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
#pragma unroll
    for (int i = 0; i < L::kScoreGroups; ++i) {
      const float(&lo)[4] = acc[i / 2][0], (&hi)[4] = acc[i / 2][L::kScoreBlocks - 1];
      const int c = 2 * (i % 2), source = L::kKeepOwn ? i - 1 : static_cast<int>(me.slice);
      uint8_t* dst = sm.exchange[group_at(me, i)] + (half * L::kSources + source) * 512 + 16 * me.lane;
      if (L::kKeepOwn && i == 0) own[half][0] = lo[0], own[half][1] = lo[1], own[half][2] = hi[0], own[half][3] = hi[1];
      else if (L::kTokenHalves) *reinterpret_cast<float2*>(dst + 8 * me.part) = make_float2(lo[c], lo[c + 1]);
      else *reinterpret_cast<float4*>(dst) = make_float4(lo[c], lo[c + 1], hi[c], hi[c + 1]);
    }
  };

  // Scores of a pair of tiles (the second may be absent) to probabilities, 8 rows a warp. True if a row's maximum grew, so that what
  // was accumulated must be rescaled.
  auto softmax = [&](int tile, bool two) {
    const Place me = Place::now();
    const int group = L::kKeepOwn ? static_cast<int>(me.warp) : group_of(me);
    uint8_t* region = sm.exchange[group];
    float t[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float4* src = reinterpret_cast<const float4*>(region) + half * L::kSources * 32 + me.lane;
      // At 64 rows source i is slice (own ^ i): (own + 1) + (2 + 3) is then (0 + 1) + (2 + 3) for every warp, for addition commutes.
      const float4 s0 = L::kKeepOwn ? make_float4(own[half][0], own[half][1], own[half][2], own[half][3]) : src[0];
      const float4 s1 = src[(L::kSources - 3) * 32], s2 = src[(L::kSources - 2) * 32], s3 = src[(L::kSources - 1) * 32];
      t[half][0] = sum_slices(s0.x, s1.x, s2.x, s3.x) * p.scale_log2, t[half][1] = sum_slices(s0.y, s1.y, s2.y, s3.y) * p.scale_log2;
      t[half][2] = sum_slices(s0.z, s1.z, s2.z, s3.z) * p.scale_log2, t[half][3] = sum_slices(s0.w, s1.w, s2.w, s3.w) * p.scale_log2;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int info = half == 0 || two ? sm.info[(tile + half) & (kDescs - 1)] & ~kBlock : kNone;
      if (info != kWhole) {
        const uint32_t seen = info == kNone ? 0 : b.visible(info, 8 * group + me.lane / 4) >> (2 * (me.lane % 4));
#pragma unroll
        for (int i = 0; i < 4; ++i) t[half][i] = (seen >> (8 * (i / 2) + i % 2)) & 1 ? t[half][i] : -INFINITY;
      }
    }
    float top = fmaxf(fmaxf(fmaxf(t[0][0], t[0][1]), fmaxf(t[0][2], t[0][3])), fmaxf(fmaxf(t[1][0], t[1][1]), fmaxf(t[1][2], t[1][3])));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    const float old = sm.row_m[8 * group + me.lane / 4], m = next_max(old, top);
    const float f = exp2_fast(old - m);
    l *= f, weight *= f;
    __syncwarp();                                   // P goes where other lanes have just read scores
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = exp2_scaled(t[half][i], m);
        e[i] = t[half][i] == -INFINITY ? 0.0f : x;
      }
      const uint32_t lo = pack_bf16(e[0], e[1]), hi = pack_bf16(e[2], e[3]);
      l += (e[0] + e[1]) + (e[2] + e[3]);
      weight += sum_bf16(lo) + sum_bf16(hi);
      uint32_t* dst = reinterpret_cast<uint32_t*>(region) + 64 * half + me.lane;
      dst[0] = lo, dst[32] = hi;
    }
    if (me.lane % 4 == 0) sm.rescale[8 * group + me.lane / 4] = f, sm.row_m[8 * group + me.lane / 4] = m;
    return old != m;
  };

  auto values = [&](int tile, int half) {
    const Place me = Place::now();
    const uint32_t from = ring + (tile & (kStages - 1)) * kTileBytes + v_at(me);
    uint32_t a[L::kMTiles][4];
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i) {
      const uint32_t* lo = reinterpret_cast<const uint32_t*>(sm.exchange[2 * i]) + 64 * half + me.lane;
      const uint32_t* hi = reinterpret_cast<const uint32_t*>(sm.exchange[2 * i + 1]) + 64 * half + me.lane;
      a[i][0] = lo[0], a[i][1] = hi[0], a[i][2] = lo[32], a[i][3] = hi[32];
    }
#pragma unroll
    for (int part = 0; part < L::kColumns / 16; ++part) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, from ^ (part << 5));
#pragma unroll
      for (int i = 0; i < L::kMTiles; ++i) {
        mma(o[i][2 * part], a[i], v[0], v[1]);
        mma(o[i][2 * part + 1], a[i], v[2], v[3]);
      }
    }
  };
  auto rescale = [&]() {
    const Place me = Place::now();
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i) {
      const float lo = sm.rescale[16 * i + me.lane / 4], hi = sm.rescale[16 * i + 8 + me.lane / 4];
#pragma unroll
      for (int c = 0; c < L::kColumns / 8; ++c) o[i][c][0] *= lo, o[i][c][1] *= lo, o[i][c][2] *= hi, o[i][c][3] *= hi;
    }
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
      b.settle(Place::now().warp), b.settle(Place::now().warp + kWarps);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");   // the plan was made in the ring
      __syncthreads();
#pragma unroll 1
      for (int n = 0; n < kStages; n += 2) b.issue(n, true);
    }
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i)
#pragma unroll
      for (int c = 0; c < L::kColumns / 8; ++c)
#pragma unroll
        for (int k = 0; k < 4; ++k) o[i][c][k] = 0.0f;
    l = weight = 0.0f;
    if (has_group && Place::now().lane % 4 == 0) sm.row_m[8 * group_of(Place::now()) + Place::now().lane / 4] = kNoMax;

    // `last` is read anew each time: registers are scarce.
    auto last = [&]() { return sm.last; };

    // Scores and probabilities of the pair that starts at `tile`.
    auto prepare = [&](int tile) {
      scores(tile, 0);
      const bool two = tile < last();
      if (two) scores(tile + 1, 1);
      __syncthreads();
      const bool grown = has_group && softmax(tile, two);
      return __syncthreads_or(grown) != 0;
    };
    if (sm.first <= last()) prepare(sm.first);
    bool changed = false;
#pragma unroll 1
    for (int tile = sm.first; tile <= last(); tile += 2) {
      if (changed) rescale();
      values(tile, 0);
      if (tile < last()) values(tile + 1, 1);
      __syncthreads();
      // The slots of eight tiles are looked up when the eight before them are entered, and settled in the step after (twice, if
      // that step is a single tile); their copies start no sooner than the step after that.
      if (tile >= kWarps && tile % kWarps <= 1) b.settle((tile / kWarps + 1) * kWarps + Place::now().warp);
      const bool two = tile < last();
      b.issue(tile + 4, two);
      const int next = two ? tile + 2 : tile + 1;
      if (next / kWarps != tile / kWarps) b.look_up((next / kWarps + 1) * kWarps + Place::now().warp, kWarps);
      changed = next <= last() && prepare(next);
    }

    // The piece is done: share each row's (m, l), then write either the output or a partial.
    const Place me = Place::now();
    const Walk item = sm.item;
    const Request r = request_of(p, item.request);
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
        sm.rescale[row] = weight > 0.0f ? 1.0f / weight : 0.0f;
        if (fits && row0 + row < rows) {
          const float m = sm.row_m[row];
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
      const float scale = sm.rescale[row];
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
