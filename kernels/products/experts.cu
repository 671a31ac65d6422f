// Routed experts: INT4 weights in groups of 32, unpacked to bf16 in registers, times the rows that chose them.
//
// Work is a list made on the device (routing.cu): entries of up to 8 NT rows of one expert. First product: gate and up with SwiGLU,
// second: down. Blocks are persistent and have equal shares of all (entry, tile) items, one stretch each. Every warp keeps its own
// ring of weights filled in the background, across items and entries, so reads of memory never pause. Nothing is summed across
// entries, and k is cut by the matrix alone: a row's bits do not depend on who else chose its experts.
#include "experts.cuh"
#include "norm.cuh"

// Slots of a warp's ring. The first product keeps more of shared memory for L1, where its activations stay.
constexpr int WARPS = 8, UNITS = STEP / UNIT, UP_DEPTH = 4, DOWN_DEPTH = 6, DOWN_DEPTH_FEW = 4;
constexpr int FEW_PLACES = 64;  // of down_few

// Mirrored in src/device/cuda/products/experts.rs.
struct GateUp {
  const uint8_t* weights;  // [experts][tiles][steps][1152], a tile = 8 gate rows and their 8 up rows
  const uint16_t* x;       // [row][k] bf16
  uint16_t* inner;         // [sorted place][8 tiles] bf16
  void* list;
  const float* factors;    // [row] what sums are multiplied by, or null
  int places;
  int k;
  int tiles;               // of 16 rows, per expert
  int steps;               // k / 128, rounded up
  int slice;               // steps of one warp
  int top_k;
};
// Few rows: down of all choices (up to FEW_PLACES, of eight rows), the shared expert's, and the weighted sum, in one launch. `k` must be a
// multiple of a step.
struct DownFew {
  Down down;               // `outer` unused
  const uint8_t* shared;   // the shared expert's matrix in half tiles, [16 tiles][32 units]
  const float* x;          // its input [rows][32 units]
  int64_t x_stride;
  float* out;              // [row][16 tiles]
  int64_t out_stride;
  int units, slice;        // of the shared expert's k, and of one warp
  int rows, top_k;
};
static_assert(sizeof(GateUp) == 64 && sizeof(Down) == 48 && sizeof(DownFew) == 104, "mirrored in Rust");

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

template <int NT> __device__ __forceinline__ void gate_up(const GateUp& p) {
  constexpr bool AHEAD = NT < 4;  // activations are loaded while the next weights are waited for
  extern __shared__ uint8_t shared[];  // the warps' rings, then sums [2][warp][NT][32]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
  const int begin = warp * p.slice, count = max(0, min(p.slice, p.steps - begin));
  const uint32_t ring = smem_addr(shared) + warp * UP_DEPTH * STEP_BYTES;
  wait_for_predecessor();
  let_successor_start();
  const Lists lists(p.list, p.places);
  const bool whole = p.k % STEP == 0;
  const uint32_t items = *lists.entries * p.tiles;
  const int first = items * blockIdx.x / gridDim.x, end = items * (blockIdx.x + 1) / gridDim.x;
  Stream<1> stream(p.weights + static_cast<int64_t>(begin) * STEP_BYTES, lists, static_cast<int64_t>(p.steps) * STEP_BYTES, p.tiles, first,
                   count > 0 ? end - first : 0, count);
#pragma unroll
  for (int i = 0; i < UP_DEPTH - 1; ++i) stream.next(ring + i * STEP_BYTES, lane);

  float4* sums = reinterpret_cast<float4*>(shared + WARPS * UP_DEPTH * STEP_BYTES);
  Rows<NT> rows;
  Entry entry;
  float factor[NT][2];
  int slot = 0, tile = first % p.tiles, at_entry = first / p.tiles;
  uint4 x[NT][UNITS];
  for (int item = first; item < end; ++item) {
    if (item == first || tile == 0) {
      entry = lists.entry[at_entry++];
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const int at = nt * 8 + g;
        rows.at[nt] = p.x + static_cast<int64_t>(lists.order[entry.first + (at < entry.count ? at : 0)] / p.top_k) * p.k + t * 8;
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int mine = nt * 8 + 2 * t + c;
          factor[nt][c] = p.factors ? p.factors[lists.order[entry.first + (mine < entry.count ? mine : 0)] / p.top_k] * SCALED : SCALED;
        }
      }
      rows.touch(begin * STEP, 2 * min(count, p.k / STEP - begin), t);
      if (AHEAD) rows.load(x, min(begin, p.steps - 1) * STEP, p.k, whole);
    }
    float d[NT][4] = {};
    for (int step = 0; step < count; ++step) {
      copies_wait<UP_DEPTH - 2>();
      __syncwarp();
      const Step s = read_step(ring + slot * STEP_BYTES, lane);
      // The slot read in the round before is free.
      stream.next(ring + (slot ? slot - 1 : UP_DEPTH - 1) * STEP_BYTES, lane);
      slot = slot + 1 == UP_DEPTH ? 0 : slot + 1;
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
    if (++tile == p.tiles) tile = 0;
  }
}

template <int NT> __device__ __forceinline__ void down(const Down& p) {
  extern __shared__ uint8_t shared[];  // the warps' rings
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

// A block has one tile of 16 output columns: a warp takes every eighth entry, and its slice of the shared expert's k. What the choices
// give meets in shared memory and is added up as in dense.cuh. grid (tiles)
__device__ __forceinline__ void down_few(const DownFew& all) {
  constexpr int DEPTH = DOWN_DEPTH_FEW;
  extern __shared__ uint8_t shared[];  // the warps' rings; the shared expert's words [warp][slice][1024], the warp's sums in its first; outputs [place][16]
  __shared__ Entry entry_of[FEW_PLACES];
  __shared__ int order[FEW_PLACES], ids[FEW_PLACES];
  __shared__ float weights[FEW_PLACES];
  const Down& p = all.down;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3, tile = blockIdx.x;
  const uint32_t ring = smem_addr(shared) + warp * DEPTH * STEP_BYTES;
  uint8_t* words = shared + WARPS * DEPTH * STEP_BYTES;
  float* outputs = reinterpret_cast<float*>(words + WARPS * all.slice * 1024);
  const int begin = warp * all.slice, count = max(0, min(all.slice, all.units - begin));
  const uint8_t* low = all.shared + (static_cast<int64_t>(2 * tile) * all.units + begin) * 512 + lane * 16;
  const uint32_t mine = smem_addr(words) + warp * all.slice * 1024 + lane * 16;
#pragma unroll 1
  for (int u = 0; u < count; ++u) {
    copy16(mine + u * 1024, low + u * 512);
    copy16(mine + u * 1024 + 512, low + (all.units + u) * 512);
  }
  copies_end_group();

  // The list and the shared expert's input were ready before the predecessor (gate and up) began.
  const Lists lists(p.list, p.places);
  if (threadIdx.x < FEW_PLACES) {
    const int i = threadIdx.x;
    entry_of[i] = lists.entry[i], order[i] = lists.order[i], ids[i] = lists.ids[i], weights[i] = lists.weights[i];
  }
  const int entries = *lists.entries;
  __syncthreads();
  int next = warp, next_step = 0;
  const auto enqueue = [&](int slot) {
    if (next < entries) {
      const uint32_t step = (entry_of[next].expert * p.tiles + tile) * p.steps + next_step;
      copy_step(ring + slot * STEP_BYTES, p.weights + step * static_cast<int64_t>(STEP_BYTES), lane);
      if (++next_step == p.steps) next_step = 0, next += WARPS;
    }
    copies_end_group();
  };
#pragma unroll
  for (int i = 0; i < DEPTH - 1; ++i) enqueue(i);
  copies_wait<DEPTH - 1>();
  {
    float sum[4] = {};
    const float* x_at = all.x + min(g, all.rows - 1) * all.x_stride + begin * UNIT + t * 8;
#pragma unroll 1
    for (int u = 0; u < count; ++u) {
      float x[8];
      load8(x, x_at + u * UNIT);
      multiply(sum, shared16(mine + u * 1024), shared16(mine + u * 1024 + 512), round8(x));
    }
    __syncwarp();
    store_16(mine, {__float_as_uint(sum[0]), __float_as_uint(sum[1]), __float_as_uint(sum[2]), __float_as_uint(sum[3])});
  }
  wait_for_predecessor();
  let_successor_start();

  int slot = 0;
  for (int e = warp; e < entries; e += WARPS) {
    const Entry entry = entry_of[e];
    const Rows<1> rows = {{p.inner + static_cast<int64_t>(entry.first + (g < entry.count ? g : 0)) * p.k + t * 8}};
    float d[1][4] = {};
#pragma unroll 1
    for (int step = 0; step < p.steps; ++step) {
      uint4 x[1][UNITS];
      rows.load(x, step * STEP, p.k, true);
      copies_wait<DEPTH - 2>();
      __syncwarp();
      const Step s = read_step(ring + slot * STEP_BYTES, lane);
      enqueue(slot ? slot - 1 : DEPTH - 1);
      slot = slot + 1 == DEPTH ? 0 : slot + 1;
      step_product<1>(d, s, x);
    }
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = 2 * t + c;
      if (row >= entry.count) continue;
      float* to = outputs + order[entry.first + row] * 16 + g;
      to[0] = d[0][c] * SCALED, to[8] = d[0][2 + c] * SCALED;
    }
  }
  __syncthreads();
  const int row = threadIdx.x / 16, n = threadIdx.x % 16;
  if (row >= all.rows) return;
  const float* at = reinterpret_cast<const float*>(words) + (n % 8 * 4 + row / 2) * 4 + n / 8 * 2 + row % 2;
  const int top_k = all.top_k;
  float total = at[0];
#pragma unroll
  for (int w = 1; w < WARPS; ++w) total += at[w * all.slice * 256];
#pragma unroll 8
  for (int i = 0; i < top_k; ++i) {
    const int place = row * top_k + i;
    if (ids[place] >= 0) total = fmaf(weights[place], outputs[place * 16 + n], total);
  }
  all.out[row * all.out_stride + tile * 16 + n] = total;
}

// Blocks that should fit a multiprocessor: all of them at once where shared memory allows it; sm_120 has room for one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define DOWN_FEW 1
#else
#define DOWN_FEW 4
#endif
extern "C" __global__ void __launch_bounds__(256, DOWN_FEW) down_few_rows(const __grid_constant__ DownFew p) { down_few(p); }
extern "C" __global__ void __launch_bounds__(256, 3) gate_up_8(const __grid_constant__ GateUp p) { gate_up<1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) gate_up_16(const __grid_constant__ GateUp p) { gate_up<2>(p); }
extern "C" __global__ void __launch_bounds__(256, 1) gate_up_32(const __grid_constant__ GateUp p) { gate_up<4>(p); }
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
