// Dense products for many rows: large batches and prompt chunks. The sums of dense.cu in the same order, bit for bit.
//
// Activations come packed (pack.cu), so both operands are half tiles of 8 rows. A block has a tile of weight rows x activation rows; a
// few units of all its half tiles are a stage, which the copy engine brings into a ring in shared memory; the warps ask for the stages
// by turns. Each block of a cluster sums one group of eight slices; then every block adds up its share of the tile's rows, the groups
// in order, and writes them out.
#include "packed.cuh"
#include "wide.cuh"

// WN x WM warps of MT tiles of 16 weight rows x NT tiles of 8 activation rows each; STAGE units a stage; PAIRS: some job is PRECISE.
// grid (groups = cluster, chunks of rows, chunks of weight rows of the jobs)
template <int WN, int WM, int MT, int NT, int STAGE, bool PAIRS> struct Product {
  static constexpr int TILES = WN * MT, ROWS = WM * NT * 8, WARPS = WN * WM, THREADS = WARPS * 32, WIDTH = TILES * 16 + 4;
  static_assert(ROWS % PACKED_ROWS == 0 && STAGE % 2 == 0);
  // Operands come a unit ahead, where registers allow it.
  static constexpr bool AHEAD = !SMALL_CARD || MT * NT < 16;
  struct Operands {  // of one unit
    uint4 low[MT], high[MT], x[NT], rest[PAIRS ? NT : 1];
  };

  // A stage's copies: half tiles of weights (low ones, high ones), blocks of rows, those of the rest. Lane i of a warp makes copy
  // WARPS i + warp.
  static constexpr int HALVES = 2 * TILES, BLOCKS = ROWS / PACKED_ROWS;

  const Dense& p;
  const Job& job;
  int lane, warp, tile, first_row, begin, count, stages, stage_bytes;
  bool precise, brings_rows, brings_weights;
  uint32_t ring, full, empty, to;
  const uint8_t* from;

  __device__ __forceinline__ Product(const Wide& w, const Job& job, int place, uint8_t* shared, uint64_t* bars)
      : p(w.dense), job(job), lane(threadIdx.x & 31), warp(threadIdx.x >> 5), tile(place * TILES), first_row(blockIdx.y * ROWS), precise(PAIRS && job.mode == PRECISE),
        ring(smem_addr(shared)), full(smem_addr(bars)), empty(full + 8 * MAX_STAGES) {
    const int group = gridDim.x > 1 ? cluster_rank() : 0;
    begin = group * SLICES * p.slice, count = min(SLICES * p.slice, p.units - begin);
    stage_bytes = STAGE * (HALVES * 512 + (precise ? 2 : 1) * BLOCKS * PACKED_UNIT);
    stages = min(static_cast<int>(w.ring) / stage_bytes, MAX_STAGES);
    const int copy = lane * WARPS + warp, of_rows = copy - HALVES;
    brings_weights = copy < HALVES;
    brings_rows = !brings_weights && of_rows < (precise ? 2 : 1) * BLOCKS;
    if (brings_weights) {
      const int held = min(tile + copy % TILES, job.tiles - 1);
      from = half_tile(job, copy < TILES ? low_half(job, held) : high_half(job, held), p.units, 0) + begin * 512;
      to = copy * (STAGE * 512);
    } else {
      const int64_t block = min(first_row / PACKED_ROWS + of_rows % BLOCKS, (p.rows - 1) / PACKED_ROWS);
      from = (of_rows < BLOCKS ? w.packed : w.rest) + (block * p.units + begin) * PACKED_UNIT;
      to = (HALVES * 512 + of_rows * PACKED_UNIT) * STAGE;
    }
  }

  // Enqueues this lane's copy of units base .. of the group into `stage`.
  __device__ __forceinline__ void bring(int stage, int base) const {
    const int unit = brings_rows ? PACKED_UNIT : 512;
    copy_bulk(ring + stage * stage_bytes + to, from + base * unit, min(STAGE, count - base) * unit, full + 8 * stage);
  }
  __device__ __forceinline__ void expect(int stage, int base) const {
    if (threadIdx.x == 0) mbarrier_expect(full + 8 * stage, stage_bytes / STAGE * min(STAGE, count - base));
  }

  __device__ __forceinline__ void load(Operands& o, int stage, int unit, int wn, int wm) const {
    const uint32_t weights = ring + stage * stage_bytes + (wn * MT * STAGE + unit) * 512 + lane * 16;
    // Tile `t` of 8 rows lies in block t / 4 of the stage's activations.
    const uint32_t rows = ring + stage * stage_bytes + HALVES * STAGE * 512 + unit * PACKED_UNIT + lane * 16;
    const auto tile_at = [&](int t) { return t / 4 * (STAGE * PACKED_UNIT) + t % 4 * 512; };
#pragma unroll
    for (int n = 0; n < NT; ++n) o.x[n] = shared16(rows + tile_at(wm * NT + n));
#pragma unroll
    for (int m = 0; m < MT; ++m) {
      o.low[m] = shared16(weights + m * (STAGE * 512));
      o.high[m] = shared16(weights + (TILES + m) * (STAGE * 512));
    }
    if (PAIRS && precise)
#pragma unroll
      for (int n = 0; n < NT; ++n) o.rest[n] = shared16(rows + BLOCKS * (STAGE * PACKED_UNIT) + tile_at(wm * NT + n));
  }

  __device__ __forceinline__ void run() {
    float slice[MT][NT][4], sum[MT][NT][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int j = 0; j < 4; ++j) slice[m][n][j] = 0, sum[m][n][j] = -0.0f;  // -0 + x is x for every x
    const int wn = warp % WN, wm = warp / WN;
    int stage = 0, previous = 0, left = p.slice;
    uint32_t parity = 0, previous_parity = 0;
    Operands operands[AHEAD ? 2 : 1];
    mbarrier_wait(full, 0);
    if (AHEAD) load(operands[0], 0, 0, wn, wm);
    for (int base = 0; base < count; base += STAGE) {
#pragma unroll
      for (int unit = 0; unit < STAGE; ++unit) {
        if (unit > 0 && base + unit >= count) break;
        const Operands& now = operands[AHEAD ? unit & 1 : 0];
        if (!AHEAD) load(operands[0], stage, unit, wn, wm);
        // The next unit's operands are on their way while this one's are multiplied.
        if (unit + 1 < STAGE) {
          if (AHEAD && base + unit + 1 < count) load(operands[unit + 1 & 1], stage, unit + 1, wn, wm);
        } else {
          __syncwarp();
          if (lane == 0) mbarrier_arrive(empty + 8 * stage);
          previous = stage, previous_parity = parity;
          if (++stage == stages) stage = 0, parity ^= 1;
          if (base + STAGE < count) {
            mbarrier_wait(full + 8 * stage, parity);
            if (AHEAD) load(operands[0], stage, 0, wn, wm);
          }
        }
        const auto products = [&](const uint4 (&x)[NT]) {
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            const uint32_t a[4] = {now.low[m].x, now.high[m].x, now.low[m].y, now.high[m].y};
#pragma unroll
            for (int n = 0; n < NT; ++n) mma(slice[m][n], a, x[n].x, x[n].y);
          }
#pragma unroll
          for (int m = 0; m < MT; ++m) {
            const uint32_t a[4] = {now.low[m].z, now.high[m].z, now.low[m].w, now.high[m].w};
#pragma unroll
            for (int n = 0; n < NT; ++n) mma(slice[m][n], a, x[n].z, x[n].w);
          }
        };
        products(now.x);
        if constexpr (PAIRS)
          if (precise) products(now.rest);
        if (--left == 0) {
          left = p.slice;
#pragma unroll
          for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
              for (int j = 0; j < 4; ++j) sum[m][n][j] += slice[m][n][j], slice[m][n][j] = 0;
        }
        if (unit == 0 && base > 0) {  // the stage before this one is free, or will be soon
          const int next = base + (stages - 1) * STAGE;
          if (next < count) {
            mbarrier_wait(empty + 8 * previous, previous_parity);
            expect(previous, next);
            if (brings_weights || brings_rows) bring(previous, next);
            __syncwarp();
          }
        }
      }
    }
    if (left != p.slice)
#pragma unroll
      for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; ++n)
#pragma unroll
          for (int j = 0; j < 4; ++j) sum[m][n][j] += slice[m][n][j];

    // Every block of the cluster gets its share of the rows from all groups: [group][ROWS / cluster][WIDTH].
    const int cluster = gridDim.x, group = begin / (SLICES * p.slice), share = ROWS / cluster;
    cluster_barrier();  // nobody needs its ring any more
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const int row = (wm * NT + n) * 8 + 2 * (lane & 3), owner = row / share;
      const uint32_t at = in_block(ring + (((group * share + row % share) * WIDTH) + wn * MT * 16 + (lane >> 2)) * 4, owner);
#pragma unroll
      for (int m = 0; m < MT; ++m) {
        store_there(at + m * 64, sum[m][n][0]);
        store_there(at + m * 64 + WIDTH * 4, sum[m][n][1]);
        store_there(at + m * 64 + 32, sum[m][n][2]);
        store_there(at + m * 64 + WIDTH * 4 + 32, sum[m][n][3]);
      }
    }
    cluster_barrier();
    write_rows<TILES, THREADS>(p, job, ring, cluster, share, WIDTH, tile, first_row + group * share);
  }
};

template <int WN, int WM, int MT, int NT, int STAGE, bool PAIRS> __device__ __forceinline__ void wide(const Wide& w) {
  using P = Product<WN, WM, MT, NT, STAGE, PAIRS>;
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint64_t bars[2 * MAX_STAGES];
  const int first_places = (w.dense.job[0].tiles + P::TILES - 1) / P::TILES, place = blockIdx.z;
  const bool second = place >= first_places;
  P product(w, w.dense.job[second], place - (second ? first_places : 0), shared, bars);
  const int ahead = min(product.stages * STAGE, product.count);
  if (threadIdx.x == 0) {
    for (int i = 0; i < product.stages; ++i) mbarrier_init(product.full + 8 * i, 1), mbarrier_init(product.empty + 8 * i, P::WARPS);
    mbarrier_init_fence();
    for (int base = 0; base < ahead; base += STAGE) product.expect(base / STAGE, base);
  }
  __syncthreads();
  // Weights do not depend on the predecessor.
  if (product.brings_weights)
    for (int base = 0; base < ahead; base += STAGE) product.bring(base / STAGE, base);
  wait_for_predecessor();
  let_successor_start();
  if (product.brings_rows)
    for (int base = 0; base < ahead; base += STAGE) product.bring(base / STAGE, base);
  __syncwarp();
  product.run();
}

#define WIDE(name, WN, WM, MT, NT, STAGE, PAIRS, blocks) \
  extern "C" __global__ void __launch_bounds__(WN * WM * 32, SMALL_CARD ? 1 : blocks) name(const __grid_constant__ Wide w) { wide<WN, WM, MT, NT, STAGE, PAIRS>(w); }
WIDE(wide_64x128, 2, 2, 2, 8, 4, false, 2)
WIDE(wide_64x64, 2, 2, 2, 4, 4, false, 3)
WIDE(wide_32x64, 1, 4, 2, 2, 4, false, 4)
WIDE(wide_32x32, 1, 2, 2, 2, 4, false, 6)
WIDE(wide_64x64_pairs, 2, 2, 2, 4, 2, true, 2)
WIDE(wide_32x32_pairs, 1, 2, 2, 2, 4, true, 6)
