// How weights are read: once a pass, streaming through L2. They are the first to leave it again, so that code, activations and KV rows
// stay.
#pragma once
#include <cstdint>

// What createpolicy.fractional.L2::evict_first makes, on sm_90 and sm_120 alike. As a constant it takes no registers.
constexpr uint64_t PASSING = 0x12f0000000000000;
