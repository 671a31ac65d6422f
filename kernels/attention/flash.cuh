// One warp's part of attention over keys and values in shared memory: 16 query rows against tiles of 64 keys, with a running maximum,
// sum and output. Used by prompt.cu (head widths 192 and 128) and drafter.cu (64 or 128).
//
// Rows in shared memory are padded by 16 bytes, so that their stride is an odd number of 16-byte units and no ldmatrix meets a bank
// conflict. Scores stay in registers and become the left operand of the second product there.
#pragma once
#include "../verify/ptx.cuh"

constexpr int kKeys = 64;             // keys a tile

template <int kKeyWidth, int kValueWidth>
struct Flash {
  static constexpr int kKeyStride = kKeyWidth + 8, kValueStride = kValueWidth + 8;   // elements
  static constexpr int kSteps = kKeyWidth / 16;

  uint32_t q[kSteps][4];              // query fragments, bf16
  float o[kValueWidth / 8][4];        // output, not normalised: rows lane / 4 and lane / 4 + 8
  float m[2], l[2];                   // maximum in log2 units; sum of this thread's columns

  __device__ void clear() {
#pragma unroll
    for (auto& part : o) part[0] = part[1] = part[2] = part[3] = 0.0f;
    m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.0f;
  }

  using Scores = float[kKeys / 8][4];

  // Scores of a tile's keys, unscaled.
  __device__ void score(const __nv_bfloat16* keys, Scores& s) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (auto& part : s) part[0] = part[1] = part[2] = part[3] = 0.0f;
#pragma unroll
    for (int k = 0; k < kSteps; ++k)
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4(b, smem_addr(keys + (16 * n + lane % 8 + 8 * (lane / 16)) * kKeyStride + 16 * k + 8 * (lane / 8 % 2)));
        mma(s[2 * n], q[k], b[0], b[1]);
        mma(s[2 * n + 1], q[k], b[2], b[3]);
      }
  }

  // Row half h sees columns first[h] .. last[h] only.
  __device__ static void hide(Scores& s, const int (&first)[2], const int (&last)[2]) {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = 8 * n + 2 * (threadIdx.x % 4) + i % 2;
        if (column < first[i / 2] || column >= last[i / 2]) s[n][i] = -INFINITY;
      }
  }

  // Scores become probabilities against the running maximum; what was summed so far is rescaled to it.
  __device__ void soften(Scores& s, float scale_log2) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = -INFINITY;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n) top = fmaxf(top, fmaxf(s[n][2 * h], s[n][2 * h + 1]));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
      top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
      const float grown = fmaxf(m[h], top * scale_log2);
      // A row that has seen nothing yet keeps m = -inf; 0 stands in for it, so that no inf - inf appears.
      const float base = grown == -INFINITY ? 0.0f : grown;
      const float rescale = exp2_fast(m[h] - base);
      m[h] = grown;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          s[n][2 * h + i] = exp2_fast(fmaf(s[n][2 * h + i], scale_log2, -base));
          sum += s[n][2 * h + i];
        }
      l[h] = l[h] * rescale + sum;
#pragma unroll
      for (auto& part : o) part[2 * h] *= rescale, part[2 * h + 1] *= rescale;
    }
  }

  // Adds probabilities x values.
  __device__ void add(const Scores& s, const __nv_bfloat16* values) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      const uint32_t p[4] = {pack_bf16(s[2 * k][0], s[2 * k][1]), pack_bf16(s[2 * k][2], s[2 * k][3]),
                             pack_bf16(s[2 * k + 1][0], s[2 * k + 1][1]), pack_bf16(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
      for (int n = 0; n < kValueWidth / 16; ++n) {
        uint32_t b[4];
        ldmatrix_x4_trans(b, smem_addr(values + (16 * k + lane % 16) * kValueStride + 16 * n + 8 * (lane / 16)));
        mma(o[2 * n], p, b[0], b[1]);
        mma(o[2 * n + 1], p, b[2], b[3]);
      }
    }
  }

  // Sum over the four threads that share a row.
  __device__ float total(int h) const {
    float sum = l[h];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    return sum;
  }
};
