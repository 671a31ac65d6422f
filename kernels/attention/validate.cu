// Mode `validate`: baseline against custom outputs, summed per layer on the device; and the planted faults of tests.
#include <cuda_bf16.h>

#include "shape.cuh"

// Mirror of `Sums` in src/device/cuda/attention/validation.rs.
struct Sums {
  double dot, own, other;
  unsigned long long argmax_equal, rows;
  uint32_t max_abs;              // bits of a non-negative f32, which order as the values do
  uint32_t max_ulp;
};
static_assert(sizeof(Sums) == 48, "mirrored in Rust");

namespace {

constexpr int kWarps = 8;

__device__ bool is_nan(uint32_t bits) { return (bits & 0x7fff) > 0x7f80; }

// Steps between two values on the bf16 grid, zero counted once.
__device__ uint32_t ulp_distance(uint32_t a, uint32_t b) {
  if (is_nan(a) || is_nan(b)) return is_nan(a) && is_nan(b) ? 0 : ~0u;
  const int x = a & 0x8000 ? -static_cast<int>(a & 0x7fff) : static_cast<int>(a);
  const int y = b & 0x8000 ? -static_cast<int>(b & 0x7fff) : static_cast<int>(b);
  return abs(x - y);
}

// The place of a magnitude: compares by magnitude, then by the lower column.
__device__ uint32_t place(uint32_t bits, int column) { return (bits & 0x7fff) << 16 | (kLatent - 1 - column); }

template <class T, class F>
__device__ T warp_reduce(T x, F f) {
  for (int step = 16; step > 0; step /= 2) x = f(x, __shfl_xor_sync(~0u, x, step));
  return x;
}

}  // namespace

// One warp a row and head.
extern "C" __global__ void __launch_bounds__(32 * kWarps)
    compare_outputs(const __nv_bfloat16* baseline, const __nv_bfloat16* custom, const uint32_t* counts, int rows, int heads, Sums* sums) {
  const int lane = threadIdx.x % 32, item = blockIdx.x * kWarps + threadIdx.x / 32;
  if (item >= min(static_cast<int>(counts[0]), rows) * heads) return;
  double dot = 0, own = 0, other = 0;
  float worst = 0.0f;
  uint32_t ulp = 0, best_a = 0, best_b = 0;
  for (int i = 0; i < kLatent / 32; ++i) {
    const int column = 32 * i + lane;
    const int64_t at = static_cast<int64_t>(item) * kLatent + column;
    const float x = __bfloat162float(baseline[at]), y = __bfloat162float(custom[at]);
    const uint32_t a = __bfloat16_as_ushort(baseline[at]), b = __bfloat16_as_ushort(custom[at]);
    const float off = fabsf(x - y);
    // A NaN on either side must show: it becomes an infinite difference.
    worst = fmaxf(worst, off == off ? off : __int_as_float(0x7f800000));
    ulp = max(ulp, ulp_distance(a, b));
    best_a = max(best_a, place(a, column)), best_b = max(best_b, place(b, column));
    dot += static_cast<double>(x) * y, own += static_cast<double>(x) * x, other += static_cast<double>(y) * y;
  }
  const auto add = [](double x, double y) { return x + y; };
  const auto most = [](uint32_t x, uint32_t y) { return max(x, y); };
  dot = warp_reduce(dot, add), own = warp_reduce(own, add), other = warp_reduce(other, add);
  const uint32_t worst_bits = warp_reduce(__float_as_uint(worst), most);
  ulp = warp_reduce(ulp, most), best_a = warp_reduce(best_a, most), best_b = warp_reduce(best_b, most);
  if (lane != 0) return;
  atomicAdd(&sums->dot, dot), atomicAdd(&sums->own, own), atomicAdd(&sums->other, other);
  atomicMax(&sums->max_abs, worst_bits), atomicMax(&sums->max_ulp, ulp);
  atomicAdd(&sums->argmax_equal, (best_a & 0xffff) == (best_b & 0xffff) ? 1ull : 0ull);
  atomicAdd(&sums->rows, 1ull);
}

// The custom kernel's inputs with a planted fault, one block of 64 threads a group. Kinds: 0 = the mask of row i is that of row
// i + 1; 1 = a draft row sees no other draft row; 2 = the first 128 tokens of the prefix are left out.
extern "C" __global__ void plant_fault(int kind, const int32_t* firsts, const uint64_t* masks, const int32_t* begins,
                                       const int32_t* prefixes, uint64_t* masks_out, int32_t* begins_out, int32_t* prefixes_out) {
  const int group = blockIdx.x, first = firsts[group], rows = firsts[group + 1] - first, row = threadIdx.x;
  if (row < rows) {
    uint64_t mask = masks[first + (kind == 0 ? (row + 1) % rows : row)];
    if (kind == 1) mask &= 1ull << row;
    masks_out[first + row] = mask;
  }
  if (row == 0) {
    const int dropped = kind == 2 ? min(prefixes[group], 128) : 0;
    begins_out[group] = begins[group] + dropped;
    prefixes_out[group] = prefixes[group] - dropped;
  }
}
