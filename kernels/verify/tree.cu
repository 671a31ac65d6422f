// Instantiations of the tree kernel for 16, 32 and 64 query rows a block, in both numerics. The maps describe this layer's KV rows.
#include "tree.cuh"

// Blocks that should fit an SM: two of one quad where shared memory allows it; sm_120 has room for one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define SMALL 1
#else
#define SMALL 2
#endif

#define VERIFY_TREE(rows, blocks, numerics, exact)                                                                                      \
  extern "C" __global__ void __launch_bounds__(32 * Layout<rows>::kWarps, blocks)                                                                       \
      verify_tree_##rows##_##numerics(const __grid_constant__ VerifyParams p, const __grid_constant__ CUtensorMap rows_map,             \
                                      const __grid_constant__ CUtensorMap tile_map) {                                                  \
    verify_tree<rows, exact>(p, &rows_map, &tile_map);                                                                                  \
  }

// What src/device/cuda/verify.rs reserves.
static_assert(sizeof(Shared<16>) <= 84992 && sizeof(Shared<32>) <= 98304 && sizeof(Shared<64>) <= 101376);

VERIFY_TREE(16, SMALL, fast, false)
VERIFY_TREE(32, SMALL, fast, false)
VERIFY_TREE(64, 1, fast, false)
VERIFY_TREE(16, SMALL, exact, true)
VERIFY_TREE(32, SMALL, exact, true)
VERIFY_TREE(64, 1, exact, true)
