// How a block of the tree kernel is laid out: quads, their rows, what lies in shared memory, and where a thread stands.
#pragma once
#include "schedule.cuh"

constexpr int kStages = 4;           // KV tiles in the ring
constexpr int kDescs = 16;           // looked-up tiles a quad keeps, in two blocks of eight, two a warp
constexpr int kAhead = 3;            // fragments of keys that a warp has in flight
constexpr int kSteps = 9;            // k-steps of a slice: 8 of latent columns, 1 of rope columns

template <int kRows>
struct Layout {
  static constexpr int kQuads = kRows == 64 ? 2 : 1, kWarps = 4 * kQuads;
  static constexpr int kMTiles = kRows == 16 ? 1 : 2;             // m16 tiles of a quad's rows
  static constexpr int kOctets = 2 * kMTiles;                     // groups of 8 rows: what a warp does softmax for
  static constexpr bool kKeepOwn = kOctets == 4;                  // every warp has an octet; its part of that octet's scores stays put
  static constexpr int kSources = kKeepOwn ? 3 : 4;               // partial scores that arrive through shared memory
};

// Whether a lane's running sums stay in registers over the loop. Where the compiler would spill for them they lie in shared memory.
__host__ __device__ constexpr bool keeps_sums(int rows, bool exact) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  return true;
#else
  return rows != 64;
#endif
}

constexpr int kBlock = 1 << 30;                    // in `info`: the tile's 16 slots are neighbours

// What one quad keeps to itself.
template <int kRows>
struct alignas(16) QuadShared {
  float2 exchange[Layout<kRows>::kOctets][Layout<kRows>::kSources][2][32];   // partial scores: a lane's tokens 0 to 7, 8 to 15
  // P of the even and of the odd tiles, in 8x8 matrices: tokens 0 to 7, 8 to 15.
  uint32_t probabilities[2][Layout<kRows>::kOctets][2][32];
  float rescale[2][8 * Layout<kRows>::kOctets];    // what a row's O is multiplied by before that tile
  float inverse[8 * Layout<kRows>::kOctets];       // 1 / weight at the end of a piece
  float2 sums[4][32];                              // a lane's sum of probabilities, and of them as rounded to bf16
  int slots[kDescs][kTile];
  int info[kDescs];                                // kind | valid or draft tile << 8 | draft row << 16 | kBlock
  Walk fetch[4];                                   // where each warp looks up next
  int2 ahead[4];                                   // the same while all is whole: place in kv_indices, look-ups left
  Walk item;                                       // what is being computed
  int first, last;                                 // its tiles, counted over all the block has done
  int whole;                                       // tiles before this one are seen whole by every row, and are not the last
  int more;                                        // whether there is a piece
  uint64_t taken;                                  // the exchange has been read
};

template <int kRows>
struct Shared {
  uint8_t ring[kStages][kTileBytes];               // aligned to 1024 bytes, the period of the swizzle
  QuadShared<kRows> quads[Layout<kRows>::kQuads];
  int unit, member;                                // the team this block is in, and its place there
  Plan plan;
  uint64_t full[kStages];                          // tile has arrived
  int released[kStages][4];                        // how often a quad was done with a tile here, counted by each of its warps
};

// Where a thread stands. `now` hides the thread number from the compiler, so that addresses made from it are worked out anew in
// each step instead of being kept (and, at 64 rows, spilled): registers are scarce, instructions are not.
struct Place {
  uint32_t lane, warp, quad;                       // warp: in its quad; also its slice of the columns
  __device__ static Place now() {
    uint32_t t = threadIdx.x;
    asm volatile("" : "+r"(t));
    return {t % 32, t / 32 % 4, t / 128};
  }
};
