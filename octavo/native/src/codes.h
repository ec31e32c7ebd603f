// Weights as codes of 4, 6, 8 or 16 bits, widened to float32 by a table or by shifts: the numbers of formats that are
// not integers with a scale per 32 inputs.
//
// A weight is value of code * scale + minimum. A panel is a sequence of records, one for each `scaled` inputs: the codes
// of 16 columns, four inputs at a time, then the columns' scales and, if the format has them, minima, in float16.
//
//   kCode4: 16 numbers. 32 bytes, with inputs 0 and 1 in the low halves and inputs 2 and 3 in the high halves, both in the
//           order of `place_of`.
//   kCode6: 64 integers from the first number on. The low four bits as kCode4, then 16 bytes with the high bits of the
//           first and the second two inputs at a place, and of those 16 places further, from the lowest on.
//   kE4m3, kE5m2: floats of 8 bits (OCP 8-bit Floating Point Specification), 16 bytes for each input.
//   kBf16: the upper halves of float32, of two inputs in a word, as kBfloat has them. kF16: float16, 32 bytes for each
//          input. Both are one record without scales and minima, and without a book.
//
// `book` points to a factor of all scales and minima, and to the numbers of all codes, which float16 has exactly (of
// kE4m3 divided by 256).
#pragma once

#include "program.h"
#include "simd.h"

namespace octavo {

constexpr bool has_codes(const OctavoOp& op) { return op.dtype >= kCode4; }

// Whether the product's activations are float32.
constexpr bool takes_floats(const OctavoOp& op) { return op.dtype == kFloat || (has_codes(op) && op.planes != 0); }

constexpr int code_bits(int dtype) { return dtype == kCode4 ? 4 : dtype == kCode6 ? 6 : dtype < kBf16 ? 8 : 16; }

constexpr bool has_scales(const OctavoOp& op) { return code_bits(op.dtype) < 16; }

// The numbers of an operation's codes, after the factor of its scales.
inline const float* numbers_of(const OctavoOp& op) {
    return has_scales(op) ? static_cast<const float*>(op.book) + 1 : nullptr;
}

constexpr int kFour = 4;  // inputs that are widened at a time

// The place of the first (0) or second (1) input of two, column c, among 32 bytes of codes: bytes that are widened to words
// twice within each half of a register yield eight columns of one input.
constexpr int place_of(int i, int c) { return i * 8 + c / 8 * 4 + c % 4 + c / 4 % 2 * 16; }

struct CodeRecord {
    int codes, size;  // bytes

    explicit CodeRecord(const OctavoOp& op)
        : codes(op.scaled * code_bits(op.dtype) * kPanel / 8),
          size(codes + kPanel * (op.minima ? 4 : has_scales(op) ? 2 : 0)) {}
};

#if defined(__AVX2__)
// Converts the float16 of two inputs: their first eight columns, and the others.
template <class Put>
__attribute__((always_inline)) inline void widen_two(__m256i first, __m256i second, int i, int j, const Put& put) {
    Vec of_i[VP], of_j[VP];
#if defined(__AVX512F__)
    of_i[0] = (Vec)_mm512_cvtph_ps(_mm256_permute2x128_si256(first, second, 0x20));
    of_j[0] = (Vec)_mm512_cvtph_ps(_mm256_permute2x128_si256(first, second, 0x31));
#else
    of_i[0] = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(first));
    of_i[1] = (Vec)_mm256_cvtph_ps(_mm256_castsi256_si128(second));
    of_j[0] = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(first, 1));
    of_j[1] = (Vec)_mm256_cvtph_ps(_mm256_extracti128_si256(second, 1));
#endif
    put(i, of_i);
    put(j, of_j);
}
#endif

// Widens four inputs of 16 columns at a time: `put(i, vectors)` receives the numbers of each.
template <int Dtype>
class Widener {
public:
    static constexpr int kBytes = kFour * kPanel * code_bits(Dtype) / 8;

    explicit Widener(const float* numbers) : numbers_(numbers) {
#if defined(__AVX2__)
        if constexpr (Dtype == kCode4) {
            alignas(16) uint8_t bytes[kTables][16];
            for (int i = 0; i < 16; i++) {
#if defined(__AVX512F__)
                const uint32_t bits = (uint32_t)_cvtss_sh(numbers[i], 0);
#else
                const uint32_t bits = load_as<uint32_t>(numbers + i) >> 8;  // the lowest byte of what float16 has is 0
#endif
                for (int t = 0; t < kTables; t++) bytes[t][i] = (uint8_t)(bits >> 8 * t);
            }
            for (int t = 0; t < kTables; t++) tables_[t] = _mm256_broadcastsi128_si256(load_as<__m128i>(bytes[t]));
        }
        if constexpr (Dtype == kCode6) offset_ = splat(8388608.0f - numbers[0]);
#endif
    }

#if defined(__AVX2__)
    template <class Put>
    __attribute__((always_inline)) void operator()(const char* from, const Put& put) const {
        if constexpr (code_bits(Dtype) == 16) {
            sixteen_bits(from, put);
            return;
        } else if constexpr (code_bits(Dtype) == 8) {
            floats(from, 0, put);
            floats(from + 2 * kPanel, 2, put);
            return;
        }
        const __m256i pairs = load_as<__m256i>(from), nibble = _mm256_set1_epi8(15);
        const __m256i even = _mm256_and_si256(pairs, nibble), odd = _mm256_and_si256(_mm256_srli_epi16(pairs, 4), nibble);
        if constexpr (Dtype == kCode4) {
            look_up(even, 0, put);
            look_up(odd, 2, put);
        } else if constexpr (Dtype == kCode6) {
            const __m128i bits = load_as<__m128i>(from + 2 * kPanel);
            const __m256i high = _mm256_set_m128i(bits, _mm_slli_epi16(bits, 4)), two = _mm256_set1_epi8(0x30);
            count(_mm256_or_si256(even, _mm256_and_si256(high, two)), 0, put);
            count(_mm256_or_si256(odd, _mm256_and_si256(_mm256_srli_epi16(high, 2), two)), 2, put);
        }
    }

private:
    template <class Put>
    __attribute__((always_inline)) void sixteen_bits(const char* from, const Put& put) const {
        for (int i = 0; i < kFour; i += 2, from += 4 * kPanel) {
            Vec first[VP], second[VP];
            for (int v = 0; v < VP; v++) {
                const uint16_t* const halves = reinterpret_cast<const uint16_t*>(from) + v * W;
                const Word words = load_as<Word>(from + v * W * 4);
                first[v] = Dtype == kBf16 ? (Vec)(words << 16) : load_half(halves);
                second[v] = Dtype == kBf16 ? (Vec)(words & 0xffff0000u) : load_half(halves + kPanel);
            }
            put(i, first);
            put(i + 1, second);
        }
    }

    // Two inputs: their bytes are the high halves of float16, whose exponent has one bit more than E4M3's.
    template <class Put>
    __attribute__((always_inline)) void floats(const char* from, int i, const Put& put) const {
        const __m256i bytes = load_as<__m256i>(from), zero = _mm256_setzero_si256();
        __m256i first = _mm256_unpacklo_epi8(zero, bytes), second = _mm256_unpackhi_epi8(zero, bytes);
        if constexpr (Dtype == kE4m3) {
            const __m256i mask = _mm256_set1_epi16((int16_t)0xbf80);
            first = _mm256_and_si256(_mm256_srai_epi16(first, 1), mask);
            second = _mm256_and_si256(_mm256_srai_epi16(second, 1), mask);
        }
        widen_two(first, second, i, i + 1, put);
    }

    // Inputs i and i + 1: the bytes of their numbers, in float16 if one instruction widens a whole input, and otherwise in
    // float32, since such conversions are slower than the additional shuffles.
    template <class Put>
    __attribute__((always_inline)) void look_up(__m256i codes, int i, const Put& put) const {
        __m256i bytes[kTables];
        for (int t = 0; t < kTables; t++) bytes[t] = _mm256_shuffle_epi8(tables_[t], codes);
#if defined(__AVX512F__)
        constexpr int order = 0xd8;  // columns 0 to 3, 8 to 11, 4 to 7, 12 to 15 in ascending order
        const __m256i first = _mm256_permute4x64_epi64(_mm256_unpacklo_epi8(bytes[0], bytes[1]), order);
        const __m256i second = _mm256_permute4x64_epi64(_mm256_unpackhi_epi8(bytes[0], bytes[1]), order);
        Vec of_first[VP] = {(Vec)_mm512_cvtph_ps(first)}, of_second[VP] = {(Vec)_mm512_cvtph_ps(second)};
        put(i, of_first);
        put(i + 1, of_second);
#else
        const __m256i zero = _mm256_setzero_si256();
        words(_mm256_unpacklo_epi8(zero, bytes[0]), _mm256_unpacklo_epi8(bytes[1], bytes[2]), i, put);
        words(_mm256_unpackhi_epi8(zero, bytes[0]), _mm256_unpackhi_epi8(bytes[1], bytes[2]), i + 1, put);
#endif
    }

    // Integers as the last bits of 2 ** 23 in float32, whose unit in the last place is 1.
    template <class Put>
    __attribute__((always_inline)) void count(__m256i codes, int i, const Put& put) const {
        const __m256i zero = _mm256_setzero_si256();
        const __m256i exponent = _mm256_set1_epi16(0x4b00);
        const auto less_offset = [&](int n, Vec (&v)[VP]) __attribute__((always_inline)) {
            for (Vec& one : v) one -= offset_;
            put(n, v);
        };
        words(_mm256_unpacklo_epi8(codes, zero), exponent, i, less_offset);
        words(_mm256_unpackhi_epi8(codes, zero), exponent, i + 1, less_offset);
    }

    // An input, of the low and the high halves of its numbers' bits in the order of `place_of`.
    template <class Put>
    __attribute__((always_inline)) void words(__m256i low, __m256i high, int i, const Put& put) const {
        const __m256i first = _mm256_unpacklo_epi16(low, high), second = _mm256_unpackhi_epi16(low, high);
#if defined(__AVX512F__)
        Vec both[VP] = {(Vec)_mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1)};
#else
        Vec both[VP] = {(Vec)first, (Vec)second};
#endif
        put(i, both);
    }

#if defined(__AVX512F__)
    static constexpr int kTables = 2;
#else
    static constexpr int kTables = 3;
#endif
    __m256i tables_[kTables];  // bytes of the numbers of kCode4, from the lowest on, twice
    Vec offset_;
#else
    template <class Put>
    void operator()(const char* from, const Put& put) const {
        for (int i = 0; i < kFour; i++) {
            Vec to[VP];
            for (int c = 0; c < kPanel; c++) to[c / W][c % W] = number(from, i, c);
            put(i, to);
        }
    }

private:
#endif

public:
    // Returns the number of input i of four, column c.
    float number(const char* from, int i, int c) const {
        const uint8_t* bytes = reinterpret_cast<const uint8_t*>(from);
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(from);
        if (Dtype == kBf16) return to_float(bf16{halves[(i / 2 * kPanel + c) * 2 + i % 2]});
        if (Dtype == kF16) return half_to_float(halves[i * kPanel + c]);
        if (code_bits(Dtype) == 8) return numbers_[bytes[i * kPanel + c]];
        const int place = place_of(i % 2, c), low = bytes[place] >> (i / 2 * 4) & 15;
        if (Dtype == kCode4) return numbers_[low];
        return numbers_[low | (bytes[2 * kPanel + place % 16] >> (place / 16 * 4 + i / 2 * 2) & 3) << 4];
    }

private:
    const float* numbers_;
};

// The scales and minima of a panel's group of inputs.
struct CodeScales {
    Vec scales[VP], minima[VP];

    CodeScales(const OctavoOp& op, const CodeRecord& record, const char* panel, int group) {
        if (!has_scales(op)) {
            for (int v = 0; v < VP; v++) scales[v] = splat(1.0f), minima[v] = Vec{};
            return;
        }
        const uint16_t* halves =
            reinterpret_cast<const uint16_t*>(panel + (int64_t)group * record.size + record.codes);
        const Vec factor = splat(*static_cast<const float*>(op.book));
        for (int v = 0; v < VP; v++) {
            scales[v] = load_half(halves + v * W) * factor;
            minima[v] = op.minima ? load_half(halves + kPanel + v * W) * factor : Vec{};
        }
    }
};

// Calls put(k, vectors) with the numbers of inputs [first, first + count) of a panel, which are in one group; both are
// multiples of four.
template <int Dtype, class Put>
__attribute__((always_inline)) inline void widen_group(const OctavoOp& op, const CodeRecord& record,
                                                      const Widener<Dtype>& widener, const char* panel, int first,
                                                      int count, const Put& put) {
    constexpr int bytes = Widener<Dtype>::kBytes;
    const char* from = panel + (int64_t)(first / op.scaled) * record.size + first % op.scaled / kFour * bytes;
    for (int k = first; k < first + count; k += kFour, from += bytes)
        widener(from, [&](int n, Vec (&v)[VP]) __attribute__((always_inline)) { put(k + n, v); });
}

// Bytes of a panel.
inline int64_t code_panel_bytes(const OctavoOp& op) {
    return (int64_t)(op.columns / op.scaled) * CodeRecord(op).size;
}

// Calls body(first, count) for the parts of inputs [begin, begin + count) that are in one group each.
template <class Body>
inline void for_groups(const OctavoOp& op, int begin, int count, const Body& body) {
    for (int k = begin, end = begin + count; k < end;) {
        const int rest = op.scaled - k % op.scaled, part = rest < end - k ? rest : end - k;
        body(k, part);
        k += part;
    }
}

// Calls body.template run<Dtype>() for the operation's format.
template <class Body>
inline void for_codes(const OctavoOp& op, const Body& body) {
    switch (op.dtype) {
        case kCode4: return body.template run<kCode4>();
        case kCode6: return body.template run<kCode6>();
        case kE4m3: return body.template run<kE4m3>();
        case kE5m2: return body.template run<kE5m2>();
        case kBf16: return body.template run<kBf16>();
        default: return body.template run<kF16>();
    }
}

}  // namespace octavo
