// What the dense kernels share: the description of a launch, and what becomes of a sum.
//
// All sum in one order, whatever the number of rows: k is cut into `slices` slices; each slice is summed in its order of k, eight
// slices make a group, summed in order, and so are the groups.
//
// A norm in front of a product is taken apart: activations are x times the norm's weight, and what is left of the norm, a factor a
// row, multiplies the row's sums. So the sum of squares is not waited for before the product.
#pragma once
#include "../attention/latent.cuh"
#include "norm.cuh"
#include "routing.cuh"

// STORE: the sum. SWIGLU: rows of the matrix are gates above ups, silu(gate) * up. PRECISE: activations as two bf16 terms. COMBINE: the
// shared expert's sum, and on top, in the order of the row's choices, weight times the routed expert's output. ROTATE: queries, whose
// rotary columns are rotated.
enum Mode : int { STORE = 0, SWIGLU = 1, PRECISE = 2, COMBINE = 3, ROTATE = 4 };

// One matrix of a launch. Mirrored in src/device/cuda/products/linear.rs.
struct Job {
  const uint8_t* weights;
  float* out;
  int64_t out_stride;
  int n;           // rows of the matrix
  int mode;
  int first_tile;  // its first tile in the launch
  int tiles;       // of 16 rows (SWIGLU: 8 gate rows and their 8 up rows)
};
struct Dense {
  const float* x;
  int64_t x_stride;
  uint16_t* rounded;  // where the activations go as bf16 [rows][k], or null
  int rows;
  int units;          // k / 32
  int slice;          // units of a slice
  int groups;         // of eight slices
  int jobs;
  int places;         // COMBINE: room of the list
  void* list;
  const float* outer;  // [place][n]
  int64_t top_k;
  const uint16_t* half;  // the kernels for bf16 rows: activations [rows][k] in place of x,
  const uint16_t* rest;  // and for PRECISE their second terms
  const float* factors;  // [rows] what a row's sums are multiplied by, or null
  Norm norm;             // few rows: the norm in front, if it has a weight
  Latents latents;       // ROTATE; few rows: whose latents the launch also stores, if it has a cache
  Job job[2];
};
static_assert(sizeof(Job) == 40 && sizeof(Dense) == 304, "mirrored in Rust");

// The words of half tile `half`, unit 0.
__device__ __forceinline__ const uint8_t* half_tile(const Job& job, int half, int units, int lane) {
  return job.weights + (static_cast<int64_t>(half) * units * 32 + lane) * 16;
}
__device__ __forceinline__ int low_half(const Job& job, int tile) { return job.mode == SWIGLU ? tile : 2 * tile; }
__device__ __forceinline__ int high_half(const Job& job, int tile) { return job.mode == SWIGLU ? (job.n + 15) / 16 + tile : 2 * tile + 1; }

// Rotates the sums of a tile of rotary columns; a pair lies in two lanes. All lanes must call.
__device__ __forceinline__ void rotate_tile(const Latents& p, float (&d)[4], int tile, int row, int rows, int lane) {
  constexpr int TILES = kQuery / 16, FIRST = kNope / 16;  // of a head
  if (tile % TILES < FIRST) return;
  const int g = lane >> 2, live = min(static_cast<int>(p.counts[0]), rows);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(~0u, d[i], 4);
    const int at = row + 2 * (lane & 3) + i % 2, pair = (tile % TILES - FIRST) * 8 + (i / 2 * 8 + g) / 2;
    if (at >= live) continue;
    const int64_t angle = static_cast<int64_t>(p.positions[at]) * (kRope / 2) + pair;
    d[i] = turned(d[i], other, g % 2, p.cos[angle], p.sin[angle]);
  }
}

// One tile of 16 weight rows x 8 activation rows from `row` on. `factors`: of rows 0, 1, ..., or null. All lanes must call. COMBINES: only
// such kernels know the mode COMBINE, which is half of the code.
template <bool COMBINES> __device__ __forceinline__ void store(const Dense& p, const Job& job, float (&d)[4], int tile, int row, int lane, const float* factors) {
  const int g = lane >> 2, n = tile * (job.mode == SWIGLU ? 8 : 16) + g;
  if (factors)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const float factor = factors[min(row + 2 * (lane & 3) + c, p.rows - 1)];
      d[c] = __fmul_rn(d[c], factor), d[2 + c] = __fmul_rn(d[2 + c], factor);
    }
  if (job.mode == ROTATE) rotate_tile(p.latents, d, tile, row, p.rows, lane);
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const int at = row + 2 * (lane & 3) + c;
    if (at >= p.rows) break;
    float* out = job.out + at * job.out_stride + n;
    float low = d[c], high = d[2 + c];
    if (job.mode == SWIGLU) {
      out[0] = swiglu(low, high);
      continue;
    }
    if (COMBINES && job.mode == COMBINE) {
      const Lists lists(p.list, p.places);
#pragma unroll 8
      for (int i = 0; i < p.top_k; ++i) {
        const int64_t place = at * p.top_k + i;
        if (lists.ids[place] < 0) continue;
        const float* y = p.outer + place * job.n + n;
        if (n < job.n) low = fmaf(lists.weights[place], y[0], low);
        if (n + 8 < job.n) high = fmaf(lists.weights[place], y[8], high);
      }
    }
    if (n < job.n) out[0] = low;
    if (n + 8 < job.n) out[8] = high;
  }
}
