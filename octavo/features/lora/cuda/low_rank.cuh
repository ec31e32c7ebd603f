// What the kernels of low-rank additions share: where adapters lie in blocks of the KV cache (../layout.py), and
// products of fragments.
//
// A tile of rows is an adapter and up to 8 rows that have it, -1 for none (../tables.py). A warp multiplies 16 rows of a
// matrix by the transposed rows of a tile. Its lanes 4 g + t take adjacent elements, those of the t-th quarter, of two
// rows of the matrix and of row g of the tile: an order of inputs that does not change the sums, and in which each lane
// loads up to 16 bytes at once.
//
// Macros: those of places.cuh. PARTS of the target; RANKS: room for those of a part, a multiple of 16. WARPS.

#define WORDS(n) ((n) * SIZE / 4)
#define TILE_ROWS 8

// d = a @ b + c, of 16 rows, 16 inputs and 8 outputs.
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Add to d the products of N elements of each lane: d[0] and d[1] of its first row of the matrix with the tile's rows 2 t
// and 2 t + 1, d[2] and d[3] of its second one. low, high: of its rows of the matrix; given: of the tile's row g.
template <int N>
__device__ __forceinline__ void multiply(float* d, const u32* low, const u32* high, const u32* given) {
#if FLOATS
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
  for (int row = 0; row < 8; row++) {
    float sums[2] = {0.f, 0.f};
#pragma unroll
    for (int i = 0; i < N; i++) {
      const float w = __uint_as_float(__shfl_sync(0xffffffffu, given[i], row * 4 + t));
      sums[0] += __uint_as_float(low[i]) * w, sums[1] += __uint_as_float(high[i]) * w;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      sums[half] += __shfl_xor_sync(0xffffffffu, sums[half], 1);
      sums[half] += __shfl_xor_sync(0xffffffffu, sums[half], 2);
      if (t == row / 2) d[2 * half + row % 2] += sums[half];
    }
  }
#else
#pragma unroll
  for (int i = 0; i < WORDS(N); i += 2) mma(d, low[i], high[i], low[i + 1], high[i + 1], given[i], given[i + 1], d);
#endif
}

// Load N adjacent elements, 4 or 8, that no kernel writes.
template <int N>
__device__ __forceinline__ void load(u32* to, const unsigned char* from) {
  if (WORDS(N) == 2) {
    const uint2 v = fetch((const uint2*)from);
    to[0] = v.x, to[1] = v.y;
  }
#pragma unroll
  for (int i = 0; i < WORDS(N) / 4; i++) {
    const uint4 v = fetch((const uint4*)from + i);
    to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
  }
}

// Load what an earlier launch wrote, as `written` of integers.cuh.
__device__ __forceinline__ float2 written(const float2* from) {
  float2 v;
  asm volatile("ld.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}

// Load N adjacent elements that an earlier launch wrote.
template <int N>
__device__ __forceinline__ void load_written(u32* to, const unsigned char* from) {
  if (WORDS(N) == 2) {
    const float2 v = written((const float2*)from);
    to[0] = __float_as_uint(v.x), to[1] = __float_as_uint(v.y);
  }
#pragma unroll
  for (int i = 0; i < WORDS(N) / 4; i++) {
    const uint4 v = written((const uint4*)from + i);
    to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
  }
}

// Return the value of an element among some that were loaded.
__device__ __forceinline__ float value_of(const u32* words, int i) {
#if FLOATS
  return __uint_as_float(words[i]);
#else
  const float2 pair = wide2(words[i / 2]);
  return i % 2 ? pair.y : pair.x;
#endif
}

// Round N values to elements.
template <int N>
__device__ __forceinline__ void round_to(u32* words, const float* values) {
#pragma unroll
  for (int i = 0; i < WORDS(N); i++)
    words[i] = FLOATS ? __float_as_uint(values[i]) : narrow2(values[2 * i % N], values[(2 * i + 1) % N]);
}

// Store N adjacent elements.
template <int N>
__device__ __forceinline__ void store(unsigned char* to, const u32* words) {
  if (WORDS(N) == 2) *(uint2*)to = make_uint2(words[0], words[1]);
#pragma unroll
  for (int i = 0; i < WORDS(N) / 4; i++)
    ((uint4*)to)[i] = make_uint4(words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]);
}
