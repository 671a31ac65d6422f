// What the host hands to the verify kernels, and the numbers that both sides must agree on.
// The Rust mirror is src/device/cuda/params.rs; a test there checks size and offsets against this file's static_asserts.
#pragma once
#include <cuda_bf16.h>
#include <cstdint>

constexpr int kLatent = 512;                      // columns of a KV row that are both key and value
constexpr int kRope = 64;                         // columns that are key only
constexpr int kRow = kLatent + kRope;             // bf16 elements of a KV row and of a query row
constexpr int kRowBytes = kRow * 2;               // 1152
constexpr int kTile = 16;                         // KV tokens a tile
constexpr int kTileBytes = kTile * kRowBytes;     // 18432, a multiple of 1024: the swizzle period
constexpr int kMaxBatch = 128;                    // requests a launch
constexpr int kMaxRows = 64;                      // draft rows a request: bits of a mask word
constexpr int kSmemLimit = 101376;                // shared memory a block may have on sm_120

// Lengths and lists are device data: a captured launch serves every later length.
struct VerifyParams {
  const __nv_bfloat16* q;         // [rows][heads][576], latent part first
  const __nv_bfloat16* kv;        // [slots][576]
  __nv_bfloat16* out;             // [rows][heads][512]
  float* lse;                     // [rows][heads], natural log; -inf where a row sees no key
  const int32_t* qo_indptr;       // [batch + 1], draft rows of request r are qo_indptr[r] .. qo_indptr[r + 1]
  const int32_t* kv_begin;        // [batch], where its prefix starts in kv_indices: tables may lie anywhere, in any order
  const int32_t* kv_len;          // [batch], tokens of its prefix
  const int32_t* kv_indices;      // prefix slots
  const int32_t* draft_slots;     // [rows]
  const uint64_t* mask;           // [rows], bit j: row j of this request is me or my ancestor
  float* partial_o;               // [partials][row tile][512], not normalised, in the order of `partial_place`
  float4* partial_ml;             // [partials][row tile], (m, l, weight, launch): maximum (base 2), sum, sum of rounded probabilities
  int4* pieces;                   // [rows], where the merge finds a row's partials: first, count, step, row in tile
  int32_t batch;
  int32_t rows;                   // rows the buffers hold, for bounds only
  int32_t slots;                  // rows of kv
  int32_t heads_log2;             // 4 .. 64 heads per rank
  float scale_log2;               // softmax scale x log2(e)
  int32_t exact;                  // 0: fast, 1: exact (for the merge; the tree kernel is compiled for each)
  int32_t item_cost;              // what starting a piece costs, in tiles (fast scheduler)
  int32_t min_tiles;              // no piece shorter than this (fast scheduler)
  float split_root;               // at most split_root x sqrt(prefix) pieces a request (fast scheduler)
  int32_t partials;               // capacity of the partial buffers, in row tiles
  uint64_t* ticket;               // launch number (not 0) << 32 | blocks of this launch that have asked for it; kernels that join only
};

// Columns of a row as the tensor cores of the tree kernel hold them: of four slices of 128, slice c has columns 64 c .. 64 c + 63 and
// 256 + 64 c .. 256 + 64 c + 63. First column of step `step` (16 columns) of a slice:
__host__ __device__ constexpr uint32_t slice_column(uint32_t slice, uint32_t step) {
  return 64 * slice + 256 * (step / 4) + 16 * (step % 4);
}

// A partial output is kept as the registers that held it, so that it is written and read 16 bytes a lane: eight rows at a time,
// [slice][step][row][quarter] of float4 = columns 2 quarter, 2 quarter + 1, 8 + 2 quarter, 9 + 2 quarter of the step. Place of (row 0,
// quarter 0) of a step, in float4; `row` counts from the start of the buffer.
__host__ __device__ constexpr int64_t partial_place(int64_t row, int slice, int step) {
  return row / 8 * 1024 + (slice * 8 + step) * 32 + row % 8 * 4;
}

static_assert(sizeof(VerifyParams) == 152, "mirrored in Rust");
