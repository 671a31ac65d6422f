// Instantiations of the tree kernel for 16, 32 and 64 query rows a block, in both numerics. The maps describe this layer's KV rows.
#include "roles.cuh"
#include "tree.cuh"

// Blocks that should fit an SM: two of one quad where shared memory allows it; sm_120 has room for one.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define SMALL 1
#else
#define SMALL 2
#endif

#define TREE_KERNEL(rows, blocks, numerics)                                                                                            \
  extern "C" __global__ void __launch_bounds__(32 * Layout<rows>::kWarps, blocks)                                                      \
      verify_tree_##rows##_##numerics(const __grid_constant__ VerifyParams p, const __grid_constant__ CUtensorMap rows_map,             \
                                      const __grid_constant__ CUtensorMap tile_map)
#define VERIFY_TREE(rows, blocks, numerics, exact)                                                                                      \
  TREE_KERNEL(rows, blocks, numerics) {                                                                                                 \
    open_block<Layout<rows>::kQuads>(head(), &rows_map, &tile_map);                                                                     \
    verify_tree<rows, exact>(p, &rows_map, &tile_map, joins(rows, exact) ? own_request(p) : Request{});                                 \
  }

// What src/device/cuda/verify.rs reserves.
static_assert(sizeof(Shared<16>) <= 98304 && sizeof(Shared<32>) <= 98304 && sizeof(Shared<64>) <= 101376);

__device__ __forceinline__ Head& head() {
  extern __shared__ __align__(1024) uint8_t raw[];
  return *reinterpret_cast<Head*>(raw);
}

VERIFY_TREE(16, SMALL, fast, false)
// Takes row tiles of 16 where the prefixes are short: then a launch is latency, and more blocks load queries and store partials.
TREE_KERNEL(32, SMALL, fast) {
  open_block<1>(head(), &rows_map, &tile_map);
  const Request own = own_request(p);
  if (p.batch <= 32 && few_tiles(p, own, 16, gridDim.x)) verify_tree<16, false>(p, &rows_map, &tile_map, own);
  else verify_tree<32, false>(p, &rows_map, &tile_map, own);
}
extern "C" __global__ void __launch_bounds__(32 * roles::kWarps, 1)
    verify_tree_64_fast(const __grid_constant__ VerifyParams p, const __grid_constant__ CUtensorMap rows_map,
                        const __grid_constant__ CUtensorMap tile_map) {
  roles::verify(p, &rows_map, &tile_map);
}
VERIFY_TREE(16, SMALL, exact, true)
VERIFY_TREE(32, SMALL, exact, true)
VERIFY_TREE(64, 1, exact, true)
