// Which rows a pass works on: mirror of RowPointers in src/device/cuda/rows.rs, which says what each field is.
#pragma once
#include <cstdint>

struct Rows {
  uint32_t* tokens;
  uint32_t* positions;
  int32_t* slots;
  uint32_t* groups;
  uint64_t* ancestors;
  uint32_t* sources;
  uint32_t* counts;        // [rows, groups]
  int32_t* firsts;         // [groups + 1]
  int32_t* table_begins;   // [groups]
  int32_t* prefixes;       // [groups]
  const int32_t* tables;
};
static_assert(sizeof(Rows) == 88, "mirrored in Rust");
