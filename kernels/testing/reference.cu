// The dense reference that tests compare with: one block per sampled (row, head), every key in turn, scores in f32, sums in f64,
// the mask as given, nothing shared with the kernels under test. Slow and plain on purpose.
#include "../verify/params.h"

// `samples`: [grid] of row x heads + head. `scratch`: [grid][scratch_keys] f32. `out`: [grid][512], `lse`: [grid], natural log.
extern "C" __global__ void __launch_bounds__(512) reference_dense(const VerifyParams p, const int* samples, float* scratch, int64_t scratch_keys,
                                                                  float* out, float* lse) {
  const int heads = 1 << p.heads_log2, row = samples[blockIdx.x] / heads;
  int request = 0;
  while (p.qo_indptr[request + 1] <= row) ++request;
  const int q_begin = p.qo_indptr[request], q_len = p.qo_indptr[request + 1] - q_begin;
  const int kv_begin = p.kv_begin[request], prefix = p.kv_len[request];
  const __nv_bfloat16* q = p.q + static_cast<int64_t>(samples[blockIdx.x]) * kRow;
  float* scores = scratch + blockIdx.x * scratch_keys;
  const float scale = p.scale_log2 * 0.69314718055994531f;
  auto row_of = [&](int key) {
    const int slot = key < prefix ? p.kv_indices[kv_begin + key] : p.draft_slots[q_begin + key - prefix];
    return p.kv + static_cast<int64_t>(slot) * kRow;
  };
  auto seen = [&](int key) { return key < prefix || ((p.mask[row] >> (key - prefix)) & 1); };

  __shared__ float query[kRow];
  __shared__ double part[512];
  for (int i = threadIdx.x; i < kRow; i += blockDim.x) query[i] = __bfloat162float(q[i]);
  __syncthreads();
  const int keys = prefix + q_len;
  float top = -INFINITY;
  for (int key = threadIdx.x; key < keys; key += blockDim.x) {
    float s = -INFINITY;
    if (seen(key)) {
      const __nv_bfloat16* k = row_of(key);
      double sum = 0;
      for (int i = 0; i < kRow; ++i) sum += static_cast<double>(query[i]) * static_cast<double>(__bfloat162float(k[i]));
      s = static_cast<float>(sum) * scale;
    }
    scores[key] = s;
    top = fmaxf(top, s);
  }
  part[threadIdx.x] = top;
  __syncthreads();
  for (int n = blockDim.x / 2; n > 0; n /= 2) {
    if (threadIdx.x < n) part[threadIdx.x] = fmax(part[threadIdx.x], part[threadIdx.x + n]);
    __syncthreads();
  }
  top = static_cast<float>(part[0]);
  __syncthreads();
  double total = 0;
  for (int key = threadIdx.x; key < keys; key += blockDim.x) {
    const double e = scores[key] == -INFINITY ? 0.0 : exp(static_cast<double>(scores[key]) - top);
    scores[key] = static_cast<float>(e);
    total += e;
  }
  part[threadIdx.x] = total;
  __syncthreads();
  for (int n = blockDim.x / 2; n > 0; n /= 2) {
    if (threadIdx.x < n) part[threadIdx.x] += part[threadIdx.x + n];
    __syncthreads();
  }
  total = part[0];
  double o = 0;
#pragma unroll 8
  for (int key = 0; key < keys; ++key) {
    const float w = scores[key];
    if (w != 0.0f) o += static_cast<double>(w) * static_cast<double>(__bfloat162float(row_of(key)[threadIdx.x]));
  }
  out[static_cast<int64_t>(blockIdx.x) * kLatent + threadIdx.x] = total > 0 ? static_cast<float>(o / total) : 0.0f;
  if (threadIdx.x == 0) lse[blockIdx.x] = total > 0 ? static_cast<float>(log(total) + top) : -INFINITY;
}
