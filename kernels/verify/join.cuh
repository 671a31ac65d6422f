// The merge inside the tree kernel (fast, 16 or 32 rows): the blocks that computed pieces of one row tile add the pieces up together,
// each a share of the rows and columns, as soon as they are written. Used by tree.cuh at the end of a block's walk.
//
// No fence and no counter: what is waited for is the data. A partial lies in zeroed memory, one word in four turned so that it is never
// zero; whoever reads it leaves zeros behind, and has it to himself. Its (m, l, weight, launch), which several read, ends with the number
// of the launch, which no earlier launch had. All of it travels 16 bytes at a time, which arrive as one. A block waits only when it has
// written all of its own pieces, and all blocks of a launch are on the card at once (the grid is what fits it), so waiting ends.
//
// Maxima are integers, so weights are exact powers of two; pieces are added in an order that the lengths alone decide.
#pragma once
#include "schedule.cuh"
#include "softmax.cuh"

// Which block of this launch this is does not matter, only that each asks once. The last sets up the next launch.
__device__ inline uint32_t launch_number(const VerifyParams& p) {
  const unsigned long long before = atomicAdd(reinterpret_cast<unsigned long long*>(p.ticket), 1ull);
  const uint32_t launch = before >> 32, blocks = gridDim.x;
  if (static_cast<uint32_t>(before) == blocks - 1) {
    const unsigned long long next = launch == ~0u ? 2 : 1;    // 0 is what fresh memory bears
    atomicAdd(reinterpret_cast<unsigned long long*>(p.ticket), (next << 32) - blocks);
  }
  return launch;
}

namespace join {

constexpr uint32_t kTurn = 0x7fffdead;              // a NaN that no arithmetic yields

// Volatile, or the compiler turns all of an output at once and needs as many registers again.
__device__ inline float turned(float x) {
  float y;
  asm volatile("xor.b32 %0, %1, %2;" : "=f"(y) : "f"(x), "n"(kTurn));
  return y;
}
// Four floats of a partial as another block waits for them.
__device__ inline float4 marked(float4 x) { return make_float4(turned(x.x), x.y, x.z, x.w); }

__device__ inline void add(float4& acc, float4 v, float w) {
  acc.x += w * v.x, acc.y += w * v.y, acc.z += w * v.z, acc.w += w * v.w;
}
__device__ inline void scale(float4& acc, float w) { acc.x *= w, acc.y *= w, acc.z *= w, acc.w *= w; }
__device__ inline float4 from_lane(float4 x, int turn) {
  return make_float4(__shfl_xor_sync(~0u, x.x, turn), __shfl_xor_sync(~0u, x.y, turn), __shfl_xor_sync(~0u, x.z, turn), __shfl_xor_sync(~0u, x.w, turn));
}

// What a thread has added up of a row: the totals, and its columns.
template <int kVectors>
struct Sum {
  float m, l, weight;
  float4 acc[kVectors];
  __device__ void add(const Sum& other) {
    const float top = fmaxf(m, other.m), mine = exp2_fast(m - top), its = exp2_fast(other.m - top);
    m = top, l = l * mine + other.l * its, weight = weight * mine + other.weight * its;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) join::scale(acc[v], mine), join::add(acc[v], other.acc[v], its);
  }
};

// Pieces first, first + groups, ... of `pieces`; `o` and `ml` of piece 0 at this thread's place, one piece `step` rows from the next.
// `groups` is a power of two. One warp a scheduler runs this, so that every instruction counts: past the last piece the last is read again, with weight 0; a piece
// that has seen no key has (kNoMax, 0, 0) and zeros, which add nothing.
template <int kVectors>
__device__ Sum<kVectors> sum(const float4* ml, float4* o, int step, int first, int groups, int pieces, uint32_t launch) {
  constexpr int kAtOnce = 10 / kVectors;
  Sum<kVectors> s{kNoMax, 0.0f, 0.0f, {}};
  const int last = pieces - 1 - ((pieces - 1 - first) & (groups - 1));   // another group's last may be gone by now
#pragma unroll 1
  for (int base = first; base < pieces; base += groups * kAtOnce) {
    float4 x[kAtOnce][kVectors], w[kAtOnce];
    uint32_t rows[kAtOnce];                         // from piece 0
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) rows[k] = min(base + groups * k, last) * step;
    auto at = [&](int k) { return o + rows[k] * (kLatent / 4); };
    bool missing;
    int tries = 0;
    do {
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        w[k] = load_shared_by_card(ml + rows[k]);
#pragma unroll
        for (int v = 0; v < kVectors; ++v) x[k][v] = load_shared_by_card(at(k) + 128 * v);
      }
      missing = false;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        missing |= __float_as_uint(w[k].w) != launch;
#pragma unroll
        for (int v = 0; v < kVectors; ++v) missing |= __float_as_uint(x[k][v].x) == 0;
      }
      if (++tries > 1 << 22) fail();                // seconds: a block is missing
    } while (missing);
    float top = s.m;
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) top = fmaxf(top, w[k].x);
    const float old = exp2_fast(s.m - top);
    s.m = top, s.l *= old, s.weight *= old;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) scale(s.acc[v], old);
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      const float e = base + groups * k < pieces ? exp2_fast(w[k].x - top) : 0.0f;
      s.l += w[k].y * e, s.weight += w[k].z * e;
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        x[k][v].x = turned(x[k][v].x), add(s.acc[v], x[k][v], e);
        at(k)[128 * v].x = 0.0f;
      }
    }
  }
  return s;
}

__device__ inline void store(__nv_bfloat16* row, int column, float4 v, float scale) {
  uint32_t* dst = reinterpret_cast<uint32_t*>(row + slice_column(column / 64, column / 8 % 8) + 2 * (column % 4));
  dst[0] = pack_bf16(v.x * scale, v.y * scale), dst[4] = pack_bf16(v.z * scale, v.w * scale);
}

}  // namespace join

// This block's share of a row tile of which it, unit `unit`, computed a piece; by 128 threads, which `meet` at a barrier.
template <int kRows, typename Meet>
__device__ void join_pieces(const VerifyParams& p, const Plan& plan, const Join& part, int unit, int member, uint32_t launch, int thread,
                            float4* scratch, Meet meet) {
  const Request r = request_of(p, part.request);
  const int row0 = (plan.team > 1 ? member : part.stream) * kRows, rows = min((r.rows << p.heads_log2) - row0, kRows);
  const int tiles = fast_tiles(r), start = plan.line[part.request] + part.stream * (tiles + plan.item_cost) + plan.item_cost;
  const int from = divide(start, plan.payload), all = divide(start + tiles - 1, plan.payload) - from + 1;
  const int slot = (from + part.id) * plan.team + member, pieces = min(all, ceil_div(p.partials - slot, plan.team));
  const int step = plan.team * kRows;
  const int64_t first_row = static_cast<int64_t>(slot) * kRows;
  const float4* ml = p.partial_ml + first_row;
  float4* o = reinterpret_cast<float4*>(p.partial_o) + partial_place(first_row, 0, 0);
  const int vectors = ceil_div(rows, 8) * 1024;     // float4 of the row tile: [octet][slice][step][row][quarter]
  auto write = [&](int e, const float4& acc, float m, float l, float weight) {
    const int row = e / 1024 * 8 + e / 4 % 8;
    const int64_t at = (static_cast<int64_t>(r.q_begin) << p.heads_log2) + row0 + row;
    join::store(p.out + at * kLatent, e % 1024 / 32 * 8 + e % 4, acc, weight > 0.0f ? __fdividef(1.0f, weight) : 0.0f);
    if (e % 1024 / 32 == 0 && e % 4 == 0) p.lse[at] = natural_lse(m, l);
  };
  if (all <= 4) {                                   // shares of 512, four a thread
    for (int e = (unit - from) * 512 + thread; e < vectors; e += all * 512) {
      const int row = e / 1024 * 8 + e / 4 % 8;
      if (row >= rows) continue;
      const join::Sum<4> s = join::sum<4>(ml + row, o + e, step, 0, 1, pieces, launch);
#pragma unroll
      for (int v = 0; v < 4; ++v) write(e + 128 * v, s.acc[v], s.m, s.l, s.weight);
    }
    return;
  }
  // Shares of 4 to 128; where a share is smaller than the block, groups of threads take pieces in turn and add up at the end.
  int share_log2 = 7;
  while (share_log2 > 2 && (vectors >> share_log2) * 2 <= all) --share_log2;
  const int share = 1 << share_log2, mine = thread & (share - 1), group = thread >> share_log2, groups = 128 >> share_log2;
  for (int e = ((unit - from) << share_log2) + mine; e - mine < vectors; e += all << share_log2) {
    const int row = e / 1024 * 8 + e / 4 % 8;
    join::Sum<1> s{kNoMax, 0.0f, 0.0f, {}};
    if (row < rows) s = join::sum<1>(ml + row, o + e, step, group, groups, pieces, launch);
    for (int d = share; d < 32; d *= 2) {
      join::Sum<1> other;
      other.m = __shfl_xor_sync(~0u, s.m, d), other.l = __shfl_xor_sync(~0u, s.l, d), other.weight = __shfl_xor_sync(~0u, s.weight, d);
      other.acc[0] = join::from_lane(s.acc[0], d);
      s.add(other);
    }
    if (share < 128) {
      scratch[2 * thread] = s.acc[0], scratch[2 * thread + 1] = make_float4(s.m, s.l, s.weight, 0.0f);
      meet();
      const int apart = max(share, 32);
      for (int t = thread + apart; thread < share && t < 128; t += apart) {
        const float4 acc = scratch[2 * t], w = scratch[2 * t + 1];
        s.add(join::Sum<1>{w.x, w.y, w.z, {acc}});
      }
      meet();
    }
    if (thread < share && row < rows) write(e, s.acc[0], s.m, s.l, s.weight);
  }
}
