// Integers in blocks of 32 with a scale each: the form of quantised weights and of the activations that meet them.
//
// Weights: a panel is a sequence of blocks of the inner dimension, each a record of 16 columns: the values (unsigned, 8
// bits: [word][column][4]; 4 bits: two words to a word's place, the first in the low halves), then the columns' scales
// and, unless the format has a fixed zero point, their minima, in float16.
//
// Activations: 8-bit or 16-bit integers. A row is its values in planes of signed bytes (of 16 bits the high bytes, then the
// low ones), then for each block a scale, scale * sum of values, and the sum.
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

struct Activations {
    const uint32_t *words, *low_words;  // the second plane, if there is one
    const float *scales, *scaled_sums;
    const int32_t* sums;

    Activations(const void* row, int columns, int planes)
        : words(static_cast<const uint32_t*>(row)),
          low_words(words + columns / 4),
          scales(reinterpret_cast<const float*>(words + columns / 4 * planes)),
          scaled_sums(scales + columns / kBlock),
          sums(reinterpret_cast<const int32_t*>(scaled_sums + columns / kBlock)) {}
};

// One row of float32, quantised: each block by its largest magnitude.
void quantise_row(const float* x, int columns, int planes, void* row);

}  // namespace octavo
