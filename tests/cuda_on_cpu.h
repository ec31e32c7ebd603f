// CUDA C++ on a CPU, for tests: the threads of a block take turns, from one barrier to the next. Functions of
// octavo/nn/*/cuda/ that consist of instructions of a GPU are replaced by those below.
//
// Copies into shared memory happen when they are issued, or as late as they may (`emulated_late`).

#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))

typedef unsigned int u32;
typedef unsigned long long u64;

struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct Dim { unsigned x, y, z; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }

static Dim threadIdx, blockIdx, gridDim;
static unsigned char* emulated_shared;
static int emulated_late;

namespace emulated {
constexpr int THREADS = WARPS * 32;
struct Copy { void* to; const void* from; };  // of 16 bytes; zeros from null
struct Thread {
  ucontext_t context;  // its start; from then on it stops and goes on by jumps, which leave the signal mask alone
  jmp_buf stopped;
  bool begun, ended;
  std::deque<std::vector<Copy>> groups;
  std::vector<Copy> open;
};
struct Barrier { unsigned arrived, passed; };
struct Lane { u32 operands[6], value; };
Thread threads[THREADS];
Barrier of_block, of_warp[WARPS];
Lane lanes[THREADS];
jmp_buf in_turn;

__attribute__((noinline)) void yield() {
  if (!_setjmp(threads[threadIdx.x].stopped)) _longjmp(in_turn, 1);
}
__attribute__((noinline)) void go_on(Thread& thread) {  // until it yields
  if (_setjmp(in_turn)) return;
  if (thread.begun) _longjmp(thread.stopped, 1);
  thread.begun = true;
  setcontext(&thread.context);
}

inline void meet(Barrier& barrier, unsigned count) {
  const unsigned before = barrier.passed;
  if (++barrier.arrived == count) barrier.arrived = 0, barrier.passed++;
  while (barrier.passed == before) yield();
}

inline void perform(const Copy& one) {
  if (one.from) memcpy(one.to, one.from, 16);
  else memset(one.to, 0, 16);
}

inline Lane& lane(int i) { return lanes[threadIdx.x / 32 * 32 + i]; }
inline Lane& own() { return lanes[threadIdx.x]; }
inline float narrow(unsigned short bits, bool half) {
  if (!half) {
    u32 wide = (u32)bits << 16;
    float v;
    memcpy(&v, &wide, 4);
    return v;
  }
  _Float16 v;
  memcpy(&v, &bits, 2);
  return v;
}
inline unsigned short rounded(float v, bool half) {
  if (half) {
    _Float16 h = (_Float16)v;
    unsigned short bits;
    memcpy(&bits, &h, 2);
    return bits;
  }
  u32 bits;
  memcpy(&bits, &v, 4);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
}  // namespace emulated

inline void __syncthreads() { emulated::meet(emulated::of_block, emulated::THREADS); }
inline void __syncwarp() { emulated::meet(emulated::of_warp[threadIdx.x / 32], 32); }
inline u32 __float_as_uint(float v) { u32 bits; memcpy(&bits, &v, 4); return bits; }
inline float __uint_as_float(u32 bits) { float v; memcpy(&v, &bits, 4); return v; }
inline float __shfl_xor_sync(u32, float v, int mask) {
  emulated::own().value = __float_as_uint(v);
  __syncwarp();
  const u32 other = emulated::lane(threadIdx.x % 32 ^ mask).value;
  __syncwarp();
  return __uint_as_float(other);
}
template <class T>
inline T __shfl_sync(u32, T v, int from) {
  static_assert(sizeof(T) == 4, "a word");
  memcpy(&emulated::own().value, &v, 4);
  __syncwarp();
  memcpy(&v, &emulated::lane(from).value, 4);
  __syncwarp();
  return v;
}
inline void count_up(unsigned* at) { ++*at; }
inline unsigned reached(const unsigned* at) { return *at; }
inline unsigned atomicAdd(unsigned* at, unsigned n) { return (*at += n) - n; }
inline void __threadfence() {}
template <class T>
inline T __ldcg(const T* from) { return *from; }
inline float exp2_of(float x) { return std::exp2(x); }
inline float reciprocal_of(float x) { return 1.f / x; }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }

inline void overlap() {}
inline void follow() {}
inline uint4 written(const uint4* from) { return *from; }
inline float2 written(const float2* from) { return *from; }
inline uint2 fetch(const uint2* from) { return *from; }
inline uint4 fetch(const uint4* from) { return *from; }
inline u32 fetch(const u32* from) { return *from; }
inline float2 wide2(u32 pair) { return {emulated::narrow(pair, HALF), emulated::narrow(pair >> 16, HALF)}; }
inline float2 both(u32 pair) { return {emulated::narrow(pair, true), emulated::narrow(pair >> 16, true)}; }
inline u32 narrow2(float low, float high) { return emulated::rounded(low, HALF) | emulated::rounded(high, HALF) << 16; }
inline u32 half2(float low, float high) { return emulated::rounded(low, true) | emulated::rounded(high, true) << 16; }
inline u32 low_nibbles(u32 w) { return (w & 0x000F000F) | 0x64006400; }
inline u32 high_nibbles(u32 w) { return (w & 0x00F000F0) | 0x64006400; }
inline u32 byte_pair(u32 w) { return (w & 0x00FF00FF) ^ 0x64806480; }
inline u32 permuted(u32 low, u32 high, u32 selection) {
  const u64 bytes = (u64)high << 32 | low;
  u32 found = 0;
  for (int i = 0; i < 4; i++) found |= (u32)(bytes >> 8 * (selection >> 4 * i & 7) & 0xFF) << 8 * i;
  return found;
}
inline u32 places_in_half(u32 w) { return w & 0x77777777; }
inline u32 halves_of_table(u32 w) { return (w >> 1 & 0x44444444) | 0x32103210; }
inline u32 float8_pair(u32 w) {  // of E4M3, as float16
  float values[2];
  for (int i = 0; i < 2; i++) {
    const int code = w >> 8 * i & 0xFF, exponent = code >> 3 & 15;
    const float size = exponent ? std::ldexp(8 + code % 8, exponent - 10) : std::ldexp(code % 8, -9);
    values[i] = code & 128 ? -size : size;
  }
  return half2(values[0], values[1]);
}
inline void float8_halves(u32 w, u32* to) { to[0] = float8_pair(w), to[1] = float8_pair(w >> 16); }
template <int HIGH>
inline u32 pair8(u32 w) {
  if (HIGH) w >>= 16;
  if (FORM == 0) return float8_pair(w);
  if (FORM == 1) return (w << 8 & 0xFF00) | (w << 16 & 0xFF000000);  // the upper halves of float16
  return half2((int)(unsigned char)w - 128, (int)(unsigned char)(w >> 8) - 128);
}

inline u32 in_shared(const void* at) { return (const unsigned char*)at - emulated_shared; }
inline void copy(u32 to, const void* from, int bytes = 16) {
  const emulated::Copy one = {emulated_shared + to, bytes ? from : nullptr};
  if (emulated_late) emulated::threads[threadIdx.x].open.push_back(one);
  else emulated::perform(one);
}
inline void commit() {
  emulated::Thread& thread = emulated::threads[threadIdx.x];
  thread.groups.push_back(thread.open);
  thread.open.clear();
}
inline void await() {
  emulated::Thread& thread = emulated::threads[threadIdx.x];
  while (thread.groups.size() > DEPTH - 1) {
    for (emulated::Copy one : thread.groups.front()) emulated::perform(one);
    thread.groups.pop_front();
  }
}

inline u32 before(const void* out, int n) {
  if (!ADDED) return 0;
  return OUT_FLOAT ? ((const u32*)out)[n] : ((const unsigned short*)out)[n];
}

inline void mma(float* d, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, const float* c) {
  const bool half = FORM != 3 || HALF;
  const u32 operands[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(emulated::own().operands, operands, sizeof operands);
  __syncwarp();
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto value = [&](int lane, int operand, int odd) {
    return emulated::narrow(emulated::lane(lane).operands[operand] >> 16 * odd, half);
  };
  float sums[4];
  for (int i = 0; i < 4; i++) {  // of rows g and g + 8, columns 2 t and 2 t + 1
    const int lower = i / 2, column = 2 * t + i % 2;
    float sum = c[i];
    for (int k = 0; k < 16; k++)
      sum += value(g * 4 + k % 8 / 2, k / 8 * 2 + lower, k % 2) * value(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
    sums[i] = sum;
  }
  __syncwarp();
  memcpy(d, sums, sizeof sums);
}

// Of tiles.cuh, clusters.cuh and fused_decode.cu. A cluster is one block.

inline void multiply(float* d, const u32* a, u32 b0, u32 b1) { mma(d, a[0], a[1], a[2], a[3], b0, b1, d); }
inline float written_at(const unsigned short* from) { return emulated::narrow(*from, HALF); }
template <class T>
inline T of_block(const T* here, int) { return *here; }
inline void meet() { __syncthreads(); }

// Word `lane % 4` of row `lane / 4` of each matrix.
inline void load(u32* a, u32 row) {
  emulated::own().value = row;
  __syncwarp();
  for (int i = 0; i < 4; i++)
    memcpy(a + i, emulated_shared + emulated::lane(8 * i + threadIdx.x % 32 / 4).value + threadIdx.x % 4 * 4, 4);
  __syncwarp();
}

inline void load_transposed(u32* a, u32 row) {
  emulated::own().value = row;
  __syncwarp();
  const int column = threadIdx.x % 32 / 4;
  for (int i = 0; i < 8; i++) {
    const u32 from = emulated::lane(i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2).value;
    memcpy((unsigned short*)a + i, emulated_shared + from + column * 2, 2);
  }
  __syncwarp();
}

inline u32 transposed(u32 pair) {
  emulated::own().value = pair;
  __syncwarp();
  const int row = threadIdx.x % 32 / 4, first = threadIdx.x % 4 * 2;
  u32 found = 0;
  for (int i = 0; i < 2; i++)
    found |= (emulated::lane((first + i) * 4 + row / 2).value >> 16 * (row % 2) & 0xFFFF) << 16 * i;
  __syncwarp();
  return found;
}

namespace emulated {
const void* body_of_block;
void (*run_body)(const void*);  // std::function's header takes a fifth of the time to compile a kernel

inline void begin() {
  run_body(body_of_block);
  threads[threadIdx.x].ended = true;
  yield();
}

template <class Body>
void launch(Dim grid, size_t shared, bool late, const Body& body) {
  constexpr size_t STACK = 64 << 10;
  static std::vector<unsigned char> stacks(THREADS * STACK);
  std::vector<unsigned char> memory(shared + 128);
  emulated_shared = (unsigned char*)(((uintptr_t)memory.data() + 127) / 128 * 128);
  emulated_late = late;
  body_of_block = &body, run_body = [](const void* given) { (*(const Body*)given)(); };
  gridDim = grid;
  for (unsigned block = 0; block < grid.x * grid.y * grid.z; block++) {
    blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    memset(emulated_shared, 0xFF, shared);
    for (int i = 0; i < THREADS; i++) {
      threads[i].begun = threads[i].ended = false, threads[i].groups.clear(), threads[i].open.clear();
      getcontext(&threads[i].context);
      threads[i].context.uc_stack = {stacks.data() + i * STACK, 0, STACK};
      makecontext(&threads[i].context, begin, 0);
    }
    for (bool runs = true; runs;) {
      runs = false;
      for (int i = 0; i < THREADS; i++) {
        if (threads[i].ended) continue;
        threadIdx = {(unsigned)i, 0, 0}, runs = true;
        go_on(threads[i]);
      }
    }
  }
}
}  // namespace emulated
