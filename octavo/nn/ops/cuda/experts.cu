// Products of experts with rows that are sorted by expert, on a Hopper GPU.
//
// A tile is at most 128 rows of one expert by WIDE outputs of its matrix. Blocks stay on their multiprocessors and take
// one tile after another: one warp group, or one warp, copies ahead of the two that multiply, also across tiles; each of
// these has 64 of the rows. So the beginning of a tile's loads overlaps the end of the one before, and, since the two
// don't wait for each other, what one of them stores overlaps what the other multiplies.
//
// A cluster of two blocks takes adjacent tiles of the list and the same outputs. If both tiles belong to one expert, each
// block copies half of the matrix to both, which reduces L2 reads by a third. Padding rows are zeros: multiplying zeros
// takes less power, which limits the speed of the matrix units.
//
// FIRST: x [T, K] has the tokens' rows; results, silu(gate) * operand with w [experts, 2, N, K], are at the choices'
// places in the order. Otherwise x [choices, K] has the rows of these places, w is [experts, N, K], and results are at
// the choices themselves.
//
// ROUNDED: x and w are E4M3, with scales of x in rows of x_stride, one for each row of each group, and scales of w
// [experts, groups, PARTS, N]. The units add up 128 inputs, more of which would lose bits of their sums; these are
// scaled and added up in float32. GROUPED: groups are as many inputs, else there is one. TILED: each 128 outputs have the
// same scales.
//
// Macros: those of expert_tiles.cuh, SIDE_BY_SIDE 2, and of cluster_tiles.cuh, CLUSTER 2; FIRST; HALF for float16, else
// bfloat16; STAGES of inputs in shared memory; ROUNDED, GROUPED, TILED. `multiply` is defined by nn/ops/expert_tiles.py.

typedef unsigned short u16;

#if HALF
#define TYPE "f16"
#else
#define TYPE "bf16"
#endif
#define SIZE (ROUNDED ? 1 : 2)       // bytes of an input
#define STEP (128 / SIZE)            // inputs of a stage: rows of 128 bytes, swizzled, in groups of 8
#define ROW_BYTES 128
#define X_BYTES (128 * ROW_BYTES)
#define W_BYTES (256 * ROW_BYTES)
#define SCALE_BYTES (GROUPED ? 1024 : 0)  // of a stage, of 256 outputs
#define STAGE_BYTES (X_BYTES + W_BYTES + SCALE_BYTES)
#define WIDE (FIRST ? 128 : 256)
#define PARTS (FIRST ? 2 : 1)
#define WARPS 8                      // that multiply

__device__ __forceinline__ u32 narrow2(float low, float high) {
  u32 d;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float2 load_pair(u32 from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}

// A block's tile, and whether the other block of its cluster multiplies by the same matrix.
struct PairedTile : Tile {
  bool shares;
};

__device__ __forceinline__ PairedTile paired_at(int index, const int* tiles, int num_tiles, int columns) {
  const Tile own = tile_at<WIDE>(index, tiles, num_tiles, columns), other = tile_at<WIDE>(index ^ 1, tiles, num_tiles, columns);
  return {own, own.rows && other.rows && own.expert == other.expert};
}

// Copies the matrix of a step of 64 words to a stage, and its rows unless FIRST. One thread calls `copy`.
struct Copies {
  const TensorMap *w_map, *x_map, *eight_map;  // of x, 64 or 8 rows at once
  const float* scales;
  int N, steps;

  __device__ __forceinline__ int halves(const PairedTile& t) const { return t.rows / 64; }
  __device__ __forceinline__ int eights(const PairedTile& t) const { return (t.rows % 64 + 7) / 8; }  // behind these

  // Clear the padding rows of a stage; all lanes of a warp call it. Later copies of the same tile don't write them.
  __device__ __forceinline__ void clear(const PairedTile& t, u32 to) const {
    const int begin = halves(t) * (X_BYTES / 2) + eights(t) * (8 * ROW_BYTES);
    const int end = (t.rows + 63) / 64 * (X_BYTES / 2);
    for (int i = begin + threadIdx.x % 32 * 16; i < end; i += 32 * 16)
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to + i), "r"(0) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
  }

  __device__ __forceinline__ void copy(const PairedTile& t, int i, u32 to, u32 barrier) const {
    if (!t.rows) return arrive(barrier);
    const int apart = FIRST ? N : 128, k = i * 64, row = t.expert * PARTS * N + t.n;
    const u32 row_bytes = FIRST ? 0 : halves(t) * (X_BYTES / 2) + eights(t) * (8 * ROW_BYTES);
#if GROUPED
    const u32 first = min(128u, (u32)(N - t.n)) * 4;
    const u32 lines[2] = {first, FIRST ? first : (u32)max(0, min(128, N - t.n - 128)) * 4};
    expect(barrier, W_BYTES + row_bytes + lines[0] + lines[1]);
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const float* const line = scales + ((u64)t.expert * steps + i) * (PARTS * N) + t.n + m * apart;
      if (lines[m]) copy_line(to + X_BYTES + W_BYTES + m * 512, line, lines[m], barrier);
    }
#else
    expect(barrier, W_BYTES + row_bytes);
#endif
    const u32 matrix = to + X_BYTES;
    if (t.shares) {
      const int half = block_of_cluster();
      copy_to_all(matrix + half * (W_BYTES / 2), w_map, barrier, k, row + half * apart);
    } else {
      copy_tile(matrix, w_map, barrier, k, row);
      copy_tile(matrix + W_BYTES / 2, w_map, barrier, k, row + apart);
    }
#if !FIRST
    for (int h = 0; h < halves(t); h++) copy_tile(to + h * (X_BYTES / 2), x_map, barrier, k, t.start + 64 * h);
    const int behind = halves(t) * 64;
    for (int e = 0; e < eights(t); e++)
      copy_tile(to + (behind + 8 * e) * ROW_BYTES, eight_map, barrier, k, t.start + behind + 8 * e);
#endif
  }
};

extern "C" __global__ void __launch_bounds__(384, 1)
experts(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map,
        const __grid_constant__ TensorMap eight_map, const unsigned char* x, const float* x_scales, const float* scales,
        const int* order, const int* tiles, u16* out, int num_tiles, int top_k, int N, int K, int x_stride) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) u64 full[STAGES], empty[STAGES];
  const u32 base = (shared(memory) + 1023) & ~1023u;
  const int steps = K / STEP, columns = (N + WIDE - 1) / WIDE, thread = threadIdx.x & 127, group = threadIdx.x / 128;
  const int lane = thread % 32;
  asm volatile("griddepcontrol.launch_dependents;");
  if (threadIdx.x == 0) prepare(full, empty, FIRST ? 129 : 1, WARPS * CLUSTER);
  __syncwarp();
  meet();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int index = blockIdx.x;
  Place<STAGES> at = {0, 0};

  if (group == 0) {
    REGISTERS("dec", 56);
    const Copies copies = {&w_map, &x_map, &eight_map, scales, N, steps};
    const bool copies_tiles = __shfl_sync(~0u, thread / 32, 0) == 0, leads = elected();
#if FIRST
    const int chunk = thread % 8, line = thread / 8;
    const u32 target = line * ROW_BYTES + ((chunk ^ (line & 7)) << 4);
    auto choice_of = [&](const Tile& t, int j) { return t.rows ? order[t.start + min(line + 16 * j, t.rows - 1)] : 0; };
    PairedTile second = paired_at(index + gridDim.x, tiles, num_tiles, columns);
    int choice[8];
#else
    if (!copies_tiles) return;
#endif
    PairedTile next = paired_at(index, tiles, num_tiles, columns);
#if FIRST
#pragma unroll
    for (int j = 0; j < 8; j++) choice[j] = choice_of(next, j);
#endif
    while (next.more) {
      const PairedTile t = next;
      index += gridDim.x;
#if FIRST
      u32 from[8];
#pragma unroll
      for (int j = 0; j < 8; j++) from[j] = (u32)(choice[j] / top_k) * (K * SIZE) + chunk * 16;
      next = second;
      second = paired_at(index + gridDim.x, tiles, num_tiles, columns);
#pragma unroll
      for (int j = 0; j < 8; j++) choice[j] = choice_of(next, j);
#else
      next = paired_at(index, tiles, num_tiles, columns);
#endif
      for (int i = 0; i < steps; i++, at.next()) {
        const u32 own = base + at.stage * STAGE_BYTES, barrier = shared(&full[at.stage]);
        wait(shared(&empty[at.stage]), at.parity ^ 1);
#if !FIRST
        if (i < STAGES) copies.clear(t, own);
#endif
        if (copies_tiles && leads) copies.copy(t, i, own, barrier);
#if FIRST
#pragma unroll
        for (int j = 0; j < 8; j++)
          if (j < 4 || t.rows > 64)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(own + target + j * 16 * ROW_BYTES),
                         "l"(x + from[j] + i * 128), "r"(t.rows - line > 16 * j ? 16 : 0)
                         : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
      }
    }
    // The other block reports here what it has read, until it has read all.
    for (int i = 0; i < STAGES; i++, at.next()) wait(shared(&empty[at.stage]), at.parity ^ 1);
    return;
  }

  REGISTERS("inc", 224);
  const int half = group - 1, warp = thread / 32;
  const int low = half * 64 + warp * 16 + lane / 4;  // this thread has rows `low` and `low + 8`
  auto release = [&](int stage) {
    if (lane < CLUSTER) arrive_at(shared(&empty[stage]), lane);
  };
  Tile next = tile_at<WIDE>(index, tiles, num_tiles, columns);
  while (next.more) {
    const Tile t = next;
    index += gridDim.x;
    next = tile_at<WIDE>(index, tiles, num_tiles, columns);
    if (t.rows <= 64 * half) {
      for (int i = 0; i < steps; i++, at.next()) {
        wait(shared(&full[at.stage]), at.parity);
        release(at.stage);
      }
      continue;
    }
    int target[2];
#if ROUNDED
    const float* of_row[2];
#endif
#pragma unroll
    for (int r = 0; r < 2; r++) {
      target[r] = t.start + min(low + 8 * r, t.rows - 1);
#if ROUNDED
      of_row[r] = x_scales + (FIRST ? order[target[r]] / top_k : target[r]);
#endif
#if !FIRST
      target[r] = order[target[r]];
#endif
    }
    float acc[128];
#pragma unroll
    for (int i = 0; i < 128; i++) acc[i] = 0.f;
#if !ROUNDED
    int previous = 0;
#endif
    for (int i = 0; i < steps; i++, at.next()) {
      wait(shared(&full[at.stage]), at.parity);
#if FIRST
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // other threads copied x without the copy engine
#endif
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const u64 form = (1ull << 62) | (64ull << 32) | (1ull << 16);
      const u32 own = base + at.stage * STAGE_BYTES;
      const u64 rows = form | ((own + half * 64 * ROW_BYTES) >> 4), matrix = form | ((own + X_BYTES) >> 4);
#if ROUNDED
      const float row_scale[2] = {GROUPED ? of_row[0][(u64)i * x_stride] : 1.f, GROUPED ? of_row[1][(u64)i * x_stride] : 1.f};
#pragma unroll
      for (int half_of = 0; half_of < 2; half_of++) {
        float sum[64];
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int r = 0; r < 4; r++) multiply(sum, rows + 2 * r, matrix + half_of * (W_BYTES / 2 >> 4) + 2 * r, r > 0);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int e = 0; e < 64; e++) asm volatile("" : "+f"(sum[e])::"memory");
        if (half_of == 1 && !GROUPED) release(at.stage);
        const u32 of_half = own + X_BYTES + W_BYTES + half_of * 512;
        const float of_tile = TILED ? load_pair(of_half).x : 1.f;
#pragma unroll
        for (int j = 0; j < 16; j++) {
          float2 scale = make_float2(of_tile, of_tile);
          if (GROUPED && !TILED) scale = load_pair(of_half + (8 * j + lane % 4 * 2) * 4);
#pragma unroll
          for (int r = 0; r < 2; r++) {
            float* const to = acc + half_of * 64 + 4 * j + 2 * r;
            to[0] += GROUPED ? sum[4 * j + 2 * r] * (row_scale[r] * scale.x) : sum[4 * j + 2 * r];
            to[1] += GROUPED ? sum[4 * j + 2 * r + 1] * (row_scale[r] * scale.y) : sum[4 * j + 2 * r + 1];
          }
        }
      }
      if (GROUPED) {
        __syncwarp();
        release(at.stage);
      }
    }
#if !GROUPED
#pragma unroll
    for (int j = 0; j < 32; j++) {
      const int n = min(t.n + (FIRST ? j % 16 : j) * 8 + lane % 4 * 2, N - 2) + (FIRST && j >= 16 ? N : 0);
      const float2 scale = *(const float2*)(scales + (u64)t.expert * (PARTS * N) + n);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float own = *of_row[r];
        acc[4 * j + 2 * r] *= own * scale.x, acc[4 * j + 2 * r + 1] *= own * scale.y;
      }
    }
#endif
#else
#pragma unroll
      for (int r = 0; r < 4; r++) multiply(acc, rows + 2 * r, matrix + 2 * r);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");  // for the previous step
      if (i > 0) release(previous);
      previous = at.stage;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 128; i++) asm volatile("" : "+f"(acc[i])::"memory");
    release(previous);
#endif

#pragma unroll
    for (int r = 0; r < 2; r++) {
      u16* to = out + (u64)target[r] * N;
      const bool valid = low + 8 * r < t.rows;
#pragma unroll
      for (int j = 0; j < WIDE / 8; j += 4) {
        u32 word[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
          float a = acc[4 * (j + i) + 2 * r], b = acc[4 * (j + i) + 2 * r + 1];
#if FIRST
          a = __fdividef(a, 1.f + __expf(-a)) * acc[64 + 4 * (j + i) + 2 * r];
          b = __fdividef(b, 1.f + __expf(-b)) * acc[64 + 4 * (j + i) + 2 * r + 1];
#endif
          word[i] = narrow2(a, b);
        }
        const uint4 eight = across(word[0], word[1], word[2], word[3]);
        const int n = t.n + 8 * (j + lane % 4);
        if (valid && n < N) *(uint4*)(to + n) = eight;
      }
    }
  }
}
