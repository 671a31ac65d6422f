// What ranks gathered from each other, brought into shape: sums in rank order, or columns side by side.
#include <cstdint>

// x[i] = g[0][i] + g[1][i] + ...: the order is fixed, so a row's bits do not depend on how many rows travel with it.
extern "C" __global__ void ranks_sum(const float* __restrict__ gathered, float* __restrict__ x, uint32_t count, uint32_t ranks) {
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    float sum = gathered[i];
    for (uint32_t r = 1; r < ranks; ++r) sum += gathered[static_cast<size_t>(r) * count + i];
    x[i] = sum;
  }
}

// out[row][r * width + c] = g[r][row][c].
extern "C" __global__ void ranks_columns(const float* __restrict__ gathered, float* __restrict__ out, uint32_t rows, uint32_t width,
                                         uint32_t ranks) {
  const uint64_t count = static_cast<uint64_t>(rows) * width * ranks;
  for (uint64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += static_cast<uint64_t>(gridDim.x) * blockDim.x) {
    const uint32_t column = i % width, r = i / width % ranks;
    const uint64_t row = i / width / ranks;
    out[i] = gathered[(r * static_cast<uint64_t>(rows) + row) * width + column];
  }
}
