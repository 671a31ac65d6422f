// Activations rounded to bf16 as pack.cu leaves them and wide.cu reads them.
#pragma once
#include "dense.cuh"

// [blocks of 32 rows][unit][4 tiles of 8 rows][32 lanes][8]: a block's units follow each other, so that a few of them are one copy.
constexpr int PACKED_ROWS = 32, PACKED_UNIT = PACKED_ROWS * UNIT * 2;  // rows of a block, bytes of its unit

// Mirrored in src/device/cuda/products/wide.rs.
struct Pack {
  const float* x;
  int64_t x_stride;
  uint4* packed;      // rows beyond `rows` are zeros
  uint4* rest;        // the same of what rounding took away, or null
  uint16_t* rounded;  // [rows][k], or null
  int rows;
  int units;          // k / 32
};
struct Wide {
  Dense dense;            // x, x_stride and rounded are unused
  const uint8_t* packed;
  const uint8_t* rest;    // null where no job is PRECISE
  int64_t ring;           // bytes of the ring of stages
};
static_assert(sizeof(Pack) == 48 && sizeof(Wide) == sizeof(Dense) + 24, "mirrored in Rust");
