// Which experts each row takes, and the work list that groups rows by expert. Sigmoid routing in f32: s = sigmoid(gate), the best
// `top_k` of s + bias (ties to the lower id), weights s over the sum of the chosen, times the scaling factor. Padding rows choose
// nothing. The order of every list is fixed: experts ascending, places ascending within an expert.
#include "../common/rows.cuh"
#include "routing.cuh"

constexpr int MAX_TOP = 32, WARPS = MAX_EXPERTS / 32, SHORT_TOP = 8;

// Mirrored in src/device/cuda/products/routing.rs.
struct Routing {
  const float* gates;  // [rows][experts]
  const float* bias;
  void* list;
  const uint32_t* counts;
  uint32_t* arrived;   // zero between launches
  int places;          // room of the list
  int rows;            // bound
  int experts, top_k;
  int rows_per_entry;
  float scaling;
  int uniform;         // benches: choose by the hash of (layer, row) instead of the gates
  int layer;
  int built;           // whoever needs the list builds it
  int unused;
};
static_assert(sizeof(Routing) == 80, "mirrored in Rust");

__device__ __forceinline__ uint32_t hash(uint32_t x) {
  x ^= x >> 16, x *= 0x7feb352du, x ^= x >> 15, x *= 0x846ca68bu;
  return x ^ x >> 16;
}

// How many of eight keys in a row are larger.
__device__ __forceinline__ int larger_of_8(const uint32_t* keys, uint32_t than) {
  const uint4 a = reinterpret_cast<const uint4*>(keys)[0], b = reinterpret_cast<const uint4*>(keys)[1];
  return (a.x > than) + (a.y > than) + (a.z > than) + (a.w > than) + (b.x > than) + (b.y > than) + (b.z > than) + (b.w > than);
}

// One block, one row: thread e has expert e. Every warp sorts out its best, then their bests are ranked, by counting who is better. `code`:
// gates are not there yet, and nothing is stored.
__device__ __forceinline__ void choose(const Routing& p, const Lists& lists, int row, bool code) {
  __shared__ __align__(16) uint32_t keys[MAX_EXPERTS];
  __shared__ __align__(16) uint32_t best_keys[WARPS * MAX_TOP];  // [warp][top_k], or [warp][SHORT_TOP]
  __shared__ float best_scores[WARPS * MAX_TOP];
  __shared__ int best_ids[WARPS * MAX_TOP];
  __shared__ int chosen_ids[SHORT_TOP];
  __shared__ __align__(16) float chosen_scores[SHORT_TOP];
  const int e = threadIdx.x, lane = e & 31, warp = e >> 5;
  const bool live = code || row < p.counts[0];  // asked for together with the gates
  float score = 0;
  uint32_t key = 1;  // as an integer of the same order; 1 = none
  if (e < p.experts) {
    const float gate = code ? 0.0f : p.gates[static_cast<int64_t>(row) * p.experts + e];
    score = 1.0f / (1.0f + expf(-gate));
    const float k = (p.uniform ? static_cast<float>(hash(hash(p.layer * 4099 + row) + e) >> 8) : score + p.bias[e]) + 0.0f;
    const uint32_t bits = __float_as_uint(k);
    if (k == k) key = (bits & 0x80000000u ? ~bits : bits | 0x80000000u) + 1;  // NaN is never chosen
  }
  keys[e] = key;
  __syncwarp();
  // Of equal keys the lower expert's is better.
  int rank = __popc(__match_any_sync(~0u, key) & ((1u << lane) - 1));
#pragma unroll
  for (int i = 0; i < 32; i += 8) rank += larger_of_8(keys + warp * 32 + i, key);
  const int kept = max(p.top_k, SHORT_TOP);
  if (rank < kept) best_keys[warp * kept + rank] = key, best_scores[warp * kept + rank] = score, best_ids[warp * kept + rank] = e;
  if (e < SHORT_TOP) chosen_ids[e] = -1, chosen_scores[e] = 0;
  __syncthreads();
  int id = -1;  // lane i of warp 0: choice i
  float chosen = 0;
  if (p.top_k <= SHORT_TOP) {
    // Four threads a candidate count how many are better; lists ascend in experts, and each is sorted.
    static_assert(WARPS * SHORT_TOP == 4 * 32 && MAX_EXPERTS == 4 * 4 * 32, "a thread for each quarter");
    const int mine = e / 4, quarter = e % 4;
    const uint32_t own = best_keys[mine];
    int better = 0;
#pragma unroll
    for (int list = quarter * 4; list < quarter * 4 + 4; ++list)
      better += list == mine / SHORT_TOP ? mine % SHORT_TOP : larger_of_8(best_keys + list * SHORT_TOP, own - (list < mine / SHORT_TOP));
    better += __shfl_xor_sync(~0u, better, 1);
    better += __shfl_xor_sync(~0u, better, 2);
    if (quarter == 0 && own > 1 && better < p.top_k) chosen_ids[better] = best_ids[mine], chosen_scores[better] = best_scores[mine];
    __syncthreads();
    if (warp > 0) return;
    if (lane < p.top_k) id = chosen_ids[lane], chosen = chosen_scores[lane];
  } else {
    if (warp > 0) return;
    int at = 0;  // lane w < WARPS: place in the list of warp w
    uint32_t head = lane < WARPS ? best_keys[lane * kept] : 0;
    for (int i = 0; i < p.top_k; ++i) {
      const uint32_t top = __reduce_max_sync(~0u, head);
      if (top <= 1) break;
      // Lists ascend in ids: the first lane with the largest key has the lowest id.
      const int winner = __ffs(__ballot_sync(~0u, head == top)) - 1, place = __shfl_sync(~0u, at, winner);
      if (lane == i) id = best_ids[winner * kept + place], chosen = best_scores[winner * kept + place];
      if (lane == winner) ++at, head = at < p.top_k ? best_keys[lane * kept + at] : 0;
    }
  }
  // The sum in the order of the choice.
  float sum = 0;
  if (p.top_k <= SHORT_TOP) {
#pragma unroll
    for (int i = 0; i < SHORT_TOP; ++i) sum += chosen_scores[i];
  } else {
    for (int i = 0; i < p.top_k; ++i) sum += __shfl_sync(~0u, chosen, i);
  }
  sum += 1e-20f;
  if (lane < p.top_k && !code) {
    lists.ids[row * p.top_k + lane] = live ? id : -1;
    lists.weights[row * p.top_k + lane] = chosen / sum * p.scaling;
  }
  if (p.rows > 1 || p.built || code) return;
  // A row alone: its choices by ascending id are the list.
  int before = 0;
  for (int i = 0; i < p.top_k; ++i) before += static_cast<uint32_t>(__shfl_sync(~0u, id, i)) < static_cast<uint32_t>(id);
  if (lane < p.top_k && id >= 0) lists.order[before] = lane, lists.entry[before] = {id, before, 1, 0};
  const int chosen_ones = __popc(__ballot_sync(~0u, lane < p.top_k && id >= 0));
  if (lane == 0) *lists.entries = chosen_ones;
}

// Up to 64 places of at most `rows_per_entry` rows: a thread a place, each finds its position by looking at all. An expert has one row at most from each
// row, so one entry an expert.
__device__ __forceinline__ void sort_few(const Routing& p, const Lists& lists) {
  __shared__ int ids[64];
  __shared__ int heads[64];
  const int i = threadIdx.x, live = min(static_cast<int>(p.counts[0]), p.rows) * p.top_k;
  if (i < 64) ids[i] = i < live ? __ldcg(lists.ids + i) : -1, heads[i] = MAX_EXPERTS;
  __syncthreads();
  const int id = i < 64 ? ids[i] : -1;
  int less = 0, before = 0, same = 0;
  if (id >= 0) {
#pragma unroll 8
    for (int j = 0; j < 64; ++j) {
      const int other = ids[j];
      less += other >= 0 && other < id;
      same += other == id;
      before += other == id && j < i;
    }
    lists.order[less + before] = i;
    if (before == 0) heads[i] = id;
  }
  __syncthreads();
  if (id >= 0 && before == 0) {
    int entry = 0;
#pragma unroll 8
    for (int j = 0; j < 64; ++j) entry += heads[j] < id;
    lists.entry[entry] = {id, less, same, 0};
  }
  const int total = __syncthreads_count(id >= 0 && before == 0);
  if (i == 0) *lists.entries = total;
}

// One block: a counting sort of the live places by expert. Warp w has a stretch of places; within it, lanes with the same expert
// rank each other.
__device__ __forceinline__ void sort(const Routing& p, const Lists& lists) {
  __shared__ uint16_t count[WARPS][MAX_EXPERTS];
  __shared__ int totals[WARPS], entry_totals[WARPS];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, e = threadIdx.x;
  const int live = min(static_cast<int>(p.counts[0]), p.rows) * p.top_k;
  const int stretch = (live + 32 * WARPS - 1) / (32 * WARPS) * 32;
  const int begin = min(warp * stretch, live), end = min(begin + stretch, live), used = stretch ? (live + stretch - 1) / stretch : 0;
  for (int i = threadIdx.x; i < used * MAX_EXPERTS / 2; i += blockDim.x) reinterpret_cast<uint32_t*>(count)[i] = 0;
  __syncthreads();
  for (int base = begin; base < end; base += 32) {
    const int place = base + lane, id = place < end ? __ldcg(lists.ids + place) : -1;
    const uint32_t same = __match_any_sync(~0u, id);
    if (id >= 0 && lane == __ffs(same) - 1) count[warp][id] += __popc(same);
    __syncwarp();
  }
  __syncthreads();
  // Thread e: how many places expert e has, where its sorted places and its entries begin.
  int total = 0;
  if (e < p.experts)
#pragma unroll 8
    for (int w = 0; w < used; ++w) total += count[w][e];
  const int chunks = (total + p.rows_per_entry - 1) / p.rows_per_entry;
  int first = total, entry = chunks;  // inclusive sums over the warp
#pragma unroll
  for (int s = 1; s < 32; s *= 2) {
    const int a = __shfl_up_sync(~0u, first, s), b = __shfl_up_sync(~0u, entry, s);
    if (lane >= s) first += a, entry += b;
  }
  if (lane == 31) totals[warp] = first, entry_totals[warp] = entry;
  __syncthreads();
  int first_before = lane < warp ? totals[lane] : 0, entries_before = lane < warp ? entry_totals[lane] : 0;
  first += __reduce_add_sync(~0u, first_before), entry += __reduce_add_sync(~0u, entries_before);
  if (e == blockDim.x - 1) *lists.entries = entry;
  first -= total, entry -= chunks;
  if (e < p.experts) {
    for (int i = 0; i < chunks; ++i)
      lists.entry[entry + i] = {e, first + i * p.rows_per_entry, min(p.rows_per_entry, total - i * p.rows_per_entry), 0};
#pragma unroll 8
    for (int w = 0, at = first; w < used; ++w) {
      const int here = count[w][e];
      count[w][e] = static_cast<uint16_t>(at);
      at += here;
    }
  }
  __syncthreads();
  for (int base = begin; base < end; base += 32) {
    const int place = base + lane, id = place < end ? __ldcg(lists.ids + place) : -1;
    const uint32_t same = __match_any_sync(~0u, id);
    if (id >= 0) lists.order[count[warp][id] + __popc(same & ((1u << lane) - 1))] = place;
    __syncwarp();
    if (id >= 0 && lane == __ffs(same) - 1) count[warp][id] += __popc(same);
    __syncwarp();
  }
}

// A block a row; the last to finish makes the list, if nobody else does.
extern "C" __global__ void __launch_bounds__(MAX_EXPERTS) route(const __grid_constant__ Routing p) {
  __shared__ uint32_t turn;
  let_successor_start();
  const Lists lists(p.list, p.places);
  // Twice: the first time only brings the code near, while the predecessor runs.
  for (bool code = unknown(true);; code = false) {
    if (!code) wait_for_predecessor();
    choose(p, lists, blockIdx.x, code);
    if (!code) break;
  }
  if (p.built) return;
  if (p.rows == 1) {
    if (threadIdx.x == 0 && p.counts[0] == 0) *lists.entries = 0;
    return;
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) turn = gridDim.x > 1 ? atomicAdd(p.arrived, 1) : 0;
  __syncthreads();
  if (turn != gridDim.x - 1) return;
  __threadfence();
  if (threadIdx.x == 0) *p.arrived = 0;
  // An expert must not get more rows than an entry holds.
  if (p.rows * p.top_k <= 64 && p.rows <= p.rows_per_entry) sort_few(p, lists);
  else sort(p, lists);
}
