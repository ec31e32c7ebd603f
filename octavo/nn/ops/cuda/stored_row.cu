// Multiply one row x [K] by a matrix [N, K] of 8- or 16-bit numbers as they are stored, with the operations of a decoder
// before and after: the norm of the row, the gated activation or the addition to `out`.
//
// Each thread has 16 bytes of adjacent numbers of two outputs, in an order of inputs that does not change the units' sums.
// For 8 bits, the matrix units take float16, which has all of these numbers; the row is scaled so that it fits. For 16
// bits they take the narrow type: a row that is not narrow yet is the sum of two that are, in two of the units' columns.
//
// Grid: a block for each multiprocessor, which takes strips of 16 outputs in turn, with GATED also the 16 that they gate,
// N / 2 below. The block's warps share the inputs. Each thread copies the numbers that it multiplies itself into a ring
// of its own in shared memory, DEPTH spans ahead, so that no barrier is needed: the first ones before it waits for the
// previous launch, and others across strips.
//
// Macros: FORM 0 for E4M3, 1 for E5M2, 2 for integers, 3 for the narrow type; TILED: scales of tiles of 128 x 128, in rows of STRIDE, instead of
// outputs; HALF: the narrow type is float16, else bfloat16; N; K; WARPS; SPAN steps of 64 bytes of an output that a warp copies at
// a time; DEPTH; NORMED, GATED, BIASED, ADDED; X_FLOAT, OUT_FLOAT: x or out are float, not the narrow type.

#define BYTES (FORM == 3 ? 2 : 1)
#define SPLIT (FORM == 3 && (NORMED || X_FLOAT))
#define STEPS (K * BYTES / 64)
#define SIDES (GATED ? 2 : 1)
#define STRIPS (N / (16 * SIDES))
#define SPANS ((STEPS + SPAN - 1) / SPAN)
#define SHARE ((SPANS + WARPS - 1) / WARPS)
#define LOADS (SIDES * 2 * SPAN)
#define SLOT (LOADS * 512)
#define EIGHTS ((K / 8 + WARPS * 32 - 1) / (WARPS * 32))

// Two adjacent numbers, the upper two of a word if HIGH, as float16.
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

__device__ __forceinline__ u32 half2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float narrow_at(const void* from, int i) { return wide2(((const unsigned short*)from)[i]).x; }

// Multiply a step of a strip; `held` are the thread's numbers.
__device__ __forceinline__ void multiply(float (*d)[4], float (*total)[2], const uint4* held, const u32* given,
                                         const float* scales, int strip, int step, int lane) {
#if FORM == 3
  const uint4 low = ((const uint4*)given)[(SPLIT ? lane / 4 % 2 * (K / 8) : 0) + step * 4 + lane % 4];
  const u32 right[4] = {low.x, low.y, low.z, low.w};
#else
  const uint4* const row = (const uint4*)given + step * 8 + 2 * (lane % 4);
  const uint4 low = row[0], high = row[1];
  const u32 right[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#endif
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    uint4 a = held[side * 2 * SPAN * 32], b = held[(side * 2 + 1) * SPAN * 32];
#if FORM == 2  // with the sign inverted, integers from 0 on
    a.x ^= 0x80808080u, a.y ^= 0x80808080u, a.z ^= 0x80808080u, a.w ^= 0x80808080u;
    b.x ^= 0x80808080u, b.y ^= 0x80808080u, b.z ^= 0x80808080u, b.w ^= 0x80808080u;
#endif
    const u32 upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {b.x, b.y, b.z, b.w};
#if FORM == 3
#pragma unroll
    for (int r = 0; r < 2; r++)
      asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[side][0]), "+f"(d[side][1]), "+f"(d[side][2]), "+f"(d[side][3])
          : "r"(upper[2 * r]), "r"(lower[2 * r]), "r"(upper[2 * r + 1]), "r"(lower[2 * r + 1]), "r"(right[2 * r]),
            "r"(right[2 * r + 1]));
#else
#pragma unroll
    for (int r = 0; r < 4; r++)
      asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
          "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
          : "+f"(d[side][0]), "+f"(d[side][1]), "+f"(d[side][2]), "+f"(d[side][3])
          : "r"(pair8<0>(upper[r])), "r"(pair8<0>(lower[r])), "r"(pair8<1>(upper[r])), "r"(pair8<1>(lower[r])),
            "r"(right[2 * r]), "r"(right[2 * r + 1]));
#endif
#if TILED
    const float scale = scales[(strip * 16 + side * (N / 2)) / 128 * STRIDE + step / 2];
    total[side][0] += d[side][0] * scale, total[side][1] += d[side][2] * scale;
    d[side][0] = d[side][1] = d[side][2] = d[side][3] = 0.f;
#endif
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
stored_row(const uint4* x, const uint4* __restrict__ norm, const unsigned char* __restrict__ codes,
     const float* __restrict__ scales, const void* __restrict__ bias, void* out, float eps) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float sums[2][WARPS][16 * SIDES], measures[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  unsigned char* const ring = memory + warp * (DEPTH * SLOT);
  u32* const given = (u32*)(memory + WARPS * DEPTH * SLOT);
  overlap();

  int next_strip = blockIdx.x, next_part = 0, next_slot = 0;
  const unsigned char* next[SIDES];
  auto begin = [&]() {
#pragma unroll
    for (int side = 0; side < SIDES; side++)
      next[side] = codes + (u64)(next_strip * 16 + side * (N / 2) + lane / 4) * (K * BYTES) + 16 * (lane % 4) + warp * (SPAN * 64);
  };
  begin();
  auto issue = [&]() {
    const int span = next_part * WARPS + warp;
    if (next_strip < STRIPS && span < SPANS) {
      const u32 to = (u32)__cvta_generic_to_shared(ring + next_slot * SLOT);
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int side = i / (2 * SPAN), half = i / SPAN % 2, step = i % SPAN;
        if (STEPS % SPAN && span * SPAN + step >= STEPS) continue;
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + i * 512 + lane * 16),
                     "l"(next[side] + half * 8 * K * BYTES + step * 64) : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    if (++next_slot == DEPTH) next_slot = 0;
#pragma unroll
    for (int side = 0; side < SIDES; side++) next[side] += WARPS * SPAN * 64;
    if (++next_part == SHARE) {
      next_part = 0, next_strip += gridDim.x;
      begin();
    }
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) issue();
#if NORMED
  uint4 norm_of[EIGHTS];
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
    if (i * 8 < K) norm_of[j] = norm[i];
  }
#endif
  follow();

  float2 v[EIGHTS][4];
  float measure = 0.f;  // the sum of squares, or the largest magnitude
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
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
    if ((j * WARPS * 32 + threadIdx.x) * 8 >= K) continue;
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
  const float factor = 1.f;
#else  // a power of two, so that the largest magnitude is about 2 ** 8
  const int power = min(max((int)(__float_as_uint(measure) >> 23) - 135, -126), 126);
  const float factor = __uint_as_float((u32)(127 - power) << 23), back = __uint_as_float((u32)(127 + power) << 23);
#endif
#pragma unroll
  for (int j = 0; j < EIGHTS; j++) {
    const int i = j * WARPS * 32 + threadIdx.x;
    if (i * 8 >= K) continue;
    u32 pairs[4];
#if SPLIT
    u32 rest[4];
#endif
#if NORMED
    const u32 weights[4] = {norm_of[j].x, norm_of[j].y, norm_of[j].z, norm_of[j].w};
#endif
#pragma unroll
    for (int p = 0; p < 4; p++) {
#if NORMED
      const float2 weight = wide2(weights[p]);
      v[j][p].x *= weight.x, v[j][p].y *= weight.y;
#endif
#if FORM == 3
      v[j][p].x *= factor, v[j][p].y *= factor;
      pairs[p] = narrow2(v[j][p].x, v[j][p].y);
#if SPLIT
      const float2 rounded = wide2(pairs[p]);
      rest[p] = narrow2(v[j][p].x - rounded.x, v[j][p].y - rounded.y);
#endif
#else
      pairs[p] = half2(v[j][p].x * factor, v[j][p].y * factor);
#endif
    }
    ((uint4*)given)[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
#if SPLIT
    ((uint4*)given)[K / 8 + i] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
#endif
  }
  __syncthreads();

  int slot = 0, turn = 0;
  for (int strip = blockIdx.x; strip < STRIPS; strip += gridDim.x, turn ^= 1) {
    float d[SIDES][4], total[SIDES][2];
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      d[side][0] = d[side][1] = d[side][2] = d[side][3] = 0.f;
      total[side][0] = total[side][1] = 0.f;
    }
    for (int part = 0; part < SHARE; part++) {
      asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory");
      const uint4* const held = (const uint4*)(ring + slot * SLOT) + lane;
#pragma unroll
      for (int j = 0; j < SPAN; j++) {
        const int step = (part * WARPS + warp) * SPAN + j;
        if (step >= STEPS) continue;
        multiply(d, total, held + j * 32, given, scales, strip, step, lane);
      }
      issue();
      if (++slot == DEPTH) slot = 0;
    }
    if (lane % 4 == 0) {
#pragma unroll
      for (int side = 0; side < SIDES; side++) {
        sums[turn][warp][side * 16 + g] = total[side][0] + d[side][0] + (SPLIT ? d[side][1] : 0.f);
        sums[turn][warp][side * 16 + g + 8] = total[side][1] + d[side][2] + (SPLIT ? d[side][3] : 0.f);
      }
    }
    __syncthreads();
    if (threadIdx.x < 16) {
      const int n = strip * 16 + threadIdx.x;
      float y[SIDES];
#pragma unroll
      for (int side = 0; side < SIDES; side++) {
        y[side] = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) y[side] += sums[turn][w][side * 16 + threadIdx.x];
#if FORM != 3
        y[side] *= (TILED ? 1.f : scales[n + side * (N / 2)]) * back;
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
    __syncwarp();  // the matrix units need the whole warp
  }
}
