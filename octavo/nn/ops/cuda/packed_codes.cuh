// Widen codes of packed experts, as they lie in shared memory, to what the matrix units take from registers.
//
// The layout of codes is that of nn/ops/triton_packed_experts.py. A stage has 128 bytes of codes of each of 2 * HALF_TILE
// outputs, and behind them their scales [HELD, 2 * HALF_TILE], then minima.
//
// Macros: those of packed_numbers.cuh; GROUPS of warps that multiply; FIRST: a thread has an output of the gate and the
// one it gates.

#define ROW_BYTES 128                // swizzled, in groups of 8 rows
#define HALF_TILE (GROUPS * 32)      // outputs of one of the two matrices, or halves of one
#define APART (FIRST ? HALF_TILE : 8)  // rows between a thread's two outputs
#define UNITS (BITS == 4 ? 4 : 2)    // of 64 inputs, in 128 bytes of codes
#define SPAN (UNITS * 64)
#define SETS (BITS == 4 ? FIELD / 16 : 1)  // words of 8 inputs and an output, in 64 inputs
#define HELD (!GROUP ? 0 : GROUP < SPAN ? SPAN / GROUP : 1)  // groups of a stage
#define FACTOR_BYTES (HELD * 2 * HALF_TILE * SCALE_BYTES)    // scales, or minima

// A thread's first output of those in a stage, g of its warp.
__device__ __forceinline__ int first_output(int group, int warp, int g) {
  return FIRST ? group * 32 + warp * 8 + g : group * 64 + warp * 16 + g;
}

__device__ __forceinline__ u32 load32(u32 from) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ u32 load16(u32 from) {
  unsigned short v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}

__device__ __forceinline__ u32 factor_at(u32 from) { return SCALE_BYTES == 4 ? load32(from) : load16(from); }

__device__ __forceinline__ u32 factor_pair(u32 from) {
  const float v = factor_of(factor_at(from));
  return narrow2(v, v);
}

// Two numbers of codes: in 4 bits, of a field of the halves of a word; in 8 bits, of bytes 0 and 1.
__device__ __forceinline__ u32 numbers(u32 w) {
#if BITS == 4 && E2M1  // exponent and mantissa become those of a format with a larger bias
  return mul2((w << 12 & 0x80008000u) | (HALF ? w << 9 & 0x0E000E00u : w << 6 & 0x01C001C0u), HALF ? 0x74007400u : 0x7E807E80u);
#elif BITS == 4
  return add2(nibbles(w), HALF ? 0xE408E408u : 0xC308C308u);
#elif E4M3 && HALF
  u32 pair[2];
  float8_halves(w, pair);
  return pair[0];
#elif E4M3
  u32 pair[2];
  float8_pairs<false>(permuted(w, 0, 0x4140), pair);
  return mul2(pair[0], MOVED_PAIR);
#elif E5M2
  const u32 high = permuted(w, 0, 0x1404);
  return HALF ? high : mul2((high & 0x80008000u) | (high >> 3 & 0x0FE00FE0u), 0x77807780u);
#else
  const u32 words[4] = {permuted(w, 0, 0x4140), 0u, 0u, 0u};
  return pair<0>((const uint4*)words, 0);
#endif
}

__device__ __forceinline__ u32 scaled(u32 pair, u32 scale, u32 least) {
#if !GROUP
  return pair;
#elif MINIMA
  return fma2(pair, scale, least);
#else
  return mul2(pair, scale);
#endif
}

// Widen the codes of 64 inputs, number U of those in a stage, of a thread's two outputs.
//
// rows: of the first output in shared memory, and 4 bytes for each t; column: what swizzles the bytes of its row;
// factors: the scale of the first output. The second output's are APART rows further on.
template <int U>
__device__ __forceinline__ void widen(u32 rows, u32 column, u32 factors, const Planes& table, u32* to) {
  u32 scale[2] = {0u, 0u}, least[2] = {0u, 0u};
  u32 word[SETS][2][2];  // of the lower or upper 8 inputs, and of either output
#if BITS == 4
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    const int chunk = (U * 64 / (4 * FIELD) * FIELD + set * 16) / 8;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int o = 0; o < 2; o++) word[set][h][o] = load32(rows + (((chunk + h) << 4) ^ column) + o * APART * ROW_BYTES);
  }
#endif
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const int input = U * 64 + r * 16;
#if GROUP
    if (r == 0 || input % GROUP == 0) {
      const u32 from = factors + (GROUP < SPAN ? input / GROUP : 0) * (2 * HALF_TILE * SCALE_BYTES);
#pragma unroll
      for (int o = 0; o < 2; o++) {
        scale[o] = factor_pair(from + o * APART * SCALE_BYTES);
        if (MINIMA) least[o] = factor_pair(from + o * APART * SCALE_BYTES + FACTOR_BYTES);
      }
    }
#endif
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
      for (int o = 0; o < 2; o++) {
#if BITS == 4
        const int set = r % SETS, field = input % (4 * FIELD) / FIELD;
        const u32 pair = TABLE ? looked_up(table, word[set][h][o], field) : numbers(word[set][h][o] >> (4 * field));
#else
        const u32 pair = numbers(load16(rows + ((input / 16 << 4) ^ column) + 8 * h + o * APART * ROW_BYTES));
#endif
        to[4 * r + 2 * h + o] = scaled(pair, scale[o], least[o]);
      }
    }
  }
}
