// Copies into shared memory that a thread begins and later waits for; see cp.async in the PTX manual.
//
// Macros: DEPTH, groups of copies that are under way at once.

__device__ __forceinline__ u32 in_shared(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Copy 16 bytes, later.
__device__ __forceinline__ void copy(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// A thread's copies since the last call are a group.
__device__ __forceinline__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait for a thread's copies, but not those of its last DEPTH - 1 groups.
__device__ __forceinline__ void await() { asm volatile("cp.async.wait_group %0;" ::"n"(DEPTH - 1) : "memory"); }

