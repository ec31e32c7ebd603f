// Multiply rows x [M, K] by a matrix [N, K] of 8- or 16-bit numbers as they are stored, with the operations of a decoder
// before and after: the norm of a single row, the gated activation or the addition to `out`.
//
// Each thread has 16 bytes of adjacent numbers of two outputs, in an order of inputs that does not change the units' sums.
// For 8 bits, the matrix units take float16, which has all of these numbers; the row is scaled so that it fits. For 16
// bits they take the narrow type: a row that is not narrow yet is the sum of two that are, in two of the units' columns.
// Several rows, up to ROWS of them, are narrow, and have columns of their own.
//
// Grid: a block for each multiprocessor, which takes strips of 16 outputs in turn, with GATED also the 16 that they gate,
// N / 2 below. The block's warps share the inputs. Each thread copies the numbers that it multiplies itself into a ring
// of its own in shared memory, DEPTH spans ahead, so that no barrier is needed: the first ones before it waits for the
// previous launch, and others across strips.
//
// JOINS: `Joined`, a struct of another source, adds something to the product of a single row before the operations after
// it, which then follow all strips, MOST_STRIPS of a block at most.
//
// Macros: those of row.cuh; TILED: scales of tiles of
// 128 x 128, in rows of STRIDE, instead of outputs; SPAN steps of 64 bytes of an output that a warp copies at a time.

#if !JOINS
typedef void* Given;  // what is joined is given
#endif
#define BYTES (FORM == 3 ? 2 : 1)
#define STEPS (K * BYTES / 64)
#define SPANS ((STEPS + SPAN - 1) / SPAN)
#define SHARE ((SPANS + WARPS - 1) / WARPS)
#define LOADS (SIDES * 2 * SPAN)
#define SLOT (LOADS * 512)
#define PITCH (K / 8 + (FORM == 3 ? 4 : 1))  // 16 bytes each: a row of several in shared memory, so that banks differ

// Multiply a step of a strip; `held` are the thread's numbers.
__device__ __forceinline__ void multiply(float (*d)[4], float (*total)[4], const uint4* held, const uint4* given,
                                         const float* scales, int strip, int step, int lane) {
  const uint4* const column = given + (ROWS > 1 ? lane / 4 % ROWS * PITCH : SPLIT ? lane / 4 % 2 * (K / 8) : 0);
#if FORM == 3
  const uint4 low = column[step * 4 + lane % 4];
  const u32 right[4] = {low.x, low.y, low.z, low.w};
#else
  const uint4* const row = column + step * 8 + 2 * (lane % 4);
  const uint4 low = row[0], high = row[1];
  const u32 right[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#endif
#pragma unroll
  for (int side = 0; side < SIDES; side++) {
    uint4 a = held[side * 2 * SPAN * 32], b = held[(side * 2 + 1) * SPAN * 32];
#if FORM == 2  // with the sign inverted, integers from 0 on
    a.x ^= 0x80808080u, a.y ^= 0x80808080u, a.z ^= 0x80808080u, a.w ^= 0x80808080u;
    b.x ^= 0x80808080u, b.y ^= 0x80808080u, b.z ^= 0x80808080u, b.w ^= 0x80808080u;
#endif
    const u32 upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {b.x, b.y, b.z, b.w};
#if FORM == 3
#pragma unroll
    for (int r = 0; r < 2; r++)
      mma(d[side], upper[2 * r], lower[2 * r], upper[2 * r + 1], lower[2 * r + 1], right[2 * r], right[2 * r + 1], d[side]);
#else
#pragma unroll
    for (int r = 0; r < 4; r++)
      mma(d[side], pair8<0>(upper[r]), pair8<0>(lower[r]), pair8<1>(upper[r]), pair8<1>(lower[r]), right[2 * r],
          right[2 * r + 1], d[side]);
#endif
#if TILED
    const float scale = scales[(strip * 16 + side * (N / 2)) / 128 * STRIDE + step / 2];
#pragma unroll
    for (int e = 0; e < 4; e++) total[side][e] += d[side][e] * scale, d[side][e] = 0.f;
#endif
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
stored_row(const uint4* x, const uint4* __restrict__ norm, const unsigned char* __restrict__ codes,
     const float* __restrict__ scales, const void* __restrict__ bias, void* out, float eps, int M,
     const Given joined) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float sums[2][WARPS][ROWS][16 * SIDES], measures[WARPS], factors[ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  unsigned char* const ring = memory + warp * (DEPTH * SLOT);
  uint4* const given = (uint4*)(memory + WARPS * DEPTH * SLOT);
  overlap();

  int next_strip = blockIdx.x, next_part = 0, next_slot = 0;
  const unsigned char* next[SIDES];
  auto begin = [&]() {
#pragma unroll
    for (int side = 0; side < SIDES; side++)
      next[side] = codes + (u64)(next_strip * 16 + side * (N / 2) + lane / 4) * (LINE * BYTES) + 16 * (lane % 4) + warp * (SPAN * 64);
  };
  begin();
  auto issue = [&]() {
    const int span = next_part * WARPS + warp;
    if (next_strip < STRIPS && span < SPANS) {
      const u32 to = in_shared(ring + next_slot * SLOT) + lane * 16;
#pragma unroll
      for (int i = 0; i < LOADS; i++) {
        const int side = i / (2 * SPAN), half = i / SPAN % 2, step = i % SPAN;
        if (STEPS % SPAN && span * SPAN + step >= STEPS) continue;
        copy(to + i * 512, next[side] + half * 8 * LINE * BYTES + step * 64);
      }
    }
    commit();
    if (++next_slot == DEPTH) next_slot = 0;
#pragma unroll
    for (int side = 0; side < SIDES; side++) next[side] += WARPS * SPAN * 64;
    if (++next_part == SHARE) {
      next_part = 0, next_strip += gridDim.x;
      begin();
    }
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) issue();
  uint4 norm_of[EIGHTS];
  if (NORMED) load_norm(norm_of, norm);
#if JOINS
  __shared__ float shared_of_joined[WARPS + ALL_RANKS], kept[MOST_STRIPS][SIDES][16];
  const int own_output = (blockIdx.x + threadIdx.x / 16 * gridDim.x) * 16 + threadIdx.x % 16;  // of the operations after
  Joined join;
  join.begin(joined, shared_of_joined, own_output);
#endif
  follow();
#if JOINS
  const u32 own_added = own_output < N / SIDES ? before(out, own_output) : 0u;
#endif

#if ROWS > 1
  bring(x, M, measures, factors, [&](int row, int i, const u32* pairs) {
    if (i * 8 < K) given[row * PITCH + i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  });
  __syncthreads();
#else
  const float back = prepare(x, norm_of, eps, measures, [&](int i, const u32* pairs, const u32* rest) {
#if JOINS
    join.take(pairs, rest);
#endif
    if (i * 8 >= K) return;
    given[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    if (SPLIT) given[K / 8 + i] = make_uint4(rest[0], rest[1], rest[2], rest[3]);
  });
#if JOINS
  join.share(given, back);
#endif
#endif

  const int row = ROWS > 1 ? threadIdx.x / 16 : 0, of_strip = ROWS > 1 ? threadIdx.x % 16 : threadIdx.x;
  const bool finishes = threadIdx.x < 16 * ROWS && (ROWS == 1 || row < M);
  void* const out_row = row_of(out, row);
  int slot = 0, turn = 0;
  for (int strip = blockIdx.x; strip < STRIPS; strip += gridDim.x, turn ^= 1) {
    const int n = strip * 16 + of_strip;
    u32 added = 0;
    float scale_of[SIDES];
    if (finishes) {
#if !JOINS
      added = before(out_row, n);
#endif
#pragma unroll
      for (int side = 0; side < SIDES; side++)
        scale_of[side] = FORM == 3 || TILED ? 1.f : __uint_as_float(fetch((const u32*)scales + n + side * (N / 2)));
    }
#if JOINS
    if (warp == 0 && strip + gridDim.x >= STRIPS) join.read();
#endif
    float d[SIDES][4], total[SIDES][4];
#pragma unroll
    for (int side = 0; side < SIDES; side++)
#pragma unroll
      for (int e = 0; e < 4; e++) d[side][e] = total[side][e] = 0.f;
    for (int part = 0; part < SHARE; part++) {
      await();
      const uint4* const held = (const uint4*)(ring + slot * SLOT) + lane;
#pragma unroll
      for (int j = 0; j < SPAN; j++) {
        const int step = (part * WARPS + warp) * SPAN + j;
        if (step >= STEPS) continue;
        multiply(d, total, held + j * 32, given, scales, strip, step, lane);
      }
      issue();
      if (++slot == DEPTH) slot = 0;
    }
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
#pragma unroll
      for (int e = 0; e < 4; e++) d[side][e] += total[side][e];
      keep(sums[turn][warp], side, d[side]);
    }
    __syncthreads();
    if (finishes) {
#if ROWS > 1
      const float back = factors[row];
#endif
      float y[SIDES];
#pragma unroll
      for (int side = 0; side < SIDES; side++) {
        y[side] = 0.f;
#pragma unroll
        for (int w = 0; w < WARPS; w++) y[side] += sums[turn][w][row][side * 16 + of_strip];
        y[side] *= scale_of[side] * back;
      }
#if JOINS
#pragma unroll
      for (int side = 0; side < SIDES; side++) kept[strip / gridDim.x][side][of_strip] = y[side];
#else
      finish(out_row, n, y, bias, added);
#endif
    }
    __syncwarp();  // the matrix units need the whole warp
  }
#if JOINS
  __syncthreads();
  for (int i = threadIdx.x, n = own_output; n < N / SIDES; i += WARPS * 32) {
    const u32 added = n == own_output ? own_added : before(out, n);
    float y[SIDES];
#pragma unroll
    for (int side = 0; side < SIDES; side++) y[side] = kept[i / 16][side][i % 16] + join.addition(side);
    finish(out, n, y, bias, added);
    n += WARPS * 2 * 16 * gridDim.x;
    if (n < N / SIDES) join.load_outputs(n);
  }
  if (warp == 0) join.end();
#endif
}
