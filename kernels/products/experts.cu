// Routed experts: INT4 weights in groups of 32, unpacked to bf16 in registers, times the rows that chose them.
//
// Work is a list made on the device (by routing.cu, or by each block up to 32 rows): entries of up to 8 NT rows of one expert. First product: gate and up with SwiGLU,
// second: down. Blocks are persistent and have equal shares of all (entry, tile) items, one stretch each. Every warp keeps its own
// ring of weights filled in the background, across items and entries, so reads of memory never pause. Nothing is summed across
// entries, and k is cut by the matrix alone: a row's bits do not depend on who else chose its experts.
#include "experts.cuh"
#include "norm.cuh"

// Slots of a warp's ring. The first product keeps more of shared memory for L1, where its activations stay.
constexpr int WARPS = 8, UNITS = STEP / UNIT, UP_DEPTH = 3, DOWN_DEPTH = 6;

// Up to 32 rows: down of all choices (up to eight a row, in entries of up to eight rows), the shared expert's, and the weighted sum, in
// one launch. `k` must be a multiple of two steps.
struct DownSum {
  Down down;               // `outer` unused
  const uint8_t* shared;   // the shared expert's matrix in half tiles, [16 tiles][32 units]
  const float* x;          // its input [rows][32 units]
  int64_t x_stride;
  float* out;              // [row][16 tiles]
  int64_t out_stride;
  int units, slice;        // of the shared expert's k, and of one warp
  int rows, top_k;
};
static_assert(sizeof(Down) == 48 && sizeof(DownSum) == 104, "mirrored in Rust");

// The tiles of a stretch of (entry, tile) items, `STRIDE` items apart; `steps` steps of each, read in the background.
template <int STRIDE> struct Stream {
  const uint8_t* weights;
  const Entry* entry;  // of the next item
  const uint8_t* at;
  int64_t tile_bytes;
  int tiles, tile, left, steps, step;
  __device__ __forceinline__ Stream(const uint8_t* weights, const Lists& lists, int64_t tile_bytes, uint32_t tiles, uint32_t first, int items, int steps)
      : weights(weights), entry(lists.entry + first / tiles), tile_bytes(tile_bytes), tiles(tiles), tile(first % tiles), left(items), steps(steps), step(0) {
    if (left > 0) open();
  }
  __device__ __forceinline__ void begin(const Entry* from, int first_tile, int items) {
    entry = from, tile = first_tile, left = items;
    if (left > 0) open();
  }
  __device__ __forceinline__ void open() { at = weights + (static_cast<int64_t>(entry->expert) * tiles + tile) * tile_bytes; }
  // Enqueues the next step into `slot`, if there is one; always ends a group.
  __device__ __forceinline__ void next(uint32_t slot, int lane) {
    if (left > 0) {
      copy_step(slot, at, lane);
      at += STEP_BYTES;
      if (++step == steps) {
        step = 0, tile += STRIDE, --left;
        at += STRIDE * tile_bytes - static_cast<int64_t>(steps) * STEP_BYTES;
        if (tile >= tiles && left > 0) {
          while (tile >= tiles) tile -= tiles, ++entry;
          open();
        }
      }
    }
    copies_end_group();
  }
};

// A lane's words of the activations of up to NT x 8 rows.
template <int NT> struct Rows {
  const uint16_t* at[NT];  // where there is no row, row 0 of the entry: its product is never stored
  // Brings `lines` lines of 128 bytes from column `k_at` on into L1, all at once.
  __device__ __forceinline__ void touch(int k_at, int lines, int t) const {
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      for (int i = t; i < lines; i += 4) {
        uint32_t unused;
        asm volatile("ld.global.ca.u32 %0, [%1];" : "=r"(unused) : "l"(at[nt] - t * 8 + k_at + i * 64) : "memory");
      }
  }
  // Those of the step at column `k_at`. `whole`: k is a multiple of a step; else zeros beyond k, where weights are zero but a NaN
  // would get through.
  __device__ __forceinline__ void load(uint4 (&x)[NT][UNITS], int k_at, int k, bool whole) const {
    if (whole) {
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) x[nt][unit] = reinterpret_cast<const uint4*>(at[nt] + k_at)[unit * (UNIT / 8)];
      return;
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int unit = 0; unit < UNITS; ++unit) {
        x[nt][unit] = {};
        if (k_at + unit * UNIT < k) x[nt][unit] = *reinterpret_cast<const uint4*>(at[nt] + k_at + unit * UNIT);
      }
  }
};

template <int NT> __device__ __forceinline__ void step_product(float (&d)[NT][4], const Step& s, const uint4 (&x)[NT][UNITS]) {
#pragma unroll
  for (int unit = 0; unit < UNITS; ++unit) {
    uint4 low, high;
    unpack_unit(s, unit, low, high);
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) multiply(d[nt], low, high, x[nt][unit]);
  }
}

// Where the list comes from: memory; the block makes it by itself; or each warp does, of a row alone.
enum Source { READ, BUILT, ALONE };
template <int NT, Source LIST, int DEPTH = UP_DEPTH> __device__ __forceinline__ void gate_up(const GateUp& p) {
  constexpr bool AHEAD = NT < 4;  // activations are loaded while the next weights are waited for
  extern __shared__ __align__(128) uint8_t shared[];  // the warps' rings, then sums [2][warp][NT][32]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int begin = warp * p.slice, count = max(0, min(p.slice, p.steps - begin));
  const uint32_t ring = smem_addr(shared) + warp * DEPTH * STEP_BYTES;
  float4* sums = reinterpret_cast<float4*>(shared + WARPS * DEPTH * STEP_BYTES);
  Building& building = *reinterpret_cast<Building*>(sums);
  constexpr int HELD = LIST == BUILT ? BUILT_PLACES : LIST == ALONE ? WARPS * 32 : 1;  // places of the list, each warp its own where it makes it
  __shared__ Entry entry_of[HELD];
  __shared__ int order[HELD];
  Lists lists(p.list, p.places);
  if (LIST != READ) lists.entry = entry_of + (LIST == ALONE ? warp * 32 : 0), lists.order = order + (LIST == ALONE ? warp * 32 : 0);
  const bool whole = LIST == BUILT || p.k % STEP == 0;
  const int64_t tile_bytes = static_cast<int64_t>(p.steps) * STEP_BYTES;

  Rows<NT> rows;
  Entry entry = {};
  float factor[NT][2];
  int first = 0, end = 0, item = 0, tile = 0, at_entry = 0;
  uint32_t slot = ring, free_slot = ring;
  uint4 x[NT][UNITS];
  Stream<1> stream(p.weights + static_cast<int64_t>(begin) * STEP_BYTES, lists, tile_bytes, p.tiles, 0, 0, count);
  // The first round only brings the code near, which the other kernels of a layer have pushed out of the caches, while the predecessor
  // runs: it multiplies weights by whatever lies in shared memory, and stores nothing. It must be the same code.
  enum Round { CODE, BEGIN, NEXT };
  for (int round = unknown(CODE);; round = round == CODE ? BEGIN : NEXT) {
    if (round != NEXT) {
      if (round == BEGIN) {
        wait_for_predecessor();
        let_successor_start();
      }
      uint32_t entries = 0;
      if (LIST == ALONE) {
        // Its activations before all weights: they would wait behind them.
        rows.at[0] = (round == CODE ? reinterpret_cast<const uint16_t*>(p.weights) : p.x) + t * 8;
        rows.touch(begin * STEP, 2 * min(count, p.k / STEP - begin), t);
        factor[0][0] = factor[0][1] = round != CODE && p.factors ? p.factors[0] * SCALED : SCALED;
        entries = list_alone(lists, round == CODE ? 0 : p.top_k, lane);
      } else if (LIST == BUILT) {
        start_building(building);
        __syncthreads();
        entries = build_list(building, lists.ids, round == CODE ? 0 : p.rows, p.top_k, order, [&](int at, int expert, int first, int count) { entry_of[at] = {expert, first, count, 0}; });
      } else if (round == BEGIN) {
        entries = *lists.entries;
      }
      if (round == BEGIN) {
        const uint32_t items = entries * p.tiles;
        first = items * blockIdx.x / gridDim.x, end = items * (blockIdx.x + 1) / gridDim.x;
        item = first, tile = first % p.tiles, at_entry = first / p.tiles;
        slot = ring, free_slot = ring + (DEPTH - 1) * STEP_BYTES;
        stream.begin(lists.entry + at_entry, tile, count > 0 ? end - first : 0);
#pragma unroll 1
        for (int i = 0; i < DEPTH - 1; ++i) stream.next(ring + i * STEP_BYTES, lane);
      }
    }
    if (round != CODE && item >= end) break;
    if (round != NEXT || tile == 0) {
      if (round != CODE) entry = lists.entry[at_entry++];
#pragma unroll
      for (int nt = 0; nt < NT && LIST != ALONE; ++nt) {
        const int at = nt * 8 + g;
        const int place = round != CODE ? lists.order[entry.first + (at < entry.count ? at : 0)] : 0;
        rows.at[nt] = (round != CODE ? p.x : reinterpret_cast<const uint16_t*>(p.weights)) + static_cast<int64_t>(place / p.top_k) * p.k + t * 8;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int mine = nt * 8 + 2 * t + c;
          factor[nt][c] = SCALED;
          if (round != CODE && p.factors) factor[nt][c] = p.factors[lists.order[entry.first + (mine < entry.count ? mine : 0)] / p.top_k] * SCALED;
        }
      }
      if (LIST != ALONE) rows.touch(begin * STEP, 2 * min(count, p.k / STEP - begin), t);
      if (AHEAD) rows.load(x, min(begin, p.steps - 1) * STEP, p.k, whole);
    }
    const int count_now = round == CODE ? min(count, 1) : count;
    float d[NT][4] = {};
    for (int step = 0; step < count_now; ++step) {
      copies_wait<DEPTH - 2>();
      __syncwarp();
      const Step s = read_step(slot, lane);
      stream.next(free_slot, lane);  // read in the round before
      free_slot = slot;
      slot = slot == ring + (DEPTH - 1) * STEP_BYTES ? ring : slot + STEP_BYTES;
      if (!AHEAD) rows.load(x, (begin + step) * STEP, p.k, whole);
      step_product<NT>(d, s, x);
      if (AHEAD) rows.load(x, (begin + (step + 1 < count ? step + 1 : 0)) * STEP, p.k, whole);
    }
    float4* mine = sums + (item & 1) * WARPS * NT * 32;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt) mine[(warp * NT + nt) * 32 + lane] = {d[nt][0], d[nt][1], d[nt][2], d[nt][3]};
    __syncthreads();
    // One warp a tile of 8 rows, by turns; the others go on.
    const int nt = (warp - item * NT) & (WARPS - 1);
    if (nt < NT) {
      float v[4] = {};
#pragma unroll
      for (int w = 0; w < WARPS; ++w) {
        const float4 s = mine[(w * NT + nt) * 32 + lane];
        v[0] += s.x, v[1] += s.y, v[2] += s.z, v[3] += s.w;
      }
      const int row = nt * 8 + 2 * t;
#pragma unroll
      for (int i = 0; i < NT; ++i)
        if (i == nt) v[0] *= factor[i][0], v[1] *= factor[i][1], v[2] *= factor[i][0], v[3] *= factor[i][1];
      uint16_t* to = p.inner + (static_cast<int64_t>(entry.first) + row) * p.tiles * 8 + tile * 8 + g;
      const uint32_t pair = pack_bf16(swiglu(v[0], v[2]), swiglu(v[1], v[3]));
      if (row < entry.count) to[0] = static_cast<uint16_t>(pair);
      if (row + 1 < entry.count) to[p.tiles * 8] = static_cast<uint16_t>(pair >> 16);
    }
    if (round == CODE) continue;
    ++item;
    if (++tile == p.tiles) tile = 0;
  }
}

template <int NT> __device__ __forceinline__ void down(const Down& p) {
  extern __shared__ __align__(128) uint8_t shared[];  // the warps' rings
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const Lists lists(p.list, p.places);
  const bool whole = p.k % STEP == 0;
  // The list and the weights were ready before the predecessor (the first product) began: start reading at once.
  const uint32_t items = *lists.entries * p.tiles;
  const int first = items * blockIdx.x / gridDim.x + warp, end = items * (blockIdx.x + 1) / gridDim.x;
  const uint32_t ring = smem_addr(shared) + warp * DOWN_DEPTH * STEP_BYTES;
  Stream<WARPS> stream(p.weights, lists, static_cast<int64_t>(p.steps) * STEP_BYTES, p.tiles, first, (end - first + WARPS - 1) / WARPS, p.steps);
#pragma unroll
  for (int i = 0; i < DOWN_DEPTH - 1; ++i) stream.next(ring + i * STEP_BYTES, lane);
  wait_for_predecessor();
  let_successor_start();

  Rows<NT> rows;
  float* to[NT][2];  // null: no row
  int slot = 0, tile = static_cast<uint32_t>(first) % p.tiles, at_entry = static_cast<uint32_t>(first) / p.tiles;
  bool turn = true;  // to another entry
  for (int item = first; item < end; item += WARPS) {
    if (turn) {
      turn = false;
      const Entry entry = lists.entry[at_entry];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const int at = nt * 8 + g;
        rows.at[nt] = p.inner + static_cast<int64_t>(entry.first + (at < entry.count ? at : 0)) * p.k + t * 8;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = nt * 8 + 2 * t + c;
          to[nt][c] = row < entry.count ? p.outer + static_cast<int64_t>(lists.order[entry.first + row]) * p.tiles * 16 + g : nullptr;
        }
      }
    }
    float d[NT][4] = {};
    for (int step = 0; step < p.steps; ++step) {
      uint4 x[NT][UNITS];
      rows.load(x, step * STEP, p.k, whole);
      copies_wait<DOWN_DEPTH - 2>();
      __syncwarp();
      const Step s = read_step(ring + slot * STEP_BYTES, lane);
      stream.next(ring + (slot ? slot - 1 : DOWN_DEPTH - 1) * STEP_BYTES, lane);
      slot = slot + 1 == DOWN_DEPTH ? 0 : slot + 1;
      step_product<NT>(d, s, x);
    }
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (to[nt][c]) to[nt][c][tile * 16] = d[nt][c] * SCALED, to[nt][c][tile * 16 + 8] = d[nt][2 + c] * SCALED;
    tile += WARPS;
    while (tile >= p.tiles) tile -= p.tiles, ++at_entry, turn = true;
  }
}

// A block has one tile of 16 output columns: a warp takes every eighth entry, and its slice of the shared expert's k, for up to 8 NT rows.
// What the choices give meets in shared memory and is added up as in dense.cuh. Weights come two steps at a time. grid (tiles)
template <int NT> __device__ __forceinline__ void down_sum(const DownSum& all) {
  constexpr int PLACES = 64 * NT, OUTPUTS = (8 * NT * 16 + 255) / 256;  // of the list; of a thread
  constexpr int PAIR_BYTES = 2 * STEP_BYTES;
  // The warps' rings of two pairs; the shared expert's words [warp][slice][1024], in their place sums [warp][NT][32], then outputs [place][16].
  extern __shared__ __align__(128) uint8_t shared[];
  __shared__ uint32_t entry_of[PLACES];  // expert, first << 10, count << 20
  __shared__ float weights[PLACES];
  __shared__ uint16_t order[PLACES];
  __shared__ bool chosen[PLACES];
  const Down& p = all.down;
  let_successor_start();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, tile = blockIdx.x;
  const uint32_t ring = smem_addr(shared) + warp * 2 * PAIR_BYTES;
  uint8_t* words = shared + WARPS * 2 * PAIR_BYTES;
  const int begin = warp * all.slice, count = max(0, min(all.slice, all.units - begin));
  const uint8_t* low = all.shared + (static_cast<int64_t>(2 * tile) * all.units + begin) * 512 + lane * 16;
  const int held = max(all.slice * 1024, NT * 512);  // bytes of a warp
  const uint32_t mine = smem_addr(words) + warp * held + lane * 16;
#pragma unroll 1
  for (int u = 0; u < count; ++u) {
    copy_weights16(mine + u * 1024, low + u * 512);
    copy_weights16(mine + u * 1024 + 512, low + (all.units + u) * 512);
  }
  copies_end_group();

  // The choices and the shared expert's input were ready before the predecessor (gate and up) began.
  const Lists lists(p.list, p.places);
  Building& building = *reinterpret_cast<Building*>(shared);
  start_building(building);
  __syncthreads();
  const int entries = build_list(building, lists.ids, all.rows, all.top_k, order,
                                 [&](int at, int expert, int first, int count) { entry_of[at] = expert | first << 10 | count << 20; });
  const int pairs = p.steps / 2;
  const int64_t expert_bytes = static_cast<int64_t>(p.tiles) * p.steps * STEP_BYTES;
  const uint8_t* from = p.weights + static_cast<int64_t>(tile) * p.steps * STEP_BYTES + lane * 16;
  int next = warp, next_pair = 0;
  const auto enqueue = [&](uint32_t slot) {
    if (next < entries) {
      const uint8_t* at = from + (entry_of[next] & 1023) * expert_bytes + next_pair * PAIR_BYTES;
#pragma unroll
      for (int i = 0; i < 4; ++i) copy_weights16(slot + lane * 16 + i * 512, at + i * 512);
      copy_weights16_if(lane < 16, slot + lane * 16 + 2048, at + 2048);
      if (++next_pair == pairs) next_pair = 0, next += WARPS;
    }
    copies_end_group();
  };
  enqueue(ring);
  enqueue(ring + PAIR_BYTES);
  if (threadIdx.x < PLACES) {
    const int place = min(static_cast<int>(threadIdx.x), all.rows * all.top_k - 1);
    weights[threadIdx.x] = lists.weights[place], chosen[threadIdx.x] = lists.ids[place] >= 0;
  }
  copies_wait<2>();
  {
    float sum[NT][4] = {};
    const float* x_at = all.x + begin * UNIT + t * 8;
#pragma unroll 1
    for (int u = 0; u < count; ++u) {
      float x[NT][8];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) load8(x[nt], x_at + min(nt * 8 + g, all.rows - 1) * all.x_stride + u * UNIT);
      const uint4 low_word = shared16(mine + u * 1024), high_word = shared16(mine + u * 1024 + 512);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) multiply(sum[nt], low_word, high_word, round8(x[nt]));
    }
    __syncwarp();
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
      store_16(mine + nt * 512, {__float_as_uint(sum[nt][0]), __float_as_uint(sum[nt][1]), __float_as_uint(sum[nt][2]), __float_as_uint(sum[nt][3])});
  }
  __syncthreads();
  float total[OUTPUTS];  // of row threadIdx.x / 16 + 16 i, column threadIdx.x % 16
  const int n = threadIdx.x % 16;
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) {
    const int row = threadIdx.x / 16 + 16 * i;
    if (row >= all.rows) break;
    const float* at = reinterpret_cast<const float*>(words + row / 8 * 512) + (n % 8 * 4 + row % 8 / 2) * 4 + n / 8 * 2 + row % 2;
    total[i] = at[0];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) total[i] += at[w * (held / 4)];
  }
  __syncthreads();
  float* outputs = reinterpret_cast<float*>(words);
  wait_for_predecessor();

  uint32_t slot = ring;
#pragma unroll 1
  for (int e = warp; e < entries; e += WARPS) {
    const uint32_t entry = entry_of[e];
    const int first = entry >> 10 & 1023, rows_of = entry >> 20;
    Rows<1> rows = {{p.inner + static_cast<int64_t>(first + (g < rows_of ? g : 0)) * p.k + t * 8}};
    float d[1][4] = {};
#pragma unroll 1
    for (int pair = 0; pair < pairs; ++pair) {
      uint4 x[1][UNITS];
      rows.load(x, 0, p.k, true);
      copies_wait<1>();
      __syncwarp();
      step_product<1>(d, read_step(slot, lane), x);
      rows.load(x, STEP, p.k, true);
      const Step s = read_step(slot + STEP_BYTES, lane);
      __syncwarp();
      enqueue(slot);
      step_product<1>(d, s, x);
      slot = slot == ring ? ring + PAIR_BYTES : ring;
      rows.at[0] += 2 * STEP;
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 2 * t + c;
      if (row >= rows_of) continue;
      float* to = outputs + order[first + row] * 16 + g;
      to[0] = d[0][c] * SCALED, to[8] = d[0][2 + c] * SCALED;
    }
  }
  __syncthreads();
  const int top_k = all.top_k;
#pragma unroll
  for (int i = 0; i < OUTPUTS; ++i) {
    const int row = threadIdx.x / 16 + 16 * i;
    if (row >= all.rows) break;
#pragma unroll 8
    for (int j = 0; j < top_k; ++j) {
      const int place = row * top_k + j;
      if (chosen[place]) total[i] = fmaf(weights[place], outputs[place * 16 + n], total[i]);
    }
    all.out[row * all.out_stride + tile * 16 + n] = total[i];
  }
}

// Blocks that should fit a multiprocessor: all of them at once where shared memory allows it; sm_120 has room for one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define DOWN_SUM 1
#else
#define DOWN_SUM 4
#endif
extern "C" __global__ void __launch_bounds__(256, DOWN_SUM) down_sum_8(const __grid_constant__ DownSum p) { down_sum<1>(p); }
extern "C" __global__ void __launch_bounds__(256, DOWN_SUM) down_sum_16(const __grid_constant__ DownSum p) { down_sum<2>(p); }
extern "C" __global__ void __launch_bounds__(256, DOWN_SUM) down_sum_32(const __grid_constant__ DownSum p) { down_sum<4>(p); }
extern "C" __global__ void __launch_bounds__(256, 3) gate_up_8(const __grid_constant__ GateUp p) { gate_up<1, READ>(p); }
extern "C" __global__ void __launch_bounds__(256, 3) gate_up_built(const __grid_constant__ GateUp p) { gate_up<1, BUILT>(p); }
extern "C" __global__ void __launch_bounds__(256, 3) gate_up_alone(const __grid_constant__ GateUp p) { gate_up<1, ALONE, 2>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) gate_up_16(const __grid_constant__ GateUp p) { gate_up<2, READ>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) gate_up_32(const __grid_constant__ GateUp p) { gate_up<4, READ>(p); }
extern "C" __global__ void __launch_bounds__(256, 3) down_8(const __grid_constant__ Down p) { down<1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) down_16(const __grid_constant__ Down p) { down<2>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) down_32(const __grid_constant__ Down p) { down<4>(p); }

// Packed rows of a checkpoint (two elements a byte, low nibble first) and their scales into tiles. Row r of tile i is `row_of`
// below: gate and up are interleaved 8 by 8 (pair != null), or rows are taken as they come. `refused` becomes the bits of a scale that the
// kernels cannot take. One thread a step's lane.
extern "C" __global__ void __launch_bounds__(256) tile_int4(const uint8_t* packed, const uint16_t* scales, const uint8_t* pair_packed, const uint16_t* pair_scales, int tiles, int k, int steps, uint8_t* to, uint32_t* refused) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int64_t i = (blockIdx.x * int64_t{256} + threadIdx.x) / 32; i < static_cast<int64_t>(tiles) * steps; i += gridDim.x * int64_t{8}) {
    const int tile = i / steps, step = i % steps;
    uint8_t* at = to + i * STEP_BYTES;
    uint32_t words[8];
    for (int unit = 0; unit < UNITS; ++unit)
      for (int upper = 0; upper < 2; ++upper) {
        const int64_t row = pair_packed ? tile * 8 + g : tile * 16 + upper * 8 + g;
        const uint8_t* from = (pair_packed && upper ? pair_packed : packed) + row * (k / 2);
        const int first = step * STEP + unit * UNIT + t * 8;
        uint32_t word = 0;
        for (int e = 0; e < 8; ++e) {
          const uint32_t nibble = first < k ? from[(first + e) / 2] >> (e % 2 * 4) & 15 : 8;
          word |= nibble << (4 * (e / 2) + 16 * (e % 2));
        }
        words[unit / 2 * 4 + unit % 2 * 2 + upper] = word;
      }
    reinterpret_cast<uint4*>(at)[lane] = {words[0], words[1], words[2], words[3]};
    reinterpret_cast<uint4*>(at + 512)[lane] = {words[4], words[5], words[6], words[7]};
    if (t < 2) {  // t = 0: scales of row g, 1: of row g + 8
      const int64_t row = pair_packed ? tile * 8 + g : tile * 16 + t * 8 + g;
      const uint16_t* from = (pair_packed && t ? pair_scales : scales) + row * (k / UNIT);
      for (int unit = 0; unit < UNITS; ++unit) {
        const int group = step * UNITS + unit;
        const uint32_t bits = group < k / UNIT ? from[group] << 16 : 0;
        const float scale = __uint_as_float(bits), size = fabsf(scale);
        if (!(size == 0 || (size >= LEAST_SCALE && size < SCALE_LIMIT))) atomicExch(refused, bits);
        reinterpret_cast<uint16_t*>(at + 1024)[g * 8 + t * 4 + unit] = static_cast<uint16_t>(__float_as_uint(scale * STORED_SCALE) >> 16);
      }
    }
  }
}
// Tiles as the kernels unpack them, row-major bf16 [tiles * 16, 128 steps], rows in the order of the tiles: for tests.
extern "C" __global__ void __launch_bounds__(256) unpack_int4(const uint8_t* from, int tiles, int steps, uint16_t* to) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int64_t i = (blockIdx.x * int64_t{256} + threadIdx.x) / 32; i < static_cast<int64_t>(tiles) * steps; i += gridDim.x * int64_t{8}) {
    Step s;
    s.w[0] = reinterpret_cast<const uint4*>(from + i * STEP_BYTES)[lane];
    s.w[1] = reinterpret_cast<const uint4*>(from + i * STEP_BYTES + 512)[lane];
    s.scales = reinterpret_cast<const uint4*>(from + i * STEP_BYTES + 1024)[g];
    for (int unit = 0; unit < UNITS; ++unit) {
      uint4 low, high;
      unpack_unit(s, unit, low, high);
      for (uint32_t* word : {&low.x, &low.y, &low.z, &low.w, &high.x, &high.y, &high.z, &high.w})
        asm("mul.rn.bf16x2 %0, %0, %1;" : "+r"(*word) : "r"(0x47804780u));  // SCALED
      uint16_t* at = to + (i / steps * 16 + g) * steps * STEP + i % steps * STEP + unit * UNIT + t * 8;
      *reinterpret_cast<uint4*>(at) = low;
      *reinterpret_cast<uint4*>(at + static_cast<int64_t>(8) * steps * STEP) = high;
    }
  }
}

// Random tiles: nibbles uniform, scales uniform in 0.5 .. 1.5 times `scale`.
extern "C" __global__ void __launch_bounds__(256) random_int4(uint8_t* to, int64_t steps, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * int64_t{256} + threadIdx.x; i < steps * (STEP_BYTES / 4); i += gridDim.x * int64_t{256}) {
    uint64_t x = (seed * 0x100000001b3ull + i) * 0x9e3779b97f4a7c15ull;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ x >> 27) * 0x94d049bb133111ebull;
    x ^= x >> 31;
    const bool nibbles = i % (STEP_BYTES / 4) < 256;
    const float a = (0.5f + (x >> 40) * 0x1p-24f) * scale, b = (0.5f + (x & 0xffffff) * 0x1p-24f) * scale;
    reinterpret_cast<uint32_t*>(to)[i] = nibbles ? static_cast<uint32_t>(x >> 16) : pack_bf16(a * STORED_SCALE, b * STORED_SCALE);
  }
}
