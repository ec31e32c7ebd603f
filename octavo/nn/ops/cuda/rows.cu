// Multiply rows x [M, K] by a matrix [N, K]: the matrix units take values from registers, into which their codes are
// widened while the previous ones are multiplied, and rows from shared memory, into which one thread copies them.
//
// Grid: 128 outputs each, behind the first `before` times 128; parts of the inputs; ROWS rows. Of 256 threads each half
// has 64 outputs. Writes the parts' sums [parts, M, N], in float or the rows' dtype. With GATED, a block has 64 outputs
// of the gate, N / 2, and the 64 that they gate, and writes silu(gate) * up [M, N / 2]; there is one part then. `book` is
// a table's.
//
// Macros: those of integers.cuh and codes.cuh; DEPTH steps of 64 inputs whose codes are held in registers; STAGES, whose
// rows are held in shared memory; BLOCKS of a multiprocessor; GATED. `multiply` is defined by nn/ops/fragments.py.

#define STAGE (ROWS * 128)
#define WARPS 8
#define MIDDLE (BITS == 4 ? 0x88888888u : 0u)
#define SPAN (GATED ? ROWS / 2 : ROWS)  // rows whose results a half of the block writes
#define NEAR 8  // tiles of rows whose blocks run at a time, so that they find each other's rows and codes in the cache

__device__ __forceinline__ void copy(u32 to, const TensorMap* map, u32 barrier, int k, int m) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(m) : "memory");
}

// Load a thread's scales and minima of a step; 0 if there is no such step.
__device__ __forceinline__ void fetch_each(u32* to, const u32* from, bool valid) {
#if EACH == 1
  to[0] = valid ? fetch(from) : 0u;
#elif EACH == 2
  const uint2 v = valid ? fetch((const uint2*)from) : make_uint2(0u, 0u);
  to[0] = v.x, to[1] = v.y;
#else
#pragma unroll
  for (int h = 0; h < EACH; h += 4) {
    const uint4 v = valid ? fetch((const uint4*)(from + h)) : make_uint4(0u, 0u, 0u, 0u);
    to[h] = v.x, to[h + 1] = v.y, to[h + 2] = v.z, to[h + 3] = v.w;
  }
#endif
}

__device__ __forceinline__ u32 scaled(u32 pair, u32 scale, u32 least) {
#if !GROUP
  return E4M3 && !HALF ? mul2(pair, MOVED_PAIR) : pair;
#elif MINIMA
  return fma2(pair, scale, least);
#else
  return mul2(pair, scale);
#endif
}

__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
rows(const __grid_constant__ TensorMap map, const uint4* __restrict__ codes, const u32* __restrict__ scales,
     void* __restrict__ out, int M, int N, int K, int groups, int wide, int before,
     const void* __restrict__ book) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int steps = K / 64, share = (steps + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share;
  // Steps beyond the last one multiply values of 0.
  const int count = max(0, min(share, steps - first)), padded = (count + DEPTH - 1) / DEPTH * DEPTH;
  const u32 base = (shared(memory) + 1023) & ~1023u;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int id = blockIdx.z * gridDim.x + blockIdx.x, band = id / (NEAR * gridDim.x) * NEAR;
  const int high = min(NEAR, (int)gridDim.z - band), in_band = id - band * gridDim.x;
  const int column = before + in_band / high, row = (band + in_band % high) * ROWS;
  overlap();
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; s++) {
      init(shared(&full[s]), 1);
      init(shared(&empty[s]), WARPS);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  auto load = [&](int i) {
    const int s = i % STAGES;
    wait(shared(&empty[s]), ((i / STAGES) & 1) ^ 1);
    copy(base + s * STAGE, &map, shared(&full[s]), (first + i) * 64, row);
  };

  const int tiles = N / 64, side = warp / 4, tile = GATED ? column + side * (tiles / 2) : column * 2 + side;
  const int near = min(tile, tiles - 1);
  const uint4* at = codes + ((u64)near * steps + first) * (128 * WORDS) + (threadIdx.x & 127);
  const u32* const scales_at = scales + ((u64)near * (groups / SCALES) * 32 + (warp & 3) * 8 + g) * EACH;
  const Planes table = planes_of(book, HALF);
  uint4 held[DEPTH][WORDS];
  u32 held_scales[DEPTH][EACH];
  auto take = [&](int i, int slot) {
    const bool valid = i < count;
#pragma unroll
    for (int j = 0; j < WORDS; j++)
      held[slot][j] = valid ? fetch(at + (i * WORDS + j) * 128) : make_uint4(MIDDLE, MIDDLE, MIDDLE, MIDDLE);
#if GROUP
    fetch_each(held_scales[slot], scales_at + (GROUP < 64 ? first + i : (first + i) * 64 / GROUP) * (32 * EACH), valid);
#endif
  };
  u32 values[2][16];
  auto widen = [&](int slot, u32* to) {
    u32 low = 0, high = 0, least_low = 0, least_high = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
#if GROUP
      if (r % SCALED == 0) {
        const u32* const of_group = held_scales[slot] + r / SCALED * (1 + MINIMA);
        const float2 s = both(of_group[0]), l = both(of_group[MINIMA]);
        low = narrow2(s.x * MOVED, s.x * MOVED), high = narrow2(s.y * MOVED, s.y * MOVED);
        if (MINIMA) least_low = narrow2(l.x, l.x), least_high = narrow2(l.y, l.y);
      }
#endif
#if INTEGERS
      to[4 * r + 0] = scaled(pair<0>(held[slot], r), low, least_low);
      to[4 * r + 1] = scaled(pair<1>(held[slot], r), high, least_high);
      to[4 * r + 2] = scaled(pair<2>(held[slot], r), low, least_low);
      to[4 * r + 3] = scaled(pair<3>(held[slot], r), high, least_high);
#else
      u32 pairs[4];
      numbers_of<HALF>(held[slot], r, table, pairs);
#pragma unroll
      for (int p = 0; p < 4; p++) to[4 * r + p] = scaled(pairs[p], p % 2 ? high : low, 0u);
#endif
    }
  };

#pragma unroll
  for (int i = 0; i < DEPTH; i++) take(i, i);
  if (threadIdx.x == 0) {
    follow();
    for (int i = 0; i < min(STAGES - 1, padded); i++) load(i);
  }
  __syncwarp();
  float acc[ROWS / 2];
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) acc[i] = 0.f;
  widen(0, values[0]);
  take(DEPTH, 0);
  auto step = [&](int from, auto which) {
    constexpr int j = decltype(which)::value;
    const int i = from + j, s = i % STAGES;
    wait(shared(&full[s]), (i / STAGES) & 1);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    // Rows of 128 bytes, swizzled, in groups of 8.
    const u64 tile_of_rows = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((base + s * STAGE) >> 4);
#pragma unroll
    for (int r = 0; r < 4; r++) multiply(acc, &values[j & 1][4 * r], tile_of_rows + 2 * r);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // for the previous step
    if (i > 0 && lane == 0) arrive(shared(&empty[(i - 1) % STAGES]));
    if (threadIdx.x == 0 && i > 0 && i + STAGES - 2 < padded) load(i + STAGES - 2);
    __syncwarp();
    widen((j + 1) % DEPTH, values[(j + 1) & 1]);
    take(i + 1 + DEPTH, (j + 1) % DEPTH);
  };
  for (int from = 0; from < padded; from += DEPTH) {
    step(from, At<0>{}), step(from, At<1>{});
#if DEPTH > 2
    step(from, At<2>{}), step(from, At<3>{});
#endif
#if DEPTH > 4
    step(from, At<4>{}), step(from, At<5>{}), step(from, At<6>{}), step(from, At<7>{});
#endif
  }
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");

#if !GROUP || E4M3
  const float2 scale = GROUP ? make_float2(1.f, 1.f) : both(fetch(scales_at));
#pragma unroll
  for (int i = 0; i < ROWS / 2; i++) acc[i] *= (i & 2 ? scale.y : scale.x) * SCALE_UNIT;
#endif
  __syncthreads();  // all have read the rows: their memory is free
#if GATED
  // Each half of the block finishes half of the rows and gives the other half's sums away.
  float4* const given = (float4*)(memory + (base - shared(memory)));
#pragma unroll
  for (int i = 0; i < ROWS / 4; i += 4) {
    const float* const kept_by_second = acc + ROWS / 4 + i;
    given[i * 64 + threadIdx.x] =
        side ? make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3])
             : make_float4(kept_by_second[0], kept_by_second[1], kept_by_second[2], kept_by_second[3]);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < ROWS / 4; i += 4) {
    const float4 taken = given[i * 64 + (threadIdx.x ^ 128)];
    const float others[4] = {taken.x, taken.y, taken.z, taken.w};
#pragma unroll
    for (int k = i; k < i + 4; k++)
      acc[k] = side ? gated(others[k - i], acc[ROWS / 4 + k]) : gated(acc[k], others[k - i]);
  }
  const int begin = row + side * SPAN, n = column * 64, width = N / 2;
  const u32 staged = base + 2 * STAGE + side * (STAGE / 2);
#else
  if (tile >= tiles) return;
  const int begin = row, n = tile * 64, width = N;
  const u32 staged = base + side * STAGE;
#endif

  const u64 part = (u64)blockIdx.y * M * width;
  if (wide) {
    float* const to = (float*)out + part + n + (warp & 3) * 16 + g;
#pragma unroll
    for (int i = 0; i < SPAN / 2; i++) {
      const int m = begin + i / 4 * 8 + 2 * t + i % 2;
      if (m < M) to[(u64)m * width + i / 2 % 2 * 8] = acc[i];
    }
    return;
  }
  // Rows of 128 bytes, swizzled, so that whole lines are written: a thread has sums of few adjacent outputs.
  const int eighth = threadIdx.x & 7, line = (threadIdx.x & 127) / 8;
  const u32 to = staged + eighth * 128 + ((((warp & 3) * 2 + lane / 8 % 2) ^ eighth) << 4);
#pragma unroll
  for (int i = 0; i < SPAN / 2; i += 4)
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to + i * 256),
                 "r"(narrow2(acc[i], acc[i + 1])), "r"(narrow2(acc[i + 2], acc[i + 3])) : "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(1 + side) : "memory");
  const uint4* const from = (const uint4*)(memory + (staged - shared(memory))) + (eighth ^ line & 7);
  unsigned short* const first_out = (unsigned short*)out + part + n + eighth * 8;
#pragma unroll
  for (int i = line; i < SPAN; i += 16)
    if (begin + i < M) *(uint4*)(first_out + (u64)(begin + i) * width) = from[i * 8];
}
