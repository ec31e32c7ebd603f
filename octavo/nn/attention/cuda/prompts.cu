// Attention of rows with many queries on a Hopper GPU, over the keys of earlier steps in a paged cache and those of this
// step in the projection's output. After FlashAttention-3 (Shah et al. 2024, https://arxiv.org/abs/2407.08608): four warps
// copy ahead, and two warp groups of 64 queries each take turns, so that one computes exponentials while the other
// multiplies; each also multiplies one tile of keys while it weighs the next.
//
// Blocks stay on their multiprocessors and take one item after another, a head of a tile of 128 queries. Tiles of keys are
// read from the last one back.
//
// Grid: blocks that run at once. Macros: those of integers.cuh; D, a multiple of 64, channels of a head; KEYS of a tile;
// PAGE tokens of a KV block, which divide KEYS; SHARING query heads of a kv head; TABLE_ROWS. `score` and `mix` are
// defined by nn/ops/wgmma.py.

#define QUERIES 128
#define ROW_BYTES 128
#define PARTS (D / 64)  // rows of 64 channels
#define QUERY_BYTES (QUERIES * ROW_BYTES * PARTS)
#define TILE_BYTES (KEYS * ROW_BYTES * PARTS)  // of keys, or of values
#define STAGES 2
#define QUERY_STAGES (D > 128 ? 1 : 2)
#define PAGES (KEYS / PAGE)
#define LOWEST __int_as_float(0xff800000)

// A head of a tile of queries. Places are those in the row, of its tokens in this step.
struct Item {
  int head, start, count;  // the row's first token in the step, and its tokens; 0 after the last item
  int first;               // query of the tile
  int past, table;         // the row's tokens in the cache before, and its block table

  // Tiles of keys: those in the cache, and all.
  __device__ __forceinline__ int paged_tiles() const { return (past + KEYS - 1) / KEYS; }
  __device__ __forceinline__ int tiles() const { return paged_tiles() + (min(count, first + QUERIES) + KEYS - 1) / KEYS; }

  // Keys from the first one of a tile to the last one of the row, of those in the cache or of the others.
  __device__ __forceinline__ int valid(int tile) const {
    return tile < paged_tiles() ? past - tile * KEYS : count - (tile - paged_tiles()) * KEYS;
  }
};

struct Rows {
  const int *tiles, *query_start, *seq_lens, *table_rows;
  int num_tiles, heads;

  // Item `number` of a block, which has none if the tile is padding. Tiles are in descending order of their keys; every
  // other round of items is dealt out backwards, so that blocks have equal work.
  __device__ __forceinline__ Item item(int number) const {
    const int within = number % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    const int index = number * gridDim.x + within;
    Item it = {0, 0, 0, 0, 0, 0};
    if (index >= num_tiles * heads) return it;
    const int tile = index / heads, row = tiles[2 * tile];
    it.head = index % heads, it.first = tiles[2 * tile + 1];
    it.start = query_start[row];
    const int count = query_start[row + 1] - it.start;
    it.count = it.first < count ? count : 0;
    it.past = seq_lens[row] - count;
    it.table = TABLE_ROWS ? table_rows[row] : row;
    return it;
  }
};

struct Memory {
  u64 query_full[QUERY_STAGES], query_empty[QUERY_STAGES];
  u64 key_full[STAGES], key_empty[STAGES], value_full[STAGES], value_empty[STAGES], partial;
  Item items[QUERY_STAGES];
};

__device__ __forceinline__ void copy_box(u32 to, const TensorMap* map, u32 barrier, int channel, int head, int token) {
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(channel), "r"(head), "r"(token) : "memory");
}

// Make stores of this thread visible to the copy engine and the matrix units.
__device__ __forceinline__ void publish() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void clear(u32 at) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
}

// A warp that copies keys or values. Two warps share the pages of a tile in the cache, since a page takes a warp as long
// as a whole tile in the projection's output; the first one also copies everything else. Both arrive at the barrier of
// each tile, so that neither falls behind by a round of stages, after which parities repeat.
struct Copies {
  const TensorMap *step_map, *cache_map;
  const int* tables;
  u32 tiles, full, empty;  // in shared memory
  int value, share, heads, kv_heads, table_stride, block_stride, value_stride, head_stride, lane;
  bool leads;

  // Where the lane's page of a tile begins in the cache, in cells; the last page in place of pages without keys.
  __device__ __forceinline__ int cell_of(const Item& it, int tile) const {
    if (tile < 0 || tile >= it.paged_tiles()) return 0;
    const int page = min(tile * PAGES + min(lane, PAGES - 1), (it.past - 1) / PAGE);
    const int block = tables[(u64)it.table * table_stride + page];
    return block * block_stride + value * value_stride + it.head / SHARING * head_stride;
  }

  // Copy this warp's share of a tile to a stage, or all of it.
  __device__ __forceinline__ void copy(const Item& it, int tile, int cell, u32 to, u32 barrier, bool all) const {
    const int fresh = tile - it.paged_tiles(), head = heads + value * kv_heads + it.head / SHARING;
    if (fresh >= 0) {
      if (!leads) return;
      if (share) return arrive(barrier);
      expect(barrier, TILE_BYTES);
#pragma unroll
      for (int c = 0; c < PARTS; c++)
        copy_box(to + c * (KEYS * ROW_BYTES), step_map, barrier, 64 * c, head, it.start + fresh * KEYS);
      return;
    }
    int cells[PAGES];
#pragma unroll
    for (int p = 0; p < PAGES; p++) cells[p] = __shfl_sync(~0u, cell, p);
    if (!leads) return;
    expect(barrier, (all ? PAGES : (PAGES + 1 - share) / 2) * (PAGE * ROW_BYTES * PARTS));
#pragma unroll
    for (int p = 0; p < PAGES; p++)
      if (all || p % 2 == share)
#pragma unroll
        for (int c = 0; c < PARTS; c++)
          copy_tile(to + (c * KEYS + p * PAGE) * ROW_BYTES, cache_map, barrier, 64 * c, cells[p]);
  }

  // Values of other rows, or of no row, may be NaN, so those in a row's last tile are cleared.
  __device__ __forceinline__ void copy_cleared(const Item& it, int tile, int cell, int stage, int valid, u32 partial,
                                               u32 parity) const {
    const u32 to = tiles + stage * TILE_BYTES;
    copy(it, tile, cell, to, partial, true);
    wait(partial, parity);
    for (int i = lane; i < (KEYS - valid) * PARTS * 8; i += 32)
      clear(to + (i / 8 % PARTS * KEYS + valid + i / (PARTS * 8)) * ROW_BYTES + i % 8 * 16);
    publish();
    __syncwarp();
    if (leads) arrive(full + 8 * stage);
  }

  __device__ __forceinline__ void copy_all(const Rows& rows, Memory& m, u32 queries) const {
    Place<STAGES> at = {0, 0};
    Place<QUERY_STAGES> at_query = {0, 0};
    u32 partial_parity = 0;
    const int rounds = (rows.num_tiles * heads + gridDim.x - 1) / gridDim.x;
    Item next = rows.item(0);
    for (int number = 0; number < rounds; number++) {
      const Item it = next;
      next = rows.item(number + 1);
      if (!it.count) continue;
      int tile = it.tiles() - 1, cell = cell_of(it, tile);
      if (value == 0 && share == 0) {
        copy_queries(it, m, queries, at_query);
        at_query.next();
      }
      for (; tile >= 0; tile--, at.next()) {
        const int own = cell;
        cell = cell_of(it, tile - 1);
        wait(empty + 8 * at.stage, at.parity ^ 1);
        const int valid = it.valid(tile);
        if (value == 0 || valid >= KEYS) {
          copy(it, tile, own, tiles + at.stage * TILE_BYTES, full + 8 * at.stage, false);
        } else if (share == 0) {
          copy_cleared(it, tile, own, at.stage, valid, shared(&m.partial), partial_parity);
          partial_parity ^= 1;
        } else if (leads) {
          arrive(full + 8 * at.stage);
        }
      }
    }
    if (value == 0 && share == 0) {
      Item none = {0, 0, 0, 0, 0, 0};
      copy_queries(none, m, queries, at_query);
    }
  }

  __device__ __forceinline__ void copy_queries(const Item& it, Memory& m, u32 queries, Place<QUERY_STAGES> at) const {
    const u32 barrier = shared(&m.query_full[at.stage]), to = queries + at.stage * QUERY_BYTES;
    wait(shared(&m.query_empty[at.stage]), at.parity ^ 1);
    if (!leads) return;
    m.items[at.stage] = it;
    if (!it.count) return arrive(barrier);
    expect(barrier, QUERY_BYTES);
#pragma unroll
    for (int c = 0; c < PARTS; c++)
#pragma unroll
      for (int i = 0; i < QUERIES; i += KEYS)
        copy_box(to + (c * QUERIES + i) * ROW_BYTES, step_map, barrier, 64 * c, it.head, it.start + it.first + i);
  }
};

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

template <int COUNT>
__device__ __forceinline__ void settle(float* values) {  // the compiler must not use them before
#pragma unroll
  for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(values[i])::"memory");
}

// The two warp groups multiply in turns.
__device__ __forceinline__ void await_turn(int half) { asm volatile("bar.sync %0, 256;" ::"r"(1 + half) : "memory"); }
__device__ __forceinline__ void pass_turn(int half) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - half) : "memory"); }

// A thread's part of a warp group's 64 queries: those of rows `row` and `row + 8`. `scores` [KEYS / 8, 4] and `mixed`
// [D / 8, 4] have two adjacent columns of each row for each 8 columns.
struct Softmax {
  float peak[2], total[2];

  __device__ __forceinline__ Softmax() : peak{LOWEST, LOWEST}, total{0.f, 0.f} {}

  // Replace scores by weights, and return by what earlier results are to be multiplied.
  __device__ __forceinline__ float2 weigh(float* scores, float scale) {
    float decay[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float most = peak[r];
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) most = fmaxf(most, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
      most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
      const float less = most == LOWEST ? 0.f : most * scale;
      decay[r] = exp2_of(peak[r] * scale - less);
      peak[r] = most;
      float sum = 0.f;
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++) {
#pragma unroll
        for (int c = 0; c < 2; c++) {
          float& one = scores[4 * i + 2 * r + c];
          one = exp2_of(one * scale - less);
          sum += one;
        }
      }
      total[r] = total[r] * decay[r] + sum;
    }
    return make_float2(decay[0], decay[1]);
  }
};

__device__ __forceinline__ void pack(u32* weights, const float* scores) {
#pragma unroll
  for (int i = 0; i < KEYS / 4; i++) weights[i] = narrow2(scores[2 * i], scores[2 * i + 1]);
}

// A warp group that multiplies.
struct Group {
  Memory* m;
  u32 queries, keys, values;
  float scale;
  int half, lane, row;  // of the tile of queries

  __device__ __forceinline__ u64 form() const { return (1ull << 62) | (64ull << 32); }

  __device__ __forceinline__ void begin_scores(float* scores, int query_stage, int stage) const {
    const u64 some = form() | (1ull << 16) | ((queries + query_stage * QUERY_BYTES + half * 64 * ROW_BYTES) >> 4);
    const u64 tile = form() | (1ull << 16) | ((keys + stage * TILE_BYTES) >> 4);
#pragma unroll
    for (int k = 0; k < D / 16; k++)
      score(scores, some + (k / 4 * (QUERIES * ROW_BYTES) >> 4) + k % 4 * 2, tile + (k / 4 * (KEYS * ROW_BYTES) >> 4) + k % 4 * 2,
            k > 0);
    end_products();
  }

  __device__ __forceinline__ void begin_mix(float* mixed, const u32* weights, int stage, int adds) const {
    const u64 tile = form() | ((u64)(KEYS * ROW_BYTES >> 4) << 16) | ((values + stage * TILE_BYTES) >> 4);
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++) mix(mixed, weights + 4 * k, tile + (k * 16 * ROW_BYTES >> 4), k > 0 ? 1 : adds);
    end_products();
  }

  // Hide scores of keys that queries don't see, in tiles that have such.
  __device__ __forceinline__ void hide(float* scores, const Item& it, int tile) const {
    const int fresh = tile - it.paged_tiles(), valid = it.valid(tile);
    if (valid >= KEYS && (fresh < 0 || fresh * KEYS + KEYS - 1 <= it.first + half * 64)) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int seen = fresh < 0 ? valid : min(valid, it.first + row + 8 * r - fresh * KEYS + 1);
#pragma unroll
      for (int i = 0; i < KEYS / 8; i++)
#pragma unroll
        for (int c = 0; c < 2; c++)
          if (8 * i + lane % 4 * 2 + c >= seen) scores[4 * i + 2 * r + c] = LOWEST;
    }
  }

  __device__ __forceinline__ void store(float* mixed, const Softmax& softmax, const Item& it, unsigned short* out, int heads) const {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float total = softmax.total[r];
      total += __shfl_xor_sync(~0u, total, 1);
      total += __shfl_xor_sync(~0u, total, 2);
      const float share = total > 0.f ? 1.f / total : 1.f;
      const int query = it.first + row + 8 * r;
      unsigned short* const to = out + ((u64)(it.start + query) * heads + it.head) * D;
#pragma unroll
      for (int j = 0; j < D / 8; j += 4) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) word[i] = narrow2(mixed[4 * (j + i) + 2 * r] * share, mixed[4 * (j + i) + 2 * r + 1] * share);
        const uint4 eight = across(word[0], word[1], word[2], word[3]);
        if (query < it.count) *(uint4*)(to + 8 * (j + lane % 4)) = eight;
      }
    }
  }

  __device__ __forceinline__ void attend_all(unsigned short* out, int heads) const {
    Place<STAGES> at = {0, 0};
    Place<QUERY_STAGES> at_query = {0, 0};
    float mixed[D / 2], scores[KEYS / 2];
    u32 weights[KEYS / 4];
    if (half == 1) pass_turn(half);
    for (;; at_query.next()) {
      wait(shared(&m->query_full[at_query.stage]), at_query.parity);
      const Item it = m->items[at_query.stage];
      if (!it.count) return;
      Softmax softmax;
      int tile = it.tiles() - 1;
      wait(shared(&m->key_full[at.stage]), at.parity);
      await_turn(half);
      begin_products();
      begin_scores(scores, at_query.stage, at.stage);
      pass_turn(half);
      await_products<0>();
      settle<KEYS / 2>(scores);
      if (lane == 0) arrive(shared(&m->key_empty[at.stage]));
      hide(scores, it, tile);
      softmax.weigh(scores, scale);
      pack(weights, scores);
      int adds = 0;
      while (--tile >= 0) {
        Place<STAGES> before = at;
        at.next();
        wait(shared(&m->key_full[at.stage]), at.parity);
        await_turn(half);
        begin_products();
        begin_scores(scores, at_query.stage, at.stage);
        wait(shared(&m->value_full[before.stage]), before.parity);
        begin_products();
        begin_mix(mixed, weights, before.stage, adds);
        pass_turn(half);
        adds = 1;
        await_products<1>();
        settle<KEYS / 2>(scores);
        if (lane == 0) arrive(shared(&m->key_empty[at.stage]));
        hide(scores, it, tile);
        const float2 decay = softmax.weigh(scores, scale);
        await_products<0>();
        settle<D / 2>(mixed);
        if (lane == 0) arrive(shared(&m->value_empty[before.stage]));
#pragma unroll
        for (int i = 0; i < D / 8; i++)
          mixed[4 * i] *= decay.x, mixed[4 * i + 1] *= decay.x, mixed[4 * i + 2] *= decay.y, mixed[4 * i + 3] *= decay.y;
        pack(weights, scores);
      }
      if (lane == 0) arrive(shared(&m->query_empty[at_query.stage]));
      wait(shared(&m->value_full[at.stage]), at.parity);
      begin_products();
      begin_mix(mixed, weights, at.stage, adds);
      await_products<0>();
      settle<D / 2>(mixed);
      if (lane == 0) arrive(shared(&m->value_empty[at.stage]));
      at.next();
      store(mixed, softmax, it, out, heads);
    }
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
prompts(const __grid_constant__ TensorMap step_map, const __grid_constant__ TensorMap cache_map, unsigned short* out,
        const int* tiles, const int* query_start, const int* seq_lens, const int* table_rows, const int* tables, int num_tiles,
        int heads, int table_stride, int block_stride, int value_stride, int head_stride, float scale) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) Memory m;
  const u32 queries = (shared(memory) + 1023) & ~1023u, keys = queries + QUERY_STAGES * QUERY_BYTES;
  const u32 values = keys + STAGES * TILE_BYTES;
  const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  overlap();
  if (threadIdx.x == 0) {
    prepare(m.query_full, m.query_empty, 1, 8);
    prepare(m.key_full, m.key_empty, 2, 8);
    prepare(m.value_full, m.value_empty, 2, 8);
    init(shared(&m.partial), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  follow();
  if (group == 0) {
    REGISTERS("dec", 72);
    const Rows rows = {tiles, query_start, seq_lens, table_rows, num_tiles, heads};
    const int side = warp % 2;
    const Copies copies = {&step_map,
                           &cache_map,
                           tables,
                           side ? values : keys,
                           shared(side ? m.value_full : m.key_full),
                           shared(side ? m.value_empty : m.key_empty),
                           side,
                           warp / 2,
                           heads,
                           heads / SHARING,
                           table_stride,
                           block_stride,
                           value_stride,
                           head_stride,
                           lane,
                           elected()};
    copies.copy_all(rows, m, queries);
    return;
  }
  REGISTERS("inc", 216);
  Group{&m, queries, keys, values, scale, group - 1, lane, (group - 1) * 64 + warp * 16 + lane / 4}.attend_all(out, heads);
}
