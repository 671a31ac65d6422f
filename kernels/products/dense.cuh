// What the two dense kernels share: the description of a launch, and what becomes of a sum.
//
// Both sum in one order, whatever the number of rows: k is cut into `slices` slices; each slice is summed in its order of k, eight
// slices make a group, summed in order, and so are the groups.
#pragma once
#include "fragments.cuh"

constexpr int SLICES = 8;  // of a group

enum Mode : int { STORE = 0, SWIGLU = 1, PRECISE = 2 };

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
  int unused;
  Job job[2];
};
static_assert(sizeof(Job) == 40 && sizeof(Dense) == 128, "mirrored in Rust");

// The words of half tile `half`, unit 0.
__device__ __forceinline__ const uint8_t* half_tile(const Job& job, int half, int units, int lane) {
  return job.weights + (static_cast<int64_t>(half) * units * 32 + lane) * 16;
}
__device__ __forceinline__ int low_half(const Job& job, int tile) { return job.mode == SWIGLU ? tile : 2 * tile; }
__device__ __forceinline__ int high_half(const Job& job, int tile) { return job.mode == SWIGLU ? (job.n + 15) / 16 + tile : 2 * tile + 1; }

// One tile of 16 weight rows x 8 activation rows from `row` on.
__device__ __forceinline__ void store(const Job& job, const float (&d)[4], int tile, int row, int rows, int lane) {
  const int g = lane >> 2;
  row += 2 * (lane & 3);
  if (job.mode == SWIGLU) {
    float* out = job.out + row * job.out_stride + tile * 8 + g;
    if (row < rows) out[0] = swiglu(d[0], d[2]);
    if (row + 1 < rows) out[job.out_stride] = swiglu(d[1], d[3]);
    return;
  }
  const int n = tile * 16 + g;
  float* out = job.out + row * job.out_stride + n;
  if (row < rows) {
    if (n < job.n) out[0] = d[0];
    if (n + 8 < job.n) out[8] = d[2];
  }
  if (row + 1 < rows) {
    if (n < job.n) out[job.out_stride] = d[1];
    if (n + 8 < job.n) out[job.out_stride + 8] = d[3];
  }
}
