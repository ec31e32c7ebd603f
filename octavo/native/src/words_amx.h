// Products of bfloat16 by AMX tiles, up to 32 rows over a pair of panels at a time.
//
// AMX sums in a different order, so all rows use it, single ones too: results are bitwise equal in any batch. The rest
// of the inner dimension after whole tiles is added with the other instruction sets' code.
#pragma once

#include "amx.h"

#if defined(OCTAVO_AMX)

#include <algorithm>

#include "linear.h"
#include "unpack.h"

namespace octavo {

template <int P>
struct TileColumns {
    static constexpr int kMaxRows = 2 * amx::kRows;

    Program& program;
    const OctavoOp& op;
    const PackedPanels<P>* packed;  // null: the matrix is stored in words
    const uint32_t* weights[P];
    const int words, panel, begin, count;  // rows [begin, begin + count) of the batch
    const int steps = words / amx::kWords;

    TileColumns(Program& program, const OctavoOp& op, const PackedPanels<P>* packed, int panel, int begin, int count)
        : program(program), op(op), packed(packed), words(op.columns / kPerWord<bf16>), panel(panel), begin(begin),
          count(count) {
        const int64_t size = (int64_t)words * kPanel;
        const uint32_t* first = packed ? packed->words() : static_cast<const uint32_t*>(op.weight) + panel * size;
        for (int p = 0; p < P; p++) weights[p] = first + p * size;
    }

    void run(amx::Registers& registers) const {
        for (int row = 0; row < count; row += kMaxRows) {
            const int rows = std::min(count - row, kMaxRows);
            registers.shape(rows);
            rows > amx::kRows ? block<2>(row, rows) : block<1>(row, rows);
        }
    }

    // Memory is read while the first rows are computed. The next step's words of each panel are prefetched, which
    // triggers the hardware prefetcher: it ignores tile loads, and prefetching much more would delay these. Integers
    // are unpacked here too, some steps before they are needed.
    template <int Halves>
    void block(int row, int rows) const {
        const int first = begin + row;
        const char* a = program.at<const char>(op.input, first);
        const int64_t stride = program.at<const char>(op.input, first + 1) - a;
        fetch_results(first, rows);
        alignas(64) float sums[kMaxRows * P * kPanel];
        if (row == 0 && packed) unpack(0);
        amx::clear_sums<Halves, P>();
        amx::add_words<Halves>(a, stride, weights, steps, [&](int step) __attribute__((always_inline)) {
            if (row > 0) return;
            if (packed)
                unpack(step + group());
            else
                fetch_step<3>(step + 1 < steps ? step + 1 : steps_to_next());
        });
        if (row + rows == count && !packed)
            for (int step = 1; step < 3; step++) fetch_step<2>(steps_to_next() + step);
        amx::store_sums<Halves, P>(sums, P * kPanel);
        for_row_tiles<4>(rows, Rest{*this, sums, first});
    }

    // Steps that are unpacked together, at the first of them. A step is one block.
    int group() const { return op.dtype == kInt4 ? 4 : 2; }

    __attribute__((always_inline)) void unpack(int step) const {
        static_assert(kBlock == amx::kWords * kPerWord<bf16>);
        if (step % group() == 0 && step < steps) packed->unpack(step, std::min(group(), steps - step));
    }

    // Offset to the panels that this thread will probably take next.
    int steps_to_next() const { return P * words / amx::kWords; }

    // (Always inline as Ahead::fetch is, and unrolled because of the loop's overhead.)
    template <int Locality>
    __attribute__((always_inline)) void fetch_step(int step) const {
#pragma GCC unroll 16
        for (int word = 0; word < amx::kWords; word++)
            for (const uint32_t* from : weights)
                __builtin_prefetch(from + ((int64_t)step * amx::kWords + word) * kPanel, 0, Locality);
    }

    // Prefetches the cache lines that will be written.
    __attribute__((always_inline)) void fetch_results(int first, int rows) const {
        if (op.epilogue == kGate) return;
        for (int m = 0; m < rows; m++)
            for (int p = 0; p < P; p++)
                __builtin_prefetch(program.at<float>(op.output, first + m) + (panel + p) * kPanel, 1);
    }

    // Continues from the tiles' sums, a few rows at a time.
    struct Rest {
        const TileColumns& columns;
        const float* sums;
        int first;

        template <int M>
        void run(int row) const {
            Tile<M, P> tile;
            for (int m = 0; m < M; m++)
                for (int j = 0; j < P * VP; j++) tile.sums[m][j] = load(sums + ((row + m) * P * VP + j) * W);
            if (columns.words % amx::kWords) columns.add_rest(tile, first + row);
            finish(columns.program, columns.op, tile, columns.panel, first + row);
        }
    };

    template <int M>
    void add_rest(Tile<M, P>& tile, int first) const {
        const int done = steps * amx::kWords;
        const uint32_t* a = program.at<const uint32_t>(op.input, first);
        const int64_t stride = program.at<const uint32_t>(op.input, first + 1) - a;
        const uint32_t* rest[P];
        for (int p = 0; p < P; p++) rest[p] = weights[p] + (int64_t)done * kPanel;
        multiply<bf16>(tile, Rowwise<M>(a + done, stride), rest, words - done, Ahead<P>{});
    }
};

}  // namespace octavo

#endif
