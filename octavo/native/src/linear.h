// Common parts of the products of all weight formats: tasks, and the epilogue of a finished tile.
#pragma once

#include <algorithm>

#include "blocks.h"
#include "codes.h"
#include "program.h"
#include "results.h"
#include "tile.h"

namespace octavo {

constexpr int kPair = 2;                    // panels of a task, and of a tile

inline int panels_of(const OctavoOp& op) { return (op.rows + kPanel - 1) / kPanel; }

inline int64_t pairs_of(const OctavoOp& op) { return (panels_of(op) + kPair - 1) / kPair; }

// Sizes of weights; records of integers are described in blocks.h.
int64_t panel_bytes(const OctavoOp& op);

constexpr int64_t kChunkBytes = 384 << 10;  // of a task's inputs, which stay in the second-level cache

// Of a task that unpacks its weights first; the more rows, the less often they are unpacked.
constexpr int64_t kUnpackedBytes = 1 << 20;
constexpr int64_t kUnpackedRows = 256;  // with more, the results evict the inputs from the cache
#if defined(OCTAVO_AMX)
constexpr int kChunkRows = 2 * amx::kRows;  // chunks are multiples of this, the rows of the largest tile
#else
constexpr int kChunkRows = 2 * kWideRows;
#endif

// Returns the most rows of a task.
inline int64_t chunk_rows(const OctavoOp& op) {
    const bool unpacks = has_codes(op) || (has_blocks(op) && op.planes == 0);
    const int64_t row = has_blocks(op) && !unpacks ? activation_bytes(op) : op.columns * (takes_floats(op) ? 4 : 2);
    const int64_t fit = unpacks ? std::min(kUnpackedBytes / row, kUnpackedRows) : kChunkBytes / row;
    return std::max<int64_t>(4 * kChunkRows, fit / kChunkRows * kChunkRows);
}

// x / (1 + e^-x)
inline Vec silu(Vec x) {
#if defined(__AVX512DQ__)
    // e^-x as a power of two, at most 2^126, and the quotient by Newton's method: half as many instructions.
    const Vec e = 1.0f + powers_of_2<6>(minimum(x * -1.44269504088896341f, splat(126.0f)));
    const Vec near = (Vec)_mm512_rcp14_ps((__m512)e);
    return x * (near + near * (1.0f - e * near));
#else
    return x / (1.0f + exponential(-x));
#endif
}

template <class T, int M, int P>
inline void gate(const Program& program, const OctavoOp& op, const Tile<M, P>& tile, int panel, int first) {
    for (int m = 0; m < M; m++) {
        T* to = program.at<T>(op.output, first + m) + panel / 2 * kPanel;
        for (int v = 0; v < VP; v++) store(to + v * W, silu(tile.sums[m][v]) * tile.sums[m][VP + v]);
    }
}

// Prefetches the cache lines that `finish` writes, while the products are computed. (Always inline as Ahead::fetch is.)
template <int M, int P>
__attribute__((always_inline)) inline void fetch_results(const Program& program, const OctavoOp& op, int panel,
                                                      int first) {
    if (op.epilogue == kGate) return;
    for (int m = 0; m < M; m++)
        for (int p = 0; p < P; p++)
            __builtin_prefetch(program.at<float>(op.output, first + m) + (panel + p) * kPanel, 1);
}

// Adds low-rank additions and the bias, and stores the tile: plainly, added to the output, or as silu(gate) * up of its
// pair of panels. What is rare is done in memory. (On a copy: the address of `tile` must not escape.)
template <int M, int P>
inline void finish(const Program& program, const OctavoOp& op, Tile<M, P>& tile, int panel, int first) {
    if (op.low_rank != nullptr || op.function != kPlain) {
        alignas(64) float sums[M * P * kPanel];
        tile.write(sums, P * kPanel);
        if (op.low_rank != nullptr) program.add_low_rank(program, op, panel, P, first, M, sums);
        if (op.function != kPlain) return program.map_results(program, op, panel, P, first, M, sums);
        for (int m = 0; m < M; m++)
            for (int j = 0; j < P * VP; j++) tile.sums[m][j] = load(sums + m * P * kPanel + j * W);
    }
    if (op.second != nullptr) {
        const float* bias = static_cast<const float*>(op.second) + panel * kPanel;
        for (int m = 0; m < M; m++)
            for (int j = 0; j < P * VP; j++) tile.sums[m][j] += load(bias + j * W);
    }
    if constexpr (P == kPair) {
        if (op.epilogue == kGate && op.output_dtype == kBfloat) return gate<bf16>(program, op, tile, panel, first);
        if (op.epilogue == kGate) return gate<float>(program, op, tile, panel, first);
    }
    for (int m = 0; m < M; m++) {
        float* to = program.at<float>(op.output, first + m) + panel * kPanel;
        for (int j = 0; j < P * VP; j++)
            store(to + j * W, op.epilogue == kAdd ? load(to + j * W) + tile.sums[m][j] : tile.sums[m][j]);
    }
}

// Runs a task: rows [first, first + count) times the pair of panels from `panel` on, or the last one of an odd number.
// `octavo_multiply_words` or `octavo_multiply_blocks`, depending on the format of the weights.
using Multiply = void (*)(Program& program, const OctavoOp& op, int panel, int first, int count, int thread);

}  // namespace octavo
