// The tree-verify kernel: KV split over the card, tensor cores, each KV byte fetched once for all heads and rows of a row tile.
//
// The unit of work is a *quad*: four warps, one a scheduler, that own up to 32 query rows (rows are draft row major, head minor) and
// walk 16-token tiles of KV. A block is one quad (16 or 32 rows) or two (64 rows) that share one ring of KV tiles but no barrier, so
// that one's latencies pass under the other's tensor cores. Step n of a quad, with one barrier:
//
//   -- quad barrier: the scores of tile n + 1 and the probabilities of tile n are there
//   values and softmax   O += P(n) x V(n), and, interleaved, P(n + 1) out of the four slices of the scores (eight rows a warp)
//   scores               of tile n + 2: each warp its slice of the columns (128 latent and 16 rope) for all rows of the quad
//
// The last warp to be done with a tile's values starts the copy of the tile that takes its place. Q and O live in registers: at 32 rows
// a quad 72 + 128 of 255. Shared memory holds the ring, the score exchange and P. Both exchanges keep the tensor cores' own layout, so
// no access meets a bank conflict.
#pragma once
#include <type_traits>
#include "layout.cuh"
#include "pieces.cuh"
#include "schedule.cuh"
#include "softmax.cuh"

template <int kRows, bool kExact>
struct Block {
  using L = Layout<kRows>;
  const VerifyParams& p;
  const CUtensorMap* rows_map;                     // box of 1 row
  const CUtensorMap* tile_map;                     // box of 16 rows
  Shared<kRows>& sm;

  int warp;                                        // of the block, known to be the same in all lanes

  __device__ int quad() const { return L::kQuads == 1 ? 0 : warp / 4; }
  __device__ QuadShared<kRows>& own() const { return sm.quads[quad()]; }
  __device__ void barrier() const {
    if (L::kQuads == 1) __syncthreads();
    else quad_barrier(quad() + 1);
  }
  // Barrier that also tells everyone whether `yes` holds anywhere.
  __device__ bool barrier_or(bool yes) const {
    if (L::kQuads == 1) return __syncthreads_or(yes) != 0;
    return quad_barrier_or(quad() + 1, yes);
  }

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

  // Tiles at the start of a piece that are whole and read by every row alike, counted as `w.tile` is.
  __device__ int whole_tiles(const Walk& w, const Request& r) const {
    if constexpr (!kExact) return r.prefix / kTile;
    return max(min(r.prefix / kTile, split_begin(split_of(w.first) + 1)) - w.first, 0);
  }

  // Looks up the slots of tiles `n` and `n + 1`, the first of which is `step` further on this warp's walk.
  __device__ void look_up(int n, int step) {
    const Place me = Place::now();
    QuadShared<kRows>& my = own();
    Walk& w = my.fetch[me.warp];
    const int desc = n & (kDescs - 1);
    const int2 ahead = my.ahead[me.warp];
    if (ahead.y > 0) {                              // nearly always: the same piece goes on, far from its request's end
      copy_word(smem_addr(&my.slots[desc][me.lane]), p.kv_indices + ahead.x + 8 * kTile + me.lane);
      __syncwarp();
      if (me.lane == 0) {
        my.ahead[me.warp] = make_int2(ahead.x + 8 * kTile, ahead.y - 1);
        w.tile += 8, my.info[desc] = my.info[desc + 1] = kWhole;
      }
      __syncwarp();
      return;
    }
    Walk moved = w;
    __syncwarp();
    if (moved.end < 0 || !advance(moved, step)) moved.end = -1;
    if (me.lane == 0) w = moved;
    if (me.lane == 0 && moved.end >= 0) {
      const Request r = request_of(p, moved.request);
      const int whole = min(whole_tiles(moved, r), moved.end);
      my.ahead[me.warp] = make_int2(r.kv_begin + ((kExact ? moved.first : 0) + moved.tile) * kTile, max(whole - moved.tile - 2, 0) / 8);
    }
    __syncwarp();
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      if (i == 1 && moved.end >= 0 && !advance(moved, 1)) moved.end = -1;
      if (moved.end >= 0) look_up_one(desc + i, moved);
      else if (me.lane == 0) my.info[desc + i] = kNone;
    }
  }

  __device__ void look_up_one(int desc, const Walk& w) {
    const Place me = Place::now();
    QuadShared<kRows>& my = own();
    const Request r = request_of(p, w.request);
    const int* src = nullptr;
    int info = kWhole;
    if constexpr (kExact) {
      const int shared_tiles = whole_tiles(w, r);
      if (w.tile < shared_tiles) {
        src = p.kv_indices + r.kv_begin + (w.first + w.tile) * kTile + me.lane;
      } else {
        int u;
        const int count = gathered_tiles<kRows>(p, r, w.stream, w.first, split_begin(split_of(w.first) + 1), u);
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
      const uint32_t dst = smem_addr(&my.slots[desc][me.lane]);
      if (src != nullptr) copy_word(dst, src);
      else my.slots[desc][me.lane] = -1;
    }
    if (me.lane == 0) my.info[desc] = info;
  }

  // Once the slots of tiles `n` and `n + 1`, looked up by this warp, have arrived: notes for each whether one copy can fetch it.
  __device__ void settle(int n) {
    const Place me = Place::now();
    QuadShared<kRows>& my = own();
    const int desc = n & (kDescs - 1);
    copy_word_wait();
    __syncwarp();
    const int first = my.slots[desc][me.lane] - static_cast<int>(me.lane % kTile);
    const bool same = first == __shfl_sync(~0u, first, me.lane & kTile);
    const uint32_t all = __ballot_sync(~0u, same) >> (me.lane & kTile) & 0xffff;
    if (me.lane % kTile == 0 && all == 0xffff) {
      int& info = my.info[desc + me.lane / kTile];
      if (info != kNone) info |= kBlock;
    }
  }

  // This quad has read tile `n - kStages`; `info` is of tile `n`. If it is the second to say so (or the only one), the copy of tile `n`
  // into its place starts: one where its slots are 16 neighbours, else one a row, four rows a warp. Each warp counts for itself.
  __device__ void refill(int n, int info) const {
    const Place me = Place::now();
    const int slice = me.warp, stage = n & (kStages - 1), lane = me.lane;
    const bool block = info & kBlock;
    if (info == kNone || (block && slice != (n & 3))) return;
    int before = 1;
    if (L::kQuads > 1) {
      if (lane == 0) before = count_up(smem_addr(&sm.released[stage][slice]));
      before = __shfl_sync(~0u, before, 0);
    }
    if (before & 1) issue(n, block, slice);
  }

  // The copy of tile `n`, or this warp's rows of it: 4 x `part` and after.
  __device__ void issue(int n, bool block, int part) const {
    const int stage = n & (kStages - 1), lane = Place::now().lane, row = block ? 0 : 4 * part + lane;
    if (lane >= (block ? 1 : 4)) return;
    const uint32_t bar = smem_addr(&sm.full[stage]);
    if (row == 0) mbarrier_expect(bar, kTileBytes);
    copy_rows(smem_addr(sm.ring[stage]) + row * kRowBytes, block ? tile_map : rows_map, own().slots[n & (kDescs - 1)][row], bar);
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

template <int kRows, bool kExact>
__device__ void verify_tree(const VerifyParams& p, const CUtensorMap* rows_map, const CUtensorMap* tile_map) {
  using L = Layout<kRows>;
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<kRows>& sm = *reinterpret_cast<Shared<kRows>*>(raw);
  static_assert(sizeof(Shared<kRows>) <= kSmemLimit, "must fit the shared memory of sm_120");

  let_next_start();                                 // the merge, which then waits for all of this kernel
  if (threadIdx.x == 32 * L::kWarps - 1) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(smem_addr(&sm.full[s]), 1);
    for (int i = 0; i < 4 * kStages; ++i) sm.released[i / 4][i % 4] = 0;
    for (int i = 0; i < L::kQuads; ++i) mbarrier_init(smem_addr(&sm.quads[i].taken), 128);
    mbarrier_init_fence();
    prefetch_map(rows_map), prefetch_map(tile_map);
  }
  make_plan<kRows, kExact>(p, sm.plan, *reinterpret_cast<PlanScratch*>(sm.ring[0]), gridDim.x);
  const int unit = divide(blockIdx.x, sm.plan.team);
  if (threadIdx.x == 0) sm.unit = unit, sm.member = blockIdx.x - unit * sm.plan.team;
  if (blockIdx.x == gridDim.x - 1) write_pieces<kRows, kExact>(p, sm.plan);
  if (unit >= sm.plan.units) return;
  __syncthreads();

  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  Block<kRows, kExact> b{p, rows_map, tile_map, sm, warp};
  QuadShared<kRows>& my = b.own();
  // This warp's slice of the columns. `hidden` as `Place::now`: what is made from it is not kept in registers over the loop.
  const int slice = warp % 4;
  auto hidden = [](int x) {
    asm volatile("" : "+r"(x));
    return x;
  };
  // Every warp starts its own walk over the block's tiles and looks up two of the first eight.
  {
    const Place me = Place::now();
    Walk start{};
    if constexpr (kExact) start.id = static_cast<int>(blockIdx.x) - static_cast<int>(gridDim.x);
    else start = start_fast(p, sm.plan, unit);
    if (me.lane == 0) {
      my.fetch[me.warp] = start, my.ahead[me.warp] = make_int2(0, 0);
      if (me.warp == 0) my.item = start, my.last = -1;
    }
    __syncwarp();
    b.look_up(2 * me.warp, 2 * me.warp);
  }

  // Addresses inside a tile. Row r keeps its 16-byte chunk j of column group g (64 columns) at chunk j ^ ((r + g) % 8). A warp's slice
  // is groups c and c + 4 (and a quarter of group 8): the second differs from the first by 512 bytes and chunk bit 2, so that four
  // addresses serve eight steps.
  auto k_at = [&](const Place& me, int group, int chunk) {
    const int r = me.lane % 8 + 8 * (me.lane / 16);
    return static_cast<uint32_t>(r * kRowBytes + group * 128 + (((chunk + (me.lane / 8) % 2) ^ ((r + group) % 8)) << 4));
  };
  auto v_at = [&](const Place& me) {
    const int r = me.lane % 16, group = hidden(slice);
    return static_cast<uint32_t>(r * kRowBytes + group * 128 + (((me.lane / 16) ^ ((r + group) % 8)) << 4));
  };
  // A warp does the softmax of the octet of its own number.
  const bool has_octet = L::kKeepOwn || slice < L::kOctets;
  // Octet at position `i` of a warp's score fragments; its own comes first where every warp has one.
  auto octet_at = [&](int i) { return L::kKeepOwn ? i ^ slice : i; };

  uint32_t q[L::kMTiles][kSteps][4];
  float o[L::kMTiles][16][4];
  float s[L::kMTiles][2][4];                        // scores of this warp's slice
  float m = kNoMax;                                 // maximum in use
  float2 kept = {};                                 // sum of probabilities, and of them as rounded to bf16, where registers last
  constexpr bool kKept = keeps_sums(kRows, kExact);
  auto sums = [&]() { return kKept ? kept : my.sums[Place::now().warp][Place::now().lane]; };
  auto set_sums = [&](float2 value) {
    if (kKept) kept = value;
    else my.sums[Place::now().warp][Place::now().lane] = value;
  };

  auto load_q = [&]() {
    const Place me = Place::now();
    const Request r = request_of(p, my.item.request);
    const int rows = r.rows << p.heads_log2, row0 = b.row_tile() * kRows + 32 * b.quad();
    const __nv_bfloat16* base = p.q + ((static_cast<int64_t>(r.q_begin) << p.heads_log2) + row0) * kRow;
    // Latent columns come 16 bytes a lane, four lanes a row, into the registers they will end in, and take the tensor cores' order on
    // the way through this warp's part of the exchange: 16 rows x 32 columns at a time.
#pragma unroll
    for (int i = 0; i < L::kOctets; ++i) {
      const int row = 8 * octet_at(i) + me.lane / 4;
      const bool present = row0 + row < rows;
      const __nv_bfloat16* src = base + row * kRow;
      uint32_t(&rope)[4] = q[i / 2][8];
      rope[i % 2] = present ? *reinterpret_cast<const uint32_t*>(src + 2 * (me.lane % 4) + kLatent + 16 * slice) : 0;
      rope[i % 2 + 2] = present ? *reinterpret_cast<const uint32_t*>(src + 2 * (me.lane % 4) + kLatent + 16 * slice + 8) : 0;
#pragma unroll
      for (int window = 0; window < 4; ++window) {
        const uint4 x = present ? *reinterpret_cast<const uint4*>(src + slice_column(slice, 2 * window) + 8 * (me.lane % 4)) : make_uint4(0, 0, 0, 0);
        uint32_t(&to)[4] = q[i / 2][2 * window + i % 2];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
      }
    }
    // Row r keeps its 16-byte chunk j at chunk j ^ (r / 2 % 4), so that neither way meets a bank conflict.
    const uint32_t scratch = smem_addr(my.exchange) + 1024 * slice;
    auto chunk_at = [&](int r, int j) { return scratch + r * 64 + ((j ^ (r / 2 % 4)) << 4); };
    const int matrix_row = static_cast<int>(me.lane % 16), matrix_chunk = static_cast<int>(me.lane / 16);
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i)
#pragma unroll
      for (int window = 0; window < 4; ++window) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t(&x)[4] = q[i][2 * window + half];
          store_16(chunk_at(8 * half + static_cast<int>(me.lane / 4), static_cast<int>(me.lane % 4)), x);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) ldmatrix_x4(q[i][2 * window + half], chunk_at(matrix_row, 2 * half + matrix_chunk));
        __syncwarp();
      }
    b.barrier();                                    // the exchange is an exchange again
  };

  // Columns 16 s of a slice lie at `from ^ 32 s` for s < 4 and at `from ^ 32 (s ^ 2) + 512` beyond, so four addresses, each the one
  // before with a bit turned, serve eight steps.
  constexpr int kOrder[8] = {0, 6, 1, 7, 3, 5, 2, 4};
  auto turn = [](uint32_t& at, int n) {
    if (n == 2 || n == 6) asm volatile("xor.b32 %0, %0, 32;" : "+r"(at));
    if (n == 4) asm volatile("xor.b32 %0, %0, 64;" : "+r"(at));
  };
  auto stage_at = [&](int tile) { return smem_addr(sm.ring[0]) + (tile & (kStages - 1)) * kTileBytes; };

  uint32_t a[L::kMTiles][4], v[4];                  // P of a tile, a fragment of its values
  auto load_probabilities = [&](int tile) {
    const uint32_t lane = Place::now().lane;
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i) ldmatrix_x4(a[i], smem_addr(&my.probabilities[tile & 1][2 * i + lane / 8 % 2][lane / 16][4 * (lane % 8)]));
  };
  // O += P x V, two steps of 16 columns at a time.
  auto values_step = [&](uint32_t& at, int n) {
    ldmatrix_x4_trans(v, at + 512 * (n % 2));
    turn(at, n + 1);
    const int step = kOrder[n];
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i) mma(o[i][2 * step], a[i], v[0], v[1]), mma(o[i][2 * step + 1], a[i], v[2], v[3]);
  };
  // This slice's scores of a tile, and their way into the exchange.
  auto scores = [&](int tile) {
    mbarrier_wait(smem_addr(&sm.full[tile & (kStages - 1)]), (tile / kStages) & 1);
    const Place me = Place::now();
    const int slice = hidden(b.warp % 4);
    auto octet_at = [&](int i) { return L::kKeepOwn ? i ^ slice : i; };
    uint32_t at = stage_at(tile) + k_at(me, slice, 0);
    const uint32_t rope = stage_at(tile) + k_at(me, 8, 2 * slice);
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[i][0][c] = s[i][1][c] = 0.0f;
    uint32_t k[kAhead][4];                          // fragments in flight
    auto fetch = [&](int n) {
      turn(at, n);
      ldmatrix_x4(k[n % kAhead], n < 8 ? at + 512 * (n % 2) : rope);
    };
#pragma unroll
    for (int n = 0; n < kAhead; ++n) fetch(n);
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const int step = n < 8 ? kOrder[n] : 8;
      const uint32_t(&kk)[4] = k[n % kAhead];
#pragma unroll
      for (int i = 0; i < L::kMTiles; ++i) mma(s[i][0], q[i][step], kk[0], kk[1]), mma(s[i][1], q[i][step], kk[2], kk[3]);
      if (n + kAhead < kSteps) fetch(n + kAhead);
    }
    mbarrier_wait(smem_addr(&my.taken), (tile & 1) ^ 1);
#pragma unroll
    for (int i = L::kKeepOwn ? 1 : 0; i < L::kOctets; ++i) {
      const float(&lo)[4] = s[i / 2][0], (&hi)[4] = s[i / 2][1];
      const int c = 2 * (i % 2), source = L::kKeepOwn ? i - 1 : slice;
      float2(&to)[2][32] = my.exchange[octet_at(i)][source];
      to[0][me.lane] = make_float2(lo[c], lo[c + 1]), to[1][me.lane] = make_float2(hi[c], hi[c + 1]);
    }
  };

  // Scores of a tile to probabilities, 8 rows a warp, in parts that values go between. Where a warp keeps its own part, source i is
  // slice (own ^ i): (own + 1) + (2 + 3) is then (0 + 1) + (2 + 3) for every warp, for addition commutes.
  float t[4], top;                                  // scores in log2 units of this lane's four tokens; the row's largest
  Exp x[4];
  bool changed = false;                             // a row's maximum grew, so that what was accumulated must be rescaled
  auto gather = [&]() {
    const int slice = hidden(b.warp % 4);
    const uint32_t lane = Place::now().lane;
    if (has_octet) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2* src = &my.exchange[slice][0][half][lane];
        const float2 s0 = L::kKeepOwn ? make_float2(s[0][half][0], s[0][half][1]) : src[0];
        const float2 s1 = src[(L::kSources - 3) * 64], s2 = src[(L::kSources - 2) * 64], s3 = src[(L::kSources - 1) * 64];
        t[2 * half] = sum_slices(s0.x, s1.x, s2.x, s3.x) * p.scale_log2, t[2 * half + 1] = sum_slices(s0.y, s1.y, s2.y, s3.y) * p.scale_log2;
      }
    }
    mbarrier_arrive(smem_addr(&my.taken));
  };
  auto mask_out = [&](int tile) {
    const int slice = hidden(b.warp % 4);
    const int info = my.info[tile & (kDescs - 1)] & ~kBlock;
    if (info == kWhole) return;
    const uint32_t lane = Place::now().lane, seen = b.visible(info, 32 * b.quad() + 8 * slice + lane / 4) >> (2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] = (seen >> (8 * (i / 2) + i % 2)) & 1 ? t[i] : -INFINITY;
  };
  auto largest = [&]() {
    top = fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = exp2_begin(t[i]);
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  };
  auto probabilities = [&](int tile) {
    const int slice = hidden(b.warp % 4);
    const uint32_t lane = Place::now().lane;
    const float old = m;
    m = next_max(old, top);
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) e[i] = t[i] == -INFINITY ? 0.0f : exp2_end(x[i], m);
    const uint32_t lo = pack_bf16(e[0], e[1]), hi = pack_bf16(e[2], e[3]);
    my.probabilities[tile & 1][slice][0][lane] = lo, my.probabilities[tile & 1][slice][1][lane] = hi;
    const float f = exp2_fast(old - m);
    if (lane % 4 == 0) my.rescale[tile & 1][8 * slice + lane / 4] = f;
    const float2 before = sums();
    set_sums(make_float2(before.x * f + ((e[0] + e[1]) + (e[2] + e[3])), before.y * f + (sum_bf16(lo) + sum_bf16(hi))));
    changed = old != m;
  };
  auto rescale = [&](int tile) {
    const uint32_t lane = Place::now().lane;
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i) {
      const float lo = my.rescale[tile & 1][16 * i + lane / 4], hi = my.rescale[tile & 1][16 * i + 8 + lane / 4];
#pragma unroll
      for (int c = 0; c < 16; ++c) o[i][c][0] *= lo, o[i][c][1] *= lo, o[i][c][2] *= hi, o[i][c][3] *= hi;
    }
  };
  // Slots of eight tiles are looked up when the eight before them are entered, and settled two steps later; their copies start no
  // sooner than the step after that.
  auto keep_looking = [&](int tile) {
    const int slice = hidden(b.warp % 4);
    if (__builtin_expect((0x82 >> (tile & 7)) & 1, 0)) {
      if ((tile & 7) == 7) b.look_up((tile & ~7) + 16 + 2 * slice, 8);
      else b.settle((tile & ~7) + 8 + 2 * slice);
    }
  };

  // The next piece of work, for the quad. False when there is none.
  auto next_piece = [&]() {
    if (Place::now().warp == 0) {
      Walk w = my.item;
      __syncwarp();
      const bool more = b.next(w);
      if (Place::now().lane == 0) {
        my.item = w, my.more = more;
        my.first = my.last + 1, my.last += w.end - w.begin;
        my.whole = more ? my.first + min(max(b.whole_tiles(w, request_of(p, w.request)) - w.begin, 0), w.end - w.begin - 1) : 0;
      }
    }
    b.barrier();
    return my.more != 0;
  };

  for (bool fresh = true; next_piece(); fresh = false) {
    load_q();
    if (fresh) {                                    // behind the query loads, for it waits for slots
      b.settle(2 * slice);
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");   // the plan was made in the ring
      b.barrier();
#pragma unroll 1
      for (int n = b.quad(); n < kStages; n += L::kQuads) {
        const int info = my.info[n];
        if (info != kNone && !(info & kBlock && slice != n)) b.issue(n, info & kBlock, slice);
      }
      b.look_up(8 + 2 * slice, 8);
    }
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i)
#pragma unroll
      for (int c = 0; c < 16; ++c)
#pragma unroll
        for (int k = 0; k < 4; ++k) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(o[i][c][k]));   // else zeros come from local memory
    m = kNoMax, changed = false;
    set_sums(make_float2(0.0f, 0.0f));

    // The bounds are read anew each time: registers are scarce.
    auto first = [&]() { return my.first; };
    auto last = [&]() { return my.last; };
    int tile = first() - 1;
    auto info_after = [&](int tile) { return my.info[(tile + kStages) & (kDescs - 1)]; };
    // A step at either end of a piece, on a masked tile, or where something must be rescaled.
    auto any_step = [&](bool grown) {
      changed = false;
      if (tile > first()) b.refill(tile - 1 + kStages, info_after(tile - 1));
      if (tile < last()) gather();
      if (tile >= first()) {
        load_probabilities(tile);
        if (grown) rescale(tile);
        uint32_t at = stage_at(tile) + v_at(Place::now());
#pragma unroll
        for (int n = 0; n < 8; ++n) values_step(at, n);
        keep_looking(tile);
      }
      if (tile < last() && has_octet) {
        mask_out(tile + 1);
        largest();
        probabilities(tile + 1);
      }
      if (tile + 2 <= last()) scores(tile + 2);
    };
    if (first() <= last()) {
      scores(first());
      for (bool grown = b.barrier_or(false);;) {
        any_step(grown);
        if (++tile > last()) break;
        int info = L::kQuads > 1 ? info_after(tile - 1) : 0, whole = tile > first() ? my.whole : 0;
        grown = b.barrier_or(changed);
#pragma unroll 1
        while (!grown && tile + 1 < whole) {
          b.refill(tile - 1 + kStages, L::kQuads > 1 ? info : info_after(tile - 1));
          gather();
          load_probabilities(tile);
          uint32_t at = stage_at(tile) + v_at(Place::now());
          values_step(at, 0), values_step(at, 1);
          if (has_octet) largest();
#pragma unroll
          for (int n = 2; n < 6; ++n) values_step(at, n);
          if (has_octet) probabilities(tile + 1);
          values_step(at, 6), values_step(at, 7);
          scores(tile + 2);
          keep_looking(tile);
          info = L::kQuads > 1 ? info_after(tile) : 0, whole = my.whole;
          ++tile;
          grown = b.barrier_or(changed);
        }
      }
    }

    // The piece is done: share each row's (m, l), then write either the output or a partial.
    const Place me = Place::now();
    const int slice = hidden(b.warp % 4);
    const Walk item = my.item;
    const int done = last();                        // read before the barrier below, after which the next piece may be noted
    const bool walked = first() <= done;
    const Request r = request_of(p, item.request);
    const int rows = r.rows << p.heads_log2, row0 = b.row_tile() * kRows + 32 * b.quad();
    const int64_t out_row = (static_cast<int64_t>(r.q_begin) << p.heads_log2) + row0;
    const int slot = kExact ? item.id : (sm.unit + item.id) * sm.plan.team + sm.member;
    const bool fits = item.direct || slot < p.partials;
    const int64_t partial_row = static_cast<int64_t>(slot) * kRows + 32 * b.quad();
    if (has_octet) {
      auto [l, weight] = sums();
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      weight += __shfl_xor_sync(~0u, weight, 1);
      weight += __shfl_xor_sync(~0u, weight, 2);
      const int row = 8 * slice + me.lane / 4;
      if (me.lane % 4 == 0) {
        my.inverse[row] = weight > 0.0f ? 1.0f / weight : 0.0f;
        if (fits && row0 + row < rows) {
          if (item.direct) p.lse[out_row + row] = natural_lse(m, l);
          else p.partial_ml[partial_row + row] = make_float4(m, l, weight, 0.0f);
        }
      }
    }
    b.barrier();
    if (walked) b.refill(done + kStages, info_after(done));
    // Written out in full: O is in registers, which no loop can index.
    auto write_octet = [&](auto octet) {
      constexpr int i = decltype(octet)::value;
      const int row = 8 * i + me.lane / 4;
      if (!fits || row0 + row >= rows) return;
      const float scale = my.inverse[row];
      __nv_bfloat16* direct = p.out + (out_row + row) * kLatent + 2 * (me.lane % 4);
      float4* partial = reinterpret_cast<float4*>(p.partial_o) + partial_place(partial_row + 8 * i, slice, 0) + me.lane;
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const float(&lo)[4] = o[i / 2][2 * step], (&hi)[4] = o[i / 2][2 * step + 1];
        constexpr int k = 2 * (i % 2);
        uint32_t* at = reinterpret_cast<uint32_t*>(direct + slice_column(slice, step));
        if (item.direct) at[0] = pack_bf16(lo[k] * scale, lo[k + 1] * scale), at[4] = pack_bf16(hi[k] * scale, hi[k + 1] * scale);
        else partial[32 * step] = make_float4(lo[k], lo[k + 1], hi[k], hi[k + 1]);
      }
    };
    write_octet(std::integral_constant<int, 0>()), write_octet(std::integral_constant<int, 1>());
    if constexpr (L::kOctets == 4) write_octet(std::integral_constant<int, 2>()), write_octet(std::integral_constant<int, 3>());
  }
}
