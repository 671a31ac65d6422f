// What the two dense kernels share: the description of a launch, and what becomes of a sum.
//
// Both sum in one order, whatever the number of rows: k is cut into `slices` slices; each slice is summed in its order of k, eight
// slices make a group, summed in order, and so are the groups.
#pragma once
#include "routing.cuh"

constexpr int SLICES = 8;  // of a group

// STORE: the sum. SWIGLU: rows of the matrix are gates above ups, silu(gate) * up. PRECISE: activations as two bf16 terms. COMBINE: the
// shared expert's sum, and on top, in the order of the row's choices, weight times the routed expert's output.
enum Mode : int { STORE = 0, SWIGLU = 1, PRECISE = 2, COMBINE = 3 };

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
  uint16_t* rounded;  // where x goes as bf16 [rows][k], or null
  int rows;
  int units;          // k / 32
  int slice;          // units of a slice
  int groups;         // of eight slices
  int jobs;
  int places;         // COMBINE: room of the list
  void* list;
  const float* outer;  // [place][n]
  int64_t top_k;
  Job job[2];
};
static_assert(sizeof(Job) == 40 && sizeof(Dense) == 152, "mirrored in Rust");

// The words of half tile `half`, unit 0.
__device__ __forceinline__ const uint8_t* half_tile(const Job& job, int half, int units, int lane) {
  return job.weights + (static_cast<int64_t>(half) * units * 32 + lane) * 16;
}
__device__ __forceinline__ int low_half(const Job& job, int tile) { return job.mode == SWIGLU ? tile : 2 * tile; }
__device__ __forceinline__ int high_half(const Job& job, int tile) { return job.mode == SWIGLU ? (job.n + 15) / 16 + tile : 2 * tile + 1; }

// One tile of 16 weight rows x 8 activation rows from `row` on.
__device__ __forceinline__ void store(const Dense& p, const Job& job, float (&d)[4], int tile, int row, int lane) {
  const int g = lane >> 2, n = tile * (job.mode == SWIGLU ? 8 : 16) + g;
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
    if (job.mode == COMBINE) {
      const Lists lists(p.list, p.places);
#pragma unroll 8
      for (int i = 0; i < p.top_k; ++i) {
        const int64_t place = at * p.top_k + i;
        if (lists.ids[place] < 0) continue;
        const float* y = p.outer + place * job.n + n;
        if (n < job.n) low += lists.weights[place] * y[0];
        if (n + 8 < job.n) high += lists.weights[place] * y[8];
      }
    }
    if (n < job.n) out[0] = low;
    if (n + 8 < job.n) out[8] = high;
  }
}
