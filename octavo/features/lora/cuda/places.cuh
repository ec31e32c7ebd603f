// Where adapters lie in blocks of the KV cache; see ../layout.py.
//
// Macros: FLOATS: elements are float32, else float16 with HALF, else bfloat16. SLICES of a block, SLICE_TILES of a
// slice; TILE: bytes of a tile of an adapter's range.

#define SIZE (FLOATS ? 4 : 2)

// Return where a tile of an adapter's range is. `blocks`: the adapter's.
__device__ __forceinline__ const unsigned char* place(const unsigned char* pool, const int* blocks, u32 tile,
                                                      int num_blocks) {
  const u32 slice = tile / SLICE_TILES;
  const u64 row = (u64)(slice % SLICES) * num_blocks + blocks[slice / SLICES];
  return pool + (row * SLICE_TILES + tile % SLICE_TILES) * TILE;
}

// Return the elements from one output of B to the next: `Geometry.stride`.
__device__ __forceinline__ int stride_of(int rank) { return rank <= 8 ? (rank > 0) * 8 : 1 << (32 - __clz(rank - 1)); }

// Return where an output's elements of B are. b: the tile where the part's B begins.
__device__ __forceinline__ const unsigned char* output_of(const unsigned char* pool, const int* blocks, u32 b,
                                                          int output, int stride, int num_blocks) {
  const u32 at = (u32)output * stride * SIZE;
  return place(pool, blocks, b + at / TILE, num_blocks) + at % TILE;
}

template <class T>
__device__ __forceinline__ T of_part(int part, T first, T second, T third) {
  return part == 0 ? first : part == 1 ? second : third;
}
