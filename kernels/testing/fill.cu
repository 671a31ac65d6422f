// Test and bench inputs made on the card: normal-ish random bf16 (sum of four uniforms) from a hash of position and seed.
#include "../verify/params.h"

namespace {
__device__ uint64_t mix(uint64_t x) {
  x ^= x >> 30, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 27, x *= 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}
__device__ float normal(uint64_t key) {
  const uint64_t h = mix(key + 0x9e3779b97f4a7c15ull);
  const float sum = static_cast<float>(h & 0xffff) + static_cast<float>((h >> 16) & 0xffff) + static_cast<float>((h >> 32) & 0xffff) +
                    static_cast<float>(h >> 48);
  return (sum * (1.0f / 65536.0f) - 2.0f) * 1.7320508f;   // variance of a uniform is 1/12
}
}  // namespace

extern "C" __global__ void fill_normal(__nv_bfloat16* data, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count; i += static_cast<int64_t>(gridDim.x) * blockDim.x)
    data[i] = __float2bfloat16(normal(mix(seed) + i) * scale);
}

// Only the listed slots get numbers; the rest of the cache keeps what it held (tests put NaN there).
extern "C" __global__ void fill_slots(__nv_bfloat16* kv, const int* slots, int64_t count, float scale, uint64_t seed) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t at = static_cast<int64_t>(slots[i]) * kRow;
    for (int c = threadIdx.x; c < kRow; c += blockDim.x) kv[at + c] = __float2bfloat16(normal(mix(seed) + at + c) * scale);
  }
}
