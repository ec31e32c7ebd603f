// Multiply the rows of single tokens by matrices of their experts, which are codes of 4 or 8 bits.
//
// FIRST: rows x [T, K], perhaps normalized, with the first matrices: out [choices, N] is activation(gate) * operand.
// Otherwise rows x [choices, K] with the second ones: out [T, N] is the weighted sum of a token's experts, plus `added`.
//
// Grid: a block for each strip of outputs, of a choice or of a token. Its warps share the spans of inputs, 128 bytes of
// codes, of all experts that it sums. A thread has 16 bytes of adjacent codes of two outputs, twice; with FIRST these are
// an output of the gate and the one that it gates. Codes are loaded before the row is prepared, and with several spans of
// a warp before the last one's are multiplied. The matrix units sum over four threads. Where pairs of these threads have
// inputs of different groups, they are in columns of their own: the others' inputs are zeros there.
//
// Integers of 4 bits are numbers more than OFFSET for the units, and their products are corrected by the sum of the row's
// values, as minima are added.
//
// Without FIRST, codes are loaded before the wait for the previous launches' results. `experts` and `weights` must be
// there by then: with FIRST, the kernel waits before it lets the next launch begin.
//
// Scales and minima are [experts, groups, PARTS, N].
//
// Macros: those of row.cuh, of packed_numbers.cuh; TOP_K choices of a token; OWNED experts; GROUPS of a matrix's inputs;
// LINE_BYTES of a row of codes; WEIGHTED; BLOCKS of a multiprocessor.

typedef unsigned short u16;

#define PARTS (FIRST ? 2 : 1)
#define STRIP (FIRST ? 8 : 16)       // outputs of a block
#define APART (FIRST ? N : 8)        // between a thread's two outputs
#define SPAN (BITS == 4 ? 256 : 128)
#define SPANS ((LINE_BYTES + 127) / 128)
#define ALL ((FIRST ? 1 : TOP_K) * SPANS)
#define PITCH (SPANS * SPAN)         // of rows in shared memory, with zeros behind the last inputs
#define GRAIN (GROUP < SPAN ? GROUP : SPAN)
#define HELD (SPAN / GRAIN)          // groups of a span
#define OWN ((HELD + 3) / 4)         // of these, whose sums a thread scales
#define OFFSET (BITS == 4 && !TABLE && !E2M1 ? 1032.f : 0.f)
#define RAISED (E2M1 ? 0x1p14f : 1.f)  // what numbers are divided by for the units
#define SUMMED (BITS == 4 && !TABLE && !E2M1 || MINIMA)
#define STEPS (BITS == 4 ? 8 : 2)    // loads of the row for a span
#define HALVES (group_of(0, 0) != group_of(0, 1))

// The first input, in a span, of the two first threads (half 0) or the two others for a step.
__device__ constexpr int input_of(int step, int half) {
  if (BITS == 8) return step * 64 + half * 32;
  if (FIELD == 64) return step / 2 * 64 + step % 2 * 32 + half * 16;
  if (FIELD == 32) return step * 32 + half * 16;
  return (step / 4 * 2 + half) * 64 + step % 4 * 16;
}

__device__ constexpr int group_of(int step, int half) { return input_of(step, half) / GRAIN; }

__device__ constexpr bool ends_group(int step) {
  return step + 1 == STEPS || group_of(step + 1, 0) != group_of(step, 0) || group_of(step + 1, 1) != group_of(step, 1);
}

// Two numbers of 4 bits, of a field of the halves of a word, plus OFFSET and divided by RAISED.
template <int AT>
__device__ __forceinline__ u32 pair4(u32 w, const Planes& table) {
#if TABLE
  return looked_up(table, w, AT);
#elif E2M1
  constexpr int sign = 12 - 4 * AT, size = 9 - 4 * AT;
  return ((sign < 0 ? w >> -sign : w << sign) & 0x80008000u) | ((size < 0 ? w >> -size : w << size) & 0x0E000E00u);
#else
  return low_nibbles(w >> (4 * AT));
#endif
}

// What a thread has of a span.
struct Span {
  int expert;  // -1 for none
  uint4 codes[2][2];
  u32 scales[2][OWN], minima[2][OWN];
};

__device__ __forceinline__ u32 factor_bits(const void* __restrict__ from, u64 i) {
  return SCALE_BYTES == 4 ? ((const u32*)from)[i] : ((const u16*)from)[i];
}

// d += the products of a thread's codes and the row's values at `given` for a step.
template <int AT>
__device__ __forceinline__ void multiply_step(float* d, const Span& span, const uint4* given, const Planes& table, u32 mask) {
  constexpr int side = BITS == 8 ? AT : FIELD == 64 ? AT % 2 : AT / 4, field = FIELD == 64 ? AT / 2 : AT % 4;
  const uint4 a = span.codes[0][side], b = span.codes[1][side];
  const u32 upper[4] = {a.x, a.y, a.z, a.w}, lower[4] = {b.x, b.y, b.z, b.w};
  const uint4 low = given[input_of(AT, 0) / 8], high = given[input_of(AT, 0) / 8 + (BITS == 8)];
  u32 right[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  if (HALVES) {
#pragma unroll
    for (int i = 0; i < 8; i++) right[i] &= mask;
  }
#if BITS == 4
#pragma unroll
  for (int h = 0; h < 2; h++)
    mma(d, pair4<field>(upper[2 * h], table), pair4<field>(lower[2 * h], table), pair4<field>(upper[2 * h + 1], table),
        pair4<field>(lower[2 * h + 1], table), right[2 * h], right[2 * h + 1], d);
#else
  const u32 turned = FORM == 2 ? 0x80808080u : 0u;
#pragma unroll
  for (int r = 0; r < 4; r++) {
    const u32 u = upper[r] ^ turned, l = lower[r] ^ turned;
    mma(d, pair8<0>(u), pair8<0>(l), pair8<1>(u), pair8<1>(l), right[2 * r], right[2 * r + 1], d);
  }
#endif
}

// Add the scaled products of a span and a row to the sums of a thread's two outputs. Each thread scales other groups.
template <int AT>
__device__ __forceinline__ void multiply_from(float* sums, float* d, const Span& span, const uint4* given,
                                              const float* of_groups, const Planes& table, u32 mask) {
  if constexpr (AT < STEPS) {
    multiply_step<AT>(d, span, given, table, mask);
    if constexpr (ends_group(AT)) {
#pragma unroll
      for (int half = 0; half <= HALVES; half++) {
        const int group = group_of(AT, half);
        const bool own = threadIdx.x % 4 == group % 4;
#pragma unroll
        for (int o = 0; o < 2; o++) {
          const float scale = own ? factor_of(span.scales[o][group / 4]) : 0.f;
          sums[o] += d[2 * o + half] * (scale * RAISED);
          if (SUMMED) {
            const float least = MINIMA && own ? factor_of(span.minima[o][group / 4]) : 0.f;
            sums[o] += of_groups[group] * (least - OFFSET * scale);
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4; i++) d[i] = 0.f;
    }
    multiply_from<AT + 1>(sums, d, span, given, of_groups, table, mask);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)
packed_expert_row(const uint4* x, const uint4* __restrict__ norm, const unsigned char* __restrict__ codes,
                  const void* __restrict__ scales, const void* __restrict__ minima, const void* __restrict__ book,
                  const void* __restrict__ bias, const float* weights, const int* experts, const void* added, void* out,
                  int first_expert, float eps, float alpha, float limit) {
  extern __shared__ __align__(128) unsigned char memory[];
  __shared__ float sums[WARPS][16], measures[WARPS], factors[ROWS];
  uint4* const given = (uint4*)memory;
  float* const of_groups = (float*)(given + ROWS * (PITCH / 8));
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int n = blockIdx.x * STRIP, choice = blockIdx.y * (FIRST ? 1 : TOP_K);
  // Where a thread's inputs are, of those of a step.
  const int own_eighth = BITS == 8 ? 2 * t : FIELD == 16 ? t / 2 * 8 + t % 2 : t;
  const u32 mask = g % 2 == t / 2 ? 0xFFFFFFFFu : 0u;

  auto expert_of = [&](int slot) {
    const int found = experts[choice + slot] - first_expert;
    return found >= 0 && found < OWNED ? found : -1;
  };
  auto load = [&](int unit) {
    Span found;
    found.expert = unit < ALL ? expert_of(unit / SPANS) : -1;
    if (found.expert < 0) return found;
    const int span = unit % SPANS;
    const u64 row = (u64)found.expert * (PARTS * N) + n + g;
#pragma unroll
    for (int o = 0; o < 2; o++) {
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int place = span * 128 + side * 64 + t * 16;
        const bool there = LINE_BYTES % 128 == 0 || place < LINE_BYTES;
        found.codes[o][side] = there ? fetch((const uint4*)(codes + (row + o * APART) * LINE_BYTES + place))
                                     : make_uint4(0u, 0u, 0u, 0u);
      }
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int group = min(GROUP < SPAN ? span * HELD + (i * 4 + t) % HELD : span * SPAN / GROUP, GROUPS - 1);
        const u64 place = ((u64)found.expert * GROUPS + group) * (PARTS * N) + n + g + o * APART;
        found.scales[o][i] = factor_bits(scales, place);
        if (MINIMA) found.minima[o][i] = factor_bits(minima, place);
      }
    }
    return found;
  };
  auto put = [&](int row, int i, const u32* pairs) {
    if (i * 8 < K) given[row * (PITCH / 8) + i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    if (!SUMMED) return;
    float sum = 0.f;
#pragma unroll
    for (int p = 0; p < 4; p++) {
      const float2 v = both(pairs[p]);
      sum += v.x + v.y;
    }
#pragma unroll
    for (int j = 1; j < GRAIN / 8; j *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, j);
    if (i % (GRAIN / 8) == 0 && i * 8 < K) of_groups[row * (SPANS * HELD) + i / (GRAIN / 8)] = sum;
  };

#if FIRST
  uint4 norm_of[EIGHTS];
  if (NORMED) load_norm(norm_of, norm);
  const Planes table = planes_of(book, true);
  follow();
  overlap();
  if (expert_of(0) < 0) return;
  Span next = load(warp);
  const uint4* const row = x + (u64)(choice / TOP_K) * K * (X_FLOAT ? 4 : 2) / 16;
  const float back = prepare(row, norm_of, eps, measures, [&](int i, const u32* pairs, const u32*) { put(0, i, pairs); });
#else
  overlap();
  const Planes table = planes_of(book, true);
  Span next = load(warp);
  follow();
  bring(x + (u64)choice * K / 8, ROWS, measures, factors, put);
#endif
  for (int row = 0; row < ROWS; row++) {  // what no input is in
    for (int i = K / 8 + threadIdx.x; i < PITCH / 8; i += WARPS * 32) given[row * (PITCH / 8) + i] = make_uint4(0u, 0u, 0u, 0u);
    for (int i = (K + GRAIN - 1) / GRAIN + threadIdx.x; i < SPANS * HELD; i += WARPS * 32)
      of_groups[row * (SPANS * HELD) + i] = 0.f;
  }
  __syncthreads();

  float total[2] = {0.f, 0.f};
#pragma unroll 1
  for (int unit = warp; unit < ALL; unit += WARPS) {
    const Span span = next;
    if (ALL > WARPS) next = load(unit + WARPS);
    if (span.expert < 0) continue;
    const int slot = unit / SPANS, part = unit % SPANS;
    float of_span[2] = {0.f, 0.f}, d[4] = {0.f, 0.f, 0.f, 0.f};
    multiply_from<0>(of_span, d, span, given + slot * (PITCH / 8) + part * (SPAN / 8) + own_eighth,
                     of_groups + slot * (SPANS * HELD) + part * HELD, table, mask);
    float factor = 1.f;
#if !FIRST
    factor = factors[slot];
    if (WEIGHTED) factor *= weights[choice + slot];
#endif
#pragma unroll
    for (int o = 0; o < 2; o++) total[o] += of_span[o] * factor;
  }
#pragma unroll
  for (int o = 0; o < 2; o++) {
    total[o] += __shfl_xor_sync(0xffffffffu, total[o], 1);
    total[o] += __shfl_xor_sync(0xffffffffu, total[o], 2);
    if (t == 0) sums[warp][o * 8 + g] = total[o];
  }
  __syncthreads();
  if (threadIdx.x >= STRIP) return;
  const int output = n + threadIdx.x;
  float y[PARTS];
#pragma unroll
  for (int part = 0; part < PARTS; part++) {
    y[part] = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) y[part] += sums[w][part * 8 + threadIdx.x];
  }
#if FIRST
  const u64 of_expert = (u64)expert_of(0) * (2 * N) + output;
#pragma unroll
  for (int part = 0; part < 2; part++) {
    y[part] *= WEIGHTED ? back * weights[choice] : back;
    if (BIASED) y[part] += narrow_at((const u16*)bias + of_expert + part * N, 0);
  }
  ((u16*)out)[(u64)choice * N + output] = (u16)narrow2(activated(y[0], y[1], alpha, limit), 0.f);
#else
  if (BIASED) {
    for (int slot = 0; slot < TOP_K; slot++) {
      const int expert = expert_of(slot);
      if (expert < 0) continue;
      y[0] += narrow_at((const u16*)bias + (u64)expert * N + output, 0) * (WEIGHTED ? weights[choice + slot] : 1.f);
    }
  }
  const u64 place = (u64)blockIdx.y * N + output;
#if ADDED && OUT_FLOAT
  y[0] += __uint_as_float(before((const float*)added + place, 0));
#elif ADDED
  y[0] += wide2(before((const u16*)added + place, 0)).x;
#endif
  if (OUT_FLOAT) ((float*)out)[place] = y[0];
  else ((u16*)out)[place] = (u16)narrow2(y[0], 0.f);
#endif
}
