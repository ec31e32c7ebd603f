// The first half of low-rank additions: x [rows, K] times A, for rows with different adapters (SGMV of Punica,
// https://arxiv.org/abs/2310.18547).
//
// An item of work is a tile of rows, 16 ranks of one part of the target, and a share of the inputs, which the block's
// warps share once more. Items are divided over any number of blocks. A warp's weights are loaded before the previous
// launch has ended.
//
// Grid: [blocks]. Macros: those of low_rank.cuh; X_FLOAT: x is float32.
//
// work: the number of entries, then entries of a tile, its adapter, and the number of 16 ranks; see `Assigned.work`.
// sums: [splits, rows, PARTS * RANKS] float32, undefined where a row has no such rank.

#define UNIT (TILE / SIZE)  // inputs that a warp multiplies at a time: a tile of A's rows
#define STEPS (UNIT / 32)
#define BATCH (STEPS < 4 ? STEPS : 4)

// Load 8 inputs of a row from input k on, as elements.
__device__ __forceinline__ void load_inputs(u32* to, const unsigned char* row, int k) {
#if X_FLOAT
  float values[8];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint4 v = written((const uint4*)(row + k * 4) + half);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int e = 0; e < 4; e++) values[4 * half + e] = __uint_as_float(words[e]);
  }
  round_to<8>(to, values);
#else
  load_written<8>(to, row + k * SIZE);
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
shrink(const unsigned char* x, const unsigned char* __restrict__ pool,
       const int* __restrict__ blocks, const int* __restrict__ meta, const int* __restrict__ tiles,
       const int* __restrict__ work, float* sums, int num_blocks, int max_blocks, int meta_parts, int K, int rows,
       int splits) {
  __shared__ float found[2][WARPS][16 * TILE_ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int row_tiles = (K + UNIT - 1) / UNIT, count = work[0] * PARTS * splits;
  bool waited = false;
  int turn = 0;
  overlap();
  for (int item = blockIdx.x; item < count; item += gridDim.x) {
    const int split = item % splits, part = item / splits % PARTS;
    const int* const entry = work + 1 + item / (splits * PARTS) * 3;
    const int* const tile = tiles + entry[0] * (1 + TILE_ROWS);
    const int adapter = entry[1], first = entry[2] * 16;
    const int* const span = meta + (adapter * meta_parts + part) * 4;
    const int a = span[0], rank = span[2];
    if (first >= rank) continue;
    const int* const own = blocks + adapter * max_blocks;
    const int row = tile[1 + g];
    const unsigned char* const inputs = x + (u64)max(row, 0) * K * (X_FLOAT ? 4 : SIZE);
    float d[4] = {0.f, 0.f, 0.f, 0.f};
    for (int unit = split * WARPS + warp; unit < row_tiles; unit += splits * WARPS) {
      const int k = unit * UNIT + t * 8;
      u32 w[2][STEPS][WORDS(8)];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int r = first + half * 8 + g;
        const unsigned char* from = r < rank ? place(pool, own, a + r * row_tiles + unit, num_blocks) : pool;
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
#pragma unroll
          for (int i = 0; i < WORDS(8); i++) w[half][j][i] = 0u;
          if (r < rank && k + j * 32 < K) load<8>(w[half][j], from + (t * 8 + j * 32) * SIZE);
        }
      }
      if (!waited) follow();
      waited = true;
#pragma unroll
      for (int batch = 0; batch < STEPS; batch += BATCH) {
        u32 given[BATCH][WORDS(8)];
#pragma unroll
        for (int j = 0; j < BATCH; j++) {
          const int at = k + (batch + j) * 32;
#pragma unroll
          for (int i = 0; i < WORDS(8); i++) given[j][i] = 0u;
          if (row >= 0 && at < K) load_inputs(given[j], inputs, at);
        }
#pragma unroll
        for (int j = 0; j < BATCH; j++) multiply<8>(d, w[0][batch + j], w[1][batch + j], given[j]);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; e++) found[turn][warp][(2 * t + e % 2) * 16 + g + e / 2 * 8] = d[e];
    if (!waited) follow();  // a warp without inputs stores sums, too
    waited = true;
    __syncthreads();
    for (int i = threadIdx.x; i < TILE_ROWS * 16; i += WARPS * 32) {
      const int row = tile[1 + i / 16], r = first + i % 16;
      float sum = 0.f;
#pragma unroll
      for (int w = 0; w < WARPS; w++) sum += found[turn][w][i];
      if (row >= 0 && r < RANKS) sums[((u64)(split * rows + row) * PARTS + part) * RANKS + r] = sum;
    }
    turn ^= 1;
  }
  if (!waited) follow();  // so that launches end in their order
}
