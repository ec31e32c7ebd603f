// The addition to the product of one row, in the product's launch: each block multiplies the row by rows of A before its
// first outputs, which takes little beside the matrix, and reads the sums of all blocks before its last ones. All blocks
// of the product run at once, so none waits for one that can't begin.
//
// Macros: those of places.cuh and row.cuh. PARTS of the target; RANKS: room for those of a part, a multiple of 16.

#define ALL_RANKS (PARTS * RANKS)

// What a launch is given; what it points at is there before the previous launch ends. See `Given` in ../row.py.
struct Given {
  const unsigned char* pool;
  const int *blocks, *meta, *adapter;
  float* sums;       // [ALL_RANKS]
  unsigned* counts;  // of sums that are there, and of blocks that have read them; 0 between launches
  int num_blocks, max_blocks, meta_parts, sizes[2];
};

// Add one, after what this thread has stored.
__device__ __forceinline__ void count_up(unsigned* at) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(at) : "memory");
}

// Return a count; what was stored before it was reached is there.
__device__ __forceinline__ unsigned reached(const unsigned* at) {
  unsigned count;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(at) : "memory");
  return count;
}

struct Joined {
  Given given;
  const int* blocks;          // the adapter's
  int a[3], ranks[3], total;  // the tiles where the parts' A begin; 0 without an adapter; ranks of all parts
  u32 b[3];                   // the tiles where their B begin
  float *partial, *all;       // in shared memory: the warps' sums; those of all blocks, RANKS for each part
  // Of a row of A: this thread's weights, the next of them that is multiplied, and its sum.
  u32 weights[EIGHTS][4];
  int turn;
  float sum;
  // Of an output, for each side: where its weights of B are, and the first of them; their number; the first of its sums.
  const unsigned char* from[SIDES];
  uint4 first[SIDES][2];
  int ranks_of[SIDES], offset_of[SIDES];
  unsigned readers;  // blocks that have read the sums, this one included

  // n: a thread's first output.
  __device__ __forceinline__ void begin(const Given& of_launch, float* shared, int n) {
    given = of_launch, partial = shared, all = shared + WARPS;
    turn = 0, sum = 0.f, readers = 0, total = 0;
    const int adapter = *given.adapter;
    const int* const spans = given.meta + max(adapter, 0) * given.meta_parts * 4;
    blocks = given.blocks + max(adapter, 0) * given.max_blocks;
#pragma unroll
    for (int part = 0; part < 3; part++) {
      const int* const span = spans + min(part, PARTS - 1) * 4;
      a[part] = span[0], b[part] = span[1], ranks[part] = part < PARTS && adapter >= 0 ? span[2] : 0;
      total += ranks[part];
    }
    load_row(blockIdx.x);
    if (n < N / SIDES) load_outputs(n);
  }

  // Load a row of A, counted over all parts.
  __device__ __forceinline__ void load_row(int rank) {
    const bool exists = rank < total;
    const int second = ranks[0], third = ranks[0] + ranks[1], part = rank < second ? 0 : rank < third ? 1 : 2;
    const u32 row_tiles = (K * SIZE + TILE - 1) / TILE;
    const u32 begin = of_part(part, a[0], a[1], a[2]) + (rank - of_part(part, 0, second, third)) * row_tiles;
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) {
      const u32 i = j * WARPS * 32 + threadIdx.x, at = i * 8 * SIZE;
      uint4 w = make_uint4(0u, 0u, 0u, 0u);
      if (exists && i * 8 < K)
        w = fetch((const uint4*)(place(given.pool, blocks, begin + at / TILE, given.num_blocks) + at % TILE));
      weights[j][0] = w.x, weights[j][1] = w.y, weights[j][2] = w.z, weights[j][3] = w.w;
    }
  }

  // Multiply a thread's next 8 inputs. All threads call it EIGHTS times, with any values beyond K.
  __device__ __forceinline__ void take(const u32* pairs, const u32* rest) {
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const float2 w = wide2(weights[turn][p]), v = as_given(pairs[p]);
      sum += w.x * v.x + w.y * v.y;
#if SPLIT
      const float2 more = wide2(rest[p]);
      sum += w.x * more.x + w.y * more.y;
#endif
    }
    if (++turn < EIGHTS) return;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, apart);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    turn = 0, sum = 0.f;
  }

  // Give the sums of this block's rows of A to all blocks. Those of the first one are taken, and all threads have met.
  // row: as `take` got it, in shared memory.
  __device__ __forceinline__ void share(const uint4* row, float back) {
    for (int rank = blockIdx.x; rank < total; rank += gridDim.x) {
      if (rank != blockIdx.x) {
        load_row(rank);
        __syncthreads();  // the last sum is given
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) {
          const int i = min(j * WARPS * 32 + (int)threadIdx.x, K / 8 - 1);
          const uint4 v = row[i], more = row[SPLIT ? K / 8 + i : i];
          const u32 pairs[4] = {v.x, v.y, v.z, v.w}, rest[4] = {more.x, more.y, more.z, more.w};
          take(pairs, rest);
        }
        __syncthreads();
      }
      if (threadIdx.x > 0) continue;
      float found = 0.f;
      for (int w = 0; w < WARPS; w++) found += partial[w];
      given.sums[rank] = found * back;
      count_up(given.counts);
    }
  }

  // Load the first ranks of B for output n of a thread.
  __device__ __forceinline__ void load_outputs(int n) {
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      const int size_0 = given.sizes[0], size_1 = given.sizes[1];
      const int part = GATED ? side : n < size_0 ? 0 : n < size_0 + size_1 ? 1 : 2;
      const int column = GATED ? n : n - of_part(part, 0, size_0, size_0 + size_1);
      ranks_of[side] = of_part(part, ranks[0], ranks[1], ranks[2]), offset_of[side] = part * RANKS;
      if (ranks_of[side] == 0) continue;
      const int stride = stride_of(ranks_of[side]);
      const u32 begin = of_part(part, b[0], b[1], b[2]);
      from[side] = output_of(given.pool, blocks, begin, column, stride, given.num_blocks);
      first[side][0] = fetch((const uint4*)from[side]);
      first[side][1] = fetch((const uint4*)from[side] + (stride > 8));
    }
  }

  // Read the sums of all blocks, when they are there. A warp calls it.
  __device__ __forceinline__ void read() {
    if (total == 0) return;
    while (reached(given.counts) < total) {}
    for (int i = threadIdx.x % 32; i < ALL_RANKS; i += 32) {
      const int part = i / RANKS, rank = i % RANKS;
      const int before = of_part(part, 0, ranks[0], ranks[0] + ranks[1]);
      const bool exists = rank < of_part(part, ranks[0], ranks[1], ranks[2]);
      all[i] = exists ? *(volatile float*)(given.sums + before + rank) : 0.f;
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) readers = atomicAdd(given.counts + 1, 1u) + 1;
  }

  // Return what is added to a side of output n, which is loaded.
  __device__ __forceinline__ float addition(int side) {
    float found = 0.f;
    for (int k = 0; k < ranks_of[side]; k += 8) {
      const uint4 w = k < 16 ? first[side][k / 8] : fetch((const uint4*)from[side] + k / 8);
      const float* const h = all + offset_of[side] + k;
      const u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int p = 0; p < 4; p++) {
        const float2 v = wide2(words[p]);
        found += v.x * h[2 * p] + v.y * h[2 * p + 1];
      }
    }
    return found;
  }

  // The last block of the launch that has read the sums prepares the next launch. The warp that has read them calls it.
  __device__ __forceinline__ void end() {
    if (total > 0 && threadIdx.x % 32 == 0 && readers == gridDim.x) given.counts[0] = 0, given.counts[1] = 0;
  }
};
