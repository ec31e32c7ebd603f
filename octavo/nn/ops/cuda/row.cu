// Multiply one row x [K] by a matrix [N, K], with the operations of a decoder before and after: the norm of the row,
// the gated activation or the addition to `out`.
//
// Grid: 16 outputs, and with GATED the 16 that they gate, N / 2 below. The block's warps share the inputs. Each thread
// loads its first integers before it waits for the previous launch, and others as soon as these are multiplied.
//
// Macros: those of integers.cuh; N, K; WARPS; AHEAD steps of 64 inputs whose integers a thread holds; NORMED, GATED,
// BIASED, ADDED; X_FLOAT, OUT_FLOAT: x or out are float, not the narrow type.

#define STEPS (K / 64)
#define ROUNDS ((STEPS + WARPS * AHEAD - 1) / (WARPS * AHEAD))
#define SIDES (GATED ? 2 : 1)
#define CHUNKS ((K / 8 + WARPS * 32 - 1) / (WARPS * 32))
#define GROUPS (GROUP ? K / GROUP : 1)

struct Eight {
  float2 pairs[4];
};

__device__ __forceinline__ Eight widened(uint4 q) { return {wide2(q.x), wide2(q.y), wide2(q.z), wide2(q.w)}; }

__device__ __forceinline__ float2 floats(u32 x, u32 y) { return make_float2(__uint_as_float(x), __uint_as_float(y)); }

__device__ __forceinline__ float narrow_at(const void* from, int i) { return wide2(((const unsigned short*)from)[i]).x; }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
row(const uint4* x, const uint4* __restrict__ norm, const uint4* __restrict__ codes,
    const u32* __restrict__ scales, const u32* __restrict__ minima, const void* __restrict__ bias, void* out, float eps) {
  __shared__ __align__(16) u32 given[K / 2];
  __shared__ float sums[WARPS][16 * SIDES], squares[WARPS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  overlap();
  u64 place[SIDES], scale_place[SIDES];
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    const int strip = blockIdx.x + side * (N / 32);
    place[side] = (u64)(strip / 4) * (STEPS * 128 * WORDS) + strip % 4 * 32 + lane;
    scale_place[side] = (u64)(strip / 4) * (GROUPS * 32) + strip % 4 * 8 + g;
  }
  uint4 held[AHEAD][SIDES][WORDS];
  u32 held_scale[AHEAD][SIDES][SCALES], held_least[AHEAD][SIDES][SCALES];
  auto take = [&](int i, int round) {
    const int step = (round * AHEAD + i) * WARPS + warp;
    if (step >= STEPS) return;
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
#pragma unroll
      for (int j = 0; j < WORDS; j++) held[i][side][j] = fetch(codes + place[side] + (step * WORDS + j) * 128);
#if GROUP
#pragma unroll
      for (int h = 0; h < SCALES; h++) {
        const u64 group = scale_place[side] + (GROUP < 64 ? SCALES * step + h : step * 64 / GROUP) * 32;
        held_scale[i][side][h] = fetch(scales + group);
        if (MINIMA) held_least[i][side][h] = fetch(minima + group);
      }
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

  float square = 0.f;
  auto read = [&](float by) {  // the row, times its norm's weights and a factor
#pragma unroll
    for (int j = 0; j < CHUNKS; j++) {
      const int i = j * WARPS * 32 + threadIdx.x;
      if (i * 8 >= K) continue;
#if X_FLOAT
      const uint4 low = written(x + 2 * i), high = written(x + 2 * i + 1);
      Eight v = {floats(low.x, low.y), floats(low.z, low.w), floats(high.x, high.y), floats(high.z, high.w)};
#else
      Eight v = widened(written(x + i));
#endif
#if NORMED
      const Eight scale = widened(norm_of[j]);
#pragma unroll
      for (int p = 0; p < 4; p++) {
        square += v.pairs[p].x * v.pairs[p].x + v.pairs[p].y * v.pairs[p].y;
        v.pairs[p].x *= scale.pairs[p].x * by, v.pairs[p].y *= scale.pairs[p].y * by;
      }
#endif
      ((uint4*)given)[i] = make_uint4(narrow2(v.pairs[0].x, v.pairs[0].y), narrow2(v.pairs[1].x, v.pairs[1].y),
                                      narrow2(v.pairs[2].x, v.pairs[2].y), narrow2(v.pairs[3].x, v.pairs[3].y));
    }
  };
  auto inverse = [&]() {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) all += squares[w];
    return rsqrtf(all / K + eps);
  };
  read(1.f);
#if NORMED
#pragma unroll
  for (int i = 16; i; i /= 2) square += __shfl_xor_sync(0xffffffffu, square, i);
  if (lane == 0) squares[warp] = square;
#endif
  __syncthreads();
#if NORMED && HALF  // whose largest number a row may exceed before it is normalized
  read(inverse());
  __syncthreads();
#endif

  float total[SIDES][2];
#pragma unroll
  for (int side = 0; side < SIDES; side++) total[side][0] = total[side][1] = 0.f;
  for (int round = 0; round < ROUNDS; round++) {
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
      const int step = (round * AHEAD + i) * WARPS + warp;
      if (step >= STEPS) continue;
      float d[SIDES][4], sum = 0.f;
#pragma unroll
      for (int r = 0; r < 4; r++) {
        // All columns of the right operand are the row.
        const u32 low = given[step * 32 + r * 8 + t], high = given[step * 32 + r * 8 + 4 + t];
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
          float* const sums_of = d[side];
          const uint4* words = held[i][side];
          if (r % SCALED == 0) sums_of[0] = sums_of[1] = sums_of[2] = sums_of[3] = 0.f;
          asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
              "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
              : "+f"(sums_of[0]), "+f"(sums_of[1]), "+f"(sums_of[2]), "+f"(sums_of[3])
              : "r"(pair<0>(words, r)), "r"(pair<1>(words, r)), "r"(pair<2>(words, r)), "r"(pair<3>(words, r)), "r"(low), "r"(high));
        }
        if (MINIMA) {
          const float2 a = wide2(low), b = wide2(high);
          sum += a.x + a.y + b.x + b.y;
        }
        if (r % SCALED < SCALED - 1) continue;
        if (MINIMA) {
          sum += __shfl_xor_sync(0xffffffffu, sum, 1);
          sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        }
#pragma unroll
        for (int side = 0; side < SIDES; side++) {
          const float2 s = GROUP ? both(held_scale[i][side][r / SCALED]) : make_float2(1.f, 1.f);
          const float2 l = MINIMA && GROUP ? both(held_least[i][side][r / SCALED]) : make_float2(0.f, 0.f);
          total[side][0] += d[side][0] * s.x + sum * l.x;
          total[side][1] += d[side][2] * s.y + sum * l.y;
        }
        sum = 0.f;
      }
      if (round + 1 < ROUNDS) take(i, round + 1);
    }
  }
  if (t == 0) {
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      sums[warp][side * 16 + g] = total[side][0];
      sums[warp][side * 16 + g + 8] = total[side][1];
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
#if !GROUP
    const int strip = blockIdx.x + side * (N / 32);
    const float2 s = both(scales[(u64)(strip / 4) * 32 + strip % 4 * 8 + threadIdx.x % 8]);
    y[side] *= threadIdx.x < 8 ? s.x : s.y;
#endif
#if NORMED && !HALF
    y[side] *= inverse();
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
