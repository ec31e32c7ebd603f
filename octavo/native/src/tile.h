// The register tile: a few rows times one or more panels of a packed matrix.
//
// A packed matrix consists of panels of 16 columns; a panel is [word of the inner dimension][column]. Each sum runs
// over the inner dimension in order, in one accumulator, so results do not depend on the number of rows that are
// multiplied together: they are bitwise equal in any batch.
#pragma once

#include "simd.h"

namespace octavo {

template <int M, int P, class Sum = Vec>
struct Tile {
    Sum sums[M][P * VP];

    void clear() {
        for (auto& row : sums)
            for (Sum& sum : row) sum = Sum{};
    }

    void write(float* to, int64_t stride) const {
#pragma GCC unroll 24
        for (int m = 0; m < M; m++, to += stride)
#pragma GCC unroll 16
            for (int j = 0; j < P * VP; j++) store(to + j * W, sums[m][j]);
    }

    void add_to(float* sum, int64_t stride) const {
#pragma GCC unroll 24
        for (int m = 0; m < M; m++, sum += stride)
#pragma GCC unroll 16
            for (int j = 0; j < P * VP; j++) store(sum + j * W, load(sum + j * W) + sums[m][j]);
    }
};

// Memory that will be read soon, prefetched into the second-level cache while a product is computed: from one address
// per panel, `step` bytes per word of the inner dimension. (Always inline: GCC treats a function that only prefetches
// as free of effects and removes its calls.)
template <int P>
struct Ahead {
    const char* from[P] = {};
    int64_t step = 0;

    __attribute__((always_inline)) void fetch(int word) const {
        for (const char* place : from) __builtin_prefetch(place + word * step, 0, 2);
    }
};

// The words of M rows that are multiplied with panels, one word of each at a time: consecutive rows, or interleaved
// words. Four rows share an address, which the compiler must not split, since there are not enough registers for the
// addresses of all rows.
template <int M>
struct Rowwise {
    static constexpr int kGroups = (M + 3) / 4;
    const char* groups[kGroups];
    int64_t stride, three_strides;  // bytes

    Rowwise(const uint32_t* words, int64_t stride_words) : stride(stride_words * 4), three_strides(3 * stride) {
        for (int g = 0; g < kGroups; g++) groups[g] = reinterpret_cast<const char*>(words) + g * 4 * stride;
    }

    __attribute__((always_inline)) uint32_t operator()(int m) const {
        return load_as<uint32_t>(groups[m / 4] + (m % 4 == 3 ? three_strides : m % 4 * stride));
    }

    __attribute__((always_inline)) void advance() {
        for (const char*& group : groups) {
            group += 4;
            asm("" : "+r"(group));
        }
    }
};

template <int M>
struct Interleaved {
    const uint32_t* words;
    __attribute__((always_inline)) uint32_t operator()(int m) const { return words[m]; }
    __attribute__((always_inline)) void advance() { words += M; }
};

// Adds the next `words` words of the rows times those of the panels b. The address of `tile` must not escape, so that
// the sums stay in registers.
template <class T, int M, int P, class Sum, class Rows>
__attribute__((always_inline)) inline void add_words(Tile<M, P, Sum>& tile, Rows& rows, const uint32_t* const (&b)[P],
                                                     int words, const Ahead<P>& ahead) {
    for (int k = 0; k < words; k++) {
        ahead.fetch(k);
#pragma GCC unroll 2
        for (int step = 0; step < kSteps<T>; step++) {
            Word columns[P * VP];
#pragma GCC unroll 16
            for (int p = 0; p < P; p++)
#pragma GCC unroll 4
                for (int v = 0; v < VP; v++)
                    columns[p * VP + v] = part<T>(load_as<Word>(b[p] + k * kPanel + v * W), step);
#pragma GCC unroll 24
            for (int m = 0; m < M; m++) {
                const Word row = part<T>(splat(rows(m)), step);
#pragma GCC unroll 16
                for (int j = 0; j < P * VP; j++)
                    tile.sums[m][j] = multiply_add_part<T>(tile.sums[m][j], columns[j], row);
            }
        }
        rows.advance();
    }
}

// Adds the rows times the panels b.
template <class T, int M, int P, class Sum, class Rows>
__attribute__((always_inline)) inline void multiply(Tile<M, P, Sum>& tile, Rows rows, const uint32_t* const (&b)[P],
                                                    int words, const Ahead<P>& ahead) {
    Tile<M, P, Sum> sum = tile;
    add_words<T>(sum, rows, b, words, ahead);
    tile = sum;
}

template <int M, class Body>
inline void dispatch(int count, int first, const Body& body) {
    if constexpr (M > 1) {
        if (count < M) return dispatch<M - 1>(count, first, body);
    }
    body.template run<M>(first);
}

// Calls body(first, count) over `rows` rows in tiles of at most `most` rows, as even as possible.
template <class Body>
inline void each_row_tile(int rows, int most, const Body& body) {
    const int tiles = (rows + most - 1) / most;
    for (int i = 0, first = 0; i < tiles; i++) {
        const int count = (rows - first + tiles - i - 1) / (tiles - i);
        body(first, count);
        first += count;
    }
}

// Calls body.template run<M>(first) for tiles of M rows, at most Max.
template <int Max, class Body>
inline void for_row_tiles(int rows, const Body& body) {
    each_row_tile(rows, Max, [&](int first, int count) { dispatch<Max>(count, first, body); });
}

}  // namespace octavo
