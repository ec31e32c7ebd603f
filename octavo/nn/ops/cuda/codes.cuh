// Codes of numbers, in the order in which the matrix units take them; see nn/ops/fragments.py.
//
// Macros: those of integers.cuh; E4M3 or TABLE (of 16 numbers), else codes are integers.

#define INTEGERS (!E4M3 && !TABLE)
#define SCALE_UNIT (E4M3 ? 0x1p-7f : 1.f)  // a scale divided by what is stored of it

// What E4M3's numbers are multiplied with after their bits were moved: bfloat16 has a larger bias, and float16 has an
// instruction for them.
#define MOVED (E4M3 && !HALF ? 0x1p120f : 1.f)
#define MOVED_PAIR 0x7B807B80u

// The low and the high bytes of a table's numbers.
struct Planes {
  uint4 low, high;
};

// Load a table of a `book` as the matrix units take it; see nn/ops/tables.py.
__device__ __forceinline__ Planes planes_of(const void* book, bool half) {
#if TABLE
  const uint4* const from = (const uint4*)book + (half ? 2 : 0);
  return {fetch(from), fetch(from + 1)};
#else
  return {};
#endif
}

// Select 4 bytes of 8, by 3 bits in each nibble of a selection's lower half.
__device__ __forceinline__ u32 permuted(u32 low, u32 high, u32 selection) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(low), "r"(high), "r"(selection));
  return d;
}

// Codes of 4 bits without their upper bit: places in a half of the table. Instructions, since the compiler would mask
// each half of a word on its own.
__device__ __forceinline__ u32 places_in_half(u32 w) {
  u32 d;
  asm("and.b32 %0, %1, 0x77777777;" : "=r"(d) : "r"(w));
  return d;
}

// For each 4 codes, the selection of bytes from what the two halves of the table have for them.
__device__ __forceinline__ u32 halves_of_table(u32 w) {
  u32 d;
  asm("lop3.b32 %0, %1, 0x44444444, %2, 0xEA;" : "=r"(d) : "r"(w >> 1), "r"(0x32103210u));
  return d;
}

// Find the numbers of 4 codes, two pairs.
__device__ __forceinline__ void look_up(const Planes& table, u32 places, u32 halves, u32* to) {
  const uint4 l = table.low, h = table.high;
  const u32 low = permuted(permuted(l.x, l.y, places), permuted(l.z, l.w, places), halves);
  const u32 high = permuted(permuted(h.x, h.y, places), permuted(h.z, h.w, places), halves);
  to[0] = permuted(low, high, 0x5140);
  to[1] = permuted(low, high, 0x7362);
}

// Convert E4M3 to float16: the low and the high half of a word.
__device__ __forceinline__ void float8_halves(u32 w, u32* to) {
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
      : "=r"(to[0]), "=r"(to[1]) : "r"(w));
}

// Convert E4M3: bytes 0 and 2, and bytes 1 and 3. In bfloat16 these are the numbers divided by MOVED, also subnormal
// ones.
template <bool FLOAT16>
__device__ __forceinline__ void float8_pairs(u32 w, u32* to) {
  if (FLOAT16) {
    float8_halves(permuted(w, 0, 0x3120), to);
  } else {
    to[0] = (w << 8 & 0x80008000u) | (w << 4 & 0x07F007F0u);
    to[1] = (w & 0x80008000u) | (w >> 4 & 0x07F007F0u);
  }
}

// The four pairs of the fragment for 16 inputs number r of a thread's words. FLOAT16: as float16, else as bfloat16.
template <bool FLOAT16>
__device__ __forceinline__ void numbers_of(const uint4* words, int r, const Planes& table, u32* to) {
#if TABLE
  const u32 w = r == 0 ? words[0].x : r == 1 ? words[0].y : r == 2 ? words[0].z : words[0].w;
  const u32 places = places_in_half(w), halves = halves_of_table(w);
  look_up(table, places, halves, to);
  look_up(table, places >> 16, halves >> 16, to + 2);
#elif E4M3
  const uint4 v = words[r / 2];
  float8_pairs<FLOAT16>(r % 2 ? v.z : v.x, to);
  float8_pairs<FLOAT16>(r % 2 ? v.w : v.y, to + 2);
#endif
}
