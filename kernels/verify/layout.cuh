// How a block of the tree kernel is laid out: quads, their rows, what lies in shared memory, and where a thread stands.
#pragma once
#include "schedule.cuh"

constexpr int kStages = 4;           // KV tiles in the ring
constexpr int kDescs = 16;           // tiles whose notes are kept
constexpr int kAhead = 2;            // fragments of keys that a warp has in flight
constexpr int kSteps = 9;            // k-steps of a slice: 8 of latent columns, 1 of rope columns

// Lanes that say for their warp that it has read an exchange. One is enough after the warp has met; racecheck cannot follow that, so a
// build for it lets every lane speak (docs/kernel.md).
#ifdef KDTREE_RACECHECK
constexpr int kTakers = 32;
#else
constexpr int kTakers = 1;
#endif

// Whether a tree kernel merges its pieces itself (join.cuh).
__host__ __device__ constexpr bool joins(int rows, bool exact) { return rows < 64 && !exact; }

template <int kRows>
struct Layout {
  static constexpr int kQuads = kRows == 64 ? 2 : 1, kConsumers = 4 * kQuads, kWarps = kConsumers + 4;
  // Registers go from producers to consumers where the block could not have enough otherwise: where there are three groups of four
  // warps or, below 64 rows, two blocks an SM (Hopper; sm_120 has room for one). The exact producers' look-ups need more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
  static constexpr bool kMovesRegisters = kRows == 64;
#else
  static constexpr bool kMovesRegisters = true;
#endif
  __host__ __device__ static constexpr int consumer_registers() {
    return kRows == 64 ? 232 : kRows == 32 ? 224 : 184;
  }
  __host__ __device__ static constexpr int producer_registers() {
    return kRows == 64 ? 40 : kRows == 32 ? 32 : 72;
  }
  static constexpr int kSharedSteps = kRows == 32 ? 3 : 1;        // steps of the scores whose queries lie in shared memory
  static constexpr int kMTiles = kRows == 16 ? 1 : 2;             // m16 tiles of a quad's rows
  static constexpr int kOctets = 2 * kMTiles;                     // groups of 8 rows: what a warp does softmax for
  static constexpr bool kKeepOwn = kOctets == 4;                  // every warp has an octet; its part of that octet's scores stays put
  static constexpr int kBatchTiles = kRows == 16 ? 4 : 1;         // tiles whose scores and probabilities are there at once
  static constexpr int kSources = kKeepOwn ? 3 : 4;               // partial scores that arrive through shared memory
};

// What one quad keeps to itself.
template <int kRows>
struct alignas(16) QuadShared {
  // Queries of the steps that are not in registers (rope columns first), as the registers of a thread would hold them.
  uint4 query[Layout<kRows>::kSharedSteps][Layout<kRows>::kMTiles][128];
  // P of a tile (at 16 rows of up to four), in 8x8 matrices: tokens 0 to 7, 8 to 15.
  uint32_t probabilities[2 * Layout<kRows>::kBatchTiles][Layout<kRows>::kOctets][32];
  float rescale[2][8 * Layout<kRows>::kOctets];    // what a row's O is multiplied by before that tile
  float inverse[8 * Layout<kRows>::kOctets];       // 1 / weight at the end of a piece
  float2 sums[128];                                // a thread's sum of probabilities, and of them as rounded to bf16
  uint32_t rope_at[128];                           // where a thread's fragment of the keys' rope columns lies in the first tile
  Walk item;                                       // what is being computed
  int first, last;                                 // its tiles, counted over all the block has done
  // Of the even and of the odd tiles: the last whose probabilities some row had to be rescaled for; tiles before which are seen whole
  // by every row and are not the last.
  int2 notes[2];
  int more;                                        // whether there is a piece
};

// A producer's place in the walk, see `Walk`.
struct Fetch {
  int request, stream, tile, end, first, id;
  int place;        // in kv_indices, four tiles further on
};

// A stream that a block has computed a part of.
struct Join {
  int request, stream, id;
};

// What lies at the same place whatever the row tile, so that a block can start before it has chosen one.
struct Head {
  uint64_t full[kStages], empty[kStages];          // a tile has arrived; all consumers have read it
  uint64_t taken[2];                               // of a quad: the exchange has been read
  Plan plan;
  int unit, member;                                // the team this block is in, and its place there
  uint32_t launch;                                 // number of this launch, which marks its partials
  Fetch fetch[4];                                  // where each producer looks up next
  int joins;                                       // streams to be merged at the end: those that the block's first and last piece are of
  Join join[2];
};
static_assert(sizeof(Head) <= 1024, "the ring begins there");

template <int kRows>
struct Shared : Head {
  alignas(1024) uint8_t ring[kStages][kTileBytes];  // aligned to the period of the swizzle
  // Partial scores: of every octet of rows, by source, tokens 0 to 7 and 8 to 15, two a lane. Aligned to 1024 bytes.
  float2 exchange[Layout<kRows>::kQuads][Layout<kRows>::kBatchTiles * Layout<kRows>::kSources][2][Layout<kRows>::kOctets][32];
  QuadShared<kRows> quads[Layout<kRows>::kQuads];
  int info[kDescs];                                // kind | valid or draft tile << 8 | draft row << 16
};

// Where a thread stands. `now` hides the thread number from the compiler, so that addresses made from it are worked out anew in
// each step instead of being kept (and, at 64 rows, spilled): registers are scarce, instructions are not.
struct Place {
  uint32_t lane, warp, quad;                       // warp: in its quad; also its slice of the columns
  __device__ uint32_t in_quad() const { return 32 * warp + lane; }
  __device__ uint32_t in_block() const { return 4 * quad + warp; }   // number of the warp
  template <int kQuads>
  __device__ uint32_t quad_of() const { return kQuads == 1 ? 0 : quad; }
  __device__ static Place of(uint32_t t) {
    asm volatile("" : "+r"(t));
    return {t % 32, t / 32 % 4, t / 128};
  }
  __device__ static Place now() { return of(threadIdx.x); }
};
