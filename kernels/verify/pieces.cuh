// The list by which the merge finds partials.
#pragma once
#include "schedule.cuh"

// Where the merge finds the partials of every draft row; written by the last block, which has the least to do.
template <int kRows, bool kExact>
__device__ void write_pieces(const VerifyParams& p, const Plan& plan) {
  for (int request = threadIdx.x / 32; request < p.batch; request += blockDim.x / 32) {
    const Request r = request_of(p, request);
    for (int u = threadIdx.x % 32; u < r.rows; u += 32) {
      const int tile = (u << p.heads_log2) / kRows, offset = (u << p.heads_log2) % kRows;
      int4 piece;
      if constexpr (kExact) {
        piece = make_int4(plan.line[request] + tile, exact_splits(r), row_tiles(p, r.rows, kRows), offset);
      } else {
        const int stream = plan.team > 1 ? 0 : tile, lane = plan.team > 1 ? tile : 0, tiles = fast_tiles(r);
        const int start = plan.line[request] + stream * (tiles + plan.item_cost) + plan.item_cost;
        const int u0 = start / plan.payload, u1 = (start + tiles - 1) / plan.payload;
        piece = make_int4((u0 + plan.streams[request] + stream) * plan.team + lane, u1 - u0 + 1, plan.team, offset);
      }
      p.pieces[r.q_begin + u] = piece;
    }
  }
}
