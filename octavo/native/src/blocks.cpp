#include "blocks.h"

#include <algorithm>
#include <cmath>

#include "linear.h"

namespace octavo {

namespace {

typedef int8_t Byte __attribute__((vector_size(W)));

// Whole numbers within [-most, most] for a block of values; `flaw` becomes NaN if they hold NaN or infinity.
template <int Planes>
inline void quantise_block(const float* x, ActivationBlock<Planes>& to, Vec& flaw) {
    // The largest number whose high byte, rounded to nearest, is still a signed byte.
    constexpr float most = Planes == 2 ? 32639.0f : 127.0f;
    Vec peak{};
    for (int i = 0; i < kBlock; i += W) {
        const Vec v = load(x + i);
        peak = maximum(peak, maximum(v, -v));
        flaw += v - v;
    }
    const float top = horizontal_max(peak), inverse = top > 0 ? most / top : 0.0f;
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    Int sum{};
    for (int i = 0; i < kBlock; i += W) {
        const Int value = (Int)(load(x + i) * inverse + magic) - (Int)magic;
        const Byte high = __builtin_convertvector(Planes == 2 ? (value + 128) >> 8 : value, Byte);
        std::memcpy(reinterpret_cast<char*>(to.words[0]) + i, &high, sizeof high);
        if constexpr (Planes == 2) {
            const Byte low = __builtin_convertvector(value, Byte);  // modulo 256: what the high byte leaves
            std::memcpy(reinterpret_cast<char*>(to.words[1]) + i, &low, sizeof low);
        }
        sum += value;
    }
    to.scale = top / most;
    to.sum = horizontal_sum(sum);
    to.scaled_sum = to.scale * (float)to.sum;
}

template <int Planes>
void quantise(const float* x, int columns, void* row) {
    ActivationBlock<Planes>* blocks = static_cast<ActivationBlock<Planes>*>(row);
    Vec flaw{};
    for (int b = 0; b < columns / kBlock; b++) quantise_block<Planes>(x + b * kBlock, blocks[b], flaw);
    // NaN and infinity would be lost in the integers; in a scale they reach the logits, where they are found.
    blocks[0].scale += horizontal_sum(flaw);
}

}  // namespace

void quantise_row(const float* x, int columns, int planes, void* row) {
    planes == 2 ? quantise<2>(x, columns, row) : quantise<1>(x, columns, row);
}

namespace {

// Rows of a tile: the integer sums of each plane and the sums of floats must fit the registers.
// Over a single panel, the last of an odd number, fewer will do.
template <int P, int Planes>
constexpr int kMaxRows = W < 16 || P == 1 ? 2 / Planes : Planes == 2 ? 4 : 6;
constexpr int kUnpackFrom = 12;            // rows from which it pays to unpack 4-bit values once for all tiles

template <int P>
struct Panels {
    const char* from[P];
    int64_t stride;         // bytes from one block to the next
    const char* scales[P];  // of the first block
    int64_t scale_stride;
    const char* soon;  // the records that this thread most likely takes next

    // Fetches as much of the next panels as a block of these is.
    __attribute__((always_inline)) void fetch(int block) const {
        const int64_t bytes = P * scale_stride;
        for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(soon + block * bytes + line, 0, 2);
    }
};

// Integer sums of one block, turned into floats block by block. Values of 16 bits are multiplied as their bytes.
template <int M, int P, bool Packed, int Planes>
struct Product {
    using Sums = Int[M][P * VP];

    const OctavoOp& op;
    const Panels<P>& panels;
    const char* rows;  // the first row's blocks
    int64_t stride;    // bytes from one row to the next
    Tile<M, P>& tile;

    __attribute__((always_inline)) void block(int b) {
        Sums high, low;
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Int start = Int{} - op.zero_point * row(m, b).sum;
            for (int j = 0; j < P * VP; j++) {
                high[m][j] = Planes == 1 ? start : Int{};
                low[m][j] = start;
            }
        }
        for (int w = 0; w < kBlockWords; w += 2) {
            Word first[P * VP], second[P * VP];
            for (int j = 0; j < P * VP; j++) fetch(b, w, j, first[j], second[j]);
            add(high, low, first, b, w);
            add(high, low, second, b, w + 1);
        }
        scale(b, high, low);
    }

    __attribute__((always_inline)) const ActivationBlock<Planes>& row(int m, int b) const {
        return reinterpret_cast<const ActivationBlock<Planes>*>(rows + m * stride)[b];
    }

    // Two words of block b, the j-th vector across the panels.
    __attribute__((always_inline)) void fetch(int b, int word, int j, Word& first, Word& second) const {
        const char* from = panels.from[j / VP] + b * panels.stride + j % VP * W * 4;
        if constexpr (Packed) {
            const Word both = load_as<Word>(from + word / 2 * kPanel * 4);
            first = both & 0x0f0f0f0fu;
            second = (both >> 4) & 0x0f0f0f0fu;
        } else {
            first = load_as<Word>(from + word * kPanel * 4);
            second = load_as<Word>(from + (word + 1) * kPanel * 4);
        }
    }

    __attribute__((always_inline)) void add(Sums& high, Sums& low, const Word (&columns)[P * VP], int b, int w) const {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Word x = splat(row(m, b).words[0][w]);
#pragma GCC unroll 16
            for (int j = 0; j < P * VP; j++) high[m][j] = multiply_add_bytes(high[m][j], columns[j], x);
            if constexpr (Planes == 2) {
                const Word y = splat(row(m, b).words[1][w]);
#pragma GCC unroll 16
                for (int j = 0; j < P * VP; j++) low[m][j] = multiply_add_bytes(low[m][j], columns[j], y);
            }
        }
    }

    __attribute__((always_inline)) void scale(int b, const Sums& high, const Sums& low) {
        for (int j = 0; j < P * VP; j++) {
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(panels.scales[j / VP] + b * panels.scale_stride);
            const Vec scale = load_half(halves + j % VP * W);
            for (int m = 0; m < M; m++) {
                const Int sum = Planes == 1 ? high[m][j] : (high[m][j] << 8) + low[m][j];
                tile.sums[m][j] += __builtin_convertvector(sum, Vec) * row(m, b).scale * scale;
            }
            if (op.zero_point) continue;
            const Vec minimum = load_half(halves + kPanel + j % VP * W);
            for (int m = 0; m < M; m++) tile.sums[m][j] += minimum * row(m, b).scaled_sum;
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
        Tile<M, P> tile;
        tile.clear();
        Product<M, P, Packed, Planes> product{op, panels, first, stride, tile};
        for (int b = 0; b < op.columns / kBlock; b++) {
            if (row == 0) panels.fetch(b);
            product.block(b);
        }
        finish(program, op, tile, panel, begin + row);
    }
};

// 4-bit values of a panel to 8 bits.
void unpack(const char* from, int64_t stride, int blocks, char* to) {
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

template <int P, int Planes>
void multiply(Program& program, const OctavoOp& op, int panel, int first, int count, int thread) {
    const Record record(op);
    const int blocks = op.columns / kBlock;
    Panels<P> panels;
    panels.stride = panels.scale_stride = record.size;
    for (int p = 0; p < P; p++) {
        panels.from[p] = static_cast<const char*>(op.weight) + (int64_t)(panel + p) * blocks * record.size;
        panels.scales[p] = panels.from[p] + record.values;
    }
    panels.soon = panels.from[0] + (int64_t)P * blocks * record.size;
    if (op.dtype == kInt8) {
        for_row_tiles<kMaxRows<P, Planes>>(count, Rows<P, false, Planes>{program, op, panels, panel, first});
    } else if (count < kUnpackFrom) {
        for_row_tiles<kMaxRows<P, Planes>>(count, Rows<P, true, Planes>{program, op, panels, panel, first});
    } else {
        const int64_t bytes = (int64_t)op.columns * kPanel;
        char* scratch = static_cast<char*>(program.scratch(thread, P * bytes));
        for (int p = 0; p < P; p++) {
            unpack(panels.from[p], record.size, blocks, scratch + p * bytes);
            panels.from[p] = scratch + p * bytes;
        }
        panels.stride = kBlock * kPanel;
        for_row_tiles<kMaxRows<P, Planes>>(count, Rows<P, false, Planes>{program, op, panels, panel, first});
    }
}

}  // namespace

void multiply_blocks(Program& program, const OctavoOp& op, int panel, int first, int count, int thread) {
    const bool pair = panel + kPair <= panels_of(op);
    const auto multiplier = op.planes == 2 ? (pair ? multiply<kPair, 2> : multiply<1, 2>)
                                           : (pair ? multiply<kPair, 1> : multiply<1, 1>);
    multiplier(program, op, panel, first, count, thread);
}

}  // namespace octavo
