// Integer sums over a block of 32 for M rows and V vectors of columns, by the processor's fastest instructions. All
// variants give the same integers.
//
// `begin` and `add` take a function from a row's number to its ActivationBlock. `add` takes one word of each column;
// with `kTakesNibbles`, `add_nibbles` takes two words of 4-bit values as they are stored, in fewer instructions.
#pragma once

#include "blocks.h"

namespace octavo {

// 8-bit activations, by byte products.
template <int M, int V>
struct ByteSums {
    static constexpr bool kTakesNibbles = false;
    Int sums[M][V];

    template <class Rows>
    __attribute__((always_inline)) void begin(const Rows& row) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
            for (Int& sum : sums[m]) sum = Int{} + row(m).start;
    }

    template <class Rows>
    __attribute__((always_inline)) void add(const Word (&columns)[V], int w, const Rows& row) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Word x = splat(row(m).words[0][w]);
            for (int v = 0; v < V; v++) sums[m][v] = multiply_add_bytes(sums[m][v], columns[v], x);
        }
    }

    __attribute__((always_inline)) Int total(int m, int v) const { return sums[m][v]; }
};

// 16-bit activations in planes of bytes, each multiplied by itself.
template <int M, int V>
struct PlaneSums {
    static constexpr bool kTakesNibbles = false;
    Int high[M][V], low[M][V];

    template <class Rows>
    __attribute__((always_inline)) void begin(const Rows& row) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) {
                high[m][v] = Int{};
                low[m][v] = Int{} + row(m).start;
            }
    }

    template <class Rows>
    __attribute__((always_inline)) void add(const Word (&columns)[V], int w, const Rows& row) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Word x = splat(row(m).words[0][w]), y = splat(row(m).words[1][w]);
            for (int v = 0; v < V; v++) high[m][v] = multiply_add_bytes(high[m][v], columns[v], x);
            for (int v = 0; v < V; v++) low[m][v] = multiply_add_bytes(low[m][v], columns[v], y);
        }
    }

    __attribute__((always_inline)) Int total(int m, int v) const { return (high[m][v] << 8) + low[m][v]; }
};

// 16-bit activations in pairs, with the values as halves of 16 bits.
template <int M, int V>
struct PairSums {
    static constexpr bool kTakesNibbles = true;
    Int sums[M][V];

    template <class Rows>
    __attribute__((always_inline)) void begin(const Rows& row) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
            for (Int& sum : sums[m]) sum = Int{} + row(m).start;
    }

    template <class Rows>
    __attribute__((always_inline)) void add(const Word (&columns)[V], int w, const Rows& row) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            Word halves[V];
            for (int v = 0; v < V; v++) halves[v] = unsigned_halves(columns[v], odd);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) {
                const Word x = splat(row(m).words[odd][w]);
                for (int v = 0; v < V; v++) sums[m][v] = multiply_add_halves(sums[m][v], halves[v], x);
            }
        }
    }

    // Adds the 4-bit values at this bit of each half: even or odd ones of word w, as `unsigned_halves`.
    template <int Shift, class Rows>
    __attribute__((always_inline)) void add_nibble(const Word (&both)[V], int w, const Rows& row) {
        Word halves[V];
        for (int v = 0; v < V; v++) halves[v] = both[v] >> Shift & 0x000f000fu;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Word x = splat(row(m).words[Shift / 8][w]);
            for (int v = 0; v < V; v++) sums[m][v] = multiply_add_halves(sums[m][v], halves[v], x);
        }
    }

    // Adds words w and w + 1, which are in the low and the high halves of the bytes.
    template <class Rows>
    __attribute__((always_inline)) void add_nibbles(const Word (&both)[V], int w, const Rows& row) {
        add_nibble<0>(both, w, row);
        add_nibble<8>(both, w, row);
        add_nibble<4>(both, w + 1, row);
        add_nibble<12>(both, w + 1, row);
    }

    __attribute__((always_inline)) Int total(int m, int v) const { return sums[m][v]; }
};

#if defined(__AVX2__)
// 8-bit activations with 4-bit values, whose sums over a block fit 16 bits: 16 products of at most 15 * 127.
template <int M, int V>
struct NarrowSums {
    static constexpr bool kTakesNibbles = false;
    Short sums[M][V];
    int32_t starts[M];

    template <class Rows>
    __attribute__((always_inline)) void begin(const Rows& row) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            starts[m] = row(m).start;
            for (Short& sum : sums[m]) sum = Short{};
        }
    }

    template <class Rows>
    __attribute__((always_inline)) void add(const Word (&columns)[V], int w, const Rows& row) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) add_row_pairs(sums[m], columns, row(m).words[0][w]);
    }

    __attribute__((always_inline)) Int total(int m, int v) const {
        return multiply_add_halves(Int{} + starts[m], (Word)sums[m][v], splat(0x00010001u));
    }
};
#endif

template <int M, int V, bool FourBits, int Planes>
struct BlockSumsOf {
    using type = std::conditional_t<Planes == 1, ByteSums<M, V>,
                                    std::conditional_t<kByteProducts, PlaneSums<M, V>, PairSums<M, V>>>;
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
template <int M, int V>
struct BlockSumsOf<M, V, true, 1> {
    using type = NarrowSums<M, V>;
};
#endif

template <int M, int V, bool FourBits, int Planes>
using BlockSums = typename BlockSumsOf<M, V, FourBits, Planes>::type;

}  // namespace octavo
