// Vectors of float by the compiler's own vector types (GCC and Clang), and what attention needs of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace octavo {

#if defined(__AVX512F__)
constexpr int W = 16;   // floats in a vector
constexpr int MR = 6;   // rows of a register tile, so that MR x NB sums stay in registers
#elif defined(__AVX__)
constexpr int W = 8;
constexpr int MR = 3;
#else
constexpr int W = 4;
constexpr int MR = 4;
#endif
constexpr int NB = 4;  // vectors of a register tile

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Int __attribute__((vector_size(W * 4)));
typedef uint32_t Bits __attribute__((vector_size(W * 4)));
typedef uint16_t Half __attribute__((vector_size(W * 2)));

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// bfloat16 is the upper half of a float32.
struct bf16 {
    uint16_t bits;
};

inline Vec splat(float x) { return x - Vec{}; }

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const bf16* p) {
    Half h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, Bits) << 16);
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Rounds to nearest, ties to even; NaN stays NaN.
inline void store(bf16* p, Vec v) {
    Bits b = (Bits)v;
    Bits rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    Bits nan = (Bits)(v != v);
    Half h = __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Half);
    std::memcpy(p, &h, sizeof h);
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    uint32_t b = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &b, sizeof f);
    return f;
}

// a where the mask is set, else b.
inline Vec select(Int mask, Vec a, Vec b) { return (Vec)((mask & (Int)a) | (~mask & (Int)b)); }

inline Vec maximum(Vec a, Vec b) { return select(a > b, a, b); }

inline float horizontal_max(Vec v) {
    float m = v[0];
    for (int i = 1; i < W; i++) m = m > v[i] ? m : v[i];
    return m;
}

// In a fixed order, by halves.
inline float horizontal_sum(Vec v) {
    float x[W];
    store(x, v);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
}

// e^x to within about 2 ulp: x = n ln 2 + r, and a polynomial for e^r (coefficients of Cephes' expf, S. Moshier).
// 0 below -87.33, e^88 above 88, NaN for NaN.
inline Vec exponential(Vec x) {
    const Int tiny = x < -87.33f;
    x = select(x > 88.0f, splat(88.0f), x);
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Vec shifted = x * 1.44269504088896341f + magic;
    const Vec n = shifted - magic;
    const Vec r = x - n * 0.693359375f - n * -2.12194440e-4f;
    Vec y = splat(1.9875691500e-4f);
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * (r * r) + r + 1.0f;
    const Int scale = ((Int)shifted - (Int)magic + 127) << 23;
    return select(tiny, Vec{}, y * (Vec)scale);
}

inline float exponential(float x) { return exponential(splat(x))[0]; }

inline Vec hyperbolic_tangent(Vec x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

}  // namespace octavo
