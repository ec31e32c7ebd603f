// What kernels of packed experts have in common: how codes and scales become numbers, and the gate's activation.
//
// The layout of codes is that of nn/ops/triton_packed_experts.py.
//
// Macros: those of integers.cuh (GROUP may be larger than all inputs) and codes.cuh; E2M1 or E5M2 for other codes than
// theirs; FIELD codes of a block, whose 4 fields of 4 bits have as many inputs each; SCALE_BYTES, BRAIN for scales of
// bfloat16; CLAMPED gates.

__device__ __forceinline__ float factor_of(u32 bits) {
  return SCALE_BYTES == 4 ? __uint_as_float(bits) : BRAIN ? __uint_as_float(bits << 16) : both(bits).x;
}

// Two numbers of a table, of a field of the halves of a word. The compiler shares what several fields have in common.
__device__ __forceinline__ u32 looked_up(const Planes& table, u32 w, int field) {
  const u32 places = places_in_half(w), halves = halves_of_table(w);
  u32 low[2], high[2];
  look_up(table, places, halves, low);
  look_up(table, places >> 16, halves >> 16, high);
  return permuted(low[field / 2], high[field / 2], field % 2 ? 0x7632 : 0x5410);
}

__device__ __forceinline__ float activated(float gate, float up, float alpha, float limit) {
#if CLAMPED
  gate = fminf(gate, limit), up = fminf(fmaxf(up, -limit), limit) + 1.f;
  return __fdividef(gate, 1.f + __expf(-alpha * gate)) * up;
#else
  return __fdividef(gate, 1.f + __expf(-gate)) * up;
#endif
}
