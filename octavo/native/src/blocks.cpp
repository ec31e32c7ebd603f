// Products with weights that are integers in blocks.

#include <algorithm>

#include "block_sums.h"
#include "blocks.h"
#include "linear.h"

namespace octavo {

namespace {

// Rows of a tile: the integer sums of each plane and the sums of floats must fit the registers.
// Fewer are enough over a single panel, the last of an odd number.
template <int P, int Planes>
constexpr int kMaxRows = !kByteProducts ? 3 + Planes : P == 1 ? 2 / Planes : Planes == 2 ? 4 : 6;

// From this number of rows on, it pays to unpack a panel once for all tiles: minima, and values if they are multiplied
// as bytes. (As halves of 16 bits, 4-bit values take no more instructions than 8-bit ones.)
constexpr int kUnpackFrom = 12;

// P panels of a matrix: records, or the values and minima made by `unpack`.
template <int P>
struct Panels {
    const char* from[P];
    int64_t stride;         // bytes from one block's values to the next
    const char* scales[P];  // of the first block, followed by the minima
    int64_t scale_stride;
    const char* minima[P] = {};  // of pairs of blocks as bfloat16; null: not unpacked yet
    const char* soon;  // the records that this thread will probably read next

    // Prefetches as much of the next panels as the size of a block of these.
    __attribute__((always_inline)) void fetch(int block) const {
        const int64_t bytes = P * scale_stride;
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(soon + block * bytes + line, 0, 2);
    }
};

// Returns the v-th vector of the minima of blocks b and b + 1, as words of bfloat16. The last block of an odd number is
// paired with zeros.
inline Word minima_of(const char* scales, int64_t stride, int b, int blocks, int v) {
    const uint16_t* low = reinterpret_cast<const uint16_t*>(scales + b * stride) + kPanel + v * W;
    const Vec high = b + 1 < blocks ? load_half(low + stride / sizeof *low) : Vec{};
    return pair_up(load_half(low), high);
}

// Integer sums of blocks, converted to float block by block.
template <int M, int P, bool Packed, int Planes>
struct Product {
    static constexpr int kVectors = std::min(P * VP, 2);  // vectors whose sums are in registers at a time
    using Sums = BlockSums<M, kVectors, Packed, Planes>;

    const OctavoOp& op;
    const Panels<P>& panels;
    const char* rows;  // the first row's blocks
    int64_t stride;    // bytes from one row to the next
    int blocks;
    Tile<M, P>& tile;

    __attribute__((always_inline)) void block(int b) {
#pragma GCC unroll 4
        for (int j = 0; j < P * VP; j += kVectors) multiply(b, j);
        if (Planes == 1 && op.minima && (b % 2 || b + 1 == blocks)) add_minima(b / 2 * 2);
    }

    // Adds block b for kVectors vectors across the panels, from j on.
    __attribute__((always_inline)) void multiply(int b, int j) {
        const auto row_of = [&](int m) -> const ActivationBlock<Planes>& { return row(m, b); };
        Sums sums;
        sums.begin(row_of);
        for (int w = 0; w < kBlockWords; w += 2) {
            if constexpr (Packed && Sums::kTakesNibbles) {
                Word both[kVectors];
                for (int v = 0; v < kVectors; v++) both[v] = load_as<Word>(place(b, w / 2, j + v));
                sums.add_nibbles(both, w, row_of);
            } else {
                Word first[kVectors], second[kVectors];
                for (int v = 0; v < kVectors; v++) fetch(b, w, j + v, first[v], second[v]);
                sums.add(first, w, row_of);
                sums.add(second, w + 1, row_of);
            }
        }
        for (int v = 0; v < kVectors; v++) {
            const int p = (j + v) / VP, column = (j + v) % VP * W;
            scale(b, j + v, sums, v, reinterpret_cast<const uint16_t*>(panels.scales[p] + b * panels.scale_stride) + column);
        }
    }

    __attribute__((always_inline)) const ActivationBlock<Planes>& row(int m, int b) const {
        return reinterpret_cast<const ActivationBlock<Planes>*>(rows + m * stride)[b];
    }

    // Returns a stored word of block b, the j-th vector across the panels.
    __attribute__((always_inline)) const char* place(int b, int word, int j) const {
        return panels.from[j / VP] + b * panels.stride + word * kPanel * 4 + j % VP * W * 4;
    }

    // Two words of block b, the j-th vector across the panels.
    __attribute__((always_inline)) void fetch(int b, int word, int j, Word& first, Word& second) const {
        if constexpr (Packed) {
            const Word both = load_as<Word>(place(b, word / 2, j));
            first = both & 0x0f0f0f0fu;
            second = (both >> 4) & 0x0f0f0f0fu;
        } else {
            first = load_as<Word>(place(b, word, j));
            second = load_as<Word>(place(b, word + 1, j));
        }
    }

    // Converts the sums of vector v in the registers to float and adds them to the tile's vector j.
    __attribute__((always_inline)) void scale(int b, int j, const Sums& sums, int v, const uint16_t* scales) {
        const Vec scale = load_half(scales);
        if constexpr (Planes == 1) {
            for (int m = 0; m < M; m++) tile.sums[m][j] += ((Vec)sums.total(m, v) - row(m, b).origin) * scale;
        } else {
            const auto product = [&](int m) { return __builtin_convertvector(sums.total(m, v), Vec) * row(m, b).scale; };
            if (!op.minima) {
                for (int m = 0; m < M; m++) tile.sums[m][j] += product(m) * scale;
                return;
            }
            const Vec minimum = load_half(scales + kPanel);
            for (int m = 0; m < M; m++)
                tile.sums[m][j] = (tile.sums[m][j] + product(m) * scale) + minimum * row(m, b).scaled_sum;
        }
    }

    // Adds the minima of blocks b and b + 1.
    __attribute__((always_inline)) void add_minima(int b) {
        if constexpr (Planes == 1) {
            for (int j = 0; j < P * VP; j++) {
                const char* unpacked = panels.minima[j / VP];
                const Word pair = unpacked ? load_as<Word>(unpacked + (b / 2 * kPanel + j % VP * W) * 4)
                                           : minima_of(panels.scales[j / VP], panels.scale_stride, b, blocks, j % VP);
                for (int m = 0; m < M; m++)
                    tile.sums[m][j] = multiply_add<bf16>(tile.sums[m][j], pair, splat(row(m, b).sums));
            }
        }
    }
};

template <int P, bool Packed, int Planes>
struct Rows {
    const Program& program;
    const OctavoOp& op;
    Panels<P> panels;
    int panel, begin;

    template <int M>
    void run(int row) const {
        const char* first = program.at<const char>(op.input, begin + row);
        const int64_t stride = program.at<const char>(op.input, begin + row + 1) - first;
        const int blocks = op.columns / kBlock;
        Tile<M, P> tile;
        tile.clear();
        Product<M, P, Packed, Planes> product{op, panels, first, stride, blocks, tile};
        for (int b = 0; b < blocks; b++) {
            if (row == 0) panels.fetch(b);
            product.block(b);
        }
        finish(program, op, tile, panel, begin + row);
    }
};

// Unpacks the 4-bit values of a panel to 8 bits.
void unpack_values(const char* from, int64_t stride, int blocks, char* to) {
    for (int b = 0; b < blocks; b++)
        for (int w = 0; w < kBlockWords; w += 2)
            for (int v = 0; v < VP; v++) {
                const Word both = load_as<Word>(from + b * stride + (w / 2 * kPanel + v * W) * 4);
                const Word low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
                char* place = to + ((b * kBlockWords + w) * kPanel + v * W) * 4;
                std::memcpy(place, &low, sizeof low);
                std::memcpy(place + kPanel * 4, &high, sizeof high);
            }
}

void unpack_minima(const char* scales, int64_t stride, int blocks, char* to) {
    for (int b = 0; b < blocks; b += 2)
        for (int v = 0; v < VP; v++) {
            const Word pair = minima_of(scales, stride, b, blocks, v);
            std::memcpy(to + (b / 2 * kPanel + v * W) * 4, &pair, sizeof pair);
        }
}

// Unpacks panels once for many rows.
template <int P>
void unpack(Program& program, const OctavoOp& op, int thread, Panels<P>& panels) {
    const int blocks = op.columns / kBlock;
    const int64_t values = kByteProducts && op.dtype == kInt4 ? (int64_t)op.columns * kPanel : 0;
    const int64_t minima = op.minima && op.planes == 1 ? (blocks + 1) / 2 * (int64_t)kPanel * 4 : 0;
    char* free = static_cast<char*>(program.scratch(thread, P * (values + minima)));
    for (int p = 0; p < P; p++, free += values + minima) {
        if (minima) {
            unpack_minima(panels.scales[p], panels.scale_stride, blocks, free + values);
            panels.minima[p] = free + values;
        }
        if (values) {
            unpack_values(panels.from[p], panels.stride, blocks, free);
            panels.from[p] = free;
        }
    }
    if (values) panels.stride = kBlock * kPanel;
}

template <int P, int Planes>
void multiply(Program& program, const OctavoOp& op, int panel, int first, int count, int thread) {
    constexpr int most = kMaxRows<P, Planes>;
    const Record record(op);
    const int blocks = op.columns / kBlock;
    Panels<P> panels;
    panels.stride = panels.scale_stride = record.size;
    for (int p = 0; p < P; p++) {
        panels.from[p] = static_cast<const char*>(op.weight) + (int64_t)(panel + p) * blocks * record.size;
        panels.scales[p] = panels.from[p] + record.values;
    }
    panels.soon = panels.from[0] + (int64_t)P * blocks * record.size;
    if (count >= kUnpackFrom) unpack(program, op, thread, panels);
    if (op.dtype == kInt4 && (count < kUnpackFrom || !kByteProducts))
        return for_row_tiles<most>(count, Rows<P, true, Planes>{program, op, panels, panel, first});
    for_row_tiles<most>(count, Rows<P, false, Planes>{program, op, panels, panel, first});
}

}  // namespace

}  // namespace octavo

extern "C" void octavo_multiply_blocks(octavo::Program& program, const OctavoOp& op, int panel, int first, int count,
                                       int thread) {
    using namespace octavo;
    const bool pair = panel + kPair <= panels_of(op);
    const Multiply multiplier = op.planes == 2 ? (pair ? multiply<kPair, 2> : multiply<1, 2>)
                                               : (pair ? multiply<kPair, 1> : multiply<1, 1>);
    multiplier(program, op, panel, first, count, thread);
}
