// What kernels of sorted experts have in common: blocks stay on their multiprocessors and take one tile after another,
// and one warp group copies ahead of those that multiply. See tile_ring.cuh, and `sort_kernel` in
// nn/ops/triton_routing.py.
//
// Macros: SIDE_BY_SIDE tiles that consecutive blocks take before the next outputs.

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
