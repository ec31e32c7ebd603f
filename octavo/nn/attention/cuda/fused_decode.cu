// Decode one row: norms and rotation of its heads, storing, attention and merging, in one launch.
//
// Grid: SPLITS blocks, which are one cluster; kv heads; rows. A context is divided into tiles of 16 keys, which all warps
// of a cluster take in turn; each warp copies its tiles into a ring of its own in shared memory, the first ones before it
// waits for the previous launch. Lengths, tables and older keys are read before that wait, too: they are from earlier
// steps, or from launches behind which none begins early. The last tile has a place for the step's own key and value,
// which its warp puts there and into the cache. At the end each warp of the cluster merges the parts of 32 outputs, which
// it reads from the other blocks' shared memory.
//
// Few registers and little shared memory are used, so that the next launch finds room while this one merges.
//
// Macros: HALF: numbers are float16, else bfloat16; D channels of a head, a multiple of 32; SHARING query heads of a kv
// head, at most 8; PAGE tokens of a block; DEPTH tiles of a warp in shared memory; NORMED; WINDOW, 0
// for none, CHUNKED; CAPPED; SINKS; SLOPES; TABLE_ROWS: as in triton_decode.py.

#define TILE 16
#define CHUNKS (D / 8)           // copies of 16 bytes of a key
#define ROW (D + 8)              // numbers of a key in shared memory: 8 keys' parts are in different banks
#define STAGE (2 * TILE * ROW)   // numbers of a tile's keys and values
#define PARTS (SPLITS * WARPS)
#define LOTS ((PARTS + 31) / 32)  // parts of a lane
#define MANY_TILES 96            // of which the other warps take theirs, too; merging more parts takes longer
#define KEY 8                    // rows of `heads`: queries, the key, the value
#define VALUE 9
#define OWN ((SHARING + 2 + WARPS - 1) / WARPS)
#define PAIRS ((D / 2 + 31) / 32)
#define NONE __uint_as_float(0xff800000u)

typedef unsigned short u16;

__device__ __forceinline__ float wide(u16 x) { return wide2(x).x; }

__device__ __forceinline__ float written_at(const u16* from) {
  u16 x;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from) : "memory");
  return wide(x);
}

__device__ __forceinline__ u32 transposed(u32 pair) {
  u32 d;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(pair));
  return d;
}

__device__ __forceinline__ float largest(float x, int from) {
#pragma unroll
  for (int i = from; i < 32; i *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

__device__ __forceinline__ float sum(float x, int from) {
#pragma unroll
  for (int i = from; i < 32; i *= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

__device__ __forceinline__ float adjusted(float score, int distance, float soft_cap, float slope) {
#if CAPPED  // tanh(x) = 1 - 2 / (exp(2 x) + 1)
  score = soft_cap * (1.f - 2.f / (exp2_of(score * (2.f / soft_cap) * LOG2_E) + 1.f)) * LOG2_E;
#endif
#if SLOPES
  score += slope * distance;
#endif
  return score;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
fused_decode(const u16* qkv, const u16* q_norm, const u16* k_norm, const float* cos_sin, const long long* positions,
             const long long* slots, u16* cache, u16* out, const int* query_start, const int* seq_lens,
             const int* table_rows, const int* tables, const float* sinks, const float* slopes, float eps, float scale,
             float soft_cap, int token_stride, int block_stride, int value_stride, int kv_head_stride, int cell_stride,
             int table_stride) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ __align__(16) u16 heads[10][ROW];
  __shared__ float parts[WARPS][SHARING][D], peaks[WARPS][8], totals[WARPS][8];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int split = blockIdx.x, kv_head = blockIdx.y, kv_heads = gridDim.y, row = blockIdx.z;
  const int token = query_start[row], own = seq_lens[row] - 1;  // the query's position; -1 for a row of padding
  if (query_start[row + 1] == token) {
    follow();
    return;
  }
  int begin = 0;
#if WINDOW
  begin = max(0, CHUNKED ? own / WINDOW * WINDOW : own - WINDOW + 1);
#endif
  const int first = begin / TILE, tiles = own < 0 ? 0 : own / TILE + 1 - first, mine = warp * SPLITS + split;
  const int turn = PARTS > 32 && tiles <= MANY_TILES ? 32 : PARTS;  // tiles that a cluster's warps take at once
  const int count = mine < min(tiles, turn) ? (tiles - mine - 1) / turn + 1 : 0;
  const bool owner = tiles > 0 && (tiles - 1) % turn == mine;
  const int* const table = tables + (u64)(TABLE_ROWS ? table_rows[row] : row) * table_stride;
  const u16* const keys = cache + (u64)kv_head * kv_head_stride;
  u16* const ring = (u16*)memory + warp * (DEPTH * STAGE);

  auto key_of = [&](int i) { return (first + mine + i * turn) * TILE + lane % TILE; };
  auto block_of = [&](int i) { return i < count && key_of(i) < own ? table[key_of(i) / PAGE] : 0; };
  auto take = [&](int i, int block) {
    if (i < count) {
      const int key = key_of(i);
      const u64 place = (u64)block * block_stride + key % PAGE * cell_stride;
      const u32 low = (u32)place, high = (u32)(place >> 32), to = in_shared(ring + i % DEPTH * STAGE);
      const int bytes = key >= begin && key < own ? 16 : 0;  // else zeros
#pragma unroll
      for (int j = 0; j < TILE * CHUNKS / 32; j++) {
        const int k = (j * 32 + lane) / CHUNKS, chunk = (j * 32 + lane) % CHUNKS;
        const u64 from = (u64)__shfl_sync(0xffffffffu, high, k) << 32 | __shfl_sync(0xffffffffu, low, k);
        const int size = __shfl_sync(0xffffffffu, bytes, k);
        const u16* const source = keys + from + chunk * 8;
        copy(to + (k * ROW + chunk * 8) * 2, source, size);
        copy(to + ((TILE + k) * ROW + chunk * 8) * 2, source + value_stride, size);
      }
    }
    commit();
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) take(i, block_of(i));
  int next_block = block_of(DEPTH);

  const long long position = positions[token];
  float cosine[PAIRS], sine[PAIRS], norm_of[2][2 * PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    const int i = min(j * 32 + lane, D / 2 - 1);
    cosine[j] = cos_sin[position * D + i], sine[j] = cos_sin[position * D + D / 2 + i];
#if NORMED
    norm_of[0][2 * j] = wide(q_norm[i]), norm_of[0][2 * j + 1] = wide(q_norm[D / 2 + i]);
    norm_of[1][2 * j] = wide(k_norm[i]), norm_of[1][2 * j + 1] = wide(k_norm[D / 2 + i]);
#endif
  }
  for (int i = threadIdx.x; i < (KEY - SHARING) * ROW; i += WARPS * 32) heads[SHARING][i] = 0;
  follow();

  float given[OWN][2 * PAIRS];
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int h = n * WARPS + warp;
    const int at = h < SHARING ? kv_head * SHARING + h : kv_heads * SHARING + (h == SHARING ? 0 : kv_heads) + kv_head;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = j * 32 + lane;
      const bool valid = h < SHARING + 2 && i < D / 2;
      const u16* const from = qkv + (u64)token * token_stride + at * D + i;
      given[n][2 * j] = valid ? written_at(from) : 0.f, given[n][2 * j + 1] = valid ? written_at(from + D / 2) : 0.f;
    }
  }
#pragma unroll
  for (int n = 0; n < OWN; n++) {
    const int h = n * WARPS + warp;
    if (h >= SHARING + 2) continue;
    float inverse = 1.f;
#if NORMED
    float square = 0.f;
#pragma unroll
    for (int j = 0; j < 2 * PAIRS; j++) square += given[n][j] * given[n][j];
    inverse = rsqrtf(sum(square, 1) / D + eps);
#endif
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const int i = j * 32 + lane;
      if (i >= D / 2) continue;
      float low = given[n][2 * j], high = given[n][2 * j + 1];
      if (h <= SHARING) {
#if NORMED
        low *= inverse * (h == SHARING ? norm_of[1][2 * j] : norm_of[0][2 * j]);
        high *= inverse * (h == SHARING ? norm_of[1][2 * j + 1] : norm_of[0][2 * j + 1]);
#endif
        const float turned = low * cosine[j] - high * sine[j];
        high = high * cosine[j] + low * sine[j], low = turned;
      }
      u16* const to = heads[h < SHARING ? h : h == SHARING ? KEY : VALUE];
      to[i] = (u16)narrow2(low, 0.f), to[D / 2 + i] = (u16)narrow2(high, 0.f);
    }
  }
  __syncthreads();
  u32 query[D / 16][2];
#pragma unroll
  for (int k = 0; k < D / 16; k++) {
    query[k][0] = *(const u32*)&heads[g][k * 16 + 2 * t];
    query[k][1] = *(const u32*)&heads[g][k * 16 + 8 + 2 * t];
  }

  float peak[2] = {NONE, NONE}, total[2] = {0.f, 0.f}, acc[D / 16][4], slope[2] = {0.f, 0.f};
#pragma unroll
  for (int k = 0; k < D / 16; k++) acc[k][0] = acc[k][1] = acc[k][2] = acc[k][3] = 0.f;
#if SLOPES
#pragma unroll
  for (int c = 0; c < 2; c++) slope[c] = 2 * t + c < SHARING ? slopes[kv_head * SHARING + 2 * t + c] * LOG2_E : 0.f;
#endif
  for (int i = 0; i < count; i++) {
    await();
    __syncwarp();
    u16* const tile = ring + i % DEPTH * STAGE;
    const int from = (first + mine + i * turn) * TILE;
    if (owner && i == count - 1) {
      const long long slot = slots[token];
      u16* const cell = cache + (u64)kv_head * kv_head_stride + slot / PAGE * block_stride + slot % PAGE * cell_stride;
#pragma unroll
      for (int j = 0; j < (2 * CHUNKS + 31) / 32; j++) {
        const int c = j * 32 + lane, part = c / CHUNKS, chunk = c % CHUNKS;
        if (c >= 2 * CHUNKS) continue;
        const uint4 eight = *(const uint4*)&heads[KEY + part][chunk * 8];
        *(uint4*)(tile + (part * TILE + own % TILE) * ROW + chunk * 8) = eight;
        if (slot >= 0) *(uint4*)(cell + (u64)part * value_stride + chunk * 8) = eight;
      }
      __syncwarp();
    }

    float d[4] = {0.f, 0.f, 0.f, 0.f};
    u32 a[4];
    const u32 key_row = in_shared(tile + lane % 16 * ROW + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
      load(a, key_row + k * 32);
      multiply(d, a, query[k][0], query[k][1]);
    }
    float decay[2];
#pragma unroll
    for (int c = 0; c < 2; c++) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int key = from + g + 8 * half;
        const float score = adjusted(d[2 * half + c] * scale, key - own, soft_cap, slope[c]);
        d[2 * half + c] = key >= begin && key <= own ? score : NONE;
      }
      const float next = fmaxf(peak[c], largest(fmaxf(d[c], d[2 + c]), 4)), safe = next == NONE ? 0.f : next;
      d[c] = exp2_of(d[c] - safe), d[2 + c] = exp2_of(d[2 + c] - safe), decay[c] = exp2_of(peak[c] - safe);
      total[c] = total[c] * decay[c] + sum(d[c] + d[2 + c], 4);
      peak[c] = next;
    }
    const u32 low = transposed(narrow2(d[0], d[1])), high = transposed(narrow2(d[2], d[3]));
    const u32 value_row = in_shared(tile + (TILE + lane % 8 + lane / 16 * 8) * ROW + lane / 8 % 2 * 8);
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
#pragma unroll
      for (int c = 0; c < 4; c++) acc[k][c] *= decay[c % 2];
      load_transposed(a, value_row + k * 32);
      multiply(acc[k], a, low, high);
    }
    __syncwarp();
    take(i + DEPTH, next_block);
    next_block = block_of(i + DEPTH + 1);
  }

  overlap();  // not before: the next launch loads weights, for which this one's loads would wait
  if (count) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      const int h = 2 * t + c;
      if (h >= SHARING) continue;
#pragma unroll
      for (int k = 0; k < D / 16; k++) parts[warp][h][k * 16 + g] = acc[k][c], parts[warp][h][k * 16 + 8 + g] = acc[k][2 + c];
      if (g == 0) peaks[warp][h] = peak[c], totals[warp][h] = total[c];
    }
  }
  meet();
  const int active = min(tiles, turn);  // part p is of warp p / SPLITS in block p % SPLITS
  for (int e = split * (WARPS * 32) + threadIdx.x; e < SHARING * D; e += PARTS * 32) {
    const int h = e / D;
    float weight[LOTS], top = NONE, all = 0.f, y = 0.f;
#pragma unroll
    for (int j = 0; j < LOTS; j++) {
      const int p = j * 32 + lane;
      weight[j] = p < active ? of_block(&peaks[p / SPLITS][h], p % SPLITS) : NONE;
      top = fmaxf(top, weight[j]);
    }
    top = largest(top, 1);
#if SINKS
    const float sink = sinks[kv_head * SHARING + h] * LOG2_E;
    top = fmaxf(top, sink);
#endif
#pragma unroll
    for (int j = 0; j < LOTS; j++) {
      const int p = j * 32 + lane;
      const float own_total = p < active ? of_block(&totals[p / SPLITS][h], p % SPLITS) : 0.f;
      weight[j] = weight[j] == NONE ? 0.f : exp2_of(weight[j] - top);
      all += weight[j] * own_total;
    }
    all = sum(all, 1);
#if SINKS
    all += exp2_of(sink - top);
#endif
#pragma unroll
    for (int j = 0; j < LOTS; j++) {
#pragma unroll 8
      for (int p = j * 32; p < min(active, j * 32 + 32); p++)
        y += __shfl_sync(0xffffffffu, weight[j], p % 32) * of_block(&parts[p / SPLITS][h][e % D], p % SPLITS);
    }
    out[((u64)token * kv_heads + kv_head) * (SHARING * D) + e] = (u16)narrow2(all > 0.f ? y / all : 0.f, 0.f);
  }
  meet();  // no block's memory is read any more
}
