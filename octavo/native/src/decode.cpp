// A whole step of one token per row in one call. The slots have all inputs of the next step, so the kernels lay out the
// batch themselves.

#include <algorithm>
#include <cmath>
#include <new>

#include "program.h"

namespace octavo {

namespace {

// The batch in the form that the operations read.
struct Layout {
    std::vector<int64_t> ids, positions, places;         // `places` is [groups][rows]
    std::vector<int32_t> query_start, seq_lens, tables;  // `tables` is [groups][rows][blocks]
    OctavoStep step{};

    explicit Layout(const OctavoDecode& d) {
        int64_t longest = 0;
        for (int row = 0; row < d.count; row++) longest = std::max(longest, d.computed[d.slots[row]] + 1);
        const int64_t blocks = (longest + d.block_size - 1) / d.block_size;
        tables.reserve(blocks * d.count * d.groups);
        for (int row = 0; row < d.count; row++) {
            const int64_t slot = d.slots[row], position = d.computed[slot];
            ids.push_back(d.tokens[slot * d.token_stride + position]);
            positions.push_back(position);
            query_start.push_back(row);
            seq_lens.push_back((int32_t)position + 1);
        }
        query_start.push_back(d.count);
        for (int group = 0; group < d.groups; group++)
            for (int row = 0; row < d.count; row++) {
                const int32_t* table = d.block_tables + group * d.group_stride + d.slots[row] * d.table_stride;
                const int64_t position = positions[row];
                places.push_back((int64_t)table[position / d.block_size] * d.block_size + position % d.block_size);
                tables.insert(tables.end(), table, table + blocks);
            }
        step.input_ids = ids.data(), step.positions = positions.data(), step.slots = places.data();
        step.query_start = query_start.data(), step.seq_lens = seq_lens.data();
        step.block_tables = tables.data(), step.table_stride = blocks;
        step.group_tables = blocks * d.count, step.group_slots = d.count;
        std::copy(std::begin(d.external), std::end(d.external), step.external);
        step.tokens = step.rows = d.count, step.block_size = d.block_size;
    }
};

// Writes the tokens into the slots; returns the number of rows without one, because their largest logit is not finite.
int note(const OctavoDecode& d) {
    int flawed = 0;
    for (int row = 0; row < d.count; row++) {
        flawed += !std::isfinite(d.peaks[row]);
        const int64_t slot = d.slots[row];
        const int64_t place = std::min(d.length[slot], d.token_stride - 1);  // the last token of all is never read
        d.tokens[slot * d.token_stride + place] = (int32_t)d.chosen[row];
        d.length[slot]++;
        d.computed[slot]++;
    }
    return flawed;
}

}  // namespace

}  // namespace octavo

using namespace octavo;

extern "C" {

// Returns the number of rows that could not be sampled, or -1 if the step's buffers can't be allocated.
int octavo_decode(void* program, const OctavoDecode* decode) {
    Program& p = *static_cast<Program*>(program);
    const OctavoDecode& d = *decode;
    try {
        p.run(0, d.operations, Layout(d).step);
    } catch (const std::bad_alloc&) {
        return -1;
    }
    const OctavoSample rows{static_cast<float*>(d.external[1]), d.slots, d.allowed, d.sampling, d.tokens, d.length,
                            d.chosen, d.peaks, d.logit_stride, d.token_stride, d.count, d.columns};
    octavo_sample(&p.pool(), &rows);
    return note(d);
}

}  // extern "C"
