// A whole step of few known tokens per row, and its drafts, in one call. The slots have all inputs of the next step, so
// the kernels lay out the batch themselves, and append the tokens. Stages of a pipeline before the last one draw none.

#include <algorithm>
#include <cmath>
#include <new>

#include "program.h"

namespace octavo {

namespace {

// Returns a slot's known tokens that are not computed, except the last one.
int64_t behind(const OctavoDecode& d, int64_t slot) {
    return d.columns ? std::max<int64_t>(0, d.length[slot] - d.computed[slot] - 1) : 0;  // stages draw no tokens
}

// The batch in the form that the operations read.
struct Layout {
    std::vector<int64_t> ids, positions, places;         // `places` is [groups][tokens]
    std::vector<int64_t> slots, ahead;                   // of each token: its slot, and its place after the last known
    std::vector<int32_t> query_start, seq_lens, tables;  // `tables` is [groups][rows][blocks]
    OctavoStep step{};

    explicit Layout(const OctavoDecode& d) {
        int64_t longest = 0;
        for (int row = 0; row < d.count; row++)
            longest = std::max(longest, d.computed[d.slots[row]] + 1 + d.drafts[row]);
        const int64_t blocks = (longest + d.block_size - 1) / d.block_size;
        tables.reserve(blocks * d.count * d.groups);
        for (int row = 0; row < d.count; row++) {
            const int64_t slot = d.slots[row], first = d.computed[slot], known = behind(d, slot);
            query_start.push_back((int32_t)ids.size());
            seq_lens.push_back((int32_t)(first + 1 + d.drafts[row]));
            for (int64_t i = 0; i <= d.drafts[row]; i++) {
                ids.push_back(d.tokens[slot * d.token_stride + first + i]);
                positions.push_back(first + i);
                slots.push_back(slot);
                ahead.push_back(i - known);
            }
        }
        query_start.push_back((int32_t)ids.size());
        for (int group = 0; group < d.groups; group++)
            for (int row = 0; row < d.count; row++) {
                const int32_t* table = d.block_tables + group * d.group_stride + d.slots[row] * d.table_stride;
                for (int token = query_start[row]; token < query_start[row + 1]; token++) {
                    const int64_t block = table[positions[token] / d.block_size];
                    places.push_back(block * d.block_size + positions[token] % d.block_size);
                }
                tables.insert(tables.end(), table, table + blocks);
            }
        step.input_ids = ids.data(), step.positions = positions.data(), step.slots = places.data();
        step.query_start = query_start.data(), step.seq_lens = seq_lens.data();
        step.block_tables = tables.data(), step.table_stride = blocks;
        step.group_tables = blocks * d.count, step.group_slots = (int64_t)ids.size();
        std::copy(std::begin(d.external), std::end(d.external), step.external);
        step.tokens = (int32_t)ids.size(), step.rows = d.count, step.block_size = d.block_size;
    }
};

// Returns how many of a row's tokens are appended: a draft is accepted if it is the token drawn in its place. `first`:
// the row's last known token.
int64_t verified(const OctavoDecode& d, int row, int first) {
    const int64_t slot = d.slots[row], drafts = std::min(d.num_drafts[slot], d.drafts[row] - behind(d, slot));
    const int32_t* draft = d.tokens + slot * d.token_stride + d.length[slot];
    int64_t accepted = 0;
    while (accepted < drafts && std::isfinite(d.peaks[first + accepted]) &&
           d.chosen[first + accepted] == draft[accepted])
        accepted++;
    return accepted + 1;
}

// Appends the tokens to the slots; returns the number of rows of logits without a token, because their largest one is
// not finite.
int note(const OctavoDecode& d, const Layout& layout) {
    int flawed = 0;
    for (int row = 0; row < d.count; row++) {
        const int64_t slot = d.slots[row], known = behind(d, slot), first = layout.query_start[row] + known;
        for (int64_t i = first; i < layout.query_start[row + 1]; i++) flawed += !std::isfinite(d.peaks[i]);
        const int64_t kept = d.kept[row] = verified(d, row, (int)first);
        for (int64_t i = 0; i < kept; i++) {
            const int64_t place = std::min(d.length[slot] + i, d.token_stride - 1);  // the last token of all is never read
            d.tokens[slot * d.token_stride + place] = (int32_t)d.chosen[first + i];
        }
        d.length[slot] += kept;
        if (kept > d.drafts[row] - known || !d.rewinds) d.computed[slot] += known + kept;
    }
    return flawed;
}

// Counts the step's tokens as computed; the last stage of the pipeline draws the next ones.
int pass_on(const OctavoDecode& d) {
    for (int row = 0; row < d.count; row++) d.computed[d.slots[row]] += 1 + d.drafts[row];
    return 0;
}

// Draws tokens from the rows [first, last) of logits.
void sample(Program& p, const OctavoDecode& d, const Layout& layout, int first, int last) {
    if (first == last) return;
    const OctavoSample rows{static_cast<float*>(d.external[1]) + first * d.logit_stride,
                            layout.slots.data() + first,
                            layout.ahead.data() + first,
                            d.allowed == nullptr ? nullptr : d.allowed + first,
                            d.sampling,
                            d.tokens,
                            d.length,
                            d.chosen + first,
                            d.peaks + first,
                            d.logit_stride,
                            d.token_stride,
                            last - first,
                            d.columns};
    octavo_sample(&p.pool(), &rows);
}

// Computes one step; returns what `octavo_decode` does.
int decode_once(Program& p, const OctavoDecode& d) {
    const Layout layout(d);
    try {
        if (!p.run(0, d.operations, layout.step)) return -2;
    } catch (const std::bad_alloc&) {
        return -1;
    }
    if (!d.columns) return pass_on(d);
    int begin = 0;  // of rows of logits that are drawn from
    for (int row = 0; row < d.count; row++) {
        const int known = (int)behind(d, d.slots[row]);
        if (known == 0) continue;
        sample(p, d, layout, begin, layout.query_start[row]);
        begin = layout.query_start[row] + known;
    }
    sample(p, d, layout, begin, d.results);
    return note(d, layout);
}

}  // namespace

}  // namespace octavo

using namespace octavo;

extern "C" {

// Returns the number of rows of logits that could not be sampled, -1 if a step's buffers can't be allocated, or -2 if
// another rank was not there in time.
int octavo_decode(void* program, const OctavoDecode* decode) {
    int flawed = 0;
    for (int i = 0; i < decode->times; i++) {
        const int found = decode_once(*static_cast<Program*>(program), *decode);
        if (found < 0) return found;
        flawed += found;
    }
    return flawed;
}

}  // extern "C"
