// Products of bfloat16 in AMX's tiles, up to 32 rows over a pair of panels at a time.
//
// A tile's sums run in an order of their own, so every row goes this way, alone too: it has the same bits in any batch.
// What is left of the inner dimension after whole tiles is added as the other instruction sets add all.
#pragma once

#include "amx.h"

#if defined(OCTAVO_AMX)

#include <algorithm>

#include "linear.h"

namespace octavo {

template <int P>
struct TileColumns {
    static constexpr int kMaxRows = 2 * amx::kRows;
    static constexpr int kLines = amx::kWords;  // cache lines of a panel that a step multiplies

    Program& program;
    const OctavoOp& op;
    const uint32_t* weights[P];
    const int words, panel, begin, count;  // rows [begin, begin + count) of the batch

    TileColumns(Program& program, const OctavoOp& op, int panel, int begin, int count)
        : program(program), op(op), words(op.columns / 2), panel(panel), begin(begin), count(count) {
        for (int p = 0; p < P; p++)
            weights[p] = static_cast<const uint32_t*>(op.weight) + (int64_t)(panel + p) * words * kPanel;
    }

    void run(amx::Registers& registers) const {
        for (int row = 0; row < count; row += kMaxRows) {
            const int rows = std::min(count - row, kMaxRows);
            registers.shape(rows);
            rows > amx::kRows ? block<2>(row, rows) : block<1>(row, rows);
        }
    }

    template <int Halves>
    void block(int row, int rows) const {
        const int first = begin + row;
        const char* a = program.at<const char>(op.input, first);
        const int64_t stride = program.at<const char>(op.input, first + 1) - a;
        fetch_results(first, rows);
        // While few rows are computed, the next step's words are fetched, for the processor's own prefetching to follow;
        // while many are, each block of them fetches some lines of the panels that this thread most likely takes next.
        const int blocks = (count + kMaxRows - 1) / kMaxRows, lines = (kLines + blocks - 1) / blocks;
        const int from = std::min(row / kMaxRows * lines, kLines), to = std::min(from + lines, kLines);
        const int64_t distance = blocks == 1 ? amx::kWords * kPanel : (int64_t)P * words * kPanel;
        alignas(64) float sums[kMaxRows * P * kPanel];
        amx::clear_sums<Halves, P>();
        amx::add_words<Halves>(a, stride, weights, words / amx::kWords, [&](int step) __attribute__((always_inline)) {
            for (int p = 0; p < P; p++)
                for (int line = from; line < to; line++)
                    __builtin_prefetch(weights[p] + distance + (step * kLines + line) * kPanel, 0, 2);
        });
        amx::store_sums<Halves, P>(sums, P * kPanel);
        for_row_tiles<4>(rows, Rest{*this, sums, first});
    }

    // (Always inline as Ahead::fetch is.)
    __attribute__((always_inline)) void fetch_results(int first, int rows) const {
        if (op.epilogue == kGate) return;
        for (int m = 0; m < rows; m++)
            for (int p = 0; p < P; p++)
                __builtin_prefetch(program.at<float>(op.output, first + m) + (panel + p) * kPanel, 1);
    }

    struct Rest {
        const TileColumns& columns;
        const float* sums;
        int first;

        template <int M>
        void run(int row) const {
            Tile<M, P> tile;
            for (int m = 0; m < M; m++)
                for (int j = 0; j < P * VP; j++) tile.sums[m][j] = load(sums + ((row + m) * P * VP + j) * W);
            columns.finish_rows(tile, first + row);
        }
    };

    template <int M>
    void finish_rows(Tile<M, P>& tile, int first) const {
        const int done = words / amx::kWords * amx::kWords;
        if (done < words) {
            const uint32_t* a = program.at<const uint32_t>(op.input, first);
            const int64_t stride = program.at<const uint32_t>(op.input, first + 1) - a;
            const uint32_t* rest[P];
            for (int p = 0; p < P; p++) rest[p] = weights[p] + done * kPanel;
            multiply<bf16>(tile, Rowwise<M>(a + done, stride), rest, words - done, Ahead<P>{});
        }
        finish(program, op, tile, panel, first);
    }
};

}  // namespace octavo

#endif
