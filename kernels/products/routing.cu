// Which experts each row takes, and the work list that groups rows by expert. Sigmoid routing in f32: s = sigmoid(gate), the best
// `top_k` of s + bias (ties to the lower id), weights s over the sum of the chosen, times the scaling factor. Padding rows choose
// nothing. The order of every list is fixed: experts ascending, places ascending within an expert.
#include "../common/rows.cuh"
#include "routing.cuh"

constexpr int MAX_EXPERTS = 512, KEYS = MAX_EXPERTS / 32, SORT_WARPS = 32;

// Mirrored in src/device/cuda/products/routing.rs.
struct Routing {
  const float* gates;  // [rows][experts]
  const float* bias;
  void* list;
  const uint32_t* counts;
  int places;          // room of the list
  int rows;            // bound
  int experts, top_k;
  int rows_per_entry;
  float scaling;
  int uniform;         // benches: choose by the hash of (layer, row) instead of the gates
  int layer;
};
static_assert(sizeof(Routing) == 64, "mirrored in Rust");

__device__ __forceinline__ uint32_t hash(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// One warp, one row.
__device__ __forceinline__ void choose(const Routing& p, const Lists& lists, int row) {
  const int lane = threadIdx.x & 31;
  float score[KEYS], key[KEYS];
#pragma unroll
  for (int i = 0; i < KEYS; ++i) {
    const int e = i * 32 + lane;
    key[i] = -INFINITY, score[i] = 0;
    if (e < p.experts) {
      score[i] = 1.0f / (1.0f + expf(-p.gates[static_cast<int64_t>(row) * p.experts + e]));
      const float k = p.uniform ? static_cast<float>(hash(hash(p.layer * 4099 + row) + e) >> 8) : score[i] + p.bias[e];
      if (k == k) key[i] = k;  // NaN is never chosen
    }
  }
  float chosen = 0;  // score of choice `lane`
  int id = -1;
  for (int choice = 0; choice < p.top_k; ++choice) {
    float best = -INFINITY, its = 0;
    int at = MAX_EXPERTS;
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
      if (key[i] > best) best = key[i], at = i * 32 + lane, its = score[i];
#pragma unroll
    for (int s = 16; s; s /= 2) {
      const float other = __shfl_xor_sync(~0u, best, s), score_there = __shfl_xor_sync(~0u, its, s);
      const int there = __shfl_xor_sync(~0u, at, s);
      if (other > best || (other == best && there < at)) best = other, at = there, its = score_there;
    }
#pragma unroll
    for (int i = 0; i < KEYS; ++i)
      if (i * 32 + lane == at) key[i] = -INFINITY;
    if (lane == choice && at < MAX_EXPERTS) chosen = its, id = at;
  }
  // The sum in the order of the choice.
  float sum = 0;
  for (int choice = 0; choice < p.top_k; ++choice) sum += __shfl_sync(~0u, chosen, choice);
  sum += 1e-20f;
  if (lane < p.top_k) {
    lists.ids[row * p.top_k + lane] = id;
    lists.weights[row * p.top_k + lane] = chosen / sum * p.scaling;
  }
}

// One block: a counting sort of the live places by expert. Warp w has a stretch of places; within it, lanes with the same expert
// rank each other.
__device__ __forceinline__ void sort(const Routing& p, const Lists& lists) {
  __shared__ uint16_t count[SORT_WARPS][MAX_EXPERTS];
  __shared__ int totals[32], entry_totals[32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, e = threadIdx.x;
  const int live = min(static_cast<int>(p.counts[0]), p.rows) * p.top_k;
  const int stretch = (live + 32 * SORT_WARPS - 1) / (32 * SORT_WARPS) * 32;
  const int begin = min(warp * stretch, live), end = min(begin + stretch, live);
  for (int i = threadIdx.x; i < SORT_WARPS * MAX_EXPERTS / 2; i += blockDim.x) reinterpret_cast<uint32_t*>(count)[i] = 0;
  __syncthreads();
  for (int base = begin; base < end; base += 32) {
    const int place = base + lane, id = place < end ? lists.ids[place] : -1;
    const uint32_t same = __match_any_sync(~0u, id);
    if (id >= 0 && lane == __ffs(same) - 1) count[warp][id] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // Thread e: how many places expert e has, where its sorted places and its entries begin.
  int total = 0;
  if (e < p.experts)
    for (int w = 0; w < SORT_WARPS; ++w) total += count[w][e];
  const int chunks = (total + p.rows_per_entry - 1) / p.rows_per_entry;
  int first = total, entry = chunks;  // inclusive sums over the warp
#pragma unroll
  for (int s = 1; s < 32; s *= 2) {
    const int a = __shfl_up_sync(~0u, first, s), b = __shfl_up_sync(~0u, entry, s);
    if (lane >= s) first += a, entry += b;
  }
  if (lane == 31) totals[warp] = first, entry_totals[warp] = entry;
  __syncthreads();
  for (int w = 0; w < warp; ++w) first += totals[w], entry += entry_totals[w];
  if (e == blockDim.x - 1) *lists.entries = entry;
  first -= total, entry -= chunks;
  if (e < p.experts) {
    for (int i = 0; i < chunks; ++i)
      lists.entry[entry + i] = {e, first + i * p.rows_per_entry, min(p.rows_per_entry, total - i * p.rows_per_entry), 0};
    for (int w = 0, at = first; w < SORT_WARPS; ++w) {
      const int here = count[w][e];
      count[w][e] = static_cast<uint16_t>(at);
      at += here;
    }
  }
  __syncthreads();
  for (int base = begin; base < end; base += 32) {
    const int place = base + lane, id = place < end ? lists.ids[place] : -1;
    const uint32_t same = __match_any_sync(~0u, id);
    if (id >= 0) lists.order[count[warp][id] + __popc(same & ((1u << lane) - 1))] = place;
    __syncwarp();
    if (id >= 0 && lane == __ffs(same) - 1) count[warp][id] += __popc(same);
    __syncwarp();
  }
}

// Few rows: everything in one block.
extern "C" __global__ void __launch_bounds__(1024) route_all(const __grid_constant__ Routing p) {
  wait_for_predecessor();
  let_successor_start();
  const Lists lists(p.list, p.places);
  for (int row = threadIdx.x / 32; row < min(static_cast<int>(p.counts[0]), p.rows); row += 32) choose(p, lists, row);
  __syncthreads();
  sort(p, lists);
}
extern "C" __global__ void __launch_bounds__(256) route_choose(const __grid_constant__ Routing p) {
  wait_for_predecessor();
  let_successor_start();
  const int row = blockIdx.x * 8 + threadIdx.x / 32;
  if (row < min(static_cast<int>(p.counts[0]), p.rows)) choose(p, Lists(p.list, p.places), row);
}
extern "C" __global__ void __launch_bounds__(1024) route_sort(const __grid_constant__ Routing p) {
  wait_for_predecessor();
  let_successor_start();
  sort(p, Lists(p.list, p.places));
}
