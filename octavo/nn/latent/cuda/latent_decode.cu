// Decode rows with latent attention in the absorbed form: all heads share a row's latents, which are keys and values.
//
// Grid: the blocks of a cluster; rows; parts. Or the blocks of a cluster and the slots of a plan, which divides rows by
// their lengths (`triton_plan.py`). Each block attends to a share of a row's latents, tile by tile, and copies two
// tiles ahead into a ring in shared memory. For the scores of a tile, a warp multiplies 8 latents by half of the
// channels, whose queries stay in its registers. Then each warp weighs the tile for one head. For the sums, a warp takes
// OWN channels of all latents. The scores of a tile are computed beside the sums of the one before it, so that two
// barriers a tile suffice. At the end the blocks of a cluster merge their sums through shared memory. Several parts of a
// row without a plan are merged by the next launch (`merge_kernel` in triton_decode.py). With one, each block of a
// cluster stores its share of the sums, and the last block of a row to store that share merges it.
//
// Macros: those of integers.cuh; HEADS, at most 16; RANK, a multiple of 16 WARPS; ROPE, which makes RANK + ROPE a
// multiple of 64; NOPE; PAGE, latents of a KV block; WARPS 16; DEPTH 2; MOST, planned parts of a row, 32. `rows` lists
// the rows, `table_rows` the block table of each; null if they are the first ones. `ended` [rows, blocks of a cluster]:
// counters of a plan's parts, zeros between launches.

#define WIDTH (RANK + ROPE)
#define CHUNKS (WIDTH / 8)              // of 16 bytes of a latent
#define TILE (4 * WARPS)                // latents
#define STAGES (DEPTH + 1)              // tiles in shared memory
#define COPIERS 8                       // threads that copy a latent
#define STEPS (WIDTH / 32)              // of 16 channels of half a latent
#define OWN (RANK / WARPS)              // channels of the sums
#define SCORES (TILE + 4)               // pitch of scores
#define WEIGHTS (TILE + 8)              // pitch of weights
#define SUMS (RANK + 4)                 // pitch of sums
#define NONE __uint_as_float(0xff800000u)

typedef unsigned short u16;

// Among lanes whose numbers differ in bits below `to`.
__device__ __forceinline__ float largest(float x, int to) {
#pragma unroll
  for (int i = 1; i < to; i *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, i));
  return x;
}

__device__ __forceinline__ float sum(float x, int to) {
#pragma unroll
  for (int i = 1; i < to; i *= 2) x += __shfl_xor_sync(0xffffffffu, x, i);
  return x;
}

// Where 16 bytes of a row of a tile are. 8 rows' chunks of one number are in different banks.
__device__ __forceinline__ int place(int row, int chunk) { return (row * CHUNKS + (chunk ^ row % 8)) * 16; }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
latent_decode(const u16* q_low, const u16* q, const u16* cache, u16* out, float* part_out, float* part_lse,
              const int* plan, unsigned* ended, const int* rows, const int* query_start, const int* seq_lens,
              const int* table_rows, const int* tables, float scale, int low_head_stride, int low_token_stride,
              int q_token_stride, int q_head_stride, int block_stride, int cell_stride, int table_stride) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float decays[16], peaks[16], totals[16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int split = blockIdx.x, splits = gridDim.x;
  overlap();
  follow();
  int item = blockIdx.y, part = blockIdx.z, parts = gridDim.z, first_part = 0;
  if (plan) {
    const int4 slot = ((const int4*)plan)[item];
    if (slot.x < 0) return;
    item = slot.x, part = slot.y, parts = slot.z, first_part = slot.w;
  }
  const int row = rows ? rows[item] : item, token = query_start[row], length = seq_lens[row];
  if (query_start[row + 1] == token) return;  // padding
  const int tiles = (length + TILE - 1) / TILE, share = (tiles + splits * parts - 1) / (splits * parts);
  const int begin = (part * splits + split) * share, count = max(0, min(tiles - begin, share));
  const int* const table = tables + (u64)(table_rows ? table_rows[row] : row) * table_stride;
  float* const scores = (float*)(memory + STAGES * TILE * WIDTH * 2);  // [2][16][SCORES], of halves of the channels
  u16* const weights = (u16*)(scores + 2 * 16 * SCORES);               // [16][WEIGHTS]
  const u32 ring = in_shared(memory);

  const int copied = threadIdx.x / COPIERS, copier = threadIdx.x % COPIERS;
  int next_block = 0;
  auto key_of = [&](int i) { return (begin + i) * TILE + copied; };
  auto find = [&](int i) { next_block = i < count && key_of(i) < length ? table[key_of(i) / PAGE] : 0; };
  auto take = [&](int i) {  // a tile, whose blocks were found
    if (i < count) {
      const int key = key_of(i), bytes = key < length ? 16 : 0;  // cells beyond may hold anything: zeros
      const u16* const from = cache + (u64)next_block * block_stride + key % PAGE * cell_stride;
      const u32 to = ring + i % STAGES * (TILE * WIDTH * 2) + place(copied, copier);
#pragma unroll
      for (int c = 0; c < CHUNKS; c += COPIERS) copy(to + c * 16, from + (c + copier) * 8, bytes);
    }
    commit();
  };

  const int half = warp / (WARPS / 2), own_keys = warp % (WARPS / 2) * 8;
  u32 query[STEPS][4];
  float acc[OWN / 8][4], peak = NONE, total = 0.f;  // peak and total: of head `warp`
#pragma unroll
  for (int n = 0; n < OWN / 8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;

  // Where this lane's rows begin with an even and an odd number of four chunks.
  const int first = half * STEPS * 2;
  const u32 even = place(own_keys + lane % 8, first + lane / 8), odd = place(own_keys + lane % 8, first + 4 + lane / 8);
  auto attend = [&](int i) {  // the scores of tile i with half of the channels
    const u32 tile = ring + i % STAGES * (TILE * WIDTH * 2);
    float d[2][4];
#pragma unroll
    for (int n = 0; n < 2; n++) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.f;
#pragma unroll
    for (int k = 0; k < STEPS; k += 2) {
      u32 b[4];
      load(b, tile + (k % 4 ? odd : even) + k / 4 * 128);
      multiply(d[0], query[k], b[0], b[1]);
      multiply(d[1], query[k + 1], b[2], b[3]);
    }
    float* const to = scores + half * (16 * SCORES) + own_keys + 2 * t;
    *(float2*)(to + g * SCORES) = make_float2(d[0][0] + d[1][0], d[0][1] + d[1][1]);
    *(float2*)(to + (g + 8) * SCORES) = make_float2(d[0][2] + d[1][2], d[0][3] + d[1][3]);
  };
  auto weigh = [&](int i) {  // the latents of tile i for head `warp`
    const float* const from = scores + warp * SCORES + 2 * lane;
    const float2 a = *(const float2*)from, b = *(const float2*)(from + 16 * SCORES);
    const int key = (begin + i) * TILE + 2 * lane;
    float low = key < length ? (a.x + b.x) * scale : NONE, high = key + 1 < length ? (a.y + b.y) * scale : NONE;
    const float next = fmaxf(peak, largest(fmaxf(low, high), 32)), decay = exp2_of(peak - next);
    low = exp2_of(low - next), high = exp2_of(high - next);
    total = total * decay + low + high, peak = next;
    *(u32*)(weights + warp * WEIGHTS + 2 * lane) = narrow2(low, high);
    if (lane == 0) decays[warp] = decay;
  };
  const u32 weighed = in_shared(weights + lane % 16 * WEIGHTS + lane / 16 * 8);
  auto add = [&](int i) {  // tile i, to this warp's channels of the sums
    const u32 tile = ring + i % STAGES * (TILE * WIDTH * 2);
    const float low = decays[g], high = decays[g + 8];
#pragma unroll
    for (int n = 0; n < OWN / 8; n++) acc[n][0] *= low, acc[n][1] *= low, acc[n][2] *= high, acc[n][3] *= high;
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
      u32 a[4];
      load(a, weighed + k * 32);
#pragma unroll
      for (int n = 0; n < OWN / 16; n++) {
        u32 b[4];
        load_transposed(b, tile + place(lane % 16, warp * (OWN / 8) + n * 2 + lane / 16) + k * (16 * WIDTH * 2));
        multiply(acc[2 * n], a, b[0], b[1]);
        multiply(acc[2 * n + 1], a, b[2], b[3]);
      }
    }
  };

  if (count) {
    find(0);
    const u32 queries = ring + DEPTH * (TILE * WIDTH * 2);  // in the last place first
    for (int e = threadIdx.x; e < 16 * CHUNKS; e += WARPS * 32) {
      const int head = e / CHUNKS, c = e % CHUNKS, there = min(head, HEADS - 1);
      const u16* const low = q_low + (u64)there * low_head_stride + (u64)token * low_token_stride + c * 8;
      const u16* const turned = q + (u64)token * q_token_stride + there * q_head_stride + NOPE + (c * 8 - RANK);
      copy(queries + place(head, c), c * 8 < RANK ? low : turned, head < HEADS ? 16 : 0);
    }
    take(0);
    find(1);
    take(1);
    find(2);
    await();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < STEPS; k++) load(query[k], queries + place(lane % 16, first + 2 * k + lane / 16));
    attend(0);
    __syncthreads();
    take(2);
    find(3);
    weigh(0);
    for (int i = 0; i < count; i++) {
      await();
      __syncthreads();  // the next tile is there, and this one's weights
      if (i + 1 < count) attend(i + 1);
      add(i);
      __syncthreads();  // this tile's place is free
      take(i + STAGES);
      find(i + STAGES + 1);
      if (i + 1 < count) weigh(i + 1);
    }
  }

  total = sum(total, 32);
  if (lane == 0) peaks[warp] = peak, totals[warp] = total;
  meet();
  const int active = max(0, min(splits, (tiles - part * splits * share + share - 1) / share));
  if (threadIdx.x < 256) {  // 16 blocks' peaks and totals of 16 heads
    const int head = threadIdx.x / 16, s = threadIdx.x % 16;
    const float of_split = s < active ? of_block(&peaks[head], s) : NONE, top = largest(of_split, 16);
    const float weight = of_split == NONE ? 0.f : exp2_of(of_split - top);
    const float all = sum(s < active ? weight * of_block(&totals[head], s) : 0.f, 16);
    if (s == split) decays[head] = all > 0.f ? weight / all : 0.f;
    if (parts > 1 && s == 0 && head < HEADS && (plan || split == 0))
      part_lse[plan ? ((first_part + part) * splits + split) * HEADS + head : (item * HEADS + head) * parts + part] =
          all > 0.f ? top + log2f(all) : NONE;
  }
  __syncthreads();
  float* const sums = (float*)memory;
  const float low = decays[g], high = decays[g + 8];
#pragma unroll
  for (int n = 0; n < OWN / 8; n++) {
    float* const to = sums + warp * OWN + n * 8 + 2 * t;
    *(float2*)(to + g * SUMS) = make_float2(acc[n][0] * low, acc[n][1] * low);
    *(float2*)(to + (g + 8) * SUMS) = make_float2(acc[n][2] * high, acc[n][3] * high);
  }
  meet();
  for (int e = split * (WARPS * 32) + threadIdx.x; e < HEADS * RANK / 4; e += splits * WARPS * 32) {
    const int head = e / (RANK / 4), c = e % (RANK / 4) * 4;
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int s = 0; s < active; s++) {
      const float4 x = of_block((const float4*)(sums + head * SUMS + c), s);
      y.x += x.x, y.y += x.y, y.z += x.z, y.w += x.w;
    }
    const int stored = plan ? (first_part + part) * HEADS + head : (item * HEADS + head) * parts + part;
    if (parts > 1) *(float4*)(part_out + (u64)stored * RANK + c) = y;
    else *(uint2*)(out + ((u64)token * HEADS + head) * RANK + c) = make_uint2(narrow2(y.x, y.y), narrow2(y.z, y.w));
  }
  meet();  // no block's memory is read any more
  if (!plan || parts == 1) return;

  float* const shares = (float*)memory;  // [16][MOST]
  unsigned* const before = (unsigned*)(shares + 16 * MOST);
  if (threadIdx.x == 0) {
    unsigned* const stored = ended + item * splits + split;
    __threadfence();
    *before = atomicAdd(stored, 1u);
    if (*before == parts - 1) *stored = 0;  // for the next layer
    __threadfence();
  }
  __syncthreads();
  if (*before < parts - 1) return;
  const bool there = lane < parts && warp < HEADS;
  const float lse = there ? __ldcg(part_lse + ((first_part + lane) * splits + split) * HEADS + warp) : NONE;
  const float top = largest(lse, 32), weight = lse == NONE ? 0.f : exp2_of(lse - top), all = sum(weight, 32);
  shares[warp * MOST + lane] = all > 0.f ? weight / all : 0.f;
  __syncthreads();
  for (int e = split * (WARPS * 32) + threadIdx.x; e < HEADS * RANK / 4; e += splits * WARPS * 32) {
    const int head = e / (RANK / 4), c = e % (RANK / 4) * 4;
    const float* const from = part_out + ((u64)first_part * HEADS + head) * RANK + c;
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
    for (int p = 0; p < parts; p++) {
      const float4 x = __ldcg((const float4*)(from + (u64)p * HEADS * RANK));
      const float share = shares[head * MOST + p];
      y.x += share * x.x, y.y += share * x.y, y.z += share * x.z, y.w += share * x.w;
    }
    *(uint2*)(out + ((u64)token * HEADS + head) * RANK + c) = make_uint2(narrow2(y.x, y.y), narrow2(y.z, y.w));
  }
}
