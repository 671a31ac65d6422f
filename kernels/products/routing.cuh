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
