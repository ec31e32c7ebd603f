// A ring of tiles in shared memory: one thread copies them, by the copy engine, ahead of warp groups that multiply them.
// See barriers.cuh. And what such kernels do with results.

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap* map, u32 barrier, int k, int row) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
               ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(row) : "memory");
}

// Copy from global to shared memory. Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void copy_line(u32 to, const void* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Prepare the barriers of a ring, by one thread: `filled` arrivals fill a stage, and `emptied` empty it.
template <int SIZE>
__device__ __forceinline__ void prepare(u64 (&full)[SIZE], u64 (&empty)[SIZE], int filled, int emptied) {
  for (int s = 0; s < SIZE; s++) {
    init(shared(&full[s]), filled);
    init(shared(&empty[s]), emptied);
  }
}

// One lane of a warp, the same one each time.
__device__ __forceinline__ bool elected() {
  u32 chosen;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(chosen));
  return chosen;
}

// Of four lanes' words, give each lane those of its number, in the order of lanes: its own inverse.
__device__ __forceinline__ uint4 across(u32 a, u32 b, u32 c, u32 d) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
  const u32 near_low = __shfl_xor_sync(~0u, odd ? a : b, 1), near_high = __shfl_xor_sync(~0u, odd ? c : d, 1);
  const u32 low0 = odd ? near_low : a, low1 = odd ? b : near_low;
  const u32 high0 = odd ? near_high : c, high1 = odd ? d : near_high;
  const u32 far0 = __shfl_xor_sync(~0u, high ? low0 : high0, 2), far1 = __shfl_xor_sync(~0u, high ? low1 : high1, 2);
  return high ? make_uint4(far0, far1, high0, high1) : make_uint4(low0, low1, far0, far1);
}

// Where a warp group is in a ring of SIZE stages.
template <int SIZE>
struct Place {
  int stage;
  u32 parity;
  __device__ __forceinline__ void next() {
    if (++stage == SIZE) stage = 0, parity ^= 1;
  }
};

#define REGISTERS(how, count) asm volatile("setmaxnreg." how ".sync.aligned.u32 " #count ";")
