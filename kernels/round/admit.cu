// Takes a request in: its parameters, slot table, biases and what its prompt shows to the penalties.
#include "state.cuh"

// Lists lie in pinned host memory.
struct Lists {
  const uint32_t* slots;
  const uint32_t* suppressed;
  const uint32_t* bias_ids;
  const float* bias_values;
  const uint32_t* prompt;
  uint32_t slots_count, suppressed_count, bias_count, prompt_count;
};
static_assert(sizeof(Lists) == 56, "mirrored in Rust");

// One block.
extern "C" __global__ __launch_bounds__(1024) void round_admit(Round r, Request request, Lists lists, uint32_t index) {
  int32_t* table = r.tables + size_t(index) * r.table_stride;
  for (int i = threadIdx.x; i < r.table_stride; i += blockDim.x) {
    table[i] = i < lists.slots_count ? int32_t(lists.slots[i]) : -1;
  }
  for (int i = threadIdx.x; i < lists.suppressed_count; i += blockDim.x) request.suppressed[i] = lists.suppressed[i];
  for (int i = threadIdx.x; i < r.vocab; i += blockDim.x) {
    if (request.bias) request.bias[i] = 0.0f;
    if (request.seen) request.seen[i] = 0;
  }
  __syncthreads();
  if (request.bias) {
    for (int i = threadIdx.x; i < lists.bias_count; i += blockDim.x) request.bias[lists.bias_ids[i]] = lists.bias_values[i];
  }
  if (request.seen) {
    for (int i = threadIdx.x; i < lists.prompt_count; i += blockDim.x) {
      uint32_t token = lists.prompt[i];
      if (token < r.vocab) request.seen[token] = kListed;
    }
  }
  if (threadIdx.x == 0) r.requests[index] = request;
}
