// Integers in blocks of 32 with a scale each: the format of quantized weights and of the activations for them.
//
// Weights: scale * (value - zero point) + minimum. A panel is a sequence of blocks of the inner dimension, each a
// record of 16 columns: the values (unsigned, 8 bits: [word][column][4]; 4 bits: two words in the place of one, the
// first in the low halves), then the columns' scales and, if the format has them, minima, in float16.
//
// Activations: 8-bit or 16-bit integers. A row is a sequence of blocks too, each with its own scale.
#pragma once

#include "program.h"
#include "simd.h"

namespace octavo {

constexpr int kBlock = 32;
constexpr int kBlockWords = kBlock / 4;

constexpr bool has_blocks(const OctavoOp& op) { return op.dtype == kInt8 || op.dtype == kInt4; }

struct Record {
    int values, size;  // bytes

    explicit Record(const OctavoOp& op)
        : values(kPanel * kBlock / (op.dtype == kInt4 ? 2 : 1)), size(values + kPanel * (op.minima ? 4 : 2)) {}
};

template <int Planes>
struct ActivationBlock;

// Whether one instruction multiplies and adds four bytes. Without it, pairs of 16 bits are multiplied, which takes half
// as many instructions as single bytes.
#if defined(__AVX512VNNI__)
constexpr bool kByteProducts = true;
#else
constexpr bool kByteProducts = false;
#endif

// 16 bits. With byte products, in planes of signed bytes: the high ones, rounded, then the low ones. Otherwise in
// pairs: words of the even values of each four, then words of the odd ones.
template <>
struct ActivationBlock<2> {
    uint32_t words[2][kBlockWords];
    float scale, scaled_sum;  // the second is scale * the sum of the values
    int32_t start;            // -(zero point) * the sum of the values
};

// 8 bits, with a power of two as the scale. The float 1.5 * 2^23 * scale has a resolution of one scale, so integer sums
// that start from its bits become scaled floats by subtracting it, without a conversion or a multiplication.
template <>
struct ActivationBlock<1> {
    uint32_t words[1][kBlockWords];
    int32_t start;  // origin's bits, less the weights' zero point times the sum of the values
    float origin;
    uint32_t sums;  // in even blocks: scale * sum of this block and of the next, as bfloat16
};

// Bytes of a row of activation blocks.
inline int64_t activation_bytes(const OctavoOp& op) {
    return op.columns / kBlock * (int64_t)(op.planes == 2 ? sizeof(ActivationBlock<2>) : sizeof(ActivationBlock<1>));
}

// Quantizes one row of float32 for weights with this zero point, each block by its largest magnitude.
void quantize_row(const float* x, int columns, int planes, int zero_point, void* row);

}  // namespace octavo
