// Tiles of 16-bit numbers in shared memory as operands of the matrix units; see mma.m16n8k16 in the PTX manual.
//
// Macros: TYPE, of numbers, from integers.cuh.

// d += a b: a has 16 rows of 16 numbers, b 8 columns of 16.
__device__ __forceinline__ void multiply(float* d, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Copy 16 bytes of which the first ones are given, and else zeros, later.
__device__ __forceinline__ void copy(u32 to, const unsigned short* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Load four 8 x 8 matrices, of which each lane has the address of a row.
__device__ __forceinline__ void load(u32* a, u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(row) : "memory");
}

__device__ __forceinline__ void load_transposed(u32* a, u32 row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3]) : "r"(row) : "memory");
}
