// What kernels of sorted experts have in common: blocks stay on their multiprocessors and take one tile after another,
// and one warp group copies ahead of those that multiply. See barriers.cuh, and `sort_kernel` in nn/ops/triton_routing.py.
//
// Macros: SIDE_BY_SIDE tiles that consecutive blocks take before the next outputs.

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, u32 barrier, int k, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(row) : "memory");
}

// Copy `bytes`, a multiple of 16, of which both addresses are multiples, too.
__device__ __forceinline__ void copy_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Prepare the barriers of a ring, by one thread: `filled` arrivals fill a stage, and `emptied` empty it.
template <int SIZE>
__device__ __forceinline__ void prepare(u64 (&full)[SIZE], u64 (&empty)[SIZE], int filled, int emptied) {
  for (int s = 0; s < SIZE; s++) {
    init(shared(&full[s]), filled);
    init(shared(&empty[s]), emptied);
  }
}

// A tile as `sort_kernel` lists it, and the first of its outputs. After the last tile, `more` is 0.
struct Tile {
  int expert, start, rows, n, more;
};

// The tile that a block takes for number `index`, of OUTPUTS outputs in one of `columns`.
template <int OUTPUTS>
__device__ __forceinline__ Tile tile_at(int index, const int* tiles, int num_tiles, int columns) {
  const int among = index % (SIDE_BY_SIDE * columns), beside = index / (SIDE_BY_SIDE * columns) * SIDE_BY_SIDE;
  const int number = beside + among % SIDE_BY_SIDE;
  Tile t = {0, 0, 0, among / SIDE_BY_SIDE * OUTPUTS, 0};
  if (beside < num_tiles) t.more = tiles[3 * beside + 2];
  if (number < num_tiles) t.expert = tiles[3 * number], t.start = tiles[3 * number + 1], t.rows = tiles[3 * number + 2];
  return t;
}

// Where a warp group is in a ring of SIZE stages.
template <int SIZE>
struct Place {
  int stage;
  u32 parity;
  __device__ __forceinline__ void next() {
    if (++stage == SIZE) stage = 0, parity ^= 1;
  }
};

#define REGISTERS(how, count) asm volatile("setmaxnreg." how ".sync.aligned.u32 " #count ";")
