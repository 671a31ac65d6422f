// What the kernels for few and for many rows of an expert share.
#pragma once
#include "routing.cuh"

// The second product. Mirrored in src/device/cuda/products/experts.rs.
struct Down {
  const uint8_t* weights;  // [experts][tiles][steps][1152]
  const uint16_t* inner;   // [sorted place][k] bf16
  float* outer;            // [place][16 tiles]
  void* list;
  int places;
  int k;
  int tiles;
  int steps;
};
