// The tree-verify kernel: KV split over the card, tensor cores, each KV byte fetched once for all heads and rows of a row tile.
//
// The unit of work is a *quad*: four warps, one a scheduler, that own up to 32 query rows (rows are draft row major, head minor) and
// walk 16-token tiles of KV. A block is one quad (16 or 32 rows) or two (64 rows in `exact`; in `fast` see roles.cuh) that share one ring of
// KV tiles but no barrier, so that one's latencies pass under the other's tensor cores, and four producer warps that fill the ring
// (block.cuh). Step n of a quad, with one barrier:
//
//   -- quad barrier: the scores of tile n + 1 and the probabilities of tile n are there
//   values and softmax   O += P(n) x V(n), and, interleaved, P(n + 1) out of the four slices of the scores (eight rows a warp)
//   scores               of tile n + 2: each warp its slice of the columns (128 latent and 16 rope) for all rows of the quad
//
// At 16 rows in `fast` up to four tiles go between two barriers instead (`walk_batches`): such a launch is a chain of latencies.
//
// Q and O live in registers, all but the queries of the rope columns: at 32 rows a quad 64 + 128 of 224 to 232. Producers give theirs up.
// Shared memory holds the ring, the score exchange and P. Both exchanges keep the tensor cores' own layout, so no access meets a bank
// conflict.
#pragma once
#include <type_traits>
#include "block.cuh"
#include "join.cuh"
#include "pieces.cuh"
#include "softmax.cuh"

// What can be done before the launch before has ended, then the wait for it: whatever made the queries, and the kernel before, whose
// partials this one writes over. A tree kernel begins with it.
template <int kQuads>
__device__ void open_block(Head& head, const CUtensorMap* rows_map, const CUtensorMap* tile_map) {
  let_next_start();                                 // which then waits for all of this kernel
  if (threadIdx.x == blockDim.x - 1) {
    for (int s = 0; s < kStages; ++s) mbarrier_init(smem_addr(&head.full[s]), 1), mbarrier_init(smem_addr(&head.empty[s]), 4 * kQuads);
    for (int i = 0; i < kQuads; ++i) mbarrier_init(smem_addr(&head.taken[i]), 4 * kTakers);
    mbarrier_init_fence();
    prefetch_map(rows_map), prefetch_map(tile_map);
    head.joins = 0;
  }
  __syncthreads();
  wait_for_previous();
}

// `own`: what `own_request` says, asked for by kernels that join only.
template <int kRows, bool kExact>
__device__ void verify_tree(const VerifyParams& p, const CUtensorMap* rows_map, const CUtensorMap* tile_map, const Request& own) {
  using L = Layout<kRows>;
  constexpr bool kJoins = joins(kRows, kExact);
  extern __shared__ __align__(1024) uint8_t raw[];
  Shared<kRows>& sm = *reinterpret_cast<Shared<kRows>*>(raw);
  static_assert(sizeof(Shared<kRows>) <= kSmemLimit, "must fit the shared memory of sm_120");

  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 32), 0);
  Start start{};
  int team = 1;
  constexpr int kCounter = 32 * L::kConsumers - 1;  // the thread that asks for the launch's number
  uint32_t launch = 0;
  if constexpr (kJoins) {
    if (threadIdx.x == kCounter) launch = launch_number(p);
    auto begin = [&](const auto& plan) {
      team = plan.team;
      start = first_piece(p, plan, team, plan.units);
      if (warp == 0) plan.store(sm.plan);
      return start.unit < plan.units;
    };
    if (p.batch == 1) {
      if (!begin(lone_plan<kRows>(p, own, gridDim.x))) return;
    } else if (p.batch <= 32) {
      if (!begin(warp_plan<kRows>(p, own, gridDim.x))) return;
    } else {
      make_plan<kRows, kExact>(p, sm.plan, *reinterpret_cast<PlanScratch*>(sm.exchange), gridDim.x);
      team = sm.plan.team;
      start = first_piece(p, SharedPlan{p, sm.plan}, team, sm.plan.units);
      if (start.unit >= sm.plan.units) return;
      __syncthreads();                              // the scratch is an exchange from here on
    }
    if (threadIdx.x == 0) sm.unit = start.unit, sm.member = start.member;
  } else {
    make_plan<kRows, kExact>(p, sm.plan, *reinterpret_cast<PlanScratch*>(sm.exchange), gridDim.x);
    start.unit = divide(blockIdx.x, sm.plan.team);
    if (threadIdx.x == 0) sm.unit = start.unit, sm.member = blockIdx.x - start.unit * sm.plan.team;
    if (blockIdx.x == gridDim.x - 1) write_pieces<kRows, kExact>(p, sm.plan);
    if (start.unit >= sm.plan.units) return;
    __syncthreads();
  }

  Block<kRows, kExact> b{p, rows_map, tile_map, sm};
  auto give_registers = [] {
    if constexpr (L::kMovesRegisters) fewer_registers<L::producer_registers()>();
  };
  auto take_registers = [] {
    if constexpr (L::kMovesRegisters) more_registers<L::consumer_registers()>();
  };
  if (warp >= L::kConsumers) {
    if constexpr (kJoins) {
      b.produce_from(start, [&] {
        __syncthreads();
        give_registers();
      });
    } else {
      give_registers();
      b.produce();
    }
    return;
  }
  if constexpr (!kJoins) take_registers();
  QuadShared<kRows>& my = b.own();
  // Of the piece `w`: its tiles, counted over all the block has done; by one lane.
  auto begin_piece = [&](const Walk& w, int first, const Request& r) {
    const int tiles = w.end - w.begin, whole = min(max(b.whole_tiles(w, r) - w.begin, 0), tiles - 1);
    my.item = w, my.first = first, my.last = first + tiles - 1;
    my.notes[0].y = my.notes[1].y = first + whole;
    my.notes[(first - 1) & 1].x = first - 1;
  };
  if constexpr (kJoins) {
    if (threadIdx.x == 0) {
      my.notes[0].x = my.notes[1].x = -1;
      if (start.some) begin_piece(start.walk, 0, start.request);
    }
    __syncthreads();
    if (threadIdx.x == kCounter) sm.launch = launch;
  }
  if constexpr (kJoins) {
    take_registers();
    if (!start.some) return;
  }
  // In a register over the loop: by way of memory, or the assembler would work it out anew in each step, from a slow special register.
  auto held = [&](uint32_t x) { return kExact ? x : there_and_back(smem_addr(&my.rope_at[threadIdx.x % 128]), x); };
  const uint32_t thread = held(threadIdx.x);
  auto here = [&] { return kExact ? Place::now() : Place::of(thread); };
  auto barrier = [&] { quad_barrier(here().template quad_of<L::kQuads>() + 1); };
  auto taken_at = [&] { return smem_addr(&sm.taken[here().template quad_of<L::kQuads>()]); };
  if (!kJoins && warp % 4 == 0) {
    Walk before{};
    if constexpr (kExact) before.id = static_cast<int>(blockIdx.x) - sm.plan.units;
    else before = start_fast(p, SharedPlan{p, sm.plan}, sm.unit);
    if (here().lane == 0) my.item = before, my.last = -1, my.notes[0].x = my.notes[1].x = -1;
    __syncwarp();
  }

  // Row r of a tile keeps its 16-byte chunk j of column group g (64 columns) at chunk j ^ ((r + g) % 8). A warp's slice is groups c and
  // c + 4 (and a quarter of group 8): the second differs from the first by 512 bytes and chunk bit 2, so that four addresses serve eight
  // steps. Matrices of a step as the tensor cores want them: keys (tokens 0 to 7, columns 0 to 7), (0 to 7, 8 to 15), (8 to 15, 0 to
  // 7), (8 to 15, 8 to 15); values with the middle two exchanged.
  auto place_in_tile = [&](uint32_t r, uint32_t group, uint32_t chunk) {
    return smem_addr(sm.ring[0]) + r * kRowBytes + group * 128 + ((chunk ^ ((r + group) % 8)) << 4);
  };
  auto find_values = [&] {
    const Place me = here();
    return place_in_tile(me.lane % 16, me.warp, me.lane / 16);
  };
  auto keys_at = [&] {
    const Place me = here();
    return place_in_tile(me.lane % 8 + 8 * (me.lane / 16), me.warp, me.lane / 8 % 2);
  };
  const uint32_t values_held = held(find_values());
  auto values_at = [&] { return kExact ? find_values() : values_held; };
  my.rope_at[here().in_quad()] = place_in_tile(here().lane % 8 + 8 * (here().lane / 16), 8, 2 * here().warp + here().lane / 8 % 2);
  auto exchange_at = [&] { return smem_addr(sm.exchange[here().template quad_of<L::kQuads>()]) + 8 * here().in_quad(); };
  // A warp does the softmax of the octet of its own number.
  auto has_octet = [&]() { return L::kKeepOwn || here().warp < L::kOctets; };
  // Octet at position `i` of a warp's score fragments; its own comes first where every warp has one.
  auto octet_at = [&](int i) { return L::kKeepOwn ? i ^ here().warp : i; };

  uint32_t q[L::kMTiles][kSteps - 1][4];            // but for those steps that are kept in shared memory
  float o[L::kMTiles][16][4];
  float s[L::kMTiles][2][4];                        // scores of this warp's slice
  float m = kNoMax;                                 // maximum in use

  constexpr int kOrder[8] = {0, 6, 1, 7, 3, 5, 2, 4};   // steps of a slice as they are walked, see below
  auto ask_for_q = [&](const Request& r, int row_tile) {
    const Place me = here();
    const int slice = me.warp;
    const int rows = r.rows << p.heads_log2, row0 = row_tile * kRows + 32 * here().template quad_of<L::kQuads>();
    const __nv_bfloat16* base = p.q + ((static_cast<int64_t>(r.q_begin) << p.heads_log2) + row0) * kRow;
    // Latent columns come 16 bytes a lane, four lanes a row, into the registers they will end in, and take the tensor cores' order on
    // the way through this warp's part of the exchange: 16 rows x 32 columns at a time.
#pragma unroll
    for (int i = 0; i < L::kOctets; ++i) {
      const int row = 8 * octet_at(i) + me.lane / 4;
      const bool present = row0 + row < rows;
      const __nv_bfloat16* src = base + row * kRow;
      const uint32_t low = present ? *reinterpret_cast<const uint32_t*>(src + 2 * (me.lane % 4) + kLatent + 16 * slice) : 0;
      const uint32_t high = present ? *reinterpret_cast<const uint32_t*>(src + 2 * (me.lane % 4) + kLatent + 16 * slice + 8) : 0;
      uint32_t* rope = reinterpret_cast<uint32_t*>(&my.query[0][i / 2][me.in_quad()]);
      rope[i % 2] = low, rope[i % 2 + 2] = high;
#pragma unroll
      for (int window = 0; window < 4; ++window) {
        const uint4 x = present ? *reinterpret_cast<const uint4*>(src + slice_column(slice, 2 * window) + 8 * (me.lane % 4)) : make_uint4(0, 0, 0, 0);
        uint32_t(&to)[4] = q[i / 2][2 * window + i % 2];
        to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
      }
    }
  };
  auto turn_q = [&]() {
    const Place me = here();
    const int slice = me.warp;
    // Row r keeps its 16-byte chunk j at chunk j ^ (r / 2 % 4), so that neither way meets a bank conflict.
    const uint32_t scratch = smem_addr(sm.exchange[here().template quad_of<L::kQuads>()]) + 1024 * slice;
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
#pragma unroll
    for (int kept = 1; kept < L::kSharedSteps; ++kept)
#pragma unroll
      for (int i = 0; i < L::kMTiles; ++i) store_16(smem_addr(&my.query[kept][i][me.in_quad()]), q[i][kOrder[8 - kept]]);
    barrier();                                      // the exchange is an exchange again
  };

  // Columns 16 s of a slice lie at `from ^ 32 s` for s < 4 and at `from ^ 32 (s ^ 2) + 512` beyond, so four addresses, each the one
  // before with a bit turned, serve eight steps.
  auto turn = [](uint32_t& at, int n) {
    if (n == 2 || n == 6) asm volatile("xor.b32 %0, %0, 32;" : "+r"(at));
    if (n == 4) asm volatile("xor.b32 %0, %0, 64;" : "+r"(at));
  };
  auto stage_of = [](int tile) { return static_cast<uint32_t>(tile & (kStages - 1)) * kTileBytes; };

  uint32_t a[L::kMTiles][4], v[4];                  // P of a tile, a fragment of its values
  auto load_probabilities = [&]() {
    const uint32_t lane = here().lane;
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i) ldmatrix_x4(a[i], smem_addr(&my.probabilities[lane / 16][2 * i][4 * (lane % 16)]));
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
  constexpr uint32_t kSourceBytes = 2 * L::kOctets * 256;
  constexpr int kFetched = kExact ? 1 : kAhead;
  uint32_t k[kAhead][4];                            // fragments of keys in flight
  auto fetch_keys = [&](int tile, uint32_t& at, int n) {
    turn(at, n);
    ldmatrix_x4(k[n % kAhead], n < 8 ? at + 512 * (n % 2) : stage_of(tile) + my.rope_at[here().in_quad()]);
  };
  auto begin_scores = [&](int tile, int ahead) {
    mbarrier_wait(smem_addr(&sm.full[tile & (kStages - 1)]), (tile / kStages) & 1);
    uint32_t at = stage_of(tile) + keys_at();
#pragma unroll
    for (int n = 0; n < ahead; ++n) fetch_keys(tile, at, n);
    return at;
  };
  auto end_scores = [&](int tile, uint32_t at, int ahead, bool hurried) {
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i)
#pragma unroll
      for (int c = 0; c < 4; ++c) s[i][0][c] = s[i][1][c] = 0.0f;
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      const uint32_t(&kk)[4] = k[n % kAhead];
      // Outside the loop the wait for the exchange stands here, where it keeps the assembler from loading so far ahead that it spills.
      if (!hurried && n == 0) mbarrier_wait(taken_at(), (tile & 1) ^ 1);
      const int kept = kSteps - 1 - n;                // place among those in shared memory
      if (kept < L::kSharedSteps)
#pragma unroll
        for (int i = 0; i < L::kMTiles; ++i) load_16(a[i], smem_addr(&my.query[kept][i][here().in_quad()]));
#pragma unroll
      for (int i = 0; i < L::kMTiles; ++i) {
        const uint32_t(&rows)[4] = kept < L::kSharedSteps ? a[i] : q[i][kOrder[n % 8]];
        mma(s[i][0], rows, kk[0], kk[1]), mma(s[i][1], rows, kk[2], kk[3]);
      }
      if (n + ahead < kSteps) fetch_keys(tile, at, n + ahead);
    }
    if (hurried && !L::kKeepOwn) mbarrier_wait(taken_at(), (tile & 1) ^ 1);   // else it has been waited for
    // [source][half][octet][lane] of float2; `exchange_at` is this lane's place in the octet of the warp's own number.
    const uint32_t place = exchange_at();
#pragma unroll
    for (int i = L::kKeepOwn ? 1 : 0; i < L::kOctets; ++i) {
      const float(&lo)[4] = s[i / 2][0], (&hi)[4] = s[i / 2][1];
      const int c = 2 * (i % 2);
      const uint32_t to = L::kKeepOwn ? (place ^ (i << 8)) + (i - 1) * kSourceBytes
                                      : smem_addr(sm.exchange) + here().warp * kSourceBytes + i * 256 + 8 * here().lane;
      store_8(to, lo[c], lo[c + 1]), store_8(to + kSourceBytes / 2, hi[c], hi[c + 1]);
    }
  };

  auto scores = [&](int tile) { end_scores(tile, begin_scores(tile, 1), 1, false); };

  // Scores of a tile to probabilities, 8 rows a warp, in parts that values go between. Where a warp keeps its own part, source i is
  // slice (own ^ i): (own + 1) + (2 + 3) is then (0 + 1) + (2 + 3) for every warp, for addition commutes.
  float t[4], top;                                  // scores in log2 units of this lane's four tokens; the row's largest
  auto gather = [&]() {
    if (has_octet()) {
      const uint32_t from = exchange_at();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        auto part = [&](int source) { return load_8(from + source * kSourceBytes + half * (kSourceBytes / 2)); };
        const float2 s0 = L::kKeepOwn ? make_float2(s[0][half][0], s[0][half][1]) : part(0);
        const float2 s1 = part(L::kSources - 3), s2 = part(L::kSources - 2), s3 = part(L::kSources - 1);
        t[2 * half] = sum_slices(s0.x, s1.x, s2.x, s3.x) * p.scale_log2, t[2 * half + 1] = sum_slices(s0.y, s1.y, s2.y, s3.y) * p.scale_log2;
      }
    }
  };
  // This warp has read the exchange, and P of the tile before.
  auto taken = [&]() {
    __syncwarp();
    if (here().lane < kTakers) mbarrier_arrive(taken_at());
  };
  auto wait_taken = [&](int tile) { mbarrier_wait(taken_at(), tile & 1); };   // by all, when `tile` was gathered
  auto mask_out = [&](int tile) {
    const int slice = here().warp;
    const int info = sm.info[tile & (kDescs - 1)];
    if (info == kWhole) return;
    const uint32_t lane = here().lane, seen = b.visible(info, 32 * here().template quad_of<L::kQuads>() + 8 * slice + lane / 4) >> (2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] = (seen >> (8 * (i / 2) + i % 2)) & 1 ? t[i] : -INFINITY;
  };
  auto largest = [&]() {
    top = fmaxf(fmaxf(t[0], t[1]), fmaxf(t[2], t[3]));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
  };
  auto probabilities = [&](int tile, bool masked) {
    const Place me = here();
    const float old = m;
    m = next_max(old, top);
    float e[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) e[i] = masked && t[i] == -INFINITY ? 0.0f : exp2_end(exp2_begin(t[i]), m);
    const uint32_t lo = pack_bf16(e[0], e[1]), hi = pack_bf16(e[2], e[3]);
    wait_taken(tile);
    my.probabilities[0][0][me.in_quad()] = lo, my.probabilities[1][0][me.in_quad()] = hi;
    const float f = exp2_fast(old - m);
    if (me.lane % 4 == 0) my.rescale[tile & 1][me.in_quad() / 4] = f;
    float2& sums = my.sums[me.in_quad()];
    const float2 before = sums;
    sums = make_float2(before.x * f + ((e[0] + e[1]) + (e[2] + e[3])), before.y * f + (sum_bf16(lo) + sum_bf16(hi)));
    if (old != m) my.notes[tile & 1].x = tile;      // what was accumulated must be rescaled
  };
  // Of the columns that steps `n` and `n + 1` of the values are about.
  auto rescale = [&](int tile, int n) {
    const uint32_t lane = here().lane;
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i) {
      const float lo = my.rescale[tile & 1][16 * i + lane / 4], hi = my.rescale[tile & 1][16 * i + 8 + lane / 4];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        float(&x)[4] = o[i][2 * kOrder[n + c / 2] + c % 2];
        x[0] *= lo, x[1] *= lo, x[2] *= hi, x[3] *= hi;
      }
    }
  };
  // This warp has read the values of a tile.
  auto release = [&](int tile) {
    __syncwarp();
    if (here().lane == 0) mbarrier_arrive(smem_addr(&sm.empty[tile & (kStages - 1)]));
  };

  // 16 rows, fast: up to four tiles between two barriers, for a launch of few tiles is a chain of latencies. A warp does the softmax of four
  // rows: lane = token quad in a half + 2 row + 8 half + 16 (tile % 2), two tiles a lane.
  constexpr bool kBatched = kJoins && L::kBatchTiles > 1;
  float sum_l = 0.0f, sum_weight = 0.0f;            // of this lane's tokens
  constexpr uint32_t kSlotBytes = L::kSources * kSourceBytes;
  auto batch_scores = [&](int one, int other, uint32_t to) {
    mbarrier_wait(smem_addr(&sm.full[one & (kStages - 1)]), (one / kStages) & 1);
    mbarrier_wait(smem_addr(&sm.full[other & (kStages - 1)]), (other / kStages) & 1);
    const uint32_t apart = stage_of(other) - stage_of(one), rope = stage_of(one) + my.rope_at[here().in_quad()];
    uint32_t at = stage_of(one) + keys_at();
    float c[2][2][4] = {};
    load_16(a[0], smem_addr(&my.query[0][0][here().in_quad()]));
#pragma unroll
    for (int n = 0; n < kSteps; ++n) {
      uint32_t k0[4], k1[4];
      turn(at, n);
      const uint32_t from = n < 8 ? at + 512 * (n % 2) : rope;
      ldmatrix_x4(k0, from), ldmatrix_x4(k1, from + apart);
      const uint32_t(&rows)[4] = n < 8 ? q[0][kOrder[n % 8]] : a[0];
      mma(c[0][0], rows, k0[0], k0[1]), mma(c[0][1], rows, k0[2], k0[3]);
      mma(c[1][0], rows, k1[0], k1[1]), mma(c[1][1], rows, k1[2], k1[3]);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {                   // tile, half, octet
      const float(&x)[4] = c[i / 4][i / 2 % 2];
      store_8(to + i / 4 * kSlotBytes + i / 2 % 2 * (kSourceBytes / 2) + i % 2 * 256, x[2 * (i % 2)], x[2 * (i % 2) + 1]);
    }
  };
  auto batch_softmax = [&](int tile, int count) {
    const Place me = here();
    const uint32_t row = 4 * me.warp + me.lane / 2 % 4, half = me.lane / 8 % 2, place = half * (kSourceBytes / 2) + row / 8 * 256 + row % 8 * 32 + me.lane % 2 * 16;
    float x[2][4];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const int slot = me.lane / 16 + 2 * j;
      const uint32_t from = smem_addr(sm.exchange[0]) + slot * kSlotBytes + place;
      uint32_t part[4][4];
#pragma unroll
      for (int source = 0; source < 4; ++source) load_16(part[source], from + source * kSourceBytes);
      uint32_t seen = slot < count ? 15 : 0;
      const int info = sm.info[(tile + slot) & (kDescs - 1)];
      if (slot < count && info != kWhole) seen = b.visible(info, row) >> (8 * half + 4 * (me.lane % 2));
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        auto of = [&](int source) { return __uint_as_float(part[source][c]); };
        x[j][c] = seen >> c & 1 ? sum_slices(of(0), of(1), of(2), of(3)) * p.scale_log2 : -INFINITY;
      }
    }
    float top = fmaxf(fmaxf(fmaxf(x[0][0], x[0][1]), fmaxf(x[0][2], x[0][3])), fmaxf(fmaxf(x[1][0], x[1][1]), fmaxf(x[1][2], x[1][3])));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 8));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 16));
    const float old = m;
    m = next_max(old, top);
    const float f = exp2_fast(old - m);
    sum_l *= f, sum_weight *= f;
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float e[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) e[c] = x[j][c] == -INFINITY ? 0.0f : exp2_end(exp2_begin(x[j][c]), m);
      const uint32_t lo = pack_bf16(e[0], e[1]), hi = pack_bf16(e[2], e[3]), slot = me.lane / 16 + 2 * j;
      sum_l += (e[0] + e[1]) + (e[2] + e[3]), sum_weight += sum_bf16(lo) + sum_bf16(hi);
      *reinterpret_cast<uint2*>(&my.probabilities[2 * slot + half][row / 8][row % 8 * 4 + me.lane % 2 * 2]) = make_uint2(lo, hi);
    }
    if ((me.lane & 25) == 0) my.rescale[0][row] = f;
    if (old != m && old != kNoMax) my.notes[0].x = tile;   // what was accumulated must be rescaled
  };
  auto walk_batches = [&](int first, int last) {
    sum_l = sum_weight = 0.0f;
#pragma unroll 1
    for (int tile = first; tile <= last;) {
      const int left = last - tile + 1, count = left <= L::kBatchTiles ? left : L::kBatchTiles / 2;
      const uint32_t to = smem_addr(sm.exchange[0]) + here().warp * kSourceBytes + 8 * here().lane;
#pragma unroll 1
      for (int i = 0; i < count; i += 2) batch_scores(tile + i, tile + min(i + 1, count - 1), to + i * kSlotBytes);
      barrier();
      batch_softmax(tile, count);
      barrier();
      if (my.notes[0].x == tile) {
        const uint32_t lane = here().lane;
        const float lo = my.rescale[0][lane / 4], hi = my.rescale[0][8 + lane / 4];
#pragma unroll
        for (int c = 0; c < 16; ++c) o[0][c][0] *= lo, o[0][c][1] *= lo, o[0][c][2] *= hi, o[0][c][3] *= hi;
      }
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        const uint32_t lane = here().lane;
        ldmatrix_x4(a[0], smem_addr(&my.probabilities[2 * i + lane / 16][0][4 * (lane % 16)]));
        uint32_t at = stage_of(tile + i) + values_at();
#pragma unroll
        for (int n = 0; n < 8; ++n) values_step(at, n);
        release(tile + i);
      }
      tile += count;
    }
  };

  // The next piece of work, for the quad. False when there is none.
  auto next_piece = [&]() {
    if (here().warp == 0) {
      Walk w = my.item;
      __syncwarp();
      const bool more = b.next(w);
      if (here().lane == 0) {
        my.more = more;
        if (more) begin_piece(w, my.last + 1, request_of(p, w.request));
      }
    }
    barrier();
    return my.more != 0;
  };

  bool begun = kJoins;                              // the block's first piece is known
  while (begun || next_piece()) {
    begun = false;
    ask_for_q(request_of(p, my.item.request), b.row_tile());
    turn_q();
#pragma unroll
    for (int i = 0; i < L::kMTiles; ++i)
#pragma unroll
      for (int c = 0; c < 16; ++c)
#pragma unroll
        for (int k = 0; k < 4; ++k) asm volatile("mov.f32 %0, 0f00000000;" : "=f"(o[i][c][k]));   // else zeros come from local memory
    m = kNoMax;
    my.sums[here().in_quad()] = make_float2(0.0f, 0.0f);

    // The bounds are read anew each time: registers are scarce.
    auto first = [&]() { return my.first; };
    auto last = [&]() { return my.last; };
    int tile = first() - 1;
    // A step at either end of a piece, on a masked tile, or where something must be rescaled.
    auto careful_step = [&](bool grown) {
      if (tile < last()) taken();
      if (tile >= first()) {
        uint32_t at = stage_of(tile) + values_at();
#pragma unroll
        for (int n = 0; n < 8; n += 2) {
          if (grown) rescale(tile, n);
          values_step(at, n), values_step(at, n + 1);
        }
        release(tile);
      }
      if (tile < last() && has_octet()) mask_out(tile + 1), largest(), probabilities(tile + 1, true);
      if (tile + 2 <= last()) scores(tile + 2);
    };
    if constexpr (kBatched) {
      walk_batches(first(), last());
    } else if (first() <= last()) {
      scores(first());
      for (;;) {
        barrier();
        const int2 note = my.notes[tile & 1];
        load_probabilities();
        gather();
        if (note.x == tile || tile + 1 >= note.y) {
          careful_step(note.x == tile);
          if (++tile > last()) break;
        } else {
          taken();
          uint32_t at = stage_of(tile) + values_at();
          // What goes between which steps of the values was tried out. `exact` has eight registers less.
          constexpr int kLargest = kExact ? -1 : 3, kProbabilities = kExact ? -1 : 5, kScores = 7;
          uint32_t keys = 0;
          auto between = [&](int n) {
            if (n == kLargest && has_octet()) largest();
            if (n == kProbabilities && has_octet()) probabilities(tile + 1, false);
            if (n == kScores) keys = begin_scores(tile + 2, kFetched);
          };
          between(-1);
#pragma unroll
          for (int n = 0; n < 8; ++n) values_step(at, n), between(n);
          release(tile);
          end_scores(tile + 2, keys, kFetched, true);
          ++tile;
        }
      }
    }

    // The piece is done: share each row's (m, l), then write either the output or a partial.
    const Place me = here();
    const int slice = here().warp;
    const Walk item = my.item;
    const Request r = request_of(p, item.request);
    const int rows = r.rows << p.heads_log2, row0 = b.row_tile() * kRows + 32 * here().template quad_of<L::kQuads>();
    const int64_t out_row = (static_cast<int64_t>(r.q_begin) << p.heads_log2) + row0;
    const int slot = kExact ? item.id : (sm.unit + item.id) * sm.plan.team + sm.member;
    const bool fits = item.direct || slot < p.partials;
    const int64_t partial_row = static_cast<int64_t>(slot) * kRows + 32 * here().template quad_of<L::kQuads>();
    auto tell = [&](int row, float l, float weight) {
      my.inverse[row] = weight > 0.0f ? kJoins ? __fdividef(1.0f, weight) : 1.0f / weight : 0.0f;
      if (!fits || row0 + row >= rows) return;
      if (item.direct) p.lse[out_row + row] = natural_lse(m, l);
      else store_shared_by_card(p.partial_ml + partial_row + row, make_float4(m, l, weight, __uint_as_float(kJoins ? sm.launch : 0)));
    };
    if constexpr (kBatched) {
#pragma unroll
      for (int d : {1, 8, 16}) sum_l += __shfl_xor_sync(~0u, sum_l, d), sum_weight += __shfl_xor_sync(~0u, sum_weight, d);
      if ((me.lane & 25) == 0) tell(4 * slice + me.lane / 2, sum_l, sum_weight);
    } else if (has_octet()) {
      auto [l, weight] = my.sums[me.in_quad()];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
      weight += __shfl_xor_sync(~0u, weight, 1);
      weight += __shfl_xor_sync(~0u, weight, 2);
      if (me.lane % 4 == 0) tell(8 * slice + me.lane / 4, l, weight);
    }
    barrier();
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
        else if constexpr (kJoins) partial[32 * step] = join::marked(make_float4(lo[k], lo[k + 1], hi[k], hi[k + 1]));
        else partial[32 * step] = make_float4(lo[k], lo[k + 1], hi[k], hi[k + 1]);
      }
    };
    write_octet(std::integral_constant<int, 0>()), write_octet(std::integral_constant<int, 1>());
    if constexpr (L::kOctets == 4) write_octet(std::integral_constant<int, 2>()), write_octet(std::integral_constant<int, 3>());
    if (kJoins && threadIdx.x == 0 && !item.direct) sm.join[sm.joins++] = {item.request, item.stream, item.id};
  }
  if constexpr (kJoins) {
    barrier();
    for (int i = 0; i < sm.joins; ++i)
      join_pieces<kRows>(p, sm.plan, sm.join[i], sm.unit, sm.member, sm.launch, here().in_quad(), reinterpret_cast<float4*>(sm.ring[0]), barrier);
  }
}
