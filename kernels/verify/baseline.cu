// The baseline verify kernel: one pass over the KV, no split, one block per draft row (and per 16 heads), one tile at a time.
// It is what `--verify off` runs and what the tree kernel is compared with, so it is written to be read.
//
// A draft row sees its request's prefix and then its own ancestors in the draft, in that order. The block walks exactly this list
// of keys, so there is nothing to mask inside the tree, and a row's result depends on its own keys only: it is the same alone or
// in a batch, in a chain or in a tree, before or after its ancestors are committed.
//
// Four warps share the 576 columns: warp c has latent columns [128c, 128c + 128) and rope columns [16c, 16c + 16).
#include "params.h"
#include "softmax.cuh"

namespace {

constexpr int kWarps = 4;
constexpr int kPadded = kRow + 8;          // elements between rows in shared memory: 1168 bytes, free of bank conflicts
constexpr int kSteps = 9;                  // k-steps of 16 columns in a warp's slice: 8 latent, 1 rope

struct Shared {
  __nv_bfloat16 kv[kTile][kPadded];
  __nv_bfloat16 p[kTile][kTile + 8];       // probabilities of 16 heads x 16 tokens
  float scores[kWarps][kTile][kTile];      // each warp's part of the scores: [slice][head][token]
  float rescale[kTile];
  float total[kTile];
};

// First column of k-step `step` in slice `c`.
__device__ int step_column(int c, int step) { return step < 8 ? 128 * c + 16 * step : kLatent + 16 * c; }

// Slot of the key at place `key` of this row's list: prefix first, then the ancestors (set bits of `mask`, lowest first).
__device__ int key_slot(const VerifyParams& p, int kv_begin, int prefix, int q_begin, uint64_t mask, int key) {
  if (key < prefix) return p.kv_indices[kv_begin + key];
  for (int skip = key - prefix; skip > 0; --skip) mask &= mask - 1;
  return p.draft_slots[q_begin + __ffsll(static_cast<long long>(mask)) - 1];
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kWarps * 32) verify_baseline(const VerifyParams p) {
  __shared__ __align__(16) Shared sm;
  const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int heads = 1 << p.heads_log2, head0 = blockIdx.y * 16;

  // Which request does this row belong to? Rows past the last request are padding and stay untouched.
  int request = 0;
  while (request < p.batch && p.qo_indptr[request + 1] <= row) ++request;
  if (request == p.batch) return;
  const int q_begin = p.qo_indptr[request], q_len = p.qo_indptr[request + 1] - q_begin;
  const int kv_begin = p.kv_begin[request], prefix = max(p.kv_len[request], 0);
  const uint64_t in_request = q_len >= 64 ? ~0ull : (1ull << q_len) - 1;
  const uint64_t mask = p.mask[row] & in_request;
  const int keys = prefix + __popcll(mask);

  // Query fragments of 16 heads (absent heads are zero) over this warp's columns.
  uint32_t q[kSteps][4];
  for (int step = 0; step < kSteps; ++step)
    for (int i = 0; i < 4; ++i) {
      const int head = head0 + lane / 4 + 8 * (i & 1), column = step_column(warp, step) + 2 * (lane % 4) + 8 * (i >> 1);
      const __nv_bfloat16* src = p.q + (static_cast<int64_t>(row) * heads + head) * kRow + column;
      q[step][i] = head < heads ? *reinterpret_cast<const uint32_t*>(src) : 0;
    }

  float o[16][4] = {};                                        // 16 heads x this warp's 128 latent columns
  float m = kNoMax, l = 0.0f, weight = 0.0f;                  // of head `threadIdx.x / 8`, shared by its 8 threads
  const int head = threadIdx.x / 8, pair = threadIdx.x % 8;   // for the softmax: 8 threads a head, 2 tokens each

  for (int first = 0; first < keys; first += kTile) {
    // 1. Fetch up to 16 rows, 16 bytes a thread; places past the end become zeros.
    for (int token = warp; token < kTile; token += kWarps) {
      const bool present = first + token < keys;
      const int64_t slot = present ? key_slot(p, kv_begin, prefix, q_begin, mask, first + token) : 0;
      for (int chunk = lane; chunk < kRow / 8; chunk += 32) {
        const uint4* src = reinterpret_cast<const uint4*>(p.kv + slot * kRow) + chunk;
        *reinterpret_cast<uint4*>(&sm.kv[token][chunk * 8]) = present ? *src : make_uint4(0, 0, 0, 0);
      }
    }
    __syncthreads();

    // 2. Scores over this warp's columns.
    float s[2][4] = {};
    for (int step = 0; step < kSteps; ++step) {
      uint32_t k[4];
      ldmatrix_x4(k, smem_addr(&sm.kv[lane % 8 + 8 * (lane / 16)][step_column(warp, step) + 8 * ((lane / 8) % 2)]));
      mma(s[0], q[step], k[0], k[1]);
      mma(s[1], q[step], k[2], k[3]);
    }
    for (int block = 0; block < 2; ++block)
      for (int i = 0; i < 4; ++i) sm.scores[warp][lane / 4 + 8 * (i / 2)][8 * block + 2 * (lane % 4) + i % 2] = s[block][i];
    __syncthreads();

    // 3. Softmax over the tile: new maximum, probabilities, running sum.
    float t[2], top = -INFINITY;
    for (int i = 0; i < 2; ++i) {
      const int token = 2 * pair + i;
      const float sum = sum_slices(sm.scores[0][head][token], sm.scores[1][head][token], sm.scores[2][head][token], sm.scores[3][head][token]);
      t[i] = first + token < keys ? sum * p.scale_log2 : -INFINITY;
      top = fmaxf(top, t[i]);
    }
    for (int step = 1; step < 8; step *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    const float m_new = next_max(m, top), scale = exp2_fast(m - m_new);
    const float p0 = t[0] == -INFINITY ? 0.0f : exp2_end(exp2_begin(t[0]), m_new), p1 = t[1] == -INFINITY ? 0.0f : exp2_end(exp2_begin(t[1]), m_new);
    const uint32_t rounded = pack_bf16(p0, p1);
    l = l * scale + (p0 + p1);
    weight = weight * scale + sum_bf16(rounded);
    m = m_new;
    *reinterpret_cast<uint32_t*>(&sm.p[head][2 * pair]) = rounded;
    if (pair == 0) sm.rescale[head] = scale;
    __syncthreads();

    // 4. Rescale what was accumulated and add probabilities x values.
    uint32_t a[4];
    ldmatrix_x4(a, smem_addr(&sm.p[lane % 16][8 * (lane / 16)]));
    const float scale_lo = sm.rescale[lane / 4], scale_hi = sm.rescale[lane / 4 + 8];
    for (int n = 0; n < 16; n += 2) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, smem_addr(&sm.kv[lane % 16][128 * warp + 8 * n + 8 * (lane / 16)]));
      for (int i = 0; i < 2; ++i) {
        float(&acc)[4] = o[n + i];
        acc[0] *= scale_lo, acc[1] *= scale_lo, acc[2] *= scale_hi, acc[3] *= scale_hi;
        mma(acc, a, v[2 * i], v[2 * i + 1]);
      }
    }
    __syncthreads();
  }

  // Normalise and write. A row that sees no key yields zeros and an LSE of -inf.
  for (int step = 1; step < 8; step *= 2) l += __shfl_xor_sync(~0u, l, step), weight += __shfl_xor_sync(~0u, weight, step);
  if (pair == 0) {
    sm.total[head] = weight > 0.0f ? 1.0f / weight : 0.0f;
    if (head0 + head < heads) p.lse[static_cast<int64_t>(row) * heads + head0 + head] = natural_lse(m, l);
  }
  __syncthreads();
  for (int n = 0; n < 16; ++n)
    for (int half = 0; half < 2; ++half) {
      const int h = lane / 4 + 8 * half, column = 128 * warp + 8 * n + 2 * (lane % 4);
      if (head0 + h >= heads) continue;
      __nv_bfloat16* dst = p.out + (static_cast<int64_t>(row) * heads + head0 + h) * kLatent + column;
      *reinterpret_cast<uint32_t*>(dst) = pack_bf16(o[n][2 * half] * sm.total[h], o[n][2 * half + 1] * sm.total[h]);
    }
}
