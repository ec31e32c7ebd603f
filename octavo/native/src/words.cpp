// Products with float32 and bfloat16 weights in panels.

#include <algorithm>

#include "linear.h"
#include "words_amx.h"

namespace octavo {

namespace {

constexpr int kMaxRows = 2 * kWideRows;  // rows of a tile over a pair of panels
constexpr int kMaxOddRows = 4;           // over the last panel of an odd number: less to compile

// P panels from `panel` on, over some rows of the batch.
template <class T, int P>
struct Columns {
    const Program& program;
    const OctavoOp& op;
    const uint32_t* weights[P];
    int words, panel, begin, count;  // rows [begin, begin + count) of the batch, tile by tile

    Columns(const Program& program, const OctavoOp& op, int panel, int begin, int count)
        : program(program), op(op), words(op.columns / kPerWord<T>), panel(panel), begin(begin), count(count) {
        for (int p = 0; p < P; p++)
            weights[p] = static_cast<const uint32_t*>(op.weight) + (int64_t)(panel + p) * words * kPanel;
    }

    // The panels that this thread most likely takes next come after these. Every tile fetches its part of them, so
    // that memory is busy all the time, not only while the first tile waits for it.
    Ahead<P> ahead(int row) const {
        const int tiles = (count + kMaxRows - 1) / kMaxRows;
        const int64_t panel_bytes = (int64_t)words * kPanel * 4;
        Ahead<P> ahead;
        ahead.step = std::max(kPanel * 4 / tiles, 1);
        for (int p = 0; p < P; p++)
            ahead.from[p] = reinterpret_cast<const char*>(weights[p]) + P * panel_bytes +
                            (int64_t)row * tiles / count * ahead.step * words;
        return ahead;
    }

    template <int M>
    void run(int row) const {
        const int first = begin + row;
        const uint32_t* a = program.at<const uint32_t>(op.input, first);
        const int64_t stride = program.at<const uint32_t>(op.input, first + 1) - a;
        fetch_results<M, P>(program, op, panel, first);
        Tile<M, P> tile;
        tile.clear();
        multiply<T>(tile, Rowwise<M>(a, stride), weights, words, ahead(row));
        finish(program, op, tile, panel, first);
    }
};

#if defined(OCTAVO_AMX)
void multiply_tiles(Program& program, const OctavoOp& op, int panel, int first, int count, int thread) {
    amx::Registers& registers = program.registers(thread);
    if (panel + kPair <= panels_of(op))
        TileColumns<kPair>(program, op, panel, first, count).run(registers);
    else
        TileColumns<1>(program, op, panel, first, count).run(registers);
}
#endif

template <class T>
void multiply_chunk(const Program& program, const OctavoOp& op, int panel, int first, int count) {
    if (panel + kPair <= panels_of(op)) {
        for_row_tiles<kMaxRows>(count, Columns<T, kPair>(program, op, panel, first, count));
    } else {
        for_row_tiles<kMaxOddRows>(count, Columns<T, 1>(program, op, panel, first, count));
    }
}

}  // namespace

}  // namespace octavo

extern "C" void octavo_multiply_words(octavo::Program& program, const OctavoOp& op, int panel, int first, int count,
                                      int thread) {
#if defined(OCTAVO_AMX)
    if (op.dtype == octavo::kBfloat) return octavo::multiply_tiles(program, op, panel, first, count, thread);
#endif
    if (op.dtype == octavo::kBfloat)
        octavo::multiply_chunk<octavo::bf16>(program, op, panel, first, count);
    else
        octavo::multiply_chunk<float>(program, op, panel, first, count);
}
