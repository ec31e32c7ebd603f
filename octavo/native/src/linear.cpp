// y = x W^T + b for float32 and bfloat16 weights in panels, with what follows a projection done on the way out.

#include <algorithm>

#include "program.h"
#include "tile.h"

namespace octavo {

namespace {

constexpr int kPair = 2;                    // panels of a task, and of a tile
constexpr int kMaxRows = 2 * kWideRows;     // rows of a tile over a pair of panels
constexpr int64_t kChunkBytes = 384 << 10;  // of inputs that a task goes over: they stay in the second-level cache

int chunk_rows(const OctavoOp& op) {
    const int64_t row_bytes = (int64_t)op.columns * (op.dtype == kBfloat ? 2 : 4);
    return (int)std::max<int64_t>(2 * kMaxRows, kChunkBytes / row_bytes / kMaxRows * kMaxRows);
}

int panels_of(const OctavoOp& op) { return (op.rows + kPanel - 1) / kPanel; }

int64_t tasks(Program& program, const OctavoOp& op) {
    const int64_t chunk = chunk_rows(op), pairs = (panels_of(op) + kPair - 1) / kPair;
    return (program.step().tokens + chunk - 1) / chunk * pairs;
}

inline Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

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
        Tile<M, P> tile;
        tile.clear();
        multiply<T>(tile, a, stride, weights, words, ahead(row));
        if (op.second != nullptr) add_bias(tile);
        finish(tile, first);
    }

    template <int M>
    void add_bias(Tile<M, P>& tile) const {
        const float* bias = static_cast<const float*>(op.second) + panel * kPanel;
        for (int m = 0; m < M; m++)
            for (int j = 0; j < P * VP; j++) tile.sums[m][j] += load(bias + j * W);
    }

    template <int M>
    void finish(const Tile<M, P>& tile, int first) const {
        for (int m = 0; m < M; m++) {
            if constexpr (P == kPair) {
                if (op.epilogue == kGate) {
                    T* to = program.at<T>(op.output, first + m) + panel / 2 * kPanel;
                    for (int v = 0; v < VP; v++) store(to + v * W, silu(tile.sums[m][v]) * tile.sums[m][VP + v]);
                    continue;
                }
            }
            float* to = program.at<float>(op.output, first + m) + panel * kPanel;
            for (int j = 0; j < P * VP; j++)
                store(to + j * W, op.epilogue == kAdd ? load(to + j * W) + tile.sums[m][j] : tile.sums[m][j]);
        }
    }
};

template <class T>
void multiply_chunk(const Program& program, const OctavoOp& op, int panel, int first, int count) {
    if (panel + kPair <= panels_of(op)) {
        for_row_tiles<kMaxRows>(count, Columns<T, kPair>(program, op, panel, first, count));
    } else {
        for_row_tiles<kMaxRows>(count, Columns<T, 1>(program, op, panel, first, count));
    }
}

void run(Program& program, const OctavoOp& op, int64_t task, int) {
    const int chunk = chunk_rows(op), pairs = (panels_of(op) + kPair - 1) / kPair;
    const int first = (int)(task / pairs) * chunk, panel = (int)(task % pairs) * kPair;
    const int count = std::min(chunk, program.step().tokens - first);
    if (op.dtype == kBfloat)
        multiply_chunk<bf16>(program, op, panel, first, count);
    else
        multiply_chunk<float>(program, op, panel, first, count);
}

}  // namespace

OpCode linear_code() { return {tasks, run}; }

}  // namespace octavo
