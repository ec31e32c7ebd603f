// Products of experts whose matrices are codes of 4 or 8 bits with rows that are sorted by expert, on a Hopper GPU.
//
// As in experts.cu, blocks stay on their multiprocessors, and one warp group copies ahead of those that multiply. A tile
// is at most HEIGHT rows of one expert by 64 outputs for each of these groups: with FIRST, half of the outputs are the
// gate's, and a thread has outputs and their gates. It loads codes from shared memory and widens them in registers, while
// the matrix units multiply its previous ones and those of other warp groups; rows stay in shared memory.
//
// FIRST: x [T, K] has the tokens' rows; results, activation(gate) * operand, are at the choices' places in the order.
// Otherwise x [choices, K] has the rows of these places, and results are at the choices themselves.
//
// Scales and minima are [experts, groups, PARTS, N].
//
// Macros: those of packed_codes.cuh and expert_tiles.cuh; HEIGHT 16, 32, 64 or 128; BIASED; X_STAGES of 64
// inputs of rows and W_STAGES of 128 bytes of codes in shared memory. `multiply` is defined by
// nn/ops/packed_expert_tiles.py.

typedef unsigned short u16;

#define PARTS (FIRST ? 2 : 1)
#define WIDE (FIRST ? HALF_TILE : 2 * HALF_TILE)
#define X_BYTES (HEIGHT * ROW_BYTES)
#define LOADS (HEIGHT / 16)          // copies of 16 bytes of a thread, for 64 inputs of the rows
#define W_BYTES (2 * HALF_TILE * ROW_BYTES)
#define W_STAGE (W_BYTES + (FACTOR_BYTES * (1 + MINIMA) + 1023) / 1024 * 1024)
#define STAGED_ROWS (HEIGHT < 64 ? HEIGHT : 64)
#define STAGED_LINE (FIRST ? 64 : 128)                       // bytes of a row of a warp group's results
#define STAGED (STAGED_ROWS * STAGED_LINE)                   // bytes of results on their way out

__device__ __forceinline__ float factor_at(const void* from, u64 i) {
  return factor_of(SCALE_BYTES == 4 ? ((const u32*)from)[i] : ((const u16*)from)[i]);
}

extern "C" __global__ void __launch_bounds__(128 * (GROUPS + 1), 1)
packed_experts(const __grid_constant__ TensorMap w_map, const __grid_constant__ TensorMap x_map, const u16* x,
               const void* scales, const void* minima, const void* book, const u16* bias, const int* order,
               const int* tiles, u16* out, int num_tiles, int top_k, int N, int K, int groups, float alpha,
               float limit) {
  extern __shared__ __align__(1024) unsigned char memory[];
  __shared__ __align__(8) u64 x_full[X_STAGES], x_empty[X_STAGES], w_full[W_STAGES], w_empty[W_STAGES];
  const u32 base = (shared(memory) + 1023) & ~1023u, x_base = base + W_STAGES * W_STAGE;
  const int spans = (K + SPAN - 1) / SPAN, columns = (N + WIDE - 1) / WIDE;
  const int thread = threadIdx.x & 127, group = threadIdx.x / 128;
  overlap();
  if (threadIdx.x == 0) {
    prepare(x_full, x_empty, FIRST ? 128 : 1, 4 * GROUPS);
    prepare(w_full, w_empty, 1, 4 * GROUPS);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  int index = blockIdx.x;
  Tile next = tile_at<WIDE>(index, tiles, num_tiles, columns);
  Place<X_STAGES> at = {0, 0};
  Place<W_STAGES> w_at = {0, 0};

  if (group == GROUPS) {
    REGISTERS("dec", 56);
#if FIRST
    const int chunk = thread % 8, line = thread / 8;
    const u32 target = line * ROW_BYTES + ((chunk ^ (line & 7)) << 4);
#endif
    while (next.more) {
      const Tile t = next;
      index += gridDim.x;
      next = tile_at<WIDE>(index, tiles, num_tiles, columns);
      if (!t.rows) continue;
#if FIRST
      u32 from[LOADS];
#pragma unroll
      for (int j = 0; j < LOADS; j++)
        from[j] = (u32)(order[t.start + min(line + 16 * j, t.rows - 1)] / top_k) * K + chunk * 8;
#endif
      const int row = t.expert * PARTS * N + t.n, beside = FIRST ? N : HALF_TILE;
      const u32 lines[2] = {(u32)min(HALF_TILE, N - t.n) * SCALE_BYTES,
                            (u32)max(0, min(HALF_TILE, FIRST ? N - t.n : N - t.n - HALF_TILE)) * SCALE_BYTES};
      for (int s = 0; s < spans; s++, w_at.next()) {
        if (thread == 0) {
          const u32 own = base + w_at.stage * W_STAGE, barrier = shared(&w_full[w_at.stage]);
          wait(shared(&w_empty[w_at.stage]), w_at.parity ^ 1);
          expect(barrier, W_BYTES + HELD * (1 + MINIMA) * (lines[0] + lines[1]));
          copy_tile(own, &w_map, barrier, s * 64, row);
          copy_tile(own + W_BYTES / 2, &w_map, barrier, s * 64, row + beside);
#pragma unroll
          for (int j = 0; j < HELD; j++) {
            const int of = min(GROUP < SPAN ? s * HELD + j : s * SPAN / max(GROUP, 1), groups - 1);
            const u64 place = (((u64)t.expert * groups + of) * PARTS * N + t.n) * SCALE_BYTES;
#pragma unroll
            for (int m = 0; m < 2; m++) {
              if (!lines[m]) continue;
              const u32 to = own + W_BYTES + (j * 2 + m) * HALF_TILE * SCALE_BYTES;
              const u64 line_at = place + (u64)m * beside * SCALE_BYTES;
              copy_line(to, (const char*)scales + line_at, lines[m], barrier);
              if (MINIMA) copy_line(to + FACTOR_BYTES, (const char*)minima + line_at, lines[m], barrier);
            }
          }
        }
        for (int u = s * UNITS; u < (s + 1) * UNITS; u++, at.next()) {  // zeros behind the last inputs
          const u32 own = x_base + at.stage * X_BYTES, barrier = shared(&x_full[at.stage]);
#if FIRST
          wait(shared(&x_empty[at.stage]), at.parity ^ 1);
          const int bytes = u * 64 + chunk * 8 < K ? 16 : 0;  // else zeros
#pragma unroll
          for (int j = 0; j < LOADS; j++)
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                         ::"r"(own + target + j * 16 * ROW_BYTES), "l"(x + (bytes ? from[j] + u * 64 : 0)), "r"(bytes)
                         : "memory");
          asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#else
          if (thread == 0) {
            wait(shared(&x_empty[at.stage]), at.parity ^ 1);
            expect(barrier, X_BYTES);
            copy_tile(own, &x_map, barrier, u * 64, t.start);
          }
#endif
        }
      }
    }
    return;
  }

#if GROUPS == 3  // no more than the launch has for all: it would wait for ever
  REGISTERS("inc", 152);
#else
  REGISTERS("inc", 104);
#endif
  const int warp = thread / 32, lane = thread % 32, g = lane / 4, t4 = lane % 4;
  const int own_output = first_output(group, warp, g);
  const u32 own_row = own_output * ROW_BYTES + (BITS == 4 ? 4 : 2) * t4, column = g << 4;
  const u32 staged = x_base + X_STAGES * X_BYTES + group * STAGED;
  const Planes table = planes_of(book, HALF);
  while (next.more) {
    const Tile t = next;
    index += gridDim.x;
    next = tile_at<WIDE>(index, tiles, num_tiles, columns);
    if (!t.rows) continue;
    float acc[HEIGHT / 2];
#pragma unroll
    for (int i = 0; i < HEIGHT / 2; i++) acc[i] = 0.f;
    u32 values[2][16];
    int previous = -1;  // the stage of rows that the matrix units may still read
    auto widened = [&](auto unit) {
      constexpr int u = decltype(unit)::value;
      const u32 stage = base + w_at.stage * W_STAGE;
      widen<u>(stage + own_row, column, stage + W_BYTES + own_output * SCALE_BYTES, table, values[u % 2]);
    };
    auto arrived = [&] {
      wait(shared(&w_full[w_at.stage]), w_at.parity);
      widened(At<0>{});
    };
    auto done = [&] {
      __syncwarp();
      if (lane == 0) arrive(shared(&w_empty[w_at.stage]));
      w_at.next();
    };
    auto step = [&](auto unit, auto is_last) {
      constexpr int u = decltype(unit)::value;
      wait(shared(&x_full[at.stage]), at.parity);
#if FIRST
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // other threads copied x without the copy engine
#endif
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      const u64 rows = (1ull << 62) | (64ull << 32) | (1ull << 16) | ((x_base + at.stage * X_BYTES) >> 4);
#pragma unroll
      for (int r = 0; r < 4; r++) multiply(acc, &values[u % 2][4 * r], rows + 2 * r);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      // For the previous unit. Right here, so that the compiler keeps this unit's values in their registers.
      asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
      if (previous >= 0 && lane == 0) arrive(shared(&x_empty[previous]));
      previous = at.stage;
      at.next();
      if constexpr (u + 1 < UNITS) {
        widened(At<u + 1>{});
      } else {
        done();
        if constexpr (!decltype(is_last)::value) arrived();
      }
    };
    auto span = [&](auto is_last) {
      step(At<0>{}, is_last), step(At<1>{}, is_last);
      if constexpr (UNITS > 2) step(At<2>{}, is_last), step(At<3>{}, is_last);
    };
    arrived();
    for (int s = 1; s < spans; s++) span(At<0>{});
    span(At<1>{});
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < HEIGHT / 2; i++) asm volatile("" : "+f"(acc[i])::"memory");
    if (lane == 0) arrive(shared(&x_empty[previous]));

#if !GROUP || BIASED
#pragma unroll
    for (int o = 0; o < 2; o++) {
      const int output = t.n + own_output + (FIRST ? 0 : 8 * o);
      const u64 place = (u64)t.expert * PARTS * N + (FIRST ? o * N : 0) + min(output, N - 1);
      const float scale = GROUP ? 1.f : factor_at(scales, place);
      const float more = BIASED ? wide2(bias[place]).x : 0.f;
#pragma unroll
      for (int i = 2 * o; i < HEIGHT / 2; i += 4) acc[i] = acc[i] * scale + more, acc[i + 1] = acc[i + 1] * scale + more;
    }
#endif
    // Rows of 64 or 128 bytes, swizzled, so that whole sectors are written: a thread has sums of few adjacent outputs.
    const int second = lane / 8 % 2, eighth = lane & 7;
    constexpr int chunks = STAGED_LINE / 16;
    const int chunk = thread % chunks, n = t.n + group * (STAGED_LINE / 2) + chunk * 8;
#pragma unroll
    for (int from = 0; from < HEIGHT; from += STAGED_ROWS) {
      asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");  // all have read what was there before
#pragma unroll
      for (int i = from / 2; i < (from + STAGED_ROWS) / 2; i += FIRST ? 8 : 4) {
#if FIRST  // rows 8 q + (0 to 7) and the next 8
        const int line = (i - from / 2) * 2 + second * 8 + eighth;
        const u32 to = staged + line * 64 + ((warp ^ (line / 2 & 3)) << 4);
        const u32 low = narrow2(activated(acc[i], acc[i + 2], alpha, limit), activated(acc[i + 1], acc[i + 3], alpha, limit));
        const u32 high = narrow2(activated(acc[i + 4], acc[i + 6], alpha, limit), activated(acc[i + 5], acc[i + 7], alpha, limit));
#else
        const u32 to = staged + ((i - from / 2) * 2 + eighth) * 128 + (((warp * 2 + second) ^ eighth) << 4);
        const u32 low = narrow2(acc[i], acc[i + 1]), high = narrow2(acc[i + 2], acc[i + 3]);
#endif
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(to), "r"(low), "r"(high)
                     : "memory");
      }
      asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
#pragma unroll
      for (int i = thread / chunks; i < STAGED_ROWS; i += 128 / chunks) {
        if (from + i >= t.rows || n >= N) continue;
        const int place = FIRST ? t.start + from + i : order[t.start + from + i], turned = FIRST ? i / 2 & 3 : i & 7;
        const uint4 eight = *(const uint4*)(memory + (staged - shared(memory)) + i * STAGED_LINE + ((chunk ^ turned) << 4));
        *(uint4*)(out + (u64)place * N + n) = eight;
      }
    }
  }
}
