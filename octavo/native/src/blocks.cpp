#include "blocks.h"

#include <algorithm>
#include <cmath>

#include "linear.h"

namespace octavo {

namespace {

// A block of values to whole numbers within [-most, most], as int32; returns their scale.
inline float quantise_block(const float* x, float most, int32_t* to) {
    Vec peak{}, flaw{};
    for (int i = 0; i < kBlock; i += W) {
        const Vec v = load(x + i);
        peak = maximum(peak, maximum(v, -v));
        flaw += v - v;
    }
    const float top = horizontal_max(peak), inverse = top > 0 ? most / top : 0.0f;
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    for (int i = 0; i < kBlock; i += W) {
        const Int rounded = (Int)(load(x + i) * inverse + magic) - (Int)magic;
        std::memcpy(to + i, &rounded, sizeof rounded);
    }
    // NaN and infinity would be lost in the integers; in the scale they reach the logits, where they are found.
    return top / most + horizontal_sum(flaw);
}

}  // namespace

void quantise_row(const float* x, int columns, int planes, void* row) {
    int8_t *high = static_cast<int8_t*>(row), *low = high + columns;
    float* scales = reinterpret_cast<float*>(high + (int64_t)columns * planes);
    float* scaled_sums = scales + columns / kBlock;
    int32_t* sums = reinterpret_cast<int32_t*>(scaled_sums + columns / kBlock);
    // The largest number whose high byte, rounded to nearest, is still a signed byte.
    const float most = planes == 2 ? 32639.0f : 127.0f;
    for (int b = 0; b < columns / kBlock; b++) {
        int32_t values[kBlock], sum = 0;
        scales[b] = quantise_block(x + b * kBlock, most, values);
        for (int i = 0; i < kBlock; i++) sum += values[i];
        for (int i = 0; i < kBlock; i++) {
            high[b * kBlock + i] = (int8_t)(planes == 2 ? (values[i] + 128) >> 8 : values[i]);
            if (planes == 2) low[b * kBlock + i] = (int8_t)values[i];  // modulo 256: what the high byte leaves
        }
        scaled_sums[b] = scales[b] * (float)sum;
        sums[b] = sum;
    }
}

namespace {

// Rows of a tile: the integer sums of each plane and the sums of floats must fit the registers.
template <int Planes>
constexpr int kMaxRows = W == 16 ? (Planes == 2 ? 4 : 6) : 2 / Planes;
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
    const Activations* rows;
    Tile<M, P>& tile;

    __attribute__((always_inline)) void block(int b) {
        Sums high, low;
        for (int m = 0; m < M; m++)
            for (int j = 0; j < P * VP; j++) {
                const Int start = Int{} - op.zero_point * rows[m].sums[b];
                high[m][j] = Planes == 1 ? start : Int{};
                low[m][j] = start;
            }
        for (int w = 0; w < kBlockWords; w += 2) {
            Word first[P * VP], second[P * VP];
            for (int j = 0; j < P * VP; j++) fetch(b, w, j, first[j], second[j]);
            add(high, low, first, b * kBlockWords + w);
            add(high, low, second, b * kBlockWords + w + 1);
        }
        scale(b, high, low);
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

    __attribute__((always_inline)) void add(Sums& high, Sums& low, const Word (&columns)[P * VP], int word) const {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Word x = splat(rows[m].words[word]);
#pragma GCC unroll 16
            for (int j = 0; j < P * VP; j++) high[m][j] = multiply_add_bytes(high[m][j], columns[j], x);
            if constexpr (Planes == 2) {
                const Word y = splat(rows[m].low_words[word]);
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
                tile.sums[m][j] += __builtin_convertvector(sum, Vec) * rows[m].scales[b] * scale;
            }
            if (op.zero_point) continue;
            const Vec minimum = load_half(halves + kPanel + j % VP * W);
            for (int m = 0; m < M; m++) tile.sums[m][j] += minimum * rows[m].scaled_sums[b];
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
        alignas(Activations) char memory[M * sizeof(Activations)];
        Activations* rows = reinterpret_cast<Activations*>(memory);
        for (int m = 0; m < M; m++)
            new (rows + m) Activations(program.at<const char>(op.input, begin + row + m), op.columns, Planes);
        Tile<M, P> tile;
        tile.clear();
        Product<M, P, Packed, Planes> product{op, panels, rows, tile};
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
        for_row_tiles<kMaxRows<Planes>>(count, Rows<P, false, Planes>{program, op, panels, panel, first});
    } else if (count < kUnpackFrom) {
        for_row_tiles<kMaxRows<Planes>>(count, Rows<P, true, Planes>{program, op, panels, panel, first});
    } else {
        const int64_t bytes = (int64_t)op.columns * kPanel;
        char* scratch = static_cast<char*>(program.scratch(thread, P * bytes));
        for (int p = 0; p < P; p++) {
            unpack(panels.from[p], record.size, blocks, scratch + p * bytes);
            panels.from[p] = scratch + p * bytes;
        }
        panels.stride = kBlock * kPanel;
        for_row_tiles<kMaxRows<Planes>>(count, Rows<P, false, Planes>{program, op, panels, panel, first});
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
