// Multiply rows x [M, K] by a matrix [N, K] of small numbers, with the operations of a decoder before and after: the norm
// of a single row, the gated activation or the addition to `out`. Several rows have columns of the units of their own.
//
// Grid: a block for each multiprocessor, which takes strips of 16 outputs in turn, with GATED also the 16 that they gate,
// N / 2 below. The block's warps share the inputs. Each warp copies codes and scales that it multiplies into a ring of
// its own in shared memory, DEPTH spans ahead: the first ones before it waits for the previous launch, and others across
// strips.
//
// The units take integers as float16 plus a constant: their bits below the mantissa's of 1024. Each unit of inputs begins
// with what that adds, the constant times the sum of a row's values, less. That spares a subtraction for each pair; the
// products are exact, and the sums lose about 5 of float's 24 bits. Other numbers are float16 as they are.
//
// `book` is a table's.
//
// Macros: those of integers.cuh, codes.cuh and row.cuh; SPAN steps of 64 inputs that a warp copies at a time; BLOCKS of a
// multiprocessor, of this launch and the next.

#define STEPS (K / 64)
#define SPANS ((STEPS + SPAN - 1) / SPAN)
#define SHARE ((SPANS + WARPS - 1) / WARPS)
#define GROUPS (GROUP ? LINE / GROUP : 1)
#define UNIT (64 / SCALES)  // inputs whose sum is scaled at a time
#define PITCH (K / 8 + 4)   // 16 bytes each: a row of several in shared memory, so that banks differ
#if GROUP
#define HELD (GROUP % (64 * SPAN) ? SPAN : 1)  // steps of a span with scales of their own
#else
#define HELD 0
#endif
#define PIECES (HELD * EACH * 2)  // 16 bytes each: a span's scales and minima
#define CODES (SIDES * SPAN * WORDS * 512)
#define SLOT (CODES + SIDES * PIECES * 16)
// Constants of outputs g and g + 8; the integers of 4 bits of the latter are multiplied by 16.
#define LOW (BITS == 4 ? 1032.f : 1152.f)
#define HIGH 1152.f
#define TIMES (BITS == 4 && INTEGERS ? 16.f : 1.f)

static_assert(WARPS * SPAN % 4 == 0, "steps of a thread have one place in the row's order");
static_assert((PIECES & (PIECES - 1)) == 0, "all lanes copy as many pieces, or some of them the same");

// (w & mask) | 1024, in both halves.
__device__ __forceinline__ u32 high_nibbles(u32 w) {
  u32 d;
  asm("lop3.b32 %0, %1, 0x00F000F0, %2, 0xEA;" : "=r"(d) : "r"(w), "r"(0x64006400u));
  return d;
}

// (w & mask) ^ (1024 | 128), in both halves: the sign is inverted.
__device__ __forceinline__ u32 byte_pair(u32 w) {
  u32 d;
  asm("lop3.b32 %0, %1, 0x00FF00FF, %2, 0x6A;" : "=r"(d) : "r"(w), "r"(0x64806480u));
  return d;
}

// d = the products of 16 inputs, fragment r of a thread's words, plus c.
__device__ __forceinline__ void multiply(
    float* d, const uint4* words, int r, const Planes& table, u32 x_low, u32 x_high, const float* c) {
#if !INTEGERS
  u32 a[4];
  numbers_of<true>(words, r, table, a);
  mma(d, a[0], a[1], a[2], a[3], x_low, x_high, c);
#elif BITS == 4
  const u32 w = r == 0 ? words[0].x : r == 1 ? words[0].y : r == 2 ? words[0].z : words[0].w;
  mma(d, low_nibbles(w), high_nibbles(w), low_nibbles(w >> 8), high_nibbles(w >> 8), x_low, x_high, c);
#else
  const uint4 v = words[r / 2];
  const u32 a = r % 2 ? v.z : v.x, b = r % 2 ? v.w : v.y;
  mma(d, byte_pair(a), byte_pair(a >> 8), byte_pair(b), byte_pair(b >> 8), x_low, x_high, c);
#endif
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
row(const uint4* x, const uint4* __restrict__ norm, const uint4* __restrict__ codes, const uint4* __restrict__ scales,
    const void* __restrict__ bias, void* out, float eps, int M, const void* __restrict__ book) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float sums[2][WARPS][ROWS][16 * SIDES], measures[WARPS], factors[ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  unsigned char* const ring = memory + warp * (DEPTH * SLOT);
  uint4* const given = (uint4*)(memory + WARPS * DEPTH * SLOT);
#if ROWS > 1
  float* const row_sums = (float*)(given + ROWS * PITCH);  // of each unit of inputs, and of each row
#else
  float4* const starts = (float4*)(given + K / 8);
#endif
  overlap();

  int next_strip = blockIdx.x, next_part = 0;
  const uint4* next[SIDES];
  u32 scale_place[SIDES];
  auto begin = [&]() {
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      const u32 strip = next_strip + side * STRIPS;
      next[side] = codes + ((u64)(strip / 4 * (LINE / 64) + warp * SPAN) * (128 * WORDS) + strip % 4 * 32 + lane);
      scale_place[side] = strip / 4 * (GROUPS / SCALES * 8 * EACH) + strip % 4 * (2 * EACH);
    }
  };
  begin();
  auto issue = [&](const unsigned char* slot) {
    const int span = next_part * WARPS + warp;
    if (next_strip < STRIPS && (SPANS % WARPS == 0 || span < SPANS)) {
      const u32 to = in_shared(slot);
#pragma unroll
      for (int side = 0; side < SIDES; side++) {
#pragma unroll
        for (int i = 0; i < SPAN * WORDS; i++) {
          if (STEPS % SPAN && span * SPAN + i / WORDS >= STEPS) continue;
          copy(to + (side * SPAN * WORDS + i) * 512 + lane * 16, next[side] + i * 128);
        }
#if GROUP
#pragma unroll
        for (int i = 0; i < PIECES; i += 32) {
          const u32 piece = (i + lane) % PIECES, input = (span * SPAN + piece / (2 * EACH)) * 64;
          const u32 step = (STEPS % SPAN ? min(input, K - 64) : input) / (GROUP < 64 ? 64 : GROUP);
          copy(to + CODES + (side * PIECES + piece) * 16, scales + scale_place[side] + step * (8 * EACH) + piece % (2 * EACH));
        }
#endif
      }
    }
    commit();
#pragma unroll
    for (int side = 0; side < SIDES; side++) next[side] += WARPS * SPAN * 128 * WORDS;
    if (++next_part == SHARE) {
      next_part = 0, next_strip += gridDim.x;
      begin();
    }
  };
#pragma unroll
  for (int i = 0; i < DEPTH; i++) issue(ring + i * SLOT);
  uint4 norm_of[EIGHTS];
  if (NORMED) load_norm(norm_of, norm);
  const Planes table = planes_of(book, true);
  follow();

  // A thread has words t and t + 4 of each 8: they are put side by side, in an order of threads in which neither the
  // stores nor the loads of a warp have conflicts.
  auto put = [&](uint4* to, int i, const u32* pairs) {
    const int step = i / 8, eighth = i % 8;
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const float2 v = both(pairs[p]);
      sum += v.x + v.y;
      if (i * 8 < K) ((u32*)(to + step * 8 + eighth / 4 * 4 + (p ^ step % 4)))[eighth % 4] = pairs[p];
    }
    if (!INTEGERS) return 0.f;
#pragma unroll
    for (int j = 1; j < UNIT / 8; j *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, j);
    return sum;
  };
#if ROWS > 1
  bring(x, M, measures, factors, [&](int row, int i, const u32* pairs) {
    const float sum = put(given + row * PITCH, i, pairs);
    if (INTEGERS && i % (UNIT / 8) == 0 && i * 8 < K) row_sums[i * 8 / UNIT * ROWS + row] = sum;
  });
  __syncthreads();
#else
  const float back = prepare(x, norm_of, eps, measures, [&](int i, const u32* pairs, const u32*) {
    const float sum = put(given, i, pairs);
    if (INTEGERS && i % (UNIT / 8) == 0 && i * 8 < K)
      starts[i * 8 / UNIT] = make_float4(-LOW * sum, sum, -HIGH * sum, TIMES * sum);
  });
#endif

  const int row = ROWS > 1 ? threadIdx.x / 16 : 0, of_strip = ROWS > 1 ? threadIdx.x % 16 : threadIdx.x;
  const bool finishes = threadIdx.x < 16 * ROWS && (ROWS == 1 || row < M);
  void* const out_row = row_of(out, row);
  int at = 0, turn = 0;  // the slot of a span, and of the one DEPTH later
  for (int strip = blockIdx.x; strip < STRIPS; strip += gridDim.x, turn ^= 1) {
    const int n = strip * 16 + of_strip;
    u32 added = 0;
    float scale_of[SIDES];
    if (finishes) {
      added = before(out_row, n);
#pragma unroll
      for (int side = 0; side < SIDES; side++) {
        const int of = strip + side * STRIPS;
        const float2 s = GROUP ? make_float2(1.f, 1.f) : both(fetch((const u32*)scales + of / 4 * 32 + of % 4 * 8 + of_strip % 8));
        scale_of[side] = of_strip < 8 ? s.x : s.y;
      }
    }
    float total[SIDES][4];
#pragma unroll
    for (int side = 0; side < SIDES; side++)
#pragma unroll
      for (int e = 0; e < 4; e++) total[side][e] = 0.f;
    const uint4* of_row = given + (ROWS > 1 ? g % ROWS * PITCH : 0) + warp * SPAN * 8;
#if ROWS > 1
    const float2* start_of = (const float2*)row_sums + warp * SPAN * SCALES * (ROWS / 2) + t % (ROWS / 2);
#else
    const float4* start_of = starts + warp * SPAN * SCALES;
#endif
    for (int part = 0; part < SHARE; part++) {
      await();
      __syncwarp();  // lanes copy scales for one another
      const unsigned char* const held = ring + at;
#pragma unroll
      for (int j = 0; j < SPAN; j++) {
        if (STEPS % (SPAN * WARPS) && (part * WARPS + warp) * SPAN + j >= STEPS) continue;
        uint4 words[SIDES][WORDS];
#pragma unroll
        for (int side = 0; side < SIDES; side++)
#pragma unroll
          for (int i = 0; i < WORDS; i++)
            words[side][i] = ((const uint4*)held)[((side * SPAN + j) * WORDS + i) * 32 + lane];
        const uint4* const of_step = of_row + (j * 8 + (t ^ (warp * SPAN + j) % 4));
        const uint4 a = of_step[0], b = of_step[4];
        const u32 right[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        float d[SIDES][4];
        float begin[4] = {0.f, 0.f, 0.f, 0.f};
#if ROWS > 1
        float2 sum;  // of the inputs, in the two columns
#else
        float4 sum;  // beside what begins the units' sums
#endif
#pragma unroll
        for (int r = 0; r < 4; r++) {
          if (INTEGERS && r % SCALED == 0) {
#if ROWS > 1
            sum = start_of[(j * SCALES + r / SCALED) * (ROWS / 2)];
            begin[0] = -LOW * sum.x, begin[1] = -LOW * sum.y, begin[2] = -HIGH * sum.x, begin[3] = -HIGH * sum.y;
#else
            sum = start_of[j * SCALES + r / SCALED];
            begin[0] = sum.x, begin[1] = sum.y, begin[2] = sum.z, begin[3] = sum.w;
#endif
          }
#pragma unroll
          for (int side = 0; side < SIDES; side++)
            multiply(d[side], words[side], r, table, right[2 * r], right[2 * r + 1], r % SCALED ? d[side] : begin);
          if (r % SCALED < SCALED - 1) continue;
#pragma unroll
          for (int side = 0; side < SIDES; side++) {
#if GROUP
            const u32* const of_group = (const u32*)(held + CODES) + side * PIECES * 4 +
                                        ((HELD == 1 ? 0 : j) * 8 + g) * EACH + r / SCALED * (1 + MINIMA);
            const float2 s = both(of_group[0]);
#pragma unroll
            for (int e = 0; e < 4; e++) total[side][e] += d[side][e] * (e < 2 ? s.x : s.y);
            if (MINIMA) {
              const float2 l = both(of_group[1]);
#if ROWS > 1
              total[side][0] += sum.x * l.x, total[side][1] += sum.y * l.x;
              total[side][2] += TIMES * sum.x * l.y, total[side][3] += TIMES * sum.y * l.y;
#else
              total[side][0] += sum.y * l.x, total[side][2] += sum.w * l.y;
#endif
            }
#else
#pragma unroll
            for (int e = 0; e < 4; e++) total[side][e] += d[side][e];
#endif
          }
        }
      }
      __syncwarp();
      issue(held);
      at = at == (DEPTH - 1) * SLOT ? 0 : at + SLOT;
      of_row += WARPS * SPAN * 8, start_of += WARPS * SPAN * SCALES * (ROWS > 1 ? ROWS / 2 : 1);
    }
#pragma unroll
    for (int side = 0; side < SIDES; side++) {
      total[side][2] *= 1.f / TIMES, total[side][3] *= 1.f / TIMES;
      keep(sums[turn][warp], side, total[side]);
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
        y[side] *= scale_of[side] * (back * SCALE_UNIT);
      }
      finish(out_row, n, y, bias, added);
    }
    __syncwarp();  // the matrix units need the whole warp
  }
}
