// What the operations of recurrent layers have in common: the rows of a step with their states, vectors that end within
// a register, and functions of gates and step sizes.
//
// A row's tokens are computed one after the other by one task, which keeps the row's state of its channels. So a token's
// bits do not depend on its chunk, on the batch or on the number of threads.
#pragma once

#include <algorithm>
#include <cmath>

#include "linear.h"
#include "rows.h"

namespace octavo {

// Channels whose states are advanced in one loop. Loops over them are unrolled by pragmas: else GCC stores each sum.
constexpr int kTogether = 4;

// States of a layer: one for each block, `stride` floats apart; octavo/native/recurrent.py documents the fields.
struct States {
    float* first;
    int64_t stride;
};

// A row of the step: its tokens, and the block of its state in a cache group.
struct Sequence {
    const int first, count;  // tokens of the step
    const bool begins;       // the sequence has no tokens before these, so what its block holds is not its state
    const int64_t block;

    Sequence(const OctavoStep& step, int group, int row)
        : first(step.query_start[row]),
          count(step.query_start[row + 1] - first),
          begins(step.seq_lens[row] == count),
          block(step.table(group, row)[0]) {}
};

// The first n numbers, n at most W; zeros in the other lanes.
inline Vec load_first(const float* p, int n) {
    if (n == W) return load(p);
    float lanes[W] = {};
    std::memcpy(lanes, p, n * sizeof(float));
    return load(lanes);
}

// Stores the first n lanes.
template <class T>
inline void store_first(T* p, int n, Vec v) {
    if (n == W) return store(p, v);
    T lanes[W];
    store(lanes, v);
    std::memcpy(p, lanes, n * sizeof(T));
}

// Calls body(c, n) for vectors of `size` values from c on; the last one may have fewer than W.
template <class Body>
inline void for_vectors(int size, const Body& body) {
    int c = 0;
    for (; c + W <= size; c += W) body(c, W);
    if (c < size) body(c, size - c);
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exponential(-x)); }

// log(1 + e^x) = max(x, 0) + log(1 + t) with t = e^-|x|, and log(1 + t) = 2 artanh(t / (2 + t)), by its series to
// within 2e-8: t / (2 + t) is at most 1/3.
inline Vec softplus(Vec x) {
    const Vec t = exponential(-maximum(x, -x)), s = t / (2.0f + t);
    constexpr float series[] = {2.0f, 2.0f / 3, 2.0f / 5, 2.0f / 7, 2.0f / 9, 2.0f / 11, 2.0f / 13};
    return maximum(x, Vec{}) + s * polynomial(s * s, series);
}

}  // namespace octavo
