// The register tile: a few rows times one or more panels of a packed matrix.
//
// A packed matrix is cut into panels of 16 columns; a panel lies [word of the inner dimension][column]. Each sum runs
// over the inner dimension in order, in one accumulator, so a result never depends on how many rows are multiplied
// together: the same bits come out alone and in any batch.
#pragma once

#include "simd.h"

namespace octavo {

template <int M, int P>
struct Tile {
    Vec sums[M][P * VP];

    void clear() {
        for (auto& row : sums)
            for (Vec& v : row) v = Vec{};
    }

    void read(const float* from, int64_t stride) {
        for (int m = 0; m < M; m++)
            for (int j = 0; j < P * VP; j++) sums[m][j] = load(from + m * stride + j * W);
    }

    void write(float* to, int64_t stride) const {
        for (int m = 0; m < M; m++)
            for (int j = 0; j < P * VP; j++) store(to + m * stride + j * W, sums[m][j]);
    }
};

// Nothing is fetched ahead: what a product reads is in a cache already.
struct Nothing {
    void fetch(int) const {}
};

// Memory that will be read soon, fetched into the second-level cache while a product is computed: from one place for
// each panel, `step` bytes for each word of the inner dimension. (Always inline: GCC takes a function that only
// prefetches for one without effect, and drops its calls.)
template <int P>
struct Ahead {
    const char* from[P] = {};
    int64_t step = 0;

    __attribute__((always_inline)) void fetch(int word) const {
        for (const char* place : from) __builtin_prefetch(place + word * step, 0, 2);
    }
};

// The rows that are multiplied with panels: one after the other, or the same word of M rows side by side, which needs no
// more than one address.
struct Rowwise {
    const uint32_t* words;
    int64_t stride;
    uint32_t operator()(int m, int k) const { return words[m * stride + k]; }
};

template <int M>
struct Interleaved {
    const uint32_t* words;
    uint32_t operator()(int m, int k) const { return words[k * M + m]; }
};

// Adds a [M rows][words] times the panels b.
template <class T, int M, int P, class Rows, class Soon = Nothing>
__attribute__((always_inline)) inline void multiply(Tile<M, P>& tile, const Rows& a, const uint32_t* const (&b)[P],
                                                    int words, const Soon& ahead = {}) {
    for (int k = 0; k < words; k++) {
        ahead.fetch(k);
        Word columns[P * VP];
#pragma GCC unroll 16
        for (int p = 0; p < P; p++)
#pragma GCC unroll 4
            for (int v = 0; v < VP; v++) columns[p * VP + v] = load_as<Word>(b[p] + k * kPanel + v * W);
#pragma GCC unroll 24
        for (int m = 0; m < M; m++) {
            const Word row = splat(a(m, k));
#pragma GCC unroll 16
            for (int j = 0; j < P * VP; j++) tile.sums[m][j] = multiply_add<T>(tile.sums[m][j], columns[j], row);
        }
    }
}

template <int M, class Body>
inline void dispatch(int count, int first, const Body& body) {
    if constexpr (M > 1) {
        if (count < M) return dispatch<M - 1>(count, first, body);
    }
    body.template run<M>(first);
}

// Calls body.template run<M>(first) over `rows` rows in tiles of at most Max, as even as they can be.
template <int Max, class Body>
inline void for_row_tiles(int rows, const Body& body) {
    const int tiles = (rows + Max - 1) / Max;
    for (int i = 0, first = 0; i < tiles; i++) {
        const int count = (rows - first + tiles - i - 1) / (tiles - i);
        dispatch<Max>(count, first, body);
        first += count;
    }
}

}  // namespace octavo
