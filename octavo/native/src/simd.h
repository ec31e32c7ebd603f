// Vectors of 32-bit lanes by the compiler's vector types (GCC and Clang), with intrinsics where an instruction has no
// other spelling. Matrices are read in *words* of 32 bits: one float32, two bfloat16 or four 8-bit integers, so that
// one tile of code multiplies them all.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

#if defined(__AVX512F__)
constexpr int W = 16;         // lanes of a vector
constexpr int kWideRows = 6;  // rows of a register tile over four panels; twice as many over two
#elif defined(__AVX__)
constexpr int W = 8;
constexpr int kWideRows = 1;
#else
constexpr int W = 4;
constexpr int kWideRows = 1;
#endif
constexpr int kPanel = 16;       // adjacent columns in a packed matrix, on every processor
constexpr int VP = kPanel / W;   // vectors across a panel

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t Int __attribute__((vector_size(W * 4)));
typedef uint32_t Word __attribute__((vector_size(W * 4)));
typedef uint16_t Half __attribute__((vector_size(W * 2)));
typedef int16_t Short __attribute__((vector_size(W * 4)));

constexpr float kNegInf = -std::numeric_limits<float>::infinity();

struct bf16 {
    uint16_t bits;  // the upper half of a float32
};

template <class T>
constexpr int kPerWord = 4 / sizeof(T);

inline Vec splat(float x) { return x - Vec{}; }

inline Word splat(uint32_t x) { return x - Word{}; }

template <class V>
inline V load_as(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const float* p) { return load_as<Vec>(p); }
inline Vec load(const bf16* p) { return (Vec)(__builtin_convertvector(load_as<Half>(p), Word) << 16); }

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

// Rounds to bfloat16, to nearest, ties to even; NaN stays NaN.
inline Half narrow(Vec v) {
#if defined(__AVX512BF16__)
    return (Half)_mm512_cvtneps_pbh((__m512)v);
#else
    const Word b = (Word)v;
    const Word rounded = (b + 0x7fff + ((b >> 16) & 1)) >> 16;
    const Word nan = (Word)(v != v);
    return __builtin_convertvector((nan & 0x7fc0) | (~nan & rounded), Half);
#endif
}

inline void store(bf16* p, Vec v) {
    const Half h = narrow(v);
    std::memcpy(p, &h, sizeof h);
}

// Words of two bfloat16 each, rounded from their lanes.
inline Word pair_up(Vec low, Vec high) {
    return __builtin_convertvector(narrow(low), Word) | __builtin_convertvector(narrow(high), Word) << 16;
}

// Converts the lanes of one or two consecutive vectors to words of T.
template <class T>
inline Word join(const Vec (&v)[kPerWord<T>]) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) return (Word)_mm512_cvtne2ps_pbh((__m512)v[1], (__m512)v[0]);
#endif
    Word words;
    for (int n = 0; n < kPerWord<T>; n++) store(reinterpret_cast<T*>(&words) + n * W, v[n]);
    return words;
}

// Ones in all places of words of T.
template <class T>
inline Word ones() {
    return splat(sizeof(T) == 2 ? 0x3f803f80u : 0x3f800000u);
}

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) {
    const uint32_t b = (uint32_t)x.bits << 16;
    float f;
    std::memcpy(&f, &b, sizeof f);
    return f;
}

inline float half_to_float(uint16_t bits) {
#if defined(__F16C__)
    return _cvtsh_ss(bits);
#else
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = bits & 0x7fff;
    uint32_t b = magnitude >= 0x7c00 ? (magnitude << 13) | 0x7f800000 : (magnitude << 13) + 0x38000000;
    float f;
    if (magnitude < 0x400) {
        f = (float)magnitude * 0x1p-24f;
        std::memcpy(&b, &f, sizeof b);
    }
    b |= sign;
    std::memcpy(&f, &b, sizeof f);
    return f;
#endif
}

inline Vec load_half(const uint16_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps(load_as<__m256i>(p));
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps(load_as<__m128i>(p));
#else
    Vec v;
    for (int i = 0; i < W; i++) v[i] = half_to_float(p[i]);
    return v;
#endif
}

// a where the mask is set, else b.
inline Vec select(Int mask, Vec a, Vec b) { return (Vec)((mask & (Int)a) | (~mask & (Int)b)); }

inline Vec maximum(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return select(a > b, a, b);
#endif
}

// b where one of them is NaN.
inline Vec minimum(Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return select(a < b, a, b);
#endif
}

// The numbers whose bits are set, of the lowest W; minus infinity in the other lanes.
inline Vec load_where(const float* p, uint32_t bits) {
#if defined(__AVX512F__)
    return (Vec)_mm512_mask_loadu_ps(_mm512_set1_ps(kNegInf), (__mmask16)bits, p);
#else
    Word lane;
    for (int i = 0; i < W; i++) lane[i] = 1u << i;
    return select((Int)((splat(bits) & lane) != 0), load(p), splat(kNegInf));
#endif
}

inline float horizontal_max(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#elif defined(__AVX__)
    const __m128 half = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
    float m = v[0];
    for (int i = 1; i < W; i++) m = m > v[i] ? m : v[i];
    return m;
#endif
}

inline bool exceeds(Vec v, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    return horizontal_max(v) > limit;
#endif
}

// In a fixed order, by halves.
inline float horizontal_sum(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX__)
    const __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    const __m128 two = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float x[W];
    store(x, v);
    for (int n = W / 2; n > 0; n /= 2)
        for (int i = 0; i < n; i++) x[i] += x[i + n];
    return x[0];
#endif
}

inline int32_t horizontal_sum(Int v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_epi32((__m512i)v);
#elif defined(__AVX2__)
    const __m128i half = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    const __m128i two = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
#else
    int32_t sum = 0;
    for (int i = 0; i < W; i++) sum += v[i];
    return sum;
#endif
}

// acc + sum over the word's elements of a * b, in the accumulator's lanes.
template <class T>
inline Vec multiply_add(Vec acc, Word a, Word b);

template <>
inline Vec multiply_add<float>(Vec acc, Word a, Word b) {
    return (Vec)a * (Vec)b + acc;
}

template <>
inline Vec multiply_add<bf16>(Vec acc, Word a, Word b) {
#if defined(__AVX512BF16__)
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
    acc = (Vec)(a << 16) * (Vec)(b << 16) + acc;
    return (Vec)(a & 0xffff0000u) * (Vec)(b & 0xffff0000u) + acc;
#endif
}

// acc + x, added in program order: the compiler must not collect products to add them as a tree, since there are not
// enough registers.
template <class V>
inline V add_in_order(V acc, V x) {
    acc += x;
#if defined(__AVX512F__)
    asm("" : "+v"(acc));
#elif defined(__AVX2__)
    asm("" : "+x"(acc));
#endif
    return acc;
}

// acc + both products of the signed 16-bit halves of a word.
inline Int multiply_add_halves(Int acc, Word a, Word b) {
#if defined(__AVX512BW__)
    return add_in_order(acc, (Int)_mm512_madd_epi16((__m512i)a, (__m512i)b));
#elif defined(__AVX2__)
    return add_in_order(acc, (Int)_mm256_madd_epi16((__m256i)a, (__m256i)b));
#else
    acc += ((Int)(a << 16) >> 16) * ((Int)(b << 16) >> 16);
    return acc + ((Int)a >> 16) * ((Int)b >> 16);
#endif
}

// The even (0) or odd (1) bytes of words as 16-bit halves: unsigned bytes, or signed ones.
inline Word unsigned_halves(Word bytes, int odd) { return bytes >> (odd * 8) & 0x00ff00ffu; }

inline Word signed_halves(Word bytes, int odd) {
    const Short halves = (Short)bytes;
    return (Word)(odd ? halves >> 8 : halves << 8 >> 8);
}

// acc + sum over the four bytes of u (unsigned) * s (signed).
inline Int multiply_add_bytes(Int acc, Word u, Word s) {
#if defined(__AVX512VNNI__)
    return (Int)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
#else
    // Even and odd bytes separately: pairs of 8-bit products do not fit the 16 bits in which `multiply_add_pairs` adds.
    for (int odd = 0; odd < 2; odd++)
        acc = multiply_add_halves(acc, unsigned_halves(u, odd), signed_halves(s, odd));
    return acc;
#endif
}

#if defined(__AVX2__)
// acc + sums of pairs of bytes of u (unsigned) * s (signed), in 16 bits each, which they must fit.
inline Short multiply_add_pairs(Short acc, Word u, Word s) {
#if defined(__AVX512BW__)
    return add_in_order(acc, (Short)_mm512_maddubs_epi16((__m512i)u, (__m512i)s));
#else
    return add_in_order(acc, (Short)_mm256_maddubs_epi16((__m256i)u, (__m256i)s));
#endif
}
#endif

#if defined(__AVX2__)
// sums[v] += products of columns[v] with one word of a row, as multiply_add_pairs. With AVX2 they are spelled out, since
// GCC stores the broadcast words of all rows in memory, where that takes as long as the products.
template <int V>
__attribute__((always_inline)) inline void add_row_pairs(Short (&sums)[V], const Word (&columns)[V],
                                                         const uint32_t& word) {
#if !defined(__AVX512F__)
    if constexpr (V == 2) {
        Short first = sums[0], second = sums[1];
        Word x, y;
        asm("vpbroadcastd %4, %2\n\t"
            "vpmaddubsw %2, %5, %3\n\t"
            "vpmaddubsw %2, %6, %2\n\t"
            "vpaddw %3, %0, %0\n\t"
            "vpaddw %2, %1, %1"
            : "+x"(first), "+x"(second), "=&x"(x), "=&x"(y)
            : "m"(word), "x"(columns[0]), "x"(columns[1]));
        sums[0] = first;
        sums[1] = second;
        return;
    }
#endif
    const Word x = splat(word);
    for (int v = 0; v < V; v++) sums[v] = multiply_add_pairs(sums[v], columns[v], x);
}
#endif

// Products of words of bytes: the second factor is signed, or the first.
struct UnsignedBySigned;
struct SignedByUnsigned;

template <class T>
inline Int multiply_add(Int acc, Word a, Word b) {
    return std::is_same<T, UnsignedBySigned>::value ? multiply_add_bytes(acc, a, b) : multiply_add_bytes(acc, b, a);
}

// Without an instruction for both, the two bfloat16 of a word are multiplied separately, as float32.
#if defined(__AVX512BF16__)
template <class T>
constexpr int kSteps = 1;
#else
template <class T>
constexpr int kSteps = std::is_same<T, bf16>::value ? 2 : 1;
#endif

// The part of a word of T that is multiplied in one step.
template <class T>
inline Word part(Word words, int step) {
    if (kSteps<T> == 1) return words;
    return step ? words & 0xffff0000u : words << 16;
}

// acc + products of parts of words.
template <class T, class Sum>
inline Sum multiply_add_part(Sum acc, Word a, Word b) {
    if constexpr (kSteps<T> == 2)
        return (Vec)a * (Vec)b + acc;
    else
        return multiply_add<T>(acc, a, b);
}

template <int N>
inline Vec polynomial(Vec x, const float (&c)[N]) {
    Vec y = splat(c[N - 1]);
    for (int i = N - 2; i >= 0; i--) y = y * x + c[i];
    return y;
}

// 2^x for x below 127: the integer part by the exponent, the fraction by a minimax polynomial of degree D (3 or 6), to
// within 8e-5 or 2e-7. 0 for very negative x, NaN for NaN.
template <int D>
inline Vec powers_of_2(Vec x) {
    static_assert(D == 3 || D == 6);
#if defined(__AVX512DQ__)
    constexpr int kFraction = 9;  // x - floor(x), raising no flags
    const Vec r = (Vec)_mm512_reduce_ps((__m512)x, kFraction);
    constexpr float near[] = {0.999925220f, 0.695833540f, 0.226067160f, 0.0780245200f};
    constexpr float close[] = {1.0f, 0.693146984f, 0.240229836f, 0.0554833420f, 0.00967884099f, 0.00124396879f,
                               0.000217022553f};
    const Vec y = D == 3 ? polynomial(r, near) : polynomial(r, close);
    return (Vec)_mm512_scalef_ps((__m512)y, (__m512)x);
#else
    constexpr float near[] = {0.999928073f, 0.693260986f, 0.242611133f, 0.0551716688f};
    constexpr float close[] = {1.0f, 0.693147206f, 0.240226469f, 0.0555032878f, 0.00961848896f, 0.00133999314f,
                               0.00015345812f};
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    const Vec shifted = x + magic, r = x - (shifted - magic);
    const Vec y = D == 3 ? polynomial(r, near) : polynomial(r, close);
    const Int exponent = (Int)shifted << 23;
    return select(x < -126.0f, Vec{}, (Vec)((Int)y + exponent));
#endif
}

// e^x to within about 2e-7, saturating at both ends; NaN for NaN.
inline Vec exponential(Vec x) {
    x = select(x > 88.0f, splat(88.0f), x);
    const Vec magic = splat(12582912.0f);
    const Vec shifted = x * 1.44269504088896341f + magic;
    const Vec n = shifted - magic;
    const Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    constexpr float taylor[] = {1.0f, 1.0f, 0.5f, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040};
    const Int scale = ((Int)shifted - (Int)magic + 127) << 23;
    return select(x < -87.0f, Vec{}, polynomial(r, taylor) * (Vec)scale);
}

inline float exponential2(float x) { return x == 0.0f ? 1.0f : powers_of_2<6>(splat(x))[0]; }

inline Vec hyperbolic_tangent(Vec x) { return 1.0f - 2.0f / (exponential(x + x) + 1.0f); }

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace octavo
