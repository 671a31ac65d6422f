// Shapes of latent attention that the kernels are compiled for; src/device/cuda/attention/mod.rs refuses others.
#pragma once
#include "../verify/params.h"

constexpr int kNope = 128;                        // part of a query head without position
constexpr int kQuery = kNope + kRope;             // 192: a query head, and an expanded key
constexpr int kValue = 128;                       // a value head
constexpr int kHeadRows = kNope + kValue;         // rows of kv_b_proj a head has: W_UK, then W_UV
