// Gated products of some hundred rows on a Hopper GPU: out [rows, N] = silu(x @ w[0]^T) * (x @ w[1]^T), for x [rows, K] and
// w [2, N, K] of 16-bit numbers.
//
// A tile is 128 rows by SIDE outputs, of both halves of w. Blocks stay on their multiprocessors and take one tile after
// another: a warp copies, also ahead of the end of a tile, and each of two warp groups multiplies 64 of the rows. With
// CLUSTER 2, two blocks have adjacent rows and the same outputs, and each copies a half of the weights to both. The first
// weights are copied before the previous launch has ended.
//
// ADDS: added [rows, 2 N] is added to both products, before the gate, in rows where `adds` [rows] is not negative.
//
// Grid: CLUSTER * clusters. Dynamic shared memory: STAGES * STAGE_BYTES + 1024. Macros: those of integers.cuh and of
// cluster_tiles.cuh; SIDE, a multiple of 8, STAGES, ADDS. `multiply_tile` is defined by nn/ops/wgmma.py.

#define ROW_BYTES 128
#define X_BYTES (128 * ROW_BYTES)
#define SIDE_BYTES (SIDE * ROW_BYTES)
#define STAGE_BYTES (X_BYTES + 2 * SIDE_BYTES)
#define TILES (SIDE / 8)  // of 8 outputs

// The tiles that a block takes.
struct Work {
  int rows, outputs, steps, heights, count, apart;

  __device__ __forceinline__ Work(int rows, int outputs, int K) : rows(rows), outputs(outputs), steps(K / 64) {
    heights = (rows + 128 * CLUSTER - 1) / (128 * CLUSTER);
    count = (outputs + SIDE - 1) / SIDE * heights, apart = gridDim.x / CLUSTER;
  }

  __device__ __forceinline__ int first() const { return blockIdx.x / CLUSTER; }
  __device__ __forceinline__ int column(int tile) const { return tile / heights * SIDE; }
  __device__ __forceinline__ int row(int tile) const { return (tile % heights * CLUSTER + block_of_cluster()) * 128; }
};

// Where the copying warp puts the inputs of a step: all its lanes know what one of them copies, so that numbers are in
// uniform registers.
struct Stages {
  const TensorMap *w_map, *x_map;
  u32 base, full, empty;
  bool leads;

  __device__ __forceinline__ void copy_rows(int stage, int k, int row) const {
    if (leads) copy_tile(base + stage * STAGE_BYTES, x_map, full + 8 * stage, k, row);
  }

  __device__ __forceinline__ void copy_weights(int stage, int k, int column, int outputs) const {
    const u32 to = base + stage * STAGE_BYTES + X_BYTES, barrier = full + 8 * stage;
    if (!leads) return;
    expect(barrier, STAGE_BYTES);
#pragma unroll
    for (int i = 0; i < 2 / CLUSTER; i++) {
      const int side = CLUSTER == 1 ? i : block_of_cluster();
      copy_to_all(to + side * SIDE_BYTES, w_map, barrier, k, column + side * outputs);
    }
  }
};

__device__ __forceinline__ void copy_all(const Stages& stages, const Work& work) {
  Place<STAGES> at = {0, 0};
  int begun = min(STAGES, work.steps);  // steps of the first tile whose weights are on their way
  for (int i = 0; i < begun; i++) stages.copy_weights(i, i * 64, work.column(work.first()), work.outputs);
  follow();
  for (int tile = work.first(); tile < work.count; tile += work.apart) {
    const int column = work.column(tile), row = work.row(tile);
    for (int i = 0; i < work.steps; i++, at.next(), begun--) {
      if (begun <= 0) {
        wait(stages.empty + 8 * at.stage, at.parity ^ 1);
        stages.copy_weights(at.stage, i * 64, column, work.outputs);
      }
      stages.copy_rows(at.stage, i * 64, row);
    }
  }
  // The other block reports here what it has read, until it has read all.
  for (int i = 0; i < STAGES; i++, at.next()) wait(stages.empty + 8 * at.stage, at.parity ^ 1);
}

// acc [2, TILES, 4]: for each 8 outputs of a half, this lane's two of row `row`, and two of row `row + 8`.

__device__ __forceinline__ void add_tile(float* acc, const unsigned short* added, const int* adds, const Work& work, int row,
                                         int column) {
  const int own = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const bool valid = row + 8 * r < work.rows && adds[row + 8 * r] >= 0;
    if (!__any_sync(~0u, valid)) continue;
    const unsigned short* const from = added + (u64)(row + 8 * r) * (2 * work.outputs);
#pragma unroll
    for (int side = 0; side < 2; side++) {
#pragma unroll
      for (int j = 0; j < TILES; j += 4) {
        const int n = column + 8 * (j + own);
        const bool exists = valid && j + own < TILES && n < work.outputs;
        uint4 eight = make_uint4(0u, 0u, 0u, 0u);
        if (exists) eight = written((const uint4*)(from + side * work.outputs + n));
        eight = across(eight.x, eight.y, eight.z, eight.w);
        const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int i = 0; i < 4 && j + i < TILES; i++) {
          const float2 pair = wide2(words[i]);
          float* const to = acc + (side * TILES + j + i) * 4 + 2 * r;
          to[0] += pair.x, to[1] += pair.y;
        }
      }
    }
  }
}

__device__ __forceinline__ u32 gated(const float* gate, const float* up) {
  const float a = __fdividef(gate[0], 1.f + __expf(-gate[0])), b = __fdividef(gate[1], 1.f + __expf(-gate[1]));
  return narrow2(a * up[0], b * up[1]);
}

__device__ __forceinline__ void store_tile(const float* acc, unsigned short* out, const Work& work, int row, int column) {
  const int own = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; r++) {
    unsigned short* const to = out + (u64)(row + 8 * r) * work.outputs;
#pragma unroll
    for (int j = 0; j < TILES; j += 4) {
      u32 word[4] = {0u, 0u, 0u, 0u};
#pragma unroll
      for (int i = 0; i < 4 && j + i < TILES; i++) word[i] = gated(acc + (j + i) * 4 + 2 * r, acc + (TILES + j + i) * 4 + 2 * r);
      const uint4 eight = across(word[0], word[1], word[2], word[3]);
      const int n = column + 8 * (j + own);
      if (row + 8 * r < work.rows && j + own < TILES && n < work.outputs) *(uint4*)(to + n) = eight;
    }
  }
}

extern "C" __global__ void __launch_bounds__(384, 1)
gated_tiles(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, unsigned short* out,
            const unsigned short* added, const int* adds, int rows, int N, int K) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const u32 base = (shared(memory) + 1023) & ~1023u;
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  const Work work(rows, N, K);
  overlap();
  if (threadIdx.x == 0) prepare(full, empty, 1, 8 * CLUSTER);
  __syncwarp();
  meet();

  if (group == 0) {
    REGISTERS("dec", 40);
    if (warp == 0) copy_all(Stages{&w_map, &x_map, base, shared(full), shared(empty), elected()}, work);
    return;
  }

  REGISTERS("inc", 232);
  const int half = group - 1;
  Place<STAGES> at = {0, 0};
  bool waited = false;
  for (int tile = work.first(); tile < work.count; tile += work.apart) {
    const int row = work.row(tile) + half * 64 + warp * 16 + lane / 4, column = work.column(tile);
    float acc[8 * TILES];
#pragma unroll
    for (int i = 0; i < 8 * TILES; i++) acc[i] = 0.f;
    int previous = 0;
    for (int i = 0; i < work.steps; i++, at.next()) {
      wait(shared(&full[at.stage]), at.parity);
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const u64 form = (1ull << 62) | (64ull << 32) | (1ull << 16);
      const u32 own = base + at.stage * STAGE_BYTES;
      const u64 some = form | ((own + half * 64 * ROW_BYTES) >> 4), matrix = form | ((own + X_BYTES) >> 4);
#pragma unroll
      for (int r = 0; r < 4; r++) multiply_tile(acc, some + 2 * r, matrix + 2 * r);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // for the previous step
      if (i > 0 && lane < CLUSTER) arrive_at(shared(&empty[previous]), lane);
      previous = at.stage;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 8 * TILES; i++) asm volatile("" : "+f"(acc[i])::"memory");
    if (lane < CLUSTER) arrive_at(shared(&empty[previous]), lane);
    if (!waited) follow();  // also since launches before may still read what is overwritten
    waited = true;
#if ADDS
    add_tile(acc, added, adds, work, row, column);
#endif
    store_tile(acc, out, work, row, column);
  }
}
