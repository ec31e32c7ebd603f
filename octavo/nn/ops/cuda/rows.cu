// Multiply rows x [M, K] by a matrix [N, K]: the matrix units take values from registers, into which their integers are
// widened while the previous ones are multiplied, and rows from shared memory, into which one thread copies them.
//
// Grid: 128 outputs, parts of the inputs, ROWS rows; 256 threads, of which each half has 64 outputs. Writes the parts'
// sums [parts, M, N], in float or the rows' dtype.
//
// Macros: those of integers.cuh; DEPTH steps of 64 inputs whose integers are held in registers; STAGES, whose rows are
// held in shared memory; BLOCKS of a multiprocessor. `multiply` is defined by nn/ops/fragments.py.

#define STAGE (ROWS * 128)
#define WARPS 8
#define MIDDLE (BITS == 4 ? 0x88888888u : 0u)
#define NEAR 8  // tiles of rows whose blocks run at a time, so that they find each other's rows and integers in the cache

template <int I>
struct At {
  static constexpr int value = I;
};

__device__ __forceinline__ void copy(u32 to, const TensorMap* map, u32 barrier, int k, int m) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(STAGE) : "memory");
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(m) : "memory");
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

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
rows(const __grid_constant__ TensorMap map, const uint4* __restrict__ codes, const u32* __restrict__ scales,
     const u32* __restrict__ minima, void* __restrict__ out, int M, int N, int K, int groups, int wide) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const int steps = K / 64, share = (steps + gridDim.y - 1) / gridDim.y, first = blockIdx.y * share;
  // Steps beyond the last one multiply values of 0.
  const int count = max(0, min(share, steps - first)), padded = (count + DEPTH - 1) / DEPTH * DEPTH;
  const u32 base = (shared(memory) + 1023) & ~1023u;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int id = blockIdx.z * gridDim.x + blockIdx.x, band = id / (NEAR * gridDim.x) * NEAR;
  const int high = min(NEAR, (int)gridDim.z - band), in_band = id - band * gridDim.x;
  const int column = in_band / high, row = (band + in_band % high) * ROWS;
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

  const int tile = column * 2 + warp / 4, tiles = N / 64, near = min(tile, tiles - 1);
  const uint4* at = codes + ((u64)near * steps + first) * (128 * WORDS) + (threadIdx.x & 127);
  const u64 place = (u64)near * groups * 32 + (warp & 3) * 8 + g;
  uint4 held[DEPTH][WORDS];
  u32 held_scale[DEPTH][SCALES], held_least[DEPTH][SCALES];
  auto take = [&](int i, int slot) {
    const bool valid = i < count;
#pragma unroll
    for (int j = 0; j < WORDS; j++)
      held[slot][j] = valid ? fetch(at + (i * WORDS + j) * 128) : make_uint4(MIDDLE, MIDDLE, MIDDLE, MIDDLE);
#if GROUP
#pragma unroll
    for (int h = 0; h < SCALES; h++) {
      const int group = GROUP < 64 ? SCALES * (first + i) + h : (first + i) * 64 / GROUP;
      held_scale[slot][h] = valid ? fetch(scales + place + group * 32) : 0u;
      held_least[slot][h] = valid && MINIMA ? fetch(minima + place + group * 32) : 0u;
    }
#endif
  };
  u32 values[2][16];
  auto widen = [&](int slot, u32* to) {
    u32 low = 0, high = 0, least_low = 0, least_high = 0;
#pragma unroll
    for (int r = 0; r < 4; r++) {
#if GROUP
      if (r % SCALED == 0) {
        const float2 s = both(held_scale[slot][r / SCALED]), l = both(held_least[slot][r / SCALED]);
        low = narrow2(s.x, s.x), high = narrow2(s.y, s.y);
        if (MINIMA) least_low = narrow2(l.x, l.x), least_high = narrow2(l.y, l.y);
      }
#endif
      to[4 * r + 0] = scaled(pair<0>(held[slot], r), low, least_low);
      to[4 * r + 1] = scaled(pair<1>(held[slot], r), high, least_high);
      to[4 * r + 2] = scaled(pair<2>(held[slot], r), low, least_low);
      to[4 * r + 3] = scaled(pair<3>(held[slot], r), high, least_high);
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

  if (tile < tiles) {
    const int n = tile * 64 + (warp & 3) * 16 + g;
#if !GROUP
    const float2 scale = both(fetch(scales + place));
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) acc[i] *= i & 2 ? scale.y : scale.x;
#endif
    const u64 part = (u64)blockIdx.y * M * N;
    const int odd = g & 1;
#pragma unroll
    for (int j = 0; j < ROWS / 8; j++) {
      const int m = row + 8 * j + 2 * t;
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float here = acc[4 * j + 2 * half], below = acc[4 * j + 2 * half + 1];
        if (wide) {
          float* to = (float*)out + part + (u64)m * N + n + 8 * half;
          if (m < M) to[0] = here;
          if (m + 1 < M) to[N] = below;
        } else {  // two adjacent outputs of one row
          const float own = odd ? below : here, other = __shfl_xor_sync(0xffffffffu, odd ? here : below, 4);
          if (m + odd < M)
            *(u32*)((unsigned short*)out + part + (u64)(m + odd) * N + (n - odd) + 8 * half) =
                narrow2(odd ? other : own, odd ? own : other);
        }
      }
    }
  }
}
