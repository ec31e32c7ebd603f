// Matrices of small integers in the order in which the matrix units take them; see nn/ops/fragments.py.
//
// Macros: BITS 4 or 8; GROUP inputs that share a scale, 16, 32 or a multiple of 64, 0 for one scale per output; MINIMA;
// HALF for float16, else bfloat16.

typedef unsigned int u32;
typedef unsigned long long u64;

#if HALF
#define TYPE "f16"
#define BASE 0x64006400u
#else
#define TYPE "bf16"
#define BASE 0x43004300u
#endif
#define WORDS (BITS / 4)              // 16-byte loads of a thread for 64 inputs of 64 outputs
#define SCALES (GROUP == 16 ? 4 : GROUP == 32 ? 2 : 1)  // groups in 64 inputs, at most
#define SCALED (4 / SCALES)                             // fragments of 16 inputs in one of them
#define EACH (SCALES * (1 + MINIMA))  // pairs of scales and minima of a thread for 64 inputs: they lie together

// A number that is known when a lambda which takes it is compiled.
template <int I>
struct At {
  static constexpr int value = I;
};

// Let the next launch begin. Before Hopper, launches follow each other.
__device__ __forceinline__ void overlap() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Wait for the previous launches' results. The assembler would move loads of constants that come before to after the
// wait, but not past a loop whose length it does not know: 1.
__device__ __forceinline__ void follow() {
#if __CUDA_ARCH__ >= 900
#pragma unroll 1
  for (unsigned i = 0; i < gridDim.z; i++) asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Load what no kernel writes, each byte once.
__device__ __forceinline__ uint4 fetch(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

__device__ __forceinline__ uint2 fetch(const uint2* from) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from));
  return v;
}

__device__ __forceinline__ u32 fetch(const u32* from) {
  u32 v;
  asm volatile("ld.global.nc.u32 %0, [%1];" : "=r"(v) : "l"(from));
  return v;
}

// Load what a launch before this one wrote. The compiler may move loads of what it takes for constant to before the wait.
__device__ __forceinline__ uint4 written(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
  return v;
}

// Arithmetic on pairs of 16-bit numbers.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn." TYPE "x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

__device__ __forceinline__ u32 add2(u32 a, u32 b) {
  u32 d;
  asm("add.rn." TYPE "x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn." TYPE "x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}

#define LOG2_E 1.4426950408889634f

// 2 to the power of x, by the instruction that approximates it.
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ u32 narrow2(float low, float high) {
  u32 d;
  asm("cvt.rn." TYPE "x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}

__device__ __forceinline__ float2 wide2(u32 pair) {
#if HALF
  float2 v;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(v.x), "=f"(v.y) : "r"(pair));
  return v;
#else
  return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000u));
#endif
}

// A thread's scales or minima, float16, of outputs g and g + 8.
__device__ __forceinline__ float2 both(u32 scales) {
  float2 v;
  asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}" : "=f"(v.x), "=f"(v.y) : "r"(scales));
  return v;
}

// A number's bits below the mantissa's, as an integer more than 128 (bfloat16) or 1024 (float16): exact.
__device__ __forceinline__ u32 nibbles(u32 w) {
  u32 d;
  asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(d) : "r"(w), "n"(BASE));
  return d;
}

// The same as float16 for either narrow type.
__device__ __forceinline__ u32 low_nibbles(u32 w) {
  u32 d;
  asm("lop3.b32 %0, %1, 0x000F000F, %2, 0xEA;" : "=r"(d) : "r"(w), "r"(0x64006400u));
  return d;
}

// Two adjacent inputs of a thread's words for 64 inputs, less the middle of the integers' range: pair P of the fragment
// for 16 inputs number r. P & 1 selects output g or g + 8, P & 2 the upper 8 inputs. Integers of 8 bits are stored less
// that middle.
template <int P>
__device__ __forceinline__ u32 pair(const uint4* words, int r) {
#if BITS == 4
  const u32 w = r == 0 ? words[0].x : r == 1 ? words[0].y : r == 2 ? words[0].z : words[0].w;
  return add2(nibbles(w >> (4 * P)), HALF ? 0xE408E408u : 0xC308C308u);
#else
  const uint4 v = words[r / 2];
  const u32 w = (r % 2 == 0 ? (P < 2 ? v.x : v.y) : (P < 2 ? v.z : v.w)) >> (P % 2 == 0 ? 0 : 8);
#if HALF  // with the sign inverted, an integer from 0 on
  u32 d;
  asm("lop3.b32 %0, %1, 0x00FF00FF, %2, 0x6A;" : "=r"(d) : "r"(w), "n"(0x64806480u));
  return add2(d, 0xE480E480u);
#else  // lower 7 bits + 128, less 128 or, of negative integers, 256
  u32 low, high;
  asm("lop3.b32 %0, %1, 0x007F007F, %2, 0xEA;" : "=r"(low) : "r"(w), "n"(BASE));
  asm("lop3.b32 %0, %1, 0x00800080, %2, 0xEA;" : "=r"(high) : "r"(w), "n"(0xC300C300u));
  return add2(low, high);
#endif
#endif
}
