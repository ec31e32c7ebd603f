// What the kernels that multiply one row x [K], or few rows x [M, K], share: rows as the matrix units take them, and the
// operations after the product.
//
// Macros: those of integers.cuh and copies.cuh; FORM 3: the units take the narrow type, a row that is not narrow yet as
// the sum of two that are; else they take float16, and the row is scaled so that it fits. Numbers of 8 bits are E4M3 if
// FORM is 0, E5M2 if it is 1, integers if it is 2. N; K; WARPS; NORMED, GATED, BIASED,
// ADDED; X_FLOAT, OUT_FLOAT: x or out are float, not the narrow type; ROWS 1, 4 or 8: more than one are narrow, without a
// norm, and M of them are there; LINE: inputs from one row of x or of the matrix to the next, of which K are multiplied.

#define SPLIT (FORM == 3 && (NORMED || X_FLOAT))
#define SIDES (GATED ? 2 : 1)
#define STRIPS (N / (16 * SIDES))  // of 16 outputs, with GATED also the 16 that they gate, N / 2 below
#define EIGHTS ((K / 8 + WARPS * 32 - 1) / (WARPS * 32))  // of the row in a thread
#define SHARERS (WARPS * 32 / ROWS)  // threads that bring one of several rows
#if FORM == 3
#define UNITS TYPE
#else
#define UNITS "f16"
#endif

__device__ __forceinline__ u32 half2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float narrow_at(const void* from, int i) { return wide2(((const unsigned short*)from)[i]).x; }

// Return two adjacent values of a row as the units take them.
__device__ __forceinline__ float2 as_given(u32 pair) { return FORM == 3 ? wide2(pair) : both(pair); }

// d = a @ b + c, of 16 outputs and 16 inputs.
__device__ __forceinline__ void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* c) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." UNITS "." UNITS ".f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Two adjacent numbers of 8 bits, the upper two of a word if HIGH, as float16. Integers have an inverted sign.
template <int HIGH>
__device__ __forceinline__ u32 pair8(u32 w) {
  u32 d;
#if FORM == 2
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(w), "r"(0x64646464u), "n"(HIGH ? 0x4342 : 0x4140));
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(d), "r"(0xE480E480u));
#elif FORM == 0
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((unsigned short)(HIGH ? w >> 16 : w)));
#else
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"((unsigned short)(HIGH ? w >> 16 : w)));
#endif
  return d;
}

// Load the norm's weights for a thread's part of the row.
__device__ __forceinline__ void load_norm(uint4* norm_of, const uint4* norm) {
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
    if (i * 8 < K) norm_of[j] = norm[i];
  }
}

// Read the row, which earlier launches wrote, and normalize it. Calls place(i, pairs, rest) for inputs 8 i to 8 i + 7:
// as the units take them, and with SPLIT what rounding took from them; values beyond K are 0. Returns the factor of the
// products' sums.
template <class Place>
__device__ __forceinline__ float prepare(const uint4* x, const uint4* norm_of, float eps, float* measures, Place place) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float2 v[EIGHTS][4];
  float measure = 0.f;  // the sum of squares, or the largest magnitude
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
    v[j][0] = v[j][1] = v[j][2] = v[j][3] = make_float2(0.f, 0.f);
    if (i * 8 >= K) continue;
#if X_FLOAT
    const uint4 low = written(x + 2 * i), high = written(x + 2 * i + 1);
    v[j][0] = make_float2(__uint_as_float(low.x), __uint_as_float(low.y));
    v[j][1] = make_float2(__uint_as_float(low.z), __uint_as_float(low.w));
    v[j][2] = make_float2(__uint_as_float(high.x), __uint_as_float(high.y));
    v[j][3] = make_float2(__uint_as_float(high.z), __uint_as_float(high.w));
#else
    const uint4 q = written(x + i);
    v[j][0] = wide2(q.x), v[j][1] = wide2(q.y), v[j][2] = wide2(q.z), v[j][3] = wide2(q.w);
#endif
  }
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
#pragma unroll
    for (int p = 0; p < 4; p++)
      measure = NORMED ? measure + v[j][p].x * v[j][p].x + v[j][p].y * v[j][p].y
                       : fmaxf(measure, fmaxf(fabsf(v[j][p].x), fabsf(v[j][p].y)));
  }
#pragma unroll
  for (int i = 16; i; i /= 2) {
    const float other = __shfl_xor_sync(0xffffffffu, measure, i);
    measure = NORMED ? measure + other : fmaxf(measure, other);
  }
  if (lane == 0) measures[warp] = measure;
  __syncthreads();
  measure = 0.f;
#pragma unroll
  for (int w = 0; w < WARPS; w++) measure = NORMED ? measure + measures[w] : fmaxf(measure, measures[w]);
#if NORMED
  const float factor = rsqrtf(measure / K + eps), back = 1.f;
#elif FORM == 3
  const float factor = 1.f, back = 1.f;
#else  // a power of two, so that the largest magnitude is about 2 ** 8
  const int power = min(max((int)(__float_as_uint(measure) >> 23) - 135, -126), 126);
  const float factor = __uint_as_float((u32)(127 - power) << 23), back = __uint_as_float((u32)(127 + power) << 23);
#endif
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
    u32 pairs[4], rest[4];
#if NORMED
    const u32 weights[4] = {norm_of[j].x, norm_of[j].y, norm_of[j].z, norm_of[j].w};
#endif
#pragma unroll
    for (int p = 0; p < 4; p++) {
#if NORMED
      const float2 weight = wide2(i * 8 < K ? weights[p] : 0u);
      v[j][p].x *= weight.x, v[j][p].y *= weight.y;
#endif
      v[j][p].x *= factor, v[j][p].y *= factor;
#if FORM == 3
      pairs[p] = narrow2(v[j][p].x, v[j][p].y);
#if SPLIT
      const float2 rounded = wide2(pairs[p]);
      rest[p] = narrow2(v[j][p].x - rounded.x, v[j][p].y - rounded.y);
#endif
#else
      pairs[p] = half2(v[j][p].x, v[j][p].y);
#endif
    }
    place(i, pairs, rest);
  }
  __syncthreads();
  return back;
}

// Read several rows, which earlier launches wrote; those from M on are 0. Calls place(row, i, pairs) for inputs 8 i to
// 8 i + 7, as the units take them; all threads of a warp call it together, beyond K with 0. Sets the factors of the rows'
// sums. The caller must wait for all threads.
template <class Place>
__device__ __forceinline__ void bring(const uint4* x, int M, float* measures, float* factors, Place place) {
  const int row = threadIdx.x / SHARERS, own = threadIdx.x % SHARERS;
  auto read = [&](int i) { return row < M && i < K / 8 ? written(x + row * (LINE / 8) + i) : make_uint4(0u, 0u, 0u, 0u); };
  float factor = 1.f, back = 1.f;
#if FORM != 3  // powers of two, so that a row's largest magnitude is about 2 ** 8
  float measure = 0.f;
#pragma unroll 4
  for (int first = 0; first < K / 8; first += SHARERS) {
    const uint4 q = read(first + own);
    const float2 v[4] = {wide2(q.x), wide2(q.y), wide2(q.z), wide2(q.w)};
#pragma unroll
    for (int p = 0; p < 4; p++) measure = fmaxf(measure, fmaxf(fabsf(v[p].x), fabsf(v[p].y)));
  }
#pragma unroll
  for (int i = 16; i; i /= 2) measure = fmaxf(measure, __shfl_xor_sync(0xffffffffu, measure, i));
  if (threadIdx.x % 32 == 0) measures[threadIdx.x / 32] = measure;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < SHARERS / 32; w++) measure = fmaxf(measure, measures[row * (SHARERS / 32) + w]);
  const int power = min(max((int)(__float_as_uint(measure) >> 23) - 135, -126), 126);
  factor = __uint_as_float((u32)(127 - power) << 23), back = __uint_as_float((u32)(127 + power) << 23);
#endif
  if (own == 0) factors[row] = back;
#pragma unroll 4
  for (int first = 0; first < K / 8; first += SHARERS) {
    const uint4 q = read(first + own);
    u32 pairs[4] = {q.x, q.y, q.z, q.w};
#if FORM != 3
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const float2 v = wide2(pairs[p]);
      pairs[p] = half2(v.x * factor, v.y * factor);
    }
#endif
    place(row, first + own, pairs);
  }
}

// Keep a warp's sums of a strip, outputs g and g + 8 in two columns, for the thread that adds up those of all warps.
__device__ __forceinline__ void keep(float (*sums)[16 * SIDES], int side, const float* sum) {
  const int lane = threadIdx.x % 32, g = lane / 4;
#if ROWS > 1
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int column = 2 * (lane % 4) + e % 2;
    if (column < ROWS) sums[column][side * 16 + e / 2 * 8 + g] = sum[e];
  }
#else
  if (lane % 4) return;
  sums[0][side * 16 + g] = sum[0] + (SPLIT ? sum[1] : 0.f);
  sums[0][side * 16 + g + 8] = sum[2] + (SPLIT ? sum[3] : 0.f);
#endif
}

// Return where a row's outputs begin.
__device__ __forceinline__ void* row_of(void* out, int row) {
  return (unsigned char*)out + (u64)row * (N / SIDES) * (OUT_FLOAT ? 4 : 2);
}

// Load the bits of what output n is added to, which earlier launches wrote. That takes long: call it before the sums are
// there.
__device__ __forceinline__ u32 before(const void* out, int n) {
  u32 v = 0;
#if ADDED && OUT_FLOAT
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"((const u32*)out + n) : "memory");
#elif ADDED
  asm volatile("ld.global.u16 %0, [%1];" : "=r"(v) : "l"((const unsigned short*)out + n) : "memory");
#endif
  return v;
}

// Store output n, whose product is y[0] or, with GATED, y[1].
__device__ __forceinline__ void finish(void* out, int n, float* y, const void* bias, u32 before) {
#if BIASED
#pragma unroll
  for (int side = 0; side < SIDES; side++) y[side] += narrow_at(bias, n + side * (N / 2));
#endif
#if GATED
  float value = y[0] / (1.f + __expf(-y[0])) * y[1];
#else
  float value = y[0];
#endif
  if (ADDED) value += OUT_FLOAT ? __uint_as_float(before) : wide2(before).x;
#if OUT_FLOAT
  ((float*)out)[n] = value;
#else
  ((unsigned short*)out)[n] = (unsigned short)narrow2(value, 0.f);
#endif
}
