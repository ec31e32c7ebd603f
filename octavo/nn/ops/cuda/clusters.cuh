// Blocks that read each other's shared memory; see clusters in the PTX manual.

// Read what a block of the cluster has at the same place.
__device__ __forceinline__ float of_block(const float* here, int block) {
  u32 there;
  float x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(in_shared(here)), "r"(block));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(there) : "memory");
  return x;
}

__device__ __forceinline__ float4 of_block(const float4* here, int block) {
  u32 there;
  float4 x;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(in_shared(here)), "r"(block));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "r"(there) : "memory");
  return x;
}

__device__ __forceinline__ void meet() {  // all threads of the cluster
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
