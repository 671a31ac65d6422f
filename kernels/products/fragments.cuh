// How weights and activations lie so that mma.sync operands come from 16-byte loads, and the dequantisation of INT4.
//
// One tensor-core product is D[16 weight rows][8 activation rows] += A[16][16] B[16][8]. Weights are A: 1 to 8 activation rows cost
// one tile. The order of k inside a product is free as long as A and B agree, so a *unit* of 32 k is cut by lane: lane (g, t) =
// (lane / 4, lane % 4) holds k = 8t .. 8t + 7 of row g, which makes two products of 16 k out of one 16-byte word.
//
// Dense weights: [ceil(n / 8)][k / 32][32 lanes][8] bf16, a *half tile* of 8 rows being k / 32 units of 512 bytes. Any two half
// tiles make an A operand, so gate and up rows of a SwiGLU block meet in one thread.
// Activations in shared memory: [unit][activation tile of 8 rows][32 lanes][8] bf16.
// INT4 weights: tiles of 16 rows, [k / 128][1152 bytes]: two words of 16 bytes a lane (64 k each: row g and row g + 8 of both
// units), then 16 bytes of scales for each g (groups 0 .. 3 of row g, then of row g + 8).
#pragma once
#include "../common/passing.cuh"
#include "../verify/ptx.cuh"

// sm_120: shared memory for one or two blocks a multiprocessor, and a compiler that needs some registers more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr bool SMALL_CARD = true;
#else
constexpr bool SMALL_CARD = false;
#endif

constexpr int UNIT = 32;              // k of a unit
constexpr int STEP = 128;             // k of a step of INT4 weights
constexpr int STEP_BYTES = 1152;

// A kernel launched as a programmatic dependent starts while its predecessor drains: before it touches anything that an earlier
// kernel reads or writes it must wait. Without that launch attribute both are no-ops.
__device__ __forceinline__ void wait_for_predecessor() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_successor_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// `x`, which the compiler must not know.
__device__ __forceinline__ int unknown(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Eight f32 as bf16.
__device__ __forceinline__ uint4 round8(const float (&x)[8]) {
  return {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}
// What rounding took away, as bf16: the second term of a product in almost f32 precision.
__device__ __forceinline__ uint4 rest8(const float (&x)[8], const uint4& high) {
  const uint32_t h[4] = {high.x, high.y, high.z, high.w};
  float r[8];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    r[2 * i] = x[2 * i] - __uint_as_float(h[i] << 16);
    r[2 * i + 1] = x[2 * i + 1] - __uint_as_float(h[i] & 0xffff0000u);
  }
  return round8(r);
}
__device__ __forceinline__ void load8(float (&x)[8], const float* p) {
  const float4 a = *reinterpret_cast<const float4*>(p), b = *reinterpret_cast<const float4*>(p + 4);
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// One unit: two products. `low` and `high` are the words of the two half tiles.
__device__ __forceinline__ void multiply(float (&d)[4], const uint4& low, const uint4& high, const uint4& x) {
  const uint32_t first[4] = {low.x, high.x, low.y, high.y}, second[4] = {low.z, high.z, low.w, high.w};
  mma(d, first, x.x, x.y);
  mma(d, second, x.z, x.w);
}

// A nibble q + 8 in the lowest bits of a bf16 is the number (q + 8) 2^-133, and in the four bits above them (q + 8) 2^-129: subnormal
// numbers and the first normal ones have the same unit. So q times a scale s, rounded once, is one fused operation: (q + 8) times the
// scale in that unit, minus 8 scales. Weights are kept 2^-16 too small, so that every factor fits bf16: sums are multiplied by SCALED.
// That holds for s = 0 and 2^-110 <= |s| < 2^10; tile_int4 refuses other scales.
constexpr float SCALED = 0x1p16f, STORED_SCALE = 0x1p117f, LEAST_SCALE = 0x1p-110f, SCALE_LIMIT = 0x1p10f;
struct Scale {
  uint32_t low, high, minus_8;  // s 2^117 (as tiles hold it), s 2^113, -s 2^-13, each in both halves
  __device__ __forceinline__ Scale(uint32_t stored) : low(stored) {
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(high) : "r"(stored), "r"(0x3d803d80u));     // 2^-4
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(minus_8) : "r"(stored), "r"(0x80088008u));  // -2^-130
  }
};
// bf16(q * scale) 2^-16 of 8 nibbles, as the checkpoint's unpacker rounds it. Element e lies at bits 4 (e / 2) + 16 (e % 2).
__device__ __forceinline__ uint4 unpack8(uint32_t word, const Scale& s) {
  const auto element = [](uint32_t v, uint32_t factor, uint32_t minus_8) {
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(factor), "r"(minus_8));
    return v;
  };
  const uint32_t above = word >> 8;
  return {element(word & 0x000f000fu, s.low, s.minus_8), element(word & 0x00f000f0u, s.high, s.minus_8),
          element(above & 0x000f000fu, s.low, s.minus_8), element(above & 0x00f000f0u, s.high, s.minus_8)};
}
__device__ __forceinline__ uint32_t both(uint32_t pair, int which) { return __byte_perm(pair, 0, which ? 0x3232 : 0x1010); }

// Weights come into a ring in shared memory, each warp its own, in the background; a lane reads back the words it asked for.
__device__ __forceinline__ void copy_weights16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "l"(PASSING) : "memory");
}
// The same if `wanted`, without a branch.
__device__ __forceinline__ void copy_weights16_if(bool wanted, uint32_t to, const void* from) {
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %0, 0;\n@p cp.async.cg.shared.global.L2::cache_hint.L2::128B [%1], [%2], 16, %3;\n}" ::"r"(static_cast<int>(wanted)), "r"(to), "l"(from), "l"(PASSING) : "memory");
}
__device__ __forceinline__ void copies_end_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// All but the last `LEFT` groups of this thread have arrived.
template <int LEFT> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
__device__ __forceinline__ uint4 shared16(uint32_t at) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
  return v;
}

// One step of INT4 weights into a slot of 1152 bytes. The scales are shared by four lanes: __syncwarp() after the wait.
__device__ __forceinline__ void copy_step(uint32_t slot, const uint8_t* at, int lane) {
  copy_weights16(slot + lane * 16, at + lane * 16);
  copy_weights16(slot + 512 + lane * 16, at + 512 + lane * 16);
  copy_weights16_if(lane < 8, slot + 1024 + lane * 16, at + 1024 + lane * 16);
}
// A lane's share of a step.
struct Step {
  uint4 w[2];
  uint4 scales;
};
__device__ __forceinline__ Step read_step(uint32_t slot, int lane) {
  return {{shared16(slot + lane * 16), shared16(slot + 512 + lane * 16)}, shared16(slot + 1024 + (lane >> 2) * 16)};
}
// Unit `unit` (0 .. 3) of a step as two half-tile words.
__device__ __forceinline__ void unpack_unit(const Step& s, int unit, uint4& low, uint4& high) {
  const uint4& w = s.w[unit / 2];
  const uint32_t below = unit / 2 ? s.scales.y : s.scales.x, above = unit / 2 ? s.scales.w : s.scales.z;
  low = unpack8(unit % 2 ? w.z : w.x, both(below, unit % 2));
  high = unpack8(unit % 2 ? w.w : w.y, both(above, unit % 2));
}

__device__ __forceinline__ float swiglu(float gate, float up) { return gate * up / (1.0f + expf(-gate)); }
