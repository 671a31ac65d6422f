// The state of rounds in device memory: mirrors of the structures in src/device/cuda/round/layout.rs, which allocates them.
#pragma once
#include <cstdint>

constexpr int kMaxRows = 64;       // rows of one request: bits of a mask word
constexpr int kMaxShares = 128;    // requests of one round
constexpr int kMaxReported = 20;   // best tokens reported beside a chosen one
constexpr uint32_t kNone = 0xffffffffu;
constexpr uint32_t kListed = 0x80000000u;  // `seen`: in prompt or output; the bits below count generated tokens

// An admitted request.
struct Request {
  int32_t length;   // committed tokens: the anchor's position
  uint32_t anchor;
  float temperature, top_p, min_p;
  uint32_t top_k;
  uint64_t seed;
  float frequency, presence, repetition;
  int32_t reported;        // best tokens to report, -1 = no report
  uint32_t free_from;      // suppressed ids are banned before this position
  uint32_t suppressed_count;
  uint32_t drafts;
  uint32_t bias_outside;   // first biased token outside the vocabulary, kNone = none
  uint32_t* seen;          // [vocab], null without penalties
  float* bias;             // [vocab], null without biases
  uint32_t* suppressed;
};
static_assert(sizeof(Request) == 88, "mirrored in Rust");

struct Share {
  uint32_t request;
  uint32_t rows;     // planned
  uint32_t chain;
  uint32_t first;    // first planned row: masks and results lie at planned rows
  uint32_t masked;   // rows that have a mask
  uint32_t pad[3];
};
static_assert(sizeof(Share) == 32, "mirrored in Rust");

struct Plan {
  uint32_t shares;
  uint32_t drafting;    // shares that have a block
  uint32_t begin;       // 1: the first token after a prompt
  uint32_t records_at;  // bytes into the result
  uint32_t reports_at;
  uint32_t pad[3];
  uint32_t drafters[kMaxShares];  // share of each block
  Share share[kMaxShares];
};
static_assert(sizeof(Plan) == 32 + 36 * kMaxShares, "mirrored in Rust");

struct Tree {
  uint32_t rows;
  uint32_t pad;
  uint32_t token[kMaxRows];
  uint8_t parent[kMaxRows];
  uint8_t depth[kMaxRows];
  uint64_t ancestors[kMaxRows];
  double logprob[kMaxRows];
};
static_assert(sizeof(Tree) == 1416, "mirrored in Rust");

// Where the verify rows of this round really are: a tree may have ended short of its plan.
struct Live {
  uint32_t rows;
  uint32_t firsts[kMaxShares];
};
static_assert(sizeof(Live) == 516, "mirrored in Rust");

// A live verify row.
struct RowInfo {
  uint32_t request;
  uint32_t position;  // of the token after it
  uint32_t place;     // share << 8 | row of the tree
  uint32_t planned;   // its planned row
};
static_assert(sizeof(RowInfo) == 16, "mirrored in Rust");

enum Fault : uint32_t { kFine = 0, kNotFinite = 1, kNothingAllowed = 2, kBiasOutside = 3 };

struct Pick {
  uint32_t token;
  uint32_t fault;
  uint32_t fault_token;
  float value;   // of the faulty logit
  float best;    // largest adjusted logit
};
static_assert(sizeof(Pick) == 20, "mirrored in Rust");

// One block's part of a row's scan.
struct ScanPart {
  uint32_t key, id;       // best adjusted logit
  uint32_t raw, adjusted;  // lowest ids that are not finite
};
static_assert(sizeof(ScanPart) == 16, "mirrored in Rust");

struct Walked {
  int32_t before;       // length before the walk
  uint32_t accepted;    // 0 = a fault
  uint32_t kept;        // accepted rows that the drafter's context takes in
  uint8_t path[kMaxRows];
};
static_assert(sizeof(Walked) == 76, "mirrored in Rust");

struct TopPart {
  double sum;
  float max;
  uint32_t count, ahead, pad;
};
static_assert(sizeof(TopPart) == 24, "mirrored in Rust");

// What the host reads of a share, then of each planned row, then the reports.
struct ShareResult {
  uint32_t accepted;
  uint32_t fault;
  uint32_t fault_token;
  float fault_value;
  uint32_t tree_rows;
  uint32_t first;  // live
  uint32_t pad[2];
};
static_assert(sizeof(ShareResult) == 32, "mirrored in Rust");

struct RowResult {
  double logprob;
  uint32_t tree_token;
  uint32_t token;  // emitted
  uint8_t parent;
  uint8_t path;
  uint8_t pad[6];
};
static_assert(sizeof(RowResult) == 24, "mirrored in Rust");

struct Report {
  uint32_t token;
  float logprob;
  uint32_t rank;
  uint32_t found;
  uint32_t ids[kMaxReported];
  float logprobs[kMaxReported];
};
static_assert(sizeof(Report) == 176, "mirrored in Rust");

struct Round {
  Request* requests;
  int32_t* tables;        // [requests][table_stride]
  Plan* plan;
  Tree* trees;            // [shares]
  uint32_t* ids;          // [shares][block - 1][kMaxRows]
  float* logprobs;
  Live* live;
  RowInfo* infos;         // [live rows]
  uint32_t* masks;        // [planned rows][words]
  ScanPart* scans;        // [rows][chunks]
  Pick* picks;            // [rows]
  Walked* walked;         // [shares]
  unsigned char* result;
  TopPart* top_parts;     // [rows][chunks]
  uint64_t* candidates;   // [rows][chunks][kCap]
  uint32_t* arrivals;     // [rows], zero between kernels
  int32_t table_stride;
  int32_t vocab;
  int32_t words;          // of a mask row
  int32_t block;          // rows of a drafter block
};
static_assert(sizeof(Round) == 144, "mirrored in Rust");

inline __device__ ShareResult* share_results(const Round& r) { return reinterpret_cast<ShareResult*>(r.result); }
inline __device__ RowResult* row_results(const Round& r) {
  return reinterpret_cast<RowResult*>(r.result + r.plan->records_at);
}
inline __device__ Report* reports(const Round& r) { return reinterpret_cast<Report*>(r.result + r.plan->reports_at); }

// Floats in the order of unsigned integers; 0 stands below every number.
inline __device__ uint32_t key_of(float value) {
  uint32_t bits = __float_as_uint(value + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline __device__ float value_of(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Four logits from id `at` (a multiple of 4); -inf beyond the vocabulary.
inline __device__ float4 load_logits(const float* row, int at, int vocab, bool aligned) {
  if (aligned && at + 4 <= vocab) return *reinterpret_cast<const float4*>(row + at);
  float4 out = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
  if (at < vocab) out.x = row[at];
  if (at + 1 < vocab) out.y = row[at + 1];
  if (at + 2 < vocab) out.z = row[at + 2];
  if (at + 3 < vocab) out.w = row[at + 3];
  return out;
}

// Whether this is the last of `blocks` blocks working on `row`; what the others wrote before is visible to it (through L2: read it
// with __ldcg). Leaves the counter zero.
inline __device__ bool last_of_row(uint32_t* arrivals, int row, int blocks) {
  __shared__ bool last;
  // The barrier orders the block's writes before the one fence, which orders them before the count.
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    last = atomicAdd(&arrivals[row], 1u) == uint32_t(blocks) - 1;
    if (last) arrivals[row] = 0;
    __threadfence();
  }
  __syncthreads();
  return last;
}
