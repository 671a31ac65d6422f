// Routed experts: INT4 weights in groups of 32, unpacked to bf16 in registers, times the rows that chose them.
//
// Work is a list made on the device (routing.cu): entries of up to 8 NT rows of one expert. First product: gate and up with SwiGLU,
// second: down, both by persistent blocks over (entry, part) items. Nothing is summed across entries, so a row's bits do not depend
// on who else chose its experts.
#include "routing.cuh"

constexpr int TILES = 4, HALVES = 2, WARPS = TILES * HALVES, UNITS = STEP / UNIT;

// Mirrored in src/device/cuda/products/experts.rs.
struct GateUp {
  const uint8_t* weights;  // [experts][tiles][steps][1152], a tile = 8 gate rows and their 8 up rows
  const float* x;
  int64_t x_stride;
  uint16_t* inner;         // [sorted place][8 tiles] bf16
  float* partial;
  uint32_t* arrived;
  void* list;
  int places;
  int k;
  int tiles;               // of 16 rows, per expert
  int steps;               // k / 128, rounded up
  int slice;               // steps of one warp
  int piece;               // steps of a slice that lie in shared memory at a time
  int stretches;           // k is cut into stretches of two slices
  int top_k;
};
struct Down {
  const uint8_t* weights;  // [experts][tiles][steps][1152]
  const uint16_t* inner;   // [sorted place][k] bf16
  float* outer;            // [place][16 tiles]
  void* list;
  int places;
  int k;
  int tiles;
  int steps;
  int parts;               // items of an entry
};
static_assert(sizeof(GateUp) == 88 && sizeof(Down) == 56, "mirrored in Rust");

template <int NT> __device__ __forceinline__ void gate_up(const GateUp& p) {
  constexpr int DEPTH = NT == 4 ? 2 : 4;
  extern __shared__ uint4 xs[];  // [half][piece][UNITS][NT][32]
  __shared__ uint32_t turn;
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, wm = warp % TILES, wk = warp / TILES;
  const int groups = (p.tiles + TILES - 1) / TILES, per_entry = groups * p.stretches;
  wait_for_predecessor();
  let_successor_start();
  const Lists lists(p.list, p.places);
  const int items = *lists.entries * per_entry;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Entry entry = lists.entry[item / per_entry];
    const int group = item % per_entry / p.stretches, stretch = item % p.stretches;
    const int tile = group * TILES + wm, begin = (stretch * HALVES + wk) * p.slice;
    const int count = tile < p.tiles ? max(0, min(p.slice, p.steps - begin)) : 0;
    const uint8_t* at = p.weights + ((static_cast<int64_t>(entry.expert) * p.tiles + tile) * p.steps + begin) * STEP_BYTES;
    Step ring[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i)
      if (i < count) load_step(ring[i], at + i * STEP_BYTES, lane);

    float d[NT][4] = {};
    const int per_half = p.piece * UNITS * NT * 32;
    for (int base = 0; base < p.slice; base += DEPTH) {
      if (base % p.piece == 0) {
        __syncthreads();
        const int here = min(p.piece, p.slice - base) * UNITS, words = entry.count * 4;
        for (int i = threadIdx.x; i < HALVES * here * words; i += WARPS * 32) {
          const int half = i / (here * words), rest = i % (here * words), unit = rest / words, word = rest % words;
          const int from = ((stretch * HALVES + half) * p.slice + base) * UNITS + unit;
          const int row = lists.order[entry.first + word / 4] / p.top_k;
          float x[8] = {};  // zeros beyond k: weights are zero there, and a NaN would get through
          if (from * UNIT < p.k) load8(x, p.x + row * p.x_stride + from * UNIT + (word & 3) * 8);
          xs[half * per_half + unit * NT * 32 + word] = round8(x);
        }
        __syncthreads();
      }
      const uint4* b = xs + wk * per_half + base % p.piece * UNITS * NT * 32 + lane;
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        const int step = base + i;
        if (step >= count) break;
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
          uint4 low, high;
          unpack_unit(ring[i], unit, low, high);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) multiply(d[nt], low, high, b[((i * UNITS + unit) * NT + nt) * 32]);
        }
        if (step + DEPTH < count) load_step(ring[i], at + (step + DEPTH) * STEP_BYTES, lane);
      }
    }

    // Halves in order, then stretches in order, as in dense.cu.
    __syncthreads();
    float4* sums = reinterpret_cast<float4*>(xs);
    if (wk == 1)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) sums[(nt * TILES + wm) * 32 + lane] = {d[nt][0], d[nt][1], d[nt][2], d[nt][3]};
    __syncthreads();
    const auto store = [&](const float (&v)[4], int nt) {
      if (tile >= p.tiles) return;
      const int row = nt * 8 + 2 * (lane & 3);
      uint16_t* to = p.inner + (static_cast<int64_t>(entry.first) + row) * p.tiles * 8 + tile * 8 + (lane >> 2);
      const uint32_t pair = pack_bf16(swiglu(v[0], v[2]), swiglu(v[1], v[3]));
      if (row < entry.count) to[0] = static_cast<uint16_t>(pair);
      if (row + 1 < entry.count) to[p.tiles * 8] = static_cast<uint16_t>(pair >> 16);
    };
    if (wk == 0)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const float4 other = sums[(nt * TILES + wm) * 32 + lane];
        d[nt][0] += other.x, d[nt][1] += other.y, d[nt][2] += other.z, d[nt][3] += other.w;
        if (p.stretches == 1) store(d[nt], nt);
      }
    if (p.stretches == 1) continue;
    const int place = item / p.stretches;
    float4* partial = reinterpret_cast<float4*>(p.partial) + static_cast<int64_t>(place) * p.stretches * NT * TILES * 32;
    if (wk == 0)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt)
        partial[((stretch * NT + nt) * TILES + wm) * 32 + lane] = {d[nt][0], d[nt][1], d[nt][2], d[nt][3]};
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) turn = atomicAdd(p.arrived + place, 1);
    __syncthreads();
    if (turn != p.stretches - 1) continue;
    __threadfence();
    if (threadIdx.x == 0) p.arrived[place] = 0;
    for (int nt = wk; nt < NT; nt += HALVES) {
      float sum[4] = {};
#pragma unroll 4
      for (int s = 0; s < p.stretches; ++s) {
        const float4 part = __ldcg(partial + ((s * NT + nt) * TILES + wm) * 32 + lane);
        sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
      }
      store(sum, nt);
    }
  }
}

template <int NT> __device__ __forceinline__ void down(const Down& p) {
  constexpr int DEPTH = NT == 4 ? 2 : 4;
  extern __shared__ uint4 xs[];  // [steps][UNITS][NT][32]
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int per_part = (p.tiles + p.parts - 1) / p.parts;
  wait_for_predecessor();
  let_successor_start();
  const Lists lists(p.list, p.places);
  const int items = *lists.entries * p.parts;
  for (int item = blockIdx.x; item < items; item += gridDim.x) {
    const Entry entry = lists.entry[item / p.parts];
    const int first = item % p.parts * per_part + warp, end = min((item % p.parts + 1) * per_part, p.tiles);
    const int tiles = first < end ? (end - first + WARPS - 1) / WARPS : 0, total = tiles * p.steps;
    // The warp's steps, tile after tile (WARPS tiles apart).
    const uint8_t* at = p.weights + (static_cast<int64_t>(entry.expert) * p.tiles + first) * p.steps * STEP_BYTES;
    const int64_t apart = static_cast<int64_t>(WARPS) * p.steps * STEP_BYTES;
    const uint8_t* next = at;
    int next_step = 0;
    const auto advance = [&] {
      if (++next_step == p.steps) next_step = 0, at += apart, next = at;
      else next += STEP_BYTES;
    };
    Step ring[DEPTH];
#pragma unroll
    for (int i = 0; i < DEPTH; ++i)
      if (i < total) load_step(ring[i], next, lane), advance();
    __syncthreads();
    for (int i = threadIdx.x; i < p.steps * UNITS * entry.count * 4; i += WARPS * 32) {
      const int unit = i / (entry.count * 4), word = i % (entry.count * 4);
      const uint16_t* from = p.inner + (static_cast<int64_t>(entry.first) + word / 4) * p.k + unit * UNIT + (word & 3) * 8;
      xs[unit * NT * 32 + word] = unit * UNIT < p.k ? *reinterpret_cast<const uint4*>(from) : uint4{};
    }
    __syncthreads();

    float d[NT][4] = {};
    int tile = first, step = 0;
    for (int base = 0; base < total; base += DEPTH) {
#pragma unroll
      for (int i = 0; i < DEPTH; ++i) {
        if (base + i >= total) break;
        const uint4* b = xs + step * UNITS * NT * 32 + lane;
#pragma unroll
        for (int unit = 0; unit < UNITS; ++unit) {
          uint4 low, high;
          unpack_unit(ring[i], unit, low, high);
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) multiply(d[nt], low, high, b[(unit * NT + nt) * 32]);
        }
        if (base + i + DEPTH < total) load_step(ring[i], next, lane), advance();
        if (++step < p.steps) continue;
        const int n = tile * 16 + (lane >> 2);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            const int row = nt * 8 + 2 * (lane & 3) + c;
            if (row < entry.count) {
              float* to = p.outer + static_cast<int64_t>(lists.order[entry.first + row]) * p.tiles * 16 + n;
              to[0] = d[nt][c], to[8] = d[nt][2 + c];
            }
          }
          d[nt][0] = d[nt][1] = d[nt][2] = d[nt][3] = 0;
        }
        step = 0, tile += WARPS;
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(256, 2) gate_up_8(const __grid_constant__ GateUp p) { gate_up<1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) gate_up_16(const __grid_constant__ GateUp p) { gate_up<2>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) gate_up_32(const __grid_constant__ GateUp p) { gate_up<4>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) down_8(const __grid_constant__ Down p) { down<1>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) down_16(const __grid_constant__ Down p) { down<2>(p); }
extern "C" __global__ void __launch_bounds__(256, 2) down_32(const __grid_constant__ Down p) { down<4>(p); }

// out[row] += sum over choices, in their order, of weight times the expert's output; `out` holds the shared expert's.
extern "C" __global__ void __launch_bounds__(256) combine(const float* outer, void* list, int places, const uint32_t* counts, int top_k, int hidden, float* out, int64_t stride) {
  wait_for_predecessor();
  let_successor_start();
  const int row = blockIdx.y, c = blockIdx.x * blockDim.x + threadIdx.x;
  if (c >= hidden / 4 || row >= counts[0]) return;
  const Lists lists(list, places);
  float4* to = reinterpret_cast<float4*>(out + row * stride) + c;
  float4 sum = *to;
  for (int i = 0; i < top_k; ++i) {
    const int64_t place = static_cast<int64_t>(row) * top_k + i;
    if (lists.ids[place] < 0) continue;
    const float w = lists.weights[place];
    const float4 y = reinterpret_cast<const float4*>(outer + place * hidden)[c];
    sum.x += w * y.x, sum.y += w * y.y, sum.z += w * y.z, sum.w += w * y.w;
  }
  *to = sum;
}

// Packed rows of a checkpoint (two elements a byte, low nibble first) and their scales into tiles. Row r of tile i is `row_of`
// below: gate and up are interleaved 8 by 8 (pair != null), or rows are taken as they come. One thread a step's lane.
extern "C" __global__ void __launch_bounds__(256) tile_int4(const uint8_t* packed, const uint16_t* scales, const uint8_t* pair_packed, const uint16_t* pair_scales, int tiles, int k, int steps, uint8_t* to) {
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
        reinterpret_cast<uint16_t*>(at + 1024)[g * 8 + t * 4 + unit] = group < k / UNIT ? from[group] : 0;
      }
    }
  }
}
// Tiles as the kernels unpack them, row-major bf16 [tiles * 16, 128 steps], rows in the order of the tiles: for tests.
extern "C" __global__ void __launch_bounds__(256) unpack_int4(const uint8_t* from, int tiles, int steps, uint16_t* to) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  for (int64_t i = (blockIdx.x * int64_t{256} + threadIdx.x) / 32; i < static_cast<int64_t>(tiles) * steps; i += gridDim.x * int64_t{8}) {
    Step s;
    load_step(s, from + i * STEP_BYTES, lane);
    for (int unit = 0; unit < UNITS; ++unit) {
      uint4 low, high;
      unpack_unit(s, unit, low, high);
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
    reinterpret_cast<uint32_t*>(to)[i] = nibbles ? static_cast<uint32_t>(x >> 16) : pack_bf16(a, b);
  }
}
