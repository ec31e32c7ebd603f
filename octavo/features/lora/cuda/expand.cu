// The second half of low-rank additions: the sums of shrink.cu times B, added to a product y [rows, sizes of all
// parts].
//
// A warp takes a tile of rows and a piece of the outputs at a time: 64 of one part, or with GATES 32 and the 32 of
// their operand. All pieces of all tiles are divided evenly over any number of blocks. A warp's first weights are
// loaded before the previous launch has ended. Instructions limit the speed, not bytes: keep them few for a piece.
//
// Grid: [blocks]. Dynamic shared memory: TILE_ROWS * PITCH elements. Macros: those of low_rank.cuh; GATES: out [rows,
// size] = silu(first half) * second half of y with the additions, also of rows without an adapter; else y is added to.

#define OUTPUTS 32  // of each of the two sides of a piece
#define RANGE 16    // ranks that are multiplied at a time
#define EACH 4      // of each lane
#define LOG2_E 1.4426950408889634f
#define PITCH ((PARTS * RANKS + 63) / 64 * 64 + 64 / SIZE)  // elements of a row's sums: rows are in different banks

// One side of a piece: outputs of a part from `column` on.
struct Side {
  u32 b;  // the tile where the part's B begins
  int part, column, size;
  int stride;                 // of B; 0 without an adapter
  const unsigned char* from;  // where this lane's first output begins in B, if all are in one slice; else null
};

// What a block's warps have in common for a tile of rows.
struct Tile {
  const int *rows, *blocks;  // the tile's, and its adapter's
  u32 b[3];                  // the tiles where the parts' B begin
  int ranks[3];              // 0 without an adapter
};

__device__ __forceinline__ float reciprocal_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Return the first of a lane's outputs in a side. Its others are 2, 4 and 6 further: so that a lane's results are
// adjacent.
__device__ __forceinline__ int first_output() {
  const int g = threadIdx.x % 32 / 4;
  return g / 2 * 8 + g % 2;
}

__device__ __forceinline__ Side side_of(const Tile& tile, int part, int column, int size, const unsigned char* pool,
                                        int num_blocks) {
  Side one = {of_part(part, tile.b[0], tile.b[1], tile.b[2]), part, column, size, 0, nullptr};
  if (column < size) one.stride = stride_of(of_part(part, tile.ranks[0], tile.ranks[1], tile.ranks[2]));
  if (one.stride == 0) return one;
  const u32 bytes = (u32)one.stride * SIZE, begin = column * bytes;
  const u32 first = one.b + begin / TILE, last = one.b + (begin + OUTPUTS * bytes - 1) / TILE;
  if (first / SLICE_TILES == last / SLICE_TILES)
    one.from = place(pool, tile.blocks, first, num_blocks) + begin % TILE + first_output() * bytes;
  return one;
}

// Load B for RANGE ranks from k on, EACH of each lane. What a lane has past the stride or the part are other weights:
// their sums are 0, or their results are not stored.
__device__ __forceinline__ void load_ranks(u32 (*w)[WORDS(EACH)], const Side& side, int k, const Tile& tile,
                                           const unsigned char* pool, int num_blocks) {
  if (k >= side.stride) return;
  const int rank = min(k + (int)(threadIdx.x % 4) * EACH, side.stride - EACH);
  if (side.from) {
    const unsigned char* const from = side.from + rank * SIZE;
#pragma unroll
    for (int j = 0; j < 4; j++) load<EACH>(w[j], from + (u32)(j * 2 * side.stride) * SIZE);
  } else {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int output = min(side.column + first_output() + 2 * j, side.size - 1);
      load<EACH>(w[j], output_of(pool, tile.blocks, side.b, output, side.stride, num_blocks) + rank * SIZE);
    }
  }
}

// Multiply RANGE ranks from k on. held: the tile's sums.
__device__ __forceinline__ void add_ranks(float (*d)[4], u32 (*w)[WORDS(EACH)], const Side& side, int k,
                                          const unsigned char* held) {
  if (k >= side.stride) return;
  const int lane = threadIdx.x % 32;
  const unsigned char* const low = held + (lane / 4 * PITCH + side.part * RANKS + k + lane % 4 * EACH) * SIZE;
  u32 given[2][WORDS(EACH)];
#pragma unroll
  for (int r = 0; r < 2; r++)
#pragma unroll
    for (int i = 0; i < WORDS(EACH); i++) given[r][i] = ((const u32*)(low + r * 8 * PITCH * SIZE))[i];
#pragma unroll
  for (int j = 0; j < 4; j++) multiply<EACH>(d[j], given[0], given[1], w[j]);
}

// Keep the sums of a tile's rows as elements, those of all splits added up; 0 where a row or a rank is missing, which
// shrink.cu leaves undefined. All threads of the block call it together. A thread takes 8 ranks of a row at a time.
__device__ __forceinline__ void hold(unsigned char* held, const float* sums, const Tile& tile, int rows, int splits) {
  const u64 apart = (u64)rows * PARTS * RANKS;
  for (int i = threadIdx.x; i < TILE_ROWS * PARTS * (RANKS / 8); i += WARPS * 32) {
    const int eight = i % (RANKS / 8), part = i / (RANKS / 8) % PARTS, m = i / (RANKS / 8 * PARTS);
    const int row = tile.rows[1 + m];
    float values[8];
#pragma unroll
    for (int e = 0; e < 8; e++) values[e] = 0.f;
    if (row >= 0 && eight * 8 < of_part(part, tile.ranks[0], tile.ranks[1], tile.ranks[2])) {
      const uint4* from = (const uint4*)(sums + ((u64)row * PARTS + part) * RANKS + eight * 8);
#pragma unroll 4
      for (int split = 0; split < splits; split++) {
        const uint4 low = written(from + split * (apart / 4)), high = written(from + split * (apart / 4) + 1);
        const u32 words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (int e = 0; e < 8; e++) values[e] += __uint_as_float(words[e]);
      }
    }
    u32 words[WORDS(8)];
    round_to<8>(words, values);
    store(held + (m * PITCH + part * RANKS + eight * 8) * SIZE, words, WORDS(8));
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
expand(const float* sums, const unsigned char* __restrict__ pool, const int* __restrict__ blocks,
       const int* __restrict__ meta, const int* __restrict__ tiles, const int* __restrict__ used,
       const int* __restrict__ adapters, unsigned char* y, unsigned char* out, int num_blocks, int max_blocks,
       int meta_parts, int rows, int splits, int size_0, int size_1, int size_2) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int each = GATES ? OUTPUTS : 2 * OUTPUTS, width = size_0 + size_1 + size_2, adapted = used[0];
  const int pieces_0 = (size_0 + each - 1) / each, pieces_1 = pieces_0 + (size_1 + each - 1) / each;
  const int pieces = GATES ? pieces_0 : pieces_1 + (size_2 + each - 1) / each;
  const int units = (pieces + WARPS - 1) / WARPS;
  const int count = units * (adapted + (GATES ? (rows + TILE_ROWS - 1) / TILE_ROWS : 0));
  const int begin = (int)((u64)count * blockIdx.x / gridDim.x), end = (int)((u64)count * (blockIdx.x + 1) / gridDim.x);
  bool waited = false, has = false, held = false;  // an adapter; its sums
  Tile tile = {tiles, blocks, {0u, 0u, 0u}, {0, 0, 0}};
  int row[2], number = begin / units, of_tile = begin % units;
  unsigned char *from[2], *into[2];  // rows g and g + 8 of y and of the result
  overlap();
  for (int unit = begin; unit < end; unit++, of_tile++) {
    if (unit == begin || of_tile == units) {
      if (of_tile == units) of_tile = 0, number++;
      if (held) __syncthreads();  // all warps have read the last tile's sums
      has = number < adapted, held = false;
      tile.rows = tiles + (has ? number : 0) * (1 + TILE_ROWS);
      const int adapter = has ? tile.rows[0] : 0;
      tile.blocks = blocks + adapter * max_blocks;
#pragma unroll
      for (int part = 0; part < PARTS; part++) {
        const int* const span = meta + (adapter * meta_parts + part) * 4;
        tile.b[part] = span[1], tile.ranks[part] = has ? span[2] : 0;
      }
#pragma unroll
      for (int r = 0; r < 2; r++) {
        row[r] = has ? tile.rows[1 + g + 8 * r] : -1;
        if (GATES && !has) {
          const int at = (number - adapted) * TILE_ROWS + g + 8 * r;
          row[r] = at < rows && adapters[at] < 0 ? at : -1;
        }
        from[r] = y + (u64)max(row[r], 0) * width * SIZE;
        into[r] = GATES ? out + (u64)max(row[r], 0) * size_0 * SIZE : from[r];
      }
    }
    const int piece = of_tile * WARPS + warp, part = GATES || piece < pieces_0 ? 0 : piece < pieces_1 ? 1 : 2;
    const int size = of_part(part, size_0, size_1, size_2), left = of_part(part, 0, size_0, size_0 + size_1);
    const int column = (piece - of_part(part, 0, pieces_0, pieces_1)) * each;
    Side sides[2];
#pragma unroll
    for (int s = 0; s < 2; s++)
      sides[s] = side_of(tile, GATES ? s : part, GATES ? column : column + s * OUTPUTS, size, pool, num_blocks);
    const int ranks = max(sides[0].stride, sides[1].stride);
    u32 w[2][4][WORDS(EACH)];
#pragma unroll
    for (int s = 0; s < 2; s++) load_ranks(w[s], sides[s], 0, tile, pool, num_blocks);
    if (!waited) follow();
    waited = true;
    u32 before[2][2][WORDS(8)];
    const int at = column + t * 8, apart = GATES ? size_0 : OUTPUTS;  // from a side's columns in y to the other's
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int s = 0; s < 2; s++)
        if (row[r] >= 0 && sides[s].column + t * 8 < size && (GATES || ranks))  // others are not stored
          load_written(before[s][r], from[r] + (u32)(left + at + s * apart) * SIZE);
    if (has && !held) {
      hold(memory, sums, tile, rows, splits);
      __syncthreads();
      held = true;
    }
    float d[2][4][4];
#pragma unroll
    for (int i = 0; i < 32; i++)
      d[i / 16][i / 4 % 4][i % 4] = value_of(before[i / 16][i % 4 / 2], i / 4 % 4 * 2 + i % 2);
#pragma unroll 1
    for (int k = 0; k < ranks; k += RANGE) {
      if (k > 0) {
#pragma unroll
        for (int s = 0; s < 2; s++) load_ranks(w[s], sides[s], k, tile, pool, num_blocks);
      }
#pragma unroll
      for (int s = 0; s < 2; s++) add_ranks(d[s], w[s], sides[s], k, memory);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (row[r] < 0 || !(GATES || ranks)) continue;
      float values[2][8];
      u32 words[WORDS(8)];
#pragma unroll
      for (int i = 0; i < 8; i++) {
        values[0][i] = d[0][i / 2][2 * r + i % 2], values[1][i] = d[1][i / 2][2 * r + i % 2];
        if (GATES) values[0][i] *= reciprocal_of(1.f + exp2_of(values[0][i] * -LOG2_E)) * values[1][i];
      }
#pragma unroll
      for (int s = 0; s < (GATES ? 1 : 2); s++) {
        if (sides[s].column + t * 8 >= size) continue;
        round_to<8>(words, values[s]);
        store(into[r] + (u32)(GATES ? at : left + at + s * apart) * SIZE, words, WORDS(8));
      }
    }
  }
  if (!waited) follow();  // so that launches end in their order
}
