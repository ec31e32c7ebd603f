// Products with float32 and bfloat16 weights in panels, and with integers that become bfloat16 task by task.

#include <algorithm>
#include <optional>

#include "linear.h"
#include "unpack.h"
#include "words_amx.h"

namespace octavo {

namespace {

constexpr int kMaxRows = 2 * kWideRows;  // rows of a tile over a pair of panels
constexpr int kMaxOddRows = 4;           // over the last panel of an odd number; fewer, to shorten compilation

// P panels from `panel` on, over some rows of the batch.
template <class T, int P>
struct Columns {
    const Program& program;
    const OctavoOp& op;
    const uint32_t* weights[P];
    int words, panel, begin, count;  // rows [begin, begin + count) of the batch, tile by tile
    const bool unpacked;

    // Panels of the matrix, or unpacked ones.
    Columns(const Program& program, const OctavoOp& op, const uint32_t* panels, int panel, int begin, int count)
        : program(program), op(op), words(op.columns / kPerWord<T>), panel(panel), begin(begin), count(count),
          unpacked(panels != nullptr) {
        const int64_t size = (int64_t)words * kPanel;
        if (!unpacked) panels = static_cast<const uint32_t*>(op.weight) + panel * size;
        for (int p = 0; p < P; p++) weights[p] = panels + p * size;
    }

    // The panels that this thread will probably take next follow these. Every tile prefetches a part of them, so that
    // memory is busy all the time, not only during the first tile. (Packed panels are prefetched while the previous
    // ones are unpacked.)
    Ahead<P> ahead(int row) const {
        const int tiles = (count + kMaxRows - 1) / kMaxRows;
        const int64_t panel_bytes = (int64_t)words * kPanel * 4;
        Ahead<P> ahead;
        for (int p = 0; p < P; p++) ahead.from[p] = reinterpret_cast<const char*>(weights[p]);
        if (unpacked) return ahead;
        ahead.step = std::max(kPanel * 4 / tiles, 1);
        for (const char*& from : ahead.from)
            from += P * panel_bytes + (int64_t)row * tiles / count * ahead.step * words;
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
template <int P>
void multiply_tiles(Program& program, const OctavoOp& op, int panel, int first, int count, int thread) {
    std::optional<PackedPanels<P>> packed;
    if (has_blocks(op) || has_codes(op)) packed.emplace(program, op, panel, thread);
    TileColumns<P>(program, op, packed ? &*packed : nullptr, panel, first, count).run(program.registers(thread));
}
#endif

template <class T, int P, int Most>
void multiply_rows(Program& program, const OctavoOp& op, int panel, int first, int count, int thread) {
    const uint32_t* unpacked = nullptr;
    if (sizeof(T) == sizeof(bf16) && (has_blocks(op) || has_codes(op))) {
        const PackedPanels<P> packed(program, op, panel, thread);
        packed.unpack(0, op.columns / kBlock);
        unpacked = packed.words();
    }
    for_row_tiles<Most>(count, Columns<T, P>(program, op, unpacked, panel, first, count));
}

}  // namespace

}  // namespace octavo

extern "C" void octavo_multiply_words(octavo::Program& program, const OctavoOp& op, int panel, int first, int count,
                                      int thread) {
    using namespace octavo;
    const bool pair = panel + kPair <= panels_of(op);
    Multiply multiplier = pair ? multiply_rows<float, kPair, kMaxRows> : multiply_rows<float, 1, kMaxOddRows>;
    if (op.dtype != kFloat)
#if defined(OCTAVO_AMX)
        multiplier = pair ? multiply_tiles<kPair> : multiply_tiles<1>;
#else
        multiplier = pair ? multiply_rows<bf16, kPair, kMaxRows> : multiply_rows<bf16, 1, kMaxOddRows>;
#endif
    multiplier(program, op, panel, first, count, thread);
}
