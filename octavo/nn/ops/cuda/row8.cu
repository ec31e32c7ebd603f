// Multiply one row x [K] by a matrix [N, K] of 8-bit numbers as they are stored, with the operations of a decoder before
// and after: the norm of the row, the gated activation or the addition to `out`.
//
// The matrix units take float16, which has all of these numbers; the row is scaled so that it fits. Each thread loads 16
// adjacent numbers of two outputs, in an order of inputs of which the units' sums do not depend.
//
// Grid: 16 outputs, and with GATED the 16 that they gate, N / 2 below. The block's warps share the inputs. Each thread
// loads its first numbers before it waits for the previous launch, and others as soon as these are multiplied.
//
// Macros: FORM 0 for E4M3, 1 for E5M2, 2 for integers; TILED: scales of tiles of 128 x 128, in rows of STRIDE, instead of
// outputs; HALF: the narrow type is float16, else bfloat16; N; K; WARPS; AHEAD steps of 64 inputs whose numbers a thread
// holds; NORMED, GATED, BIASED, ADDED; X_FLOAT, OUT_FLOAT: x or out are float, not the narrow type.

#define STEPS (K / 64)
#define ROUNDS ((STEPS + WARPS * AHEAD - 1) / (WARPS * AHEAD))
#define SIDES (GATED ? 2 : 1)
#define CHUNKS ((K / 8 + WARPS * 32 - 1) / (WARPS * 32))

// Two adjacent numbers, the upper two of a word if HIGH, as float16.
template <int HIGH>
__device__ __forceinline__ u32 pair8(u32 w) {
#if FORM == 2
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(w), "r"(0x64646464u), "n"(HIGH ? 0x4342 : 0x4140));
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(d), "r"(0xE480E480u));
  return d;
#else
  u32 d;
#if FORM == 0
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((unsigned short)(HIGH ? w >> 16 : w)));
#else
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"((unsigned short)(HIGH ? w >> 16 : w)));
#endif
  return d;
#endif
}

__device__ __forceinline__ u32 half2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float narrow_at(const void* from, int i) { return wide2(((const unsigned short*)from)[i]).x; }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
row8(const void* __restrict__ x, const uint4* __restrict__ norm, const unsigned char* __restrict__ codes,
     const float* __restrict__ scales, const void* __restrict__ bias, void* out, float eps) {
  __shared__ __align__(16) u32 given[K / 2];
  __shared__ float sums[WARPS][16 * SIDES], measures[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  overlap();
  const unsigned char* place[SIDES];
#pragma unroll
  for (int side = 0; side < SIDES; side++) place[side] = codes + (u64)(blockIdx.x * 16 + side * (N / 2) + g) * K + 16 * t;
  uint4 held[AHEAD][SIDES][2];
#if TILED
  float held_scale[AHEAD][SIDES];
#endif
  auto take = [&](int i, int round) {
    const int step = (round * AHEAD + i) * WARPS + warp;
    if (step >= STEPS) return;
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      held[i][side][0] = fetch((const uint4*)(place[side] + step * 64));
      held[i][side][1] = fetch((const uint4*)(place[side] + step * 64 + 8 * (u64)K));
#if TILED
      held_scale[i][side] = scales[(blockIdx.x * 16 + side * (N / 2)) / 128 * STRIDE + step / 2];
#endif
    }
  };
#pragma unroll
  for (int i = 0; i < AHEAD; i++) take(i, 0);
#if NORMED
  uint4 norm_of[CHUNKS];
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
    if (i * 8 < K) norm_of[j] = norm[i];
  }
#endif
  follow();

  auto eight = [&](int i, float2* v) {  // adjacent numbers of the row
#if X_FLOAT
    const float4 low = ((const float4*)x)[2 * i], high = ((const float4*)x)[2 * i + 1];
    v[0] = make_float2(low.x, low.y), v[1] = make_float2(low.z, low.w);
    v[2] = make_float2(high.x, high.y), v[3] = make_float2(high.z, high.w);
#else
    const uint4 q = ((const uint4*)x)[i];
    v[0] = wide2(q.x), v[1] = wide2(q.y), v[2] = wide2(q.z), v[3] = wide2(q.w);
#endif
  };
  float measure = 0.f;  // the sum of squares, or the largest magnitude
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
    if (i * 8 >= K) continue;
    float2 v[4];
    eight(i, v);
#pragma unroll
    for (int p = 0; p < 4; p++)
      measure = NORMED ? measure + v[p].x * v[p].x + v[p].y * v[p].y : fmaxf(measure, fmaxf(fabsf(v[p].x), fabsf(v[p].y)));
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
  const float factor = rsqrtf(measure / K + eps);
#else  // a power of two, so that the largest magnitude is about 2 ** 8
  const int power = min(max((int)(__float_as_uint(measure) >> 23) - 135, -126), 126);
  const float factor = __uint_as_float((u32)(127 - power) << 23), back = __uint_as_float((u32)(127 + power) << 23);
#endif
#pragma unroll
  for (int j = 0; j < CHUNKS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
    if (i * 8 >= K) continue;
    float2 v[4];
    eight(i, v);
    u32 halves[4];
#if NORMED
    const u32 weights[4] = {norm_of[j].x, norm_of[j].y, norm_of[j].z, norm_of[j].w};
#endif
#pragma unroll
    for (int p = 0; p < 4; p++) {
#if NORMED
      const float2 weight = wide2(weights[p]);
      v[p].x *= weight.x, v[p].y *= weight.y;
#endif
      halves[p] = half2(v[p].x * factor, v[p].y * factor);
    }
    ((uint4*)given)[i] = make_uint4(halves[0], halves[1], halves[2], halves[3]);
  }
  __syncthreads();

  float total[SIDES][2], d[SIDES][4];
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    total[side][0] = total[side][1] = 0.f;
    d[side][0] = d[side][1] = d[side][2] = d[side][3] = 0.f;
  }
  for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int step = (round * AHEAD + i) * WARPS + warp;
      if (step >= STEPS) continue;
      const uint4 low = ((const uint4*)given)[step * 8 + 2 * t], high = ((const uint4*)given)[step * 8 + 2 * t + 1];
      const u32 right[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int side = 0; side < SIDES; side++) {
        uint4 a = held[i][side][0], b = held[i][side][1];
#if FORM == 2  // with the sign inverted, integers from 0 on
        a.x ^= 0x80808080u, a.y ^= 0x80808080u, a.z ^= 0x80808080u, a.w ^= 0x80808080u;
        b.x ^= 0x80808080u, b.y ^= 0x80808080u, b.z ^= 0x80808080u, b.w ^= 0x80808080u;
#endif
        const u32 upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
        for (int r = 0; r < 4; r++)
          asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
              "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
              : "+f"(d[side][0]), "+f"(d[side][1]), "+f"(d[side][2]), "+f"(d[side][3])
              : "r"(pair8<0>(upper[r])), "r"(pair8<0>(lower[r])), "r"(pair8<1>(upper[r])), "r"(pair8<1>(lower[r])),
                "r"(right[2 * r]), "r"(right[2 * r + 1]));
#if TILED
        total[side][0] += d[side][0] * held_scale[i][side], total[side][1] += d[side][2] * held_scale[i][side];
        d[side][0] = d[side][1] = d[side][2] = d[side][3] = 0.f;
#endif
      }
      if (round + 1 < ROUNDS) take(i, round + 1);
    }
  }
  if (t == 0) {
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      sums[warp][side * 16 + g] = TILED ? total[side][0] : d[side][0];
      sums[warp][side * 16 + g + 8] = TILED ? total[side][1] : d[side][2];
    }
  }
  __syncthreads();
  if (threadIdx.x >= 16) return;
  const int n = blockIdx.x * 16 + threadIdx.x;
  float y[SIDES];
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    y[side] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) y[side] += sums[w][side * 16 + threadIdx.x];
#if !TILED
    y[side] *= scales[n + side * (N / 2)];
#endif
#if !NORMED
    y[side] *= back;
#endif
#if BIASED
    y[side] += narrow_at(bias, n + side * (N / 2));
#endif
  }
#if GATED
  const float value = y[0] / (1.f + __expf(-y[0])) * y[1];
#else
  const float value = y[0];
#endif
#if OUT_FLOAT
  float* to = (float*)out + n;
  *to = ADDED ? value + *to : value;
#else
  unsigned short* to = (unsigned short*)out + n;
  *to = (unsigned short)narrow2(ADDED ? value + narrow_at(to, 0) : value, 0.f);
#endif
}
