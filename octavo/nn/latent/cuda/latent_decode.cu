// Decode rows with latent attention in the absorbed form: all heads share a row's latents, which are keys and values.
//
// Grid: the blocks of a cluster; rows; parts. Each block attends to a share of a row's latents, tile by
// tile, and copies two tiles ahead into a ring in shared memory. Queries stay in registers. For the scores, a warp takes
// 8 latents of a tile, for the sums OWN channels of all of them. The scores of a tile are computed beside the sums of the
// one before it, so that two barriers a tile suffice. At the end the blocks of a cluster merge their sums through shared
// memory; several parts are merged by the next launch (`merge_kernel` in triton_decode.py).
//
// Macros: those of integers.cuh; HEADS, at most 16; RANK, a multiple of 16 WARPS; ROPE, which makes RANK + ROPE a
// multiple of 32; NOPE; PAGE, latents of a KV block; WARPS; DEPTH 2. `rows` lists the rows, `table_rows` the block table of
// each; null if they are the first ones.

#define WIDTH (RANK + ROPE)
#define CHUNKS (WIDTH / 8)              // copies of 16 bytes of a latent
#define PITCH (WIDTH + 8)               // numbers of a latent in shared memory: 8 latents' parts are in different banks
#define TILE (8 * WARPS)                // latents
#define STAGES (DEPTH + 1)              // tiles in shared memory
#define COPIERS 8                       // threads that copy a latent
#define TURNS (TILE * COPIERS / (WARPS * 32))  // latents that a thread takes part in copying, of a tile
#define STEPS (WIDTH / 16)
#define OWN (RANK / WARPS)              // channels of the sums
#define FACTORS (TILE + 8)              // pitch of the factors of a tile's latents
#define SUMS (RANK + 4)                 // pitch of sums
#define NONE __uint_as_float(0xff800000u)

typedef unsigned short u16;

// Over the four lanes that have a row's numbers.
__device__ __forceinline__ float largest(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

__device__ __forceinline__ float share_of(float peak, float top) { return peak == NONE ? 0.f : exp2_of(peak - top); }

extern "C" __global__ void __launch_bounds__(WARPS * 32)
latent_decode(const u16* q_low, const u16* q, const u16* cache, u16* out, float* part_out, float* part_lse,
              const int* rows, const int* query_start, const int* seq_lens, const int* table_rows, const int* tables,
              float scale, int low_head_stride, int low_token_stride, int q_token_stride, int q_head_stride,
              int block_stride, int cell_stride, int table_stride) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float peaks[WARPS][16], totals[WARPS][16], merged[2][16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int split = blockIdx.x, splits = gridDim.x, item = blockIdx.y, part = blockIdx.z, parts = gridDim.z;
  overlap();
  follow();
  const int row = rows ? rows[item] : item, token = query_start[row], length = seq_lens[row];
  if (query_start[row + 1] == token) return;  // padding
  const int tiles = (length + TILE - 1) / TILE, share = (tiles + splits * parts - 1) / (splits * parts);
  const int begin = (part * splits + split) * share, count = max(0, min(tiles - begin, share));
  const int* const table = tables + (u64)(table_rows ? table_rows[row] : row) * table_stride;
  u16* const ring = (u16*)memory;
  u16* const factors = ring + STAGES * TILE * PITCH;  // [16][FACTORS], of the latents in the sums
  const int copied = threadIdx.x / COPIERS, copier = threadIdx.x % COPIERS;

  auto key_of = [&](int i, int turn) { return (begin + i) * TILE + turn * (WARPS * 32 / COPIERS) + copied; };
  int next_block[TURNS];
  auto find = [&](int i) {
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) {
      const int key = key_of(i, turn);
      next_block[turn] = i < count && key < length ? table[key / PAGE] : 0;
    }
  };
  auto take = [&](int i) {  // a tile, whose blocks were found
    if (i < count) {
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        const int key = key_of(i, turn), bytes = key < length ? 16 : 0;  // cells beyond may hold anything: zeros
        const u16* const from = cache + (u64)next_block[turn] * block_stride + key % PAGE * cell_stride;
        const u32 to = in_shared(ring + (i % STAGES * TILE + turn * (WARPS * 32 / COPIERS) + copied) * PITCH);
#pragma unroll
        for (int c = copier; c < CHUNKS; c += COPIERS) copy(to + c * 16, from + c * 8, bytes);
      }
    }
    commit();
  };

  u32 query[STEPS][4];
  float score[4], acc[OWN / 8][4], peak[2] = {NONE, NONE}, total[2] = {0.f, 0.f}, decay[2];
#pragma unroll
  for (int n = 0; n < OWN / 8; n++) acc[n][0] = acc[n][1] = acc[n][2] = acc[n][3] = 0.f;

  // Scores of heads g and g + 8 with this warp's latents 2 t and 2 t + 1 of tile i, and the warp's largest ones.
  auto attend = [&](int i) {
    float d[4][4];
#pragma unroll
    for (int n = 0; n < 4; n++) d[n][0] = d[n][1] = d[n][2] = d[n][3] = 0.f;
    const u32 from = in_shared(ring + (i % STAGES * TILE + warp * 8 + lane % 8) * PITCH + lane / 8 * 8);
#pragma unroll
    for (int k = 0; k < STEPS; k += 2) {
      u32 b[4];
      load(b, from + k * 32);
      multiply(d[k % 4], query[k], b[0], b[1]);
      multiply(d[k % 4 + 1], query[k + 1], b[2], b[3]);
    }
    const int key = (begin + i) * TILE + warp * 8 + 2 * t;
#pragma unroll
    for (int c = 0; c < 4; c++)
      score[c] = key + c % 2 < length ? (d[0][c] + d[1][c] + (d[2][c] + d[3][c])) * scale : NONE;
    const float low = largest(fmaxf(score[0], score[1])), high = largest(fmaxf(score[2], score[3]));
    if (t == 0) peaks[warp][g] = low, peaks[warp][g + 8] = high;
  };
  // The factors of that tile's latents.
  auto weigh = [&]() {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float next = peak[half];
#pragma unroll
      for (int w = 0; w < WARPS; w++) next = fmaxf(next, peaks[w][g + 8 * half]);
      const float low = exp2_of(score[2 * half] - next), high = exp2_of(score[2 * half + 1] - next);
      decay[half] = exp2_of(peak[half] - next);
      total[half] = total[half] * decay[half] + low + high;
      peak[half] = next;
      *(u32*)(factors + (g + 8 * half) * FACTORS + warp * 8 + 2 * t) = narrow2(low, high);
    }
  };
  // Add tile i to this warp's channels.
  auto add = [&](int i) {
#pragma unroll
    for (int n = 0; n < OWN / 8; n++)
      acc[n][0] *= decay[0], acc[n][1] *= decay[0], acc[n][2] *= decay[1], acc[n][3] *= decay[1];
    const u32 weights = in_shared(factors + lane % 16 * FACTORS + lane / 16 * 8);
    const u32 values = in_shared(ring + (i % STAGES * TILE + lane % 16) * PITCH + warp * OWN + lane / 16 * 8);
#pragma unroll
    for (int k = 0; k < TILE / 16; k++) {
      u32 a[4];
      load(a, weights + k * 32);
#pragma unroll
      for (int n = 0; n < OWN / 16; n++) {
        u32 b[4];
        load_transposed(b, values + (k * 16 * PITCH + n * 16) * 2);
        multiply(acc[2 * n], a, b[0], b[1]);
        multiply(acc[2 * n + 1], a, b[2], b[3]);
      }
    }
  };

  if (count) {
    find(0);
    const u32 to = in_shared(ring + DEPTH * TILE * PITCH);  // the last stage has the queries first
    for (int e = threadIdx.x; e < 16 * CHUNKS; e += WARPS * 32) {
      const int head = e / CHUNKS, c = e % CHUNKS, there = min(head, HEADS - 1);
      const u16* const low = q_low + (u64)there * low_head_stride + (u64)token * low_token_stride + c * 8;
      const u16* const turned = q + (u64)token * q_token_stride + there * q_head_stride + NOPE + (c * 8 - RANK);
      copy(to + head * PITCH * 2 + c * 16, c * 8 < RANK ? low : turned, head < HEADS ? 16 : 0);
    }
    take(0);
    find(1);
    take(1);
    find(2);
    await();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < STEPS; k++) load(query[k], to + (lane % 16 * PITCH + lane / 16 * 8) * 2 + k * 32);
    attend(0);
    __syncthreads();
    take(2);
    find(3);
    weigh();
    for (int i = 0; i < count; i++) {
      await();
      __syncthreads();  // the next tile is there, and this one's factors
      if (i + 1 < count) attend(i + 1);
      add(i);
      __syncthreads();  // this tile's place is free
      take(i + STAGES);
      find(i + STAGES + 1);
      if (i + 1 < count) weigh();
    }
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    total[half] = sum(total[half]);
    if (t == 0) totals[warp][g + 8 * half] = total[half];
  }
  __syncthreads();
  if (warp == 0 && t == 0) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float all = 0.f;
      for (int w = 0; w < WARPS; w++) all += totals[w][g + 8 * half];
      merged[0][g + 8 * half] = peak[half], merged[1][g + 8 * half] = all;
    }
  }
  meet();
  float factor[2];
  const int active = max(0, min(splits, (tiles - part * splits * share + share - 1) / share));
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int head = g + 8 * half;
    float top = NONE, all = 0.f;
    for (int s = 0; s < active; s++) top = fmaxf(top, of_block(&merged[0][head], s));
    for (int s = 0; s < active; s++) all += of_block(&merged[1][head], s) * share_of(of_block(&merged[0][head], s), top);
    factor[half] = all > 0.f ? share_of(peak[half], top) / all : 0.f;
    if (parts > 1 && split == 0 && warp == 0 && t == 0 && head < HEADS)
      part_lse[((u64)item * HEADS + head) * parts + part] = all > 0.f ? top + log2f(all) : NONE;
  }
  float* const sums = (float*)memory;
#pragma unroll
  for (int n = 0; n < OWN / 8; n++) {
#pragma unroll
    for (int half = 0; half < 2; half++)
      *(float2*)(sums + (g + 8 * half) * SUMS + warp * OWN + n * 8 + 2 * t) =
          make_float2(acc[n][2 * half] * factor[half], acc[n][2 * half + 1] * factor[half]);
  }
  meet();
  for (int e = split * (WARPS * 32) + threadIdx.x; e < HEADS * RANK / 4; e += splits * WARPS * 32) {
    const int head = e / (RANK / 4), c = e % (RANK / 4) * 4;
    float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int s = 0; s < active; s++) {
      const float4 x = of_block((const float4*)(sums + head * SUMS + c), s);
      y.x += x.x, y.y += x.y, y.z += x.z, y.w += x.w;
    }
    if (parts > 1) *(float4*)(part_out + (((u64)item * HEADS + head) * parts + part) * RANK + c) = y;
    else *(uint2*)(out + ((u64)token * HEADS + head) * RANK + c) = make_uint2(narrow2(y.x, y.y), narrow2(y.z, y.w));
  }
  meet();  // no block's memory is read any more
}
