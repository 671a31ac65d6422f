// The work list of one layer's experts, as routing.cu writes it and experts.cu reads it.
#pragma once
#include "fragments.cuh"

// Up to 8 NT consecutive sorted places of one expert.
struct Entry {
  int expert, first, count, unused;
};
// The list as it lies in memory: a header of 256 bytes (how many entries), then arrays with room for `places` places, a multiple of
// 64. Mirrored in src/device/cuda/products/routing.rs.
struct Lists {
  int* entries;    // [1]
  int* ids;        // [places] chosen expert of place = row * top_k + choice, best first; -1 = none
  float* weights;  // [places]
  int* order;      // [places] places sorted by expert, then by place
  Entry* entry;    // [places + 1]
  __device__ __forceinline__ Lists(void* list, int places) {
    entries = static_cast<int*>(list);
    ids = entries + 64;
    weights = reinterpret_cast<float*>(ids + places);
    order = ids + 2 * places;
    entry = reinterpret_cast<Entry*>(ids + 3 * places);
  }
};

constexpr int MAX_EXPERTS = 512;
constexpr int BUILT_ROWS = 32, BUILT_PLACES = 256;  // of a list that blocks build by themselves

// What the threads of a block leave for each other while they build a list.
struct Building {
  uint32_t rows_of[MAX_EXPERTS];  // of an expert, as bits
  uint16_t first_of[MAX_EXPERTS];
  int sums[8];
};
// The same list for up to BUILT_ROWS rows, from the choices alone, by every block that needs it, sooner than it could be read:
// `put(entry, expert, first, count)` gets its entries of up to eight rows, `order` the sorted places. Returns how many entries there are.
// 256 threads; all must call, after a __syncthreads() behind start_building.
__device__ __forceinline__ void start_building(Building& b) { reinterpret_cast<uint2*>(b.rows_of)[threadIdx.x] = {0, 0}; }
template <class Order, class Put>
__device__ __forceinline__ int build_list(Building& b, const int* ids, int rows, int top_k, Order* order, Put put) {
  const int i = threadIdx.x, lane = i & 31, warp = i >> 5, row = i / top_k;
  const int id = row < rows ? __ldcg(ids + i) : -1;
  if (id >= 0) atomicOr(&b.rows_of[id], 1u << row);
  __syncthreads();
  const uint2 rows_of = reinterpret_cast<const uint2*>(b.rows_of)[i];  // of experts 2 i and 2 i + 1
  const int count[2] = {__popc(rows_of.x), __popc(rows_of.y)};
  const int own = (count[0] + count[1]) | ((count[0] + 7) / 8 + (count[1] + 7) / 8) << 16;  // places, entries
  int sum = own;
#pragma unroll
  for (int s = 1; s < 32; s *= 2) {
    const int below = __shfl_up_sync(~0u, sum, s);
    if (lane >= s) sum += below;
  }
  if (lane == 31) b.sums[warp] = sum;
  __syncthreads();
  int before = sum - own, all = 0;
#pragma unroll
  for (int w = 0; w < 8; ++w) {
    const int other = b.sums[w];
    all += other;
    if (w < warp) before += other;
  }
  int first = before & 0xffff, entry = before >> 16;
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    b.first_of[2 * i + e] = static_cast<uint16_t>(first);
#pragma unroll 1
    for (int at = 0; at < count[e]; at += 8) put(entry++, 2 * i + e, first + at, min(8, count[e] - at));
    first += count[e];
  }
  __syncthreads();
  if (id >= 0) order[b.first_of[id] + __popc(b.rows_of[id] & ((1u << row) - 1))] = static_cast<Order>(i);
  __syncthreads();
  return all >> 16;
}

// The list of a row alone: its choices by ascending expert. `lists.entry` and `lists.order` are the warp's own, in shared memory. Returns how
// many entries there are.
__device__ __forceinline__ int list_alone(const Lists& lists, int top_k, int lane) {
  const int id = lane < top_k ? __ldcg(lists.ids + lane) : -1;
  int before = 0;
  for (int i = 0; i < top_k; ++i) before += static_cast<uint32_t>(__shfl_sync(~0u, id, i)) < static_cast<uint32_t>(id);
  if (id >= 0) lists.order[before] = lane, lists.entry[before] = {id, before, 1, 0};
  __syncwarp();
  return __popc(__ballot_sync(~0u, id >= 0));
}
