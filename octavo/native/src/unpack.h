// Integers in blocks to bfloat16: a pair of panels of a packed matrix (blocks.h) as panels of words of two bfloat16
// (tile.h), for products with activations in bfloat16.
//
// A weight is scale * (value - zero point) + minimum. The difference and its product are exact in float32, so only the
// sum is rounded, and once more to bfloat16: on every processor, the bits equal those of a bfloat16 matrix made from
// the same blocks.
#pragma once

#include "blocks.h"
#include "codes.h"

namespace octavo {

// Returns a vector's first or second half, each lane twice.
template <class V>
inline V twice(V v, int half) {
#if defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return (V)_mm512_permutexvar_epi32(half ? _mm512_add_epi32(low, _mm512_set1_epi32(8)) : low, (__m512i)v);
#else
    V both;
    for (int i = 0; i < W; i++) both[i] = v[half * W / 2 + i / 2];
    return both;
#endif
}

// Values in words with duplicated lanes: the first ones at some bit, the second ones 8 bits above. Each becomes part of
// the fraction of a power of two whose unit in the last place is 1 at that bit, which is a float without a conversion.
struct Places {
    Word mask, exponent;
    Vec offset;

    Places(int bits, int bit, int zero_point) {
        for (int i = 0; i < W; i++) {
            const int place = bit + i % 2 * 8;
            mask[i] = ((1u << bits) - 1) << place;
            exponent[i] = (uint32_t)(127 + 23 - place) << 23;
            offset[i] = (float)((1 << (23 - place)) + zero_point);
        }
    }

    // Returns the values minus the zero point.
    __attribute__((always_inline)) Vec operator()(Word v) const { return (Vec)((v & mask) | exponent) - offset; }
};

// One block of a panel. 4-bit formats have two words in the place of one: the low halves of its bytes, then the others.
template <int Bits>
__attribute__((always_inline)) inline void unpack_block(const Places& low, const Places& high, bool minima,
                                                     const char* record, uint32_t* to) {
    constexpr int kHalves = 8 / Bits;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(record + kPanel * kBlock * Bits / 8);
    for (int v = 0; v < VP; v++, scales += W, record += W * 4) {
        const Vec scale = load_half(scales), minimum = minima ? load_half(scales + kPanel) : Vec{};
        const Vec scale_of[2] = {twice(scale, 0), twice(scale, 1)};
        const Vec minimum_of[2] = {twice(minimum, 0), twice(minimum, 1)};
        uint32_t* place = to + v * W;
#pragma GCC unroll 8
        for (int w = 0; w < kBlockWords / kHalves; w++) {
            const Word both = load_as<Word>(record + w * kPanel * 4);
            const Word lanes[2] = {twice(both, 0), twice(both, 1)};
            for (int half = 0; half < kHalves; half++)
                for (int shift = 0; shift < 32; shift += 16, place += kPanel) {
                    Vec values[2];
                    for (int i = 0; i < 2; i++) {
                        const Word shifted = lanes[i] >> shift;
                        values[i] = (half ? high(shifted) : low(shifted)) * scale_of[i] + minimum_of[i];
                    }
                    const Word words = join<bf16>(values);
                    std::memcpy(place, &words, sizeof words);
                }
        }
    }
}

// P panels of an integer matrix from `panel` on. Their words are written to the thread's buffer, panel by panel.
template <int P>
class PackedPanels {
public:
    PackedPanels(Program& program, const OctavoOp& op, int panel, int thread)
        : op_(op), blocks_(op.columns / kBlock), size_(Record(op).size) {
        const int64_t bytes = has_codes(op) ? code_panel_bytes(op) : (int64_t)blocks_ * size_;
        from_ = static_cast<const char*>(op.weight) + panel * bytes;
        words_ = static_cast<uint32_t*>(program.scratch(thread, (size_t)P * op.columns * kPanel * sizeof(bf16)));
    }

    const uint32_t* words() const { return words_; }

    // Unpacks blocks [first, first + count) of each, and prefetches as much of the panels that this thread will
    // probably take next.
    void unpack(int first, int count) const {
        if (has_codes(op_)) return for_codes(op_, Codes{*this, first * kBlock, count * kBlock});
        op_.dtype == kInt4 ? unpack<4>(first, count) : unpack<8>(first, count);
    }

private:
    // Rounds inputs [first, first + count) of codes.
    struct Codes {
        const PackedPanels& panels;
        int first, count;

        template <int Dtype>
        __attribute__((noinline)) void run() const {
            const OctavoOp& op = panels.op_;
            const int64_t bytes = code_panel_bytes(op), words = (int64_t)op.columns / kPerWord<bf16> * kPanel;
            const CodeRecord record(op);
            const Widener<Dtype> widener(numbers_of(op));
            for (int p = 0; p < P; p++) {
                const char* const panel = panels.from_ + p * bytes;
                uint32_t* const to = panels.words_ + p * words;
                for_groups(op, first, count, [&](int begin, int inputs) {
                    const CodeScales of(op, record, panel, begin / op.scaled);
                    for (int k = begin; k < begin + inputs; k += kFour) {
                        Vec four[kFour][VP];
                        widen_group(op, record, widener, panel, k, kFour, [&](int n, Vec(&v)[VP]) {
                            for (int j = 0; j < VP; j++) four[n - k][j] = v[j] * of.scales[j] + of.minima[j];
                        });
                        for (int i = 0; i < kFour; i += 2)
                            for (int j = 0; j < VP; j++) {
                                const Word both = pair_up(four[i][j], four[i + 1][j]);
                                std::memcpy(to + (k + i) / 2 * kPanel + j * W, &both, sizeof both);
                            }
                    }
                });
            }
        }
    };

    template <int Bits>
    __attribute__((noinline)) void unpack(int first, int count) const {
        constexpr int64_t words = kBlock / kPerWord<bf16> * kPanel;
        const Places low(Bits, 0, op_.zero_point), high(Bits, Bits % 8, op_.zero_point);
        const bool minima = op_.minima;
        const char* soon = from_ + (int64_t)P * (blocks_ + first) * size_;
        for (int b = first; b < first + count; b++)
            for (int p = 0; p < P; p++, soon += size_) {
                for (int line = 0; line < size_; line += 64) __builtin_prefetch(soon + line, 0, 2);
                const int64_t block = (int64_t)p * blocks_ + b;
                unpack_block<Bits>(low, high, minima, from_ + block * size_, words_ + block * words);
            }
    }

    const OctavoOp& op_;
    const char* from_;
    uint32_t* words_;
    int blocks_, size_;
};

}  // namespace octavo
