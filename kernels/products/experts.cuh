// What the kernels for few and for many rows of an expert share.
#pragma once
#include "routing.cuh"

// The first product, with SwiGLU. Mirrored in src/device/cuda/products/experts.rs.
struct GateUp {
  const uint8_t* weights;  // [experts][tiles][steps][1152], a tile = 8 gate rows and their 8 up rows
  const uint16_t* x;       // [row][k] bf16
  const float* factors;    // [row] what sums are multiplied by, or null
  uint16_t* inner;         // [sorted place][8 tiles] bf16
  void* list;
  int places;
  int k;
  int tiles;               // of 16 rows, per expert
  int steps;               // k / 128, rounded up
  int slice;               // steps of a slice
  int top_k;
  int rows;                // bound
  int unused;
};
static_assert(sizeof(GateUp) == 72, "mirrored in Rust");

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
