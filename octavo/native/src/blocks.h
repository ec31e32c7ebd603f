// Integers in blocks of 32 with a scale each: the form of quantised weights and of the activations that meet them.
//
// Weights: a panel is a sequence of blocks of the inner dimension, each a record of 16 columns: the values (unsigned, 8
// bits: [word][column][4]; 4 bits: two words to a word's place, the first in the low halves), then the columns' scales
// and, unless the format has a fixed zero point, their minima, in float16.
//
// Activations: 8-bit or 16-bit integers. A row is a sequence of blocks too, each with its own scale.
#pragma once

#include "program.h"
#include "simd.h"

namespace octavo {

constexpr int kBlock = 32;
constexpr int kBlockWords = kBlock / 4;

struct Record {
    int values, size;  // bytes

    explicit Record(const OctavoOp& op)
        : values(kPanel * kBlock / (op.dtype == kInt4 ? 2 : 1)), size(values + kPanel * (op.zero_point ? 2 : 4)) {}
};

// Values in planes of signed bytes: of 16 bits the high bytes, rounded, then the low ones.
template <int Planes>
struct ActivationBlock {
    uint32_t words[Planes][kBlockWords];
    float scale, scaled_sum;  // the second is scale * sum
    int32_t sum;
};

// Size of a row of them.
inline int64_t activation_bytes(const OctavoOp& op) {
    return op.columns / kBlock * (int64_t)(op.planes == 2 ? sizeof(ActivationBlock<2>) : sizeof(ActivationBlock<1>));
}

// One row of float32, quantised: each block by its largest magnitude.
void quantise_row(const float* x, int columns, int planes, void* row);

}  // namespace octavo
