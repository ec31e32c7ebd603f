#include "blocks.h"

#include <algorithm>
#include <cmath>

#include "linear.h"

namespace octavo {

void quantise_row(const float* x, int columns, void* row) {
    int8_t* values = static_cast<int8_t*>(row);
    float* scales = reinterpret_cast<float*>(values + columns);
    float* scaled_sums = scales + columns / kBlock;
    int32_t* sums = reinterpret_cast<int32_t*>(scaled_sums + columns / kBlock);
    for (int b = 0; b < columns / kBlock; b++, x += kBlock, values += kBlock) {
        Vec peak{}, flaw{};
        for (int i = 0; i < kBlock; i += W) {
            const Vec v = load(x + i);
            peak = maximum(peak, maximum(v, -v));
            flaw += v - v;
        }
        const float top = horizontal_max(peak);
        const float inverse = top > 0 ? 127.0f / top : 0.0f;
        int sum = 0;
        int8_t quantised[kBlock];
        for (int i = 0; i < kBlock; i++) quantised[i] = (int8_t)std::nearbyintf(x[i] * inverse);
        for (int i = 0; i < kBlock; i++) sum += quantised[i];
        std::memcpy(values, quantised, kBlock);
        // NaN and infinity would be lost in the integers; in the scale they reach the logits, where they are found.
        scales[b] = top / 127.0f + horizontal_sum(flaw);
        scaled_sums[b] = scales[b] * (float)sum;
        sums[b] = sum;
    }
}

namespace {

constexpr int kMaxRows = W == 16 ? 6 : 2;  // rows of a tile: two sets of sums must fit the registers
constexpr int kUnpackFrom = 12;            // rows from which it pays to unpack 4-bit values once for all tiles

template <int P>
struct Panels {
    const char* from[P];
    int64_t stride;            // bytes from one block to the next
    const char* scales[P];     // of the first block
    int64_t scale_stride;
};

// Integer sums of one block, turned into floats block by block.
template <int M, int P, bool Packed>
struct Product {
    const OctavoOp& op;
    const Panels<P>& panels;
    const Activations* rows;
    Tile<M, P>& tile;

    __attribute__((always_inline)) void block(int b) {
        Int sums[M][P * VP];
        for (int m = 0; m < M; m++)
            for (Int& sum : sums[m]) sum = Int{} - op.zero_point * rows[m].sums[b];
        if constexpr (Packed)
            halves(b, sums);
        else
            bytes(b, sums);
        scale(b, sums);
    }

    __attribute__((always_inline)) void add(Int (&sums)[M][P * VP], const Word (&columns)[P * VP], int word) {
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            const Word x = splat(rows[m].words[word]);
#pragma GCC unroll 16
            for (int j = 0; j < P * VP; j++) sums[m][j] = multiply_add_bytes(sums[m][j], columns[j], x);
        }
    }

    __attribute__((always_inline)) void bytes(int b, Int (&sums)[M][P * VP]) {
        for (int w = 0; w < kBlockWords; w++) {
            Word columns[P * VP];
            for (int j = 0; j < P * VP; j++)
                columns[j] = load_as<Word>(panels.from[j / VP] + b * panels.stride + (w * kPanel + j % VP * W) * 4);
            add(sums, columns, b * kBlockWords + w);
        }
    }

    __attribute__((always_inline)) void halves(int b, Int (&sums)[M][P * VP]) {
        for (int w = 0; w < kBlockWords; w += 2) {
            Word low[P * VP], high[P * VP];
            for (int j = 0; j < P * VP; j++) {
                const Word both =
                    load_as<Word>(panels.from[j / VP] + b * panels.stride + (w / 2 * kPanel + j % VP * W) * 4);
                low[j] = both & 0x0f0f0f0fu;
                high[j] = (both >> 4) & 0x0f0f0f0fu;
            }
            add(sums, low, b * kBlockWords + w);
            add(sums, high, b * kBlockWords + w + 1);
        }
    }

    __attribute__((always_inline)) void scale(int b, const Int (&sums)[M][P * VP]) {
        for (int j = 0; j < P * VP; j++) {
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(panels.scales[j / VP] + b * panels.scale_stride);
            const Vec scale = load_half(halves + j % VP * W);
            for (int m = 0; m < M; m++)
                tile.sums[m][j] += __builtin_convertvector(sums[m][j], Vec) * rows[m].scales[b] * scale;
            if (op.zero_point) continue;
            const Vec minimum = load_half(halves + kPanel + j % VP * W);
            for (int m = 0; m < M; m++) tile.sums[m][j] += minimum * rows[m].scaled_sums[b];
        }
    }
};

template <int P, bool Packed>
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
            new (rows + m) Activations(program.at<const char>(op.input, begin + row + m), op.columns);
        Tile<M, P> tile;
        tile.clear();
        Product<M, P, Packed> product{op, panels, rows, tile};
        for (int b = 0; b < op.columns / kBlock; b++) product.block(b);
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

template <int P>
void multiply(Program& program, const OctavoOp& op, int panel, int first, int count, int thread) {
    const Record record(op);
    const int blocks = op.columns / kBlock;
    Panels<P> panels;
    panels.stride = panels.scale_stride = record.size;
    for (int p = 0; p < P; p++) {
        panels.from[p] = static_cast<const char*>(op.weight) + (int64_t)(panel + p) * blocks * record.size;
        panels.scales[p] = panels.from[p] + record.values;
    }
    if (op.dtype == kInt8) {
        for_row_tiles<kMaxRows>(count, Rows<P, false>{program, op, panels, panel, first});
    } else if (count < kUnpackFrom) {
        for_row_tiles<kMaxRows>(count, Rows<P, true>{program, op, panels, panel, first});
    } else {
        const int64_t bytes = (int64_t)op.columns * kPanel;
        char* scratch = static_cast<char*>(program.scratch(thread, P * bytes));
        for (int p = 0; p < P; p++) {
            unpack(panels.from[p], record.size, blocks, scratch + p * bytes);
            panels.from[p] = scratch + p * bytes;
        }
        panels.stride = kBlock * kPanel;
        for_row_tiles<kMaxRows>(count, Rows<P, false>{program, op, panels, panel, first});
    }
}

}  // namespace

void multiply_blocks(Program& program, const OctavoOp& op, int panel, int first, int count, int thread) {
    if (panel + kPair <= panels_of(op))
        multiply<kPair>(program, op, panel, first, count, thread);
    else
        multiply<1>(program, op, panel, first, count, thread);
}

}  // namespace octavo
