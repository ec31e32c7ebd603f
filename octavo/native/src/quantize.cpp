// Quantization of activations to integers, for integer weights.

#include <algorithm>

#include "blocks.h"

namespace octavo {

namespace {

typedef int8_t Byte __attribute__((vector_size(W)));

// Returns the smallest power of two that is at least x.
inline float power_of_two_from(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    bits = (bits + 0x7fffff) & 0x7f800000;
    std::memcpy(&x, &bits, sizeof bits);
    return x;
}

constexpr float kLeastScale = 0x1p-100f;
constexpr float kOrigin = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits

struct Quantized {
    float scale;
    int32_t sum;
};

// Values i to i + W - 1 of a block, as bytes in planes.
template <int Planes>
inline void write_bytes(Int value, uint32_t (&words)[Planes][kBlockWords], int i) {
    const Byte high = __builtin_convertvector(Planes == 2 ? (value + 128) >> 8 : value, Byte);
    std::memcpy(reinterpret_cast<char*>(words[0]) + i, &high, sizeof high);
    if constexpr (Planes == 2) {
        const Byte low = __builtin_convertvector(value, Byte);  // modulo 256: the rest after the high byte
        std::memcpy(reinterpret_cast<char*>(words[1]) + i, &low, sizeof low);
    }
}

// The same as pairs of 16 bits, with even and odd ones separated: those of four values at once.
inline void write_pairs(Int value, uint32_t (&words)[2][kBlockWords], int i) {
    for (int n = 0; n < W; n += 4) {
        const uint64_t low_halves = 0x0000ffff0000ffff;
        uint64_t first, second;
        std::memcpy(&first, reinterpret_cast<const char*>(&value) + n * 4, sizeof first);
        std::memcpy(&second, reinterpret_cast<const char*>(&value) + (n + 2) * 4, sizeof second);
        const uint64_t both = (first & low_halves) | (second & low_halves) << 16;
        words[0][(i + n) / 4] = (uint32_t)both;
        words[1][(i + n) / 4] = (uint32_t)(both >> 32);
    }
}

// Quantizes a block of values to integers within [-most, most], in bytes or pairs. `flaw` becomes NaN if a value is NaN
// or infinite: integers can't represent these, so it is added to a scale, which carries it to the logits' check.
template <int Planes>
inline Quantized quantize_block(const float* x, uint32_t (&words)[Planes][kBlockWords], Vec& flaw) {
    // The largest number whose high byte, rounded to nearest, is still a signed byte.
    constexpr float most = Planes == 2 ? 32639.0f : 127.0f;
    Vec peak{};
    for (int i = 0; i < kBlock; i += W) {
        const Vec v = load(x + i);
        peak = maximum(peak, maximum(v, -v));
        flaw += v - v;
    }
    const float exact = std::max(horizontal_max(peak) / most, kLeastScale);
    const float scale = Planes == 1 ? power_of_two_from(exact) : exact;
    Int sum{};
    for (int i = 0; i < kBlock; i += W) {
        const Int value = (Int)(load(x + i) * (1.0f / scale) + kOrigin) - (Int)splat(kOrigin);
        if constexpr (Planes == 2 && !kByteProducts)
            write_pairs(value, words, i);
        else
            write_bytes(value, words, i);
        sum += value;
    }
    return {scale, horizontal_sum(sum)};
}

void quantize(const float* x, int blocks, int zero_point, ActivationBlock<2>* row) {
    Vec flaw{};
    for (int b = 0; b < blocks; b++) {
        const auto [scale, sum] = quantize_block<2>(x + b * kBlock, row[b].words, flaw);
        row[b].scale = scale;
        row[b].start = -zero_point * sum;
        row[b].scaled_sum = scale * (float)sum;
    }
    row[0].scale += horizontal_sum(flaw);
}

void quantize(const float* x, int blocks, int zero_point, ActivationBlock<1>* row) {
    Vec flaw{};
    for (int b = 0; b < blocks; b++) {
        const auto [scale, sum] = quantize_block<1>(x + b * kBlock, row[b].words, flaw);
        row[b].origin = kOrigin * scale;
        std::memcpy(&row[b].start, &row[b].origin, sizeof row[b].start);
        row[b].start -= zero_point * sum;
        const uint32_t rounded = pair_up(splat(scale * (float)sum), Vec{})[0];
        row[b].sums = rounded;
        if (b % 2) row[b - 1].sums |= rounded << 16;
    }
    row[0].origin += horizontal_sum(flaw);
}

}  // namespace

void quantize_row(const float* x, int columns, int planes, int zero_point, void* row) {
    const int blocks = columns / kBlock;
    planes == 2 ? quantize(x, blocks, zero_point, static_cast<ActivationBlock<2>*>(row))
                : quantize(x, blocks, zero_point, static_cast<ActivationBlock<1>*>(row));
}

}  // namespace octavo
