// Attention over keys and values in bfloat16 by AMX. All rows use it, of prompts and of single tokens: AMX rounds
// differently from AVX-512, and a row's result must not depend on the rest of the batch.
#pragma once

#include "amx.h"
#include "attention.h"

#if defined(OCTAVO_AMX)

namespace octavo {

// A product of a block of rows with panels, two panels at a time.
struct TileProduct {
    const uint32_t* const* panels;
    const uint32_t* const* tails;  // one more tile after a panel's whole tiles, stored elsewhere; or null
    int count, tiles;              // panels; whole tiles of a panel
    const void* rows;
    int64_t row_stride;  // bytes
    float* sums;         // of a row, panel by panel
    int64_t sum_stride;  // floats
    bool anew, both;     // sums begin with zero, not with the stored ones; there are rows of a second tile

    // Multiplies this panel and the next one, if any. Meanwhile prefetches half tile `half` of `panel` of the data read
    // next into the second-level cache, from soon(panel, half), which may be null.
    template <class Soon>
    void run(int panel, const Soon& soon) const {
        if (panel + 1 < count)
            both ? run<2, 2>(panel, soon) : run<1, 2>(panel, soon);
        else
            both ? run<2, 1>(panel, soon) : run<1, 1>(panel, soon);
    }

    template <class Soon>
    void run(const Soon& soon) const {
        for (int panel = 0; panel < count; panel += 2) run(panel, soon);
    }

private:
    static constexpr int kHalfWords = amx::kWords / 2;

    template <int Halves, int P, class Soon>
    void run(int panel, const Soon& soon) const {
        const uint32_t* from[P];
        for (int p = 0; p < P; p++) from[p] = panels[panel + p];
        const char* const left = static_cast<const char*>(rows);
        float* const to = sums + panel * kPanel;
        anew ? amx::clear_sums<Halves, P>() : amx::load_sums<Halves, P>(to, sum_stride);
        amx::add_words<Halves>(left, row_stride, from, tiles, [&](int tile) __attribute__((always_inline)) {
            for (int p = 0; p < P; p++)
                for (int half = 2 * tile; half < 2 * tile + 2; half++)
                    if (const uint32_t* next = soon(panel + p, half))
                        for (int word = 0; word < kHalfWords; word++) __builtin_prefetch(next + word * kPanel, 0, 2);
        });
        if (tails != nullptr) {
            for (int p = 0; p < P; p++) from[p] = tails[panel + p];
            amx::add_words<Halves>(left + tiles * amx::kRowBytes, row_stride, from, 1, [](int) {});
        }
        amx::store_sums<Halves, P>(to, sum_stride);
    }
};

// A panel of keys consists of tiles in the cache's own layout, and half a tile more if channels are an odd multiple of
// 16. A tile of values has 32 tokens, which may be in two blocks: they are gathered once for all rows of the task.
// Gathered data is 0 beyond the context's end, where the cache is arbitrary and even a product with 0 may be NaN.
struct TileReader : Reader<bf16, TileReader> {
    static_assert(kBlockRows == 2 * amx::kRows);
    static constexpr int kTileWords = amx::kWords * kPanel;
    static constexpr int kHalfTile = kTileWords / 2;
    static constexpr int kValues = kTile / 2 * kPanel;  // words of a tile's values of 16 channels

    const int key_tiles;   // whole ones of a panel
    const int words;       // of a query, with zeros up to whole tiles
    const int block_rows;  // of all blocks; surplus rows of the last one are computed from arbitrary data
    uint32_t* queries;     // [room][words]
    uint32_t* values;      // [channel panel][kTile / 2][kPanel]
    uint32_t* tails;       // [kMaxPanels][amx::kWords][kPanel]: incomplete tiles of keys, padded with zeros
    const uint32_t **key_panels, **key_tails, **value_panels;

    TileReader(Program& program, const OctavoOp& op, const AttentionTask& task, const AttentionTask& after, int thread)
        : Reader(program, op, task, after, thread, query_words(op.head_dim),
                 op.head_dim / kPanel * kValues + kMaxPanels * kTileWords + 4 * kMaxPanels + op.head_dim / 8),
          key_tiles(dim / 2 / amx::kWords),
          words(query_words(dim)),
          block_rows(even_rows(rows)),
          queries(reinterpret_cast<uint32_t*>(take(room * words))),
          values(reinterpret_cast<uint32_t*>(take(dim / kPanel * kValues))),
          tails(reinterpret_cast<uint32_t*>(take(kMaxPanels * kTileWords))),
          key_panels(reinterpret_cast<const uint32_t**>(take(2 * kMaxPanels))),
          key_tails(reinterpret_cast<const uint32_t**>(take(2 * kMaxPanels))),
          value_panels(reinterpret_cast<const uint32_t**>(take(dim / 8))) {
        for (int p = 0; p < kMaxPanels; p++) key_tails[p] = tails + p * kTileWords;
        if (has_tails()) std::fill_n(tails, kMaxPanels * kTileWords, 0);
        for (int panel = 0; panel < dim / kPanel; panel++) value_panels[panel] = values + panel * kValues;
        program.registers(thread).shape(block_rows);
    }

    bool has_tails() const { return key_tiles * 2 * amx::kWords < dim; }

    static int query_words(int dim) { return (dim / 2 + amx::kWords - 1) / amx::kWords * amx::kWords; }

    static int even_rows(int rows) {
        const int blocks = (rows + kBlockRows - 1) / kBlockRows;
        return (rows + blocks - 1) / blocks;
    }

    void fetch() {
        if (has_tails()) std::fill_n(queries, (int64_t)room * words, 0);
        for (int m = 0; m < rows; m++) std::memcpy(queries + (int64_t)m * words, query<bf16>(m), dim * 2);
    }

    void attend_tile(int begin, int end) {
        const auto next_keys = [&](int p, int half) { return soon[p].keys + half * kHalfTile; };
        const auto nowhere = [](int, int) -> const uint32_t* { return nullptr; };
        for (int p = 0; p * kPanel < end - begin; p++) bring_keys(p);
        const TileProduct first_scores = score(0, seen(0, begin, end));
        for (int p = 0; p * kPanel < end - begin; p += 2) {
            if (p < first_scores.count) first_scores.run(p, next_keys);
            for (int i = p; i < p + 2; i++) bring_values(i, begin + i * kPanel < first_panel ? 0 : end - begin);
        }
        for (int first = 0; first < rows; first += block_rows) {
            const int count = seen(first, begin, end);
            if (count == 0) continue;
            if (first > 0) score(first, count).run(nowhere);
            weigh_block(first, std::min(first + block_rows, rows), begin, end);
            gather(first, count).run(nowhere);
        }
    }

    // Number of leading keys of a tile that a block's rows attend to.
    int seen(int first, int begin, int end) const {
        if (!sharers && visible_begin(first) >= end) return 0;
        if (step.ahead != nullptr) return std::max(std::min(end, this->end) - begin, 0);
        return std::max(std::min(end, visible_end(std::min(first + block_rows, rows) - 1)) - begin, 0);
    }

    // Address of the keys at place p for the products.
    void bring_keys(int p) const {
        key_panels[p] = places[p].keys;
        if (has_tails()) std::memcpy(tails + p * kTileWords, places[p].keys + key_tiles * kTileWords, kHalfTile * 4);
    }

    // Gathers the values at place p of a tile of `count` keys; prefetches the next tile's into the second-level cache.
    void bring_values(int p, int count) const {
        const int there = std::max(0, std::min((count - p * kPanel + 1) / 2, kPanel / 2));
        for (int panel = 0; panel < dim / kPanel; panel++) {
            const uint32_t *from = values_of(places[p], panel), *next = values_of(soon[p], panel);
            uint32_t* const to = values + panel * kValues + p * kHalfTile;
#pragma GCC unroll 8
            for (int word = 0; word < kPanel / 2; word++) {
                __builtin_prefetch(next + word * kPanel, 0, 2);
                const Word line = word < there ? load_as<Word>(from + word * kPanel) : Word{};
                std::memcpy(to + word * kPanel, &line, sizeof line);
            }
        }
    }

    // Computes the scores of a block with the first `count` keys.
    TileProduct score(int first, int count) const {
        return {key_panels,
                has_tails() ? key_tails : nullptr,
                (count + kPanel - 1) / kPanel,
                key_tiles,
                queries + (int64_t)first * words,
                words * 4,
                scores,
                kTile,
                true,
                block_rows > amx::kRows};
    }

    // Adds the values of the first `count` keys times a block's weights to its sums.
    TileProduct gather(int first, int count) const {
        return {value_panels,
                nullptr,
                dim / kPanel,
                (count + 2 * kPanel - 1) / (2 * kPanel),
                scores,
                kTile * 4,
                part.sums + (int64_t)first * dim,
                dim,
                false,
                block_rows > amx::kRows};
    }

    // Converts the scores of rows [first, last) to weights, in place. If all rows attend to the whole tile, which is
    // the usual case, bounds are not checked per row.
    void weigh_block(int first, int last, int begin, int end) {
        const bool plain = op.soft_cap <= 0 && op.window <= 0 && op.second == nullptr && step.unseen == nullptr &&
                           std::min(visible_end(first), end) >= begin + kTile;
        const float scale = op.scale * kLog2E;
        float* s = scores;
        for (int m = first; m < last; m++, s += kTile) {
            bf16* const to = reinterpret_cast<bf16*>(s);
            plain ? weigh_columns<3, kTile>(m, scale, s, to) : weigh<3>(m, begin, end, s, to);
        }
    }
};

}  // namespace octavo

#endif
