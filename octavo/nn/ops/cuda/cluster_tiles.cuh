// Clusters of blocks that copy tiles for each other, by the copy engine. See tile_ring.cuh.
//
// Macros: CLUSTER blocks, 1 or 2.

__device__ __forceinline__ int block_of_cluster() {
  int rank = 0;
#if CLUSTER > 1
  asm("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Wait until one thread of each block of the cluster has prepared its barriers.
__device__ __forceinline__ void meet() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
  __syncthreads();
#endif
}

// Arrive at the barrier at this place in a block of the cluster. No release at cluster scope: it is not needed, and would
// wait for all outstanding writes to global memory.
__device__ __forceinline__ void arrive_at(u32 here, int block) {
#if CLUSTER > 1
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
#else
  arrive(here);
#endif
}

// Copy a tile to the same place of all blocks of the cluster.
__device__ __forceinline__ void copy_to_all(u32 to, const TensorMap* map, u32 barrier, int k, int row) {
#if CLUSTER > 1
  const unsigned short blocks = (1 << CLUSTER) - 1;
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%3, %4}], [%2], %5;" ::"r"(to), "l"(map), "r"(barrier), "r"(k), "r"(row), "h"(blocks)
      : "memory");
#else
  copy_tile(to, map, barrier, k, row);
#endif
}
