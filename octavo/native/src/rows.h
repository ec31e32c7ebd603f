// Products of plain rows: matrices [row][channel] in float32 or bfloat16, which are not packed in panels. A few of their
// rows or columns at a time are copied to float32 scratch and multiplied with all rows of a task.
//
// Each sum runs in one accumulator and in one order, whatever is multiplied beside it, so results are bitwise equal in
// any batch.
#pragma once

#include "tile.h"

namespace octavo {

constexpr int kTileRows = W == 16 ? 6 : 3;  // of a register tile
constexpr int kTileColumns = 4;             // vectors, or rows of the other matrix, of a register tile

// acc + a * b, rounded once where the processor can. GCC would decide it loop by loop, and so by the number of rows.
inline Vec fused(Vec acc, Vec a, Vec b) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)acc);
#elif defined(__AVX__) && defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)acc);
#else
    return a * b + acc;
#endif
}

template <class T>
inline void widen(const T* from, int size, float* to) {
    for (int c = 0; c < size; c += W) store(to + c, load(from + c));
}

// to[m * to_stride + k] = x[m] · y[k] for rows x, and the kTileColumns rows y of `size` values each.
struct Dots {
    const float* x;
    int64_t stride;
    const float* y;
    int size;
    float* to;
    int64_t to_stride;

    template <int M>
    void run(int first) const {
        Vec sums[M][kTileColumns] = {};
        const float* rows = x + first * stride;
        for (int c = 0; c < size; c += W) {
            Vec values[M];
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) values[m] = load(rows + m * stride + c);
#pragma GCC unroll 4
            for (int k = 0; k < kTileColumns; k++) {
                const Vec column = load(y + k * size + c);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) sums[m][k] = fused(sums[m][k], values[m], column);
            }
        }
        for (int m = 0; m < M; m++)
            for (int k = 0; k < kTileColumns; k++) to[(first + m) * to_stride + k] = horizontal_sum(sums[m][k]);
    }
};

// to[m][c] += sum over t of x[m][t] * y[t][c], for V vectors of channels c and `count` rows y.
template <int V>
struct Mix {
    const float* x;
    int64_t stride;
    const float* y;  // [count][V * W]
    int count;
    float* to;
    int64_t to_stride;

    template <int M>
    void run(int first) const {
        Vec sums[M][V];
        const float* rows = x + first * stride;
        float* results = to + first * to_stride;
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) sums[m][v] = load(results + m * to_stride + v * W);
        for (int t = 0; t < count; t++) {
            Vec values[M];
#pragma GCC unroll 6
            for (int m = 0; m < M; m++) values[m] = splat(rows[m * stride + t]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                const Vec column = load(y + (t * V + v) * W);
#pragma GCC unroll 6
                for (int m = 0; m < M; m++) sums[m][v] = fused(sums[m][v], values[m], column);
            }
        }
        for (int m = 0; m < M; m++)
            for (int v = 0; v < V; v++) store(results + m * to_stride + v * W, sums[m][v]);
    }
};

// Adds x [rows][count] times y [count][channels] to `to`. `row(t)` returns row t of y; `scratch` has room for
// `count * kTileColumns * W` floats.
template <class Row>
void mix_rows(const float* x, int64_t stride, int rows, int count, int channels, const Row& row, float* scratch,
              float* to, int64_t to_stride) {
    int c = 0;
    for (; c + kTileColumns * W <= channels; c += kTileColumns * W) {
        for (int t = 0; t < count; t++) widen(row(t) + c, kTileColumns * W, scratch + t * kTileColumns * W);
        for_row_tiles<kTileRows>(rows, Mix<kTileColumns>{x, stride, scratch, count, to + c, to_stride});
    }
    for (; c < channels; c += W) {
        for (int t = 0; t < count; t++) widen(row(t) + c, W, scratch + t * W);
        for_row_tiles<kTileRows>(rows, Mix<1>{x, stride, scratch, count, to + c, to_stride});
    }
}

// Sets `to` [rows][count] to the products of rows x [rows][size] and rows y [count][size]; rows of `to` have room for
// whole tiles. `scratch` has room for `kTileColumns * size` floats.
template <class Row>
void dot_rows(const float* x, int64_t stride, int rows, int count, int size, const Row& row, float* scratch, float* to,
              int64_t to_stride) {
    for (int first = 0; first < count; first += kTileColumns) {
        for (int k = 0; k < kTileColumns; k++) widen(row(std::min(first + k, count - 1)), size, scratch + k * size);
        for_row_tiles<kTileRows>(rows, Dots{x, stride, scratch, size, to + first, to_stride});
    }
}

}  // namespace octavo
