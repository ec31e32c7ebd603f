// The second half of low-rank additions: the sums of shrink.cu times B, added to a product y [rows, sizes of all
// parts], whose rows are `width` elements apart.
//
// A piece is 64 outputs of one part, or with GATES 32 of the first part and the 32 of their operand, of a tile of rows.
// A warp multiplies on its own; all warps take about the same cost, in adjacent pieces. The outputs are the rows of the
// matrix units, and the rows of a tile its columns. A warp copies weights into a ring of its own in shared memory, DEPTH
// - 1 times RANGE ranks of a piece ahead, and the first ones before the previous launch has ended.
//
// Grid: [blocks]. Dynamic shared memory: WARPS * (HELD + DEPTH * STAGE) elements. Macros: those of low_rank.cuh; GATES:
// out [rows, size] = silu(first half) * second half of y with the additions, also of rows without an adapter; else y is
// added to, or with ALONE overwritten.
//
// ends: what the tiles up to the end of each one cost, then the last one's for tiles that are not used, of `room` tiles;
// rest: the same of each 8 rows, which cost nothing if all of them have adapters. See `Assigned`.

#define OUTPUTS 32              // of each of the two sides of a piece
#define RANGE 16                // ranks that are multiplied at a time
#define EACH 4                  // adjacent ranks, and adjacent outputs of a side, of each lane
#define CHUNK (16 / SIZE)       // adjacent ranks that are copied at a time
#define CHUNKS (RANGE / CHUNK)  // of an output
#define STAGE (2 * OUTPUTS * RANGE)                 // elements of RANGE ranks of a piece
#define HELD ((GATES ? 2 : 1) * RANKS * TILE_ROWS)  // elements of a tile's sums
#define KNOWN 4                 // ends of tiles that each lane reads at first

// A tile of rows, for a lane.
struct Tile {
  const int *rows, *blocks;  // its rows, and its adapter's blocks
  u32 b[3];                  // the tiles of its range where the parts' B begin
  int ranks[3];              // 0 without an adapter
  int row[2];                // rows 2 t and 2 t + 1; where there is none, another
  bool stored[2];            // whether they get results
};

// Adjacent pieces of a tile have two sides of OUTPUTS, of one part or with GATES of both. Of a side:
struct Side {
  u32 b;                      // the tile of the range where B begins
  int ranks, stride;          // 0 without an adapter; elements from one output to the next
  int size;                   // outputs of the part
  u32 slice;                  // where the lane has read last,
  const unsigned char* base;  // and where that begins
};

__device__ __forceinline__ float reciprocal_of(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Where a lane keeps its EACH sums of a slot and of RANGE ranks.
__device__ __forceinline__ unsigned char* held_at(unsigned char* held, int slot, int range) {
  return held + ((slot * (RANKS / RANGE) + range) * 32 + threadIdx.x % 32) * EACH * SIZE;
}

__device__ __forceinline__ void load_shared(u32* to, const unsigned char* from) {
  if (WORDS(EACH) == 2) {
    const uint2 v = *(const uint2*)from;
    to[0] = v.x, to[1] = v.y;
  } else {
    const uint4 v = *(const uint4*)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  }
}

// The ends of the first tiles, of which each lane has some.
struct Ends {
  u32 known[KNOWN];
};

__device__ __forceinline__ Ends ends_of(const int* ends, int count) {
  Ends found;
#pragma unroll
  for (int i = 0; i < KNOWN; i++) {
    const int at = threadIdx.x % 32 + 32 * i;
    found.known[i] = at < count ? ends[at] : ~0u;
  }
  return found;
}

// Return how many tiles end up to a cost.
__device__ __forceinline__ int tiles_up_to(const Ends& some, const int* ends, int count, u32 cost) {
  const int lane = threadIdx.x % 32;
  int found = 0;
#pragma unroll
  for (int i = 0; i < KNOWN; i++) found += some.known[i] <= cost;
  for (int i = lane + 32 * KNOWN; i < count; i += 32) found += ends[i] <= cost;
#pragma unroll
  for (int apart = 16; apart > 0; apart /= 2) found += __shfl_sync(0xffffffffu, found, lane ^ apart);
  return found;
}

__device__ __forceinline__ Tile tile_of(bool has, int number, const int* blocks, const int* meta, const int* tiles,
                                        const int* adapters, int max_blocks, int meta_parts, int rows) {
  Tile tile;
  tile.rows = tiles + (has ? number : 0) * (1 + TILE_ROWS);
  const int adapter = has ? tile.rows[0] : 0, first = number * TILE_ROWS;
  tile.blocks = blocks + adapter * max_blocks;
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    const int* const span = meta + (adapter * meta_parts + part) * 4;
    tile.b[part] = span[1], tile.ranks[part] = has ? span[2] : 0;
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const int at = threadIdx.x % 4 * 2 + r, row = has ? tile.rows[1 + at] : first + at;
    tile.stored[r] = has ? row >= 0 : row < rows && adapters[row] < 0;
    tile.row[r] = tile.stored[r] ? row : has ? tile.rows[1] : first;
  }
  return tile;
}

__device__ __forceinline__ Side side_of(const Tile& tile, int part, int size) {
  Side side;
  side.b = of_part(part, tile.b[0], tile.b[1], tile.b[2]);
  side.ranks = of_part(part, tile.ranks[0], tile.ranks[1], tile.ranks[2]);
  side.stride = stride_of(side.ranks), side.size = size, side.slice = ~0u;
  return side;
}

// Return where an output's weights are.
__device__ __forceinline__ const unsigned char* weights_of(Side& side, int output, const int* blocks,
                                                           const unsigned char* pool, int num_blocks) {
  const u32 at = (u32)(output * side.stride) * SIZE, tile = side.b + at / TILE, slice = tile / SLICE_TILES;
  if (slice != side.slice) side.slice = slice, side.base = place(pool, blocks, slice * SLICE_TILES, num_blocks);
  return side.base + (tile % SLICE_TILES * TILE + at % TILE);
}

// Return where a chunk of a side lies in the ring, so that lanes that read together read from different banks.
__device__ __forceinline__ int place_of(int chunk) {
  return SIZE == 2 ? chunk ^ (chunk >> 3 & 3) << 1 : chunk ^ (chunk >> 4 & 1) << 2;
}

// Copy B for RANGE ranks from k on, of the side's outputs from `column` on. Past the ranks, or the part, they are other
// weights: their sums are 0, or their results are not stored.
__device__ __forceinline__ void copy_ranks(u32 to, Side& side, int column, int k, const int* blocks,
                                           const unsigned char* pool, int num_blocks) {
  if (k >= side.ranks) return;
#pragma unroll
  for (int i = 0; i < OUTPUTS * CHUNKS / 32; i++) {
    const int chunk = i * 32 + threadIdx.x % 32, output = min(column + chunk / CHUNKS, side.size - 1);
    const int rank = min(k + chunk % CHUNKS * CHUNK, side.stride - CHUNK);
    copy(to + place_of(chunk) * 16, weights_of(side, output, blocks, pool, num_blocks) + rank * SIZE);
  }
}

// Read the ranks of a lane's outputs from a stage of the ring.
__device__ __forceinline__ void read_ranks(u32 (*w)[WORDS(EACH)], const unsigned char* stage) {
  const int lane = threadIdx.x % 32, rank = lane % 4 * EACH;
#pragma unroll
  for (int j = 0; j < EACH; j++)
    load_shared(w[j], stage + place_of((lane / 4 * EACH + j) * CHUNKS + rank / CHUNK) * 16 + rank % CHUNK * SIZE);
}

// Multiply RANGE ranks from k on. stage: of the side; held: this lane's sums.
__device__ __forceinline__ void add_ranks(float (*d)[4], const unsigned char* stage, int k, int slot,
                                          unsigned char* held) {
  u32 w[EACH][WORDS(EACH)], given[WORDS(EACH)];
  read_ranks(w, stage);
  load_shared(given, held_at(held, slot, k / RANGE));
#pragma unroll
  for (int i = 0; i < 2; i++) multiply<EACH>(d[i], w[i], w[2 + i], given);
}

// Keep what this lane multiplies of the sums of a part as elements, those of all splits added up; 0 where a row or a
// rank is missing, which shrink.cu leaves undefined.
__device__ __forceinline__ void hold(unsigned char* held, const float* sums, const Tile& tile, int slot, int part,
                                     int ranks, int rows, int splits) {
  const int lane = threadIdx.x % 32, row = ranks ? tile.rows[1 + lane / 4] : 0;
  const u64 apart = (u64)rows * PARTS * RANKS / 4;
  for (int k = 0; k < ranks; k += RANGE) {
    float values[4] = {0.f, 0.f, 0.f, 0.f};
    if (row >= 0) {
      const uint4* from = (const uint4*)(sums + ((u64)row * PARTS + part) * RANKS + k + lane % 4 * EACH);
#pragma unroll 4
      for (int split = 0; split < splits; split++) {
        const uint4 more = written(from + split * apart);
        values[0] += __uint_as_float(more.x), values[1] += __uint_as_float(more.y);
        values[2] += __uint_as_float(more.z), values[3] += __uint_as_float(more.w);
      }
    }
    u32 words[WORDS(EACH)];
    round_to<EACH>(words, values);
    store<EACH>(held_at(held, slot, k / RANGE), words);
  }
}

// Return a lane's results of a side of a row.
__device__ __forceinline__ void result(u32* words, const float (*d)[2][4], int side, int r) {
  float values[EACH];
#pragma unroll
  for (int o = 0; o < EACH; o++) {
    values[o] = d[side][o % 2][o / 2 * 2 + r];
    if (GATES) values[o] *= reciprocal_of(1.f + exp2_of(values[o] * -LOG2_E)) * d[1][o % 2][o / 2 * 2 + r];
  }
  round_to<EACH>(words, values);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)
expand(const float* sums, const unsigned char* __restrict__ pool, const int* __restrict__ blocks,
       const int* __restrict__ meta, const int* __restrict__ tiles, const int* __restrict__ ends,
       const int* __restrict__ rest, const int* __restrict__ adapters, unsigned char* y, unsigned char* out,
       int num_blocks, int max_blocks, int meta_parts, int rows, int splits, int room, int width, int size_0, int size_1,
       int size_2) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int each = GATES ? OUTPUTS : 2 * OUTPUTS, apart = GATES ? size_0 : OUTPUTS;
  const int first = (size_0 + each - 1) / each, second = first + (size_1 + each - 1) / each;
  const u32 pieces = GATES ? first : second + (size_2 + each - 1) / each;
  const int plain = GATES ? (rows + TILE_ROWS - 1) / TILE_ROWS : 0, within = (int)(threadIdx.x % 32) / 4 * EACH;
  const Ends known = ends_of(ends, room);
  const u32 adapted = ends[room - 1], total = (adapted + (GATES ? rest[plain - 1] : 0)) * pieces;
  const u32 warps = gridDim.x * WARPS, number = blockIdx.x * WARPS + threadIdx.x / 32;
  const u32 begin = number * (total / warps) + min((int)number, (int)(total % warps));
  const u32 end = begin + total / warps + (number < total % warps);
  unsigned char* const held = memory + threadIdx.x / 32 * HELD * SIZE;
  unsigned char* const ring = memory + (WARPS * HELD + threadIdx.x / 32 * DEPTH * STAGE) * SIZE;
  bool waited = false;
  overlap();
  int n = room + plain;
  if (begin < end) {
    const u32 cost = begin / pieces;
    if (!GATES || cost < adapted) n = tiles_up_to(known, ends, room, cost);
    else n = room + tiles_up_to(ends_of(rest, plain), rest, plain, cost - adapted);
  }
  for (; n < room + plain; n++) {
    const bool has = n < room;
    const int* const ended = has ? ends + n : rest + (n - room);
    const u32 before_all = has ? 0 : adapted, start = n == 0 || n == room ? 0 : ended[-1], cost = *ended - start;
    const u32 origin = (before_all + start) * pieces;
    if (origin >= end) break;
    if (cost == 0) {
      if (has) n = room - 1;  // no more adapters
      continue;
    }
    int piece = begin > origin ? (begin - origin + cost - 1) / cost : 0;
    const int last = min((int)pieces, (int)((end - origin + cost - 1) / cost));
    if (piece >= last) continue;
    const Tile tile = tile_of(has, has ? n : n - room, blocks, meta, tiles, adapters, max_blocks, meta_parts, rows);
    while (piece < last) {  // pieces of one part
      const int part = GATES || piece < first ? 0 : piece < second ? 1 : 2, size = of_part(part, size_0, size_1, size_2);
      const int stop = GATES ? last : min(last, of_part(part, first, second, (int)pieces));
      int column = (piece - of_part(part, 0, first, second)) * each + within;
      Side sides[2] = {side_of(tile, part, size), side_of(tile, GATES ? 1 : part, GATES ? size_1 : size)};
      if (!GATES && !ALONE && sides[0].ranks == 0) {
        piece = stop;
        continue;
      }
      const int other = GATES ? 0 : OUTPUTS, left = of_part(part, 0, size_0, size_0 + size_1);
      const int ranks = max(sides[0].ranks, sides[1].ranks);
      int ahead = piece, ahead_column = column - within, ahead_k = 0, ahead_stage = 0, stage = 0;
      auto begin_copies = [&]() {
        if (ahead < stop) {
#pragma unroll
          for (int s = 0; s < 2; s++) {
            const u32 to = in_shared(ring + (ahead_stage * STAGE + s * STAGE / 2) * SIZE);
            copy_ranks(to, sides[s], ahead_column + s * other, ahead_k, tile.blocks, pool, num_blocks);
          }
          ahead_k += RANGE;
          if (ahead_k >= ranks) ahead_k = 0, ahead++, ahead_column += each;
          ahead_stage = (ahead_stage + 1) % DEPTH;
        }
        commit();
      };
      if (ranks > 0) {
#pragma unroll 1
        for (int i = 0; i < DEPTH - 1; i++) begin_copies();
      }
      u32 before[2][2][WORDS(EACH)];
      if (!waited) follow();
      waited = true;
      const unsigned char* from[2];
      unsigned char* into[2];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        from[r] = y + ((u64)tile.row[r] * width + left + column) * SIZE;
        into[r] = out + ((u64)tile.row[r] * (GATES ? size_0 : width) + left + column) * SIZE;
#pragma unroll
        for (int s = 0; s < 2; s++)
          if (!ALONE && column + s * other < sides[s].size) load_written<EACH>(before[s][r], from[r] + s * apart * SIZE);
      }
#pragma unroll
      for (int s = 0; s < (GATES ? 2 : 1); s++)
        hold(held, sums, tile, s, GATES ? s : part, sides[s].ranks, rows, splits);
#pragma unroll 1
      for (; piece < stop; piece++) {
        float d[2][2][4];
#pragma unroll
        for (int i = 0; i < 16; i++)
          d[i / 8][i / 4 % 2][i % 4] = ALONE ? 0.f : value_of(before[i / 8][i % 2], i / 2 % 2 * 2 + i / 4 % 2);
        if (!ALONE && piece + 1 < stop) {
#pragma unroll
          for (int s = 0; s < 2; s++)
#pragma unroll
            for (int r = 0; r < 2; r++)
              if (column + each + s * other < sides[s].size)
                load_written<EACH>(before[s][r], from[r] + (each + s * apart) * SIZE);
        }
#pragma unroll 1
        for (int k = 0; k < ranks; k += RANGE) {
          begin_copies();
          await();
          __syncwarp();  // lanes copy for one another
#pragma unroll
          for (int s = 0; s < 2; s++)
            if (k < sides[s].ranks)
              add_ranks(d[s], ring + (stage * STAGE + s * STAGE / 2) * SIZE, k, GATES ? s : 0, held);
          __syncwarp();
          stage = (stage + 1) % DEPTH;
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
          for (int s = 0; s < (GATES ? 1 : 2); s++) {
            u32 words[WORDS(EACH)];
            result(words, d, s, r);
            if (tile.stored[r] && column + s * other < sides[s].size) store<EACH>(into[r] + s * apart * SIZE, words);
          }
          from[r] += each * SIZE, into[r] += each * SIZE;
        }
        column += each;
      }
    }
  }
  if (!waited) follow();  // so that launches end in their order
}
