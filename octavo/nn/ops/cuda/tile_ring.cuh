// A ring of tiles in shared memory: one thread copies them, by the copy engine, ahead of warp groups that multiply them.
// See barriers.cuh.

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
