// Division of a step's attention into tasks of about equal size.

#include <algorithm>

#include "attention.h"

namespace octavo {

namespace {

// Approximate rows of a task (queries x heads that share a kv head). With AMX, each task rearranges the values it
// reads.
#if defined(OCTAVO_AMX)
constexpr int kQueryRows = 96;
#else
constexpr int kQueryRows = 48;
#endif
constexpr int kSplitQueries = 8;  // rows with at most this many queries are split over their context

// Rows of one query each, sorted so that rows whose contexts begin with the same blocks are adjacent.
struct Decodes {
    const OctavoStep& step;
    const int group;  // of the cache
    std::vector<Sharer> rows;
    std::vector<int> common;  // number of whole parts that a row has in common with the next

    const int32_t* begin(const Sharer& row) const { return step.table(group, row.row); }

    // The end of the blocks of its whole parts.
    const int32_t* end(const Sharer& row) const {
        return begin(row) + step.seq_lens[row.row] / kPart * (kPart / step.block_size);
    }

    void find_common() {
        common.assign(rows.size(), 0);
        if (rows.size() < 2 || kPart % step.block_size) return;
        std::sort(rows.begin(), rows.end(), [&](const Sharer& a, const Sharer& b) {
            return std::lexicographical_compare(begin(a), end(a), begin(b), end(b));
        });
        for (size_t i = 0; i + 1 < rows.size(); i++) {
            const auto differ = std::mismatch(begin(rows[i]), end(rows[i]), begin(rows[i + 1]), end(rows[i + 1]));
            common[i] = (int)(differ.first - begin(rows[i])) / (kPart / step.block_size);
        }
    }

    // Number of whole parts that row i shares with a neighbour.
    int shared(size_t i) const { return std::max(common[i], i > 0 ? common[i - 1] : 0); }
};

// Adds tasks for the parts that rows have in common, for at most `most` rows each.
void plan_shared(const Decodes& decodes, int kv_heads, int most, AttentionPlan& plan) {
    const int count = (int)decodes.rows.size();
    const auto take = [&](int part, int first, int rows) {
        const int32_t sharers = (int32_t)plan.sharers.size();
        plan.sharers.insert(plan.sharers.end(), &decodes.rows[first], &decodes.rows[first] + rows);
        for (int head = 0; head < kv_heads; head++)
            plan.tasks.push_back({decodes.rows[first].row, head, 0, rows, part, -1, sharers});
    };
    const int parts = count ? *std::max_element(decodes.common.begin(), decodes.common.end()) : 0;
    for (int part = 0; part < parts; part++)
        for (int first = 0, last; first < count; first = last) {
            for (last = first + 1; last < count && decodes.common[last - 1] > part;) last++;
            if (last - first > 1)
                each_row_tile(last - first, most, [&](int at, int rows) { take(part, first + at, rows); });
        }
}

}  // namespace

void plan_attention(const Program& program, const OctavoOp& op, AttentionPlan& plan) {
    const OctavoStep& step = program.step();
    const int group = op.heads / op.kv_heads, most = std::max(1, kQueryRows / group);
    Decodes decodes{step, op.group, {}, {}};
    const auto split = [&](int row, int64_t result, int first) {
        for (int head = 0; head < op.kv_heads; head++)
            for (int part = first; part < parts_of(step, row); part++)
                plan.tasks.push_back({row, head, 0, queries_of(step, row), part, result, -1});
    };
    for (int row = 0; row < step.rows; row++) {
        const int count = queries_of(step, row);
        if (count > kSplitQueries || step.seq_lens[row] <= kPart) {
            for (int end = count; end > 0; end -= most)
                for (int head = 0; head < op.kv_heads; head++)
                    plan.tasks.push_back({row, head, std::max(0, end - most), std::min(end, most), -1, -1, -1});
            continue;
        }
        for (int head = 0; head < op.kv_heads; head++)
            plan.merges.push_back({row, head, 0, count, -1, plan.partial_heads, -1});
        if (count == 1)
            decodes.rows.push_back({row, plan.partial_heads});
        else
            split(row, plan.partial_heads, 0);
        plan.partial_heads += (int64_t)parts_of(step, row) * op.heads * count;
    }
    decodes.find_common();
    plan_shared(decodes, op.kv_heads, most, plan);
    for (size_t i = 0; i < decodes.rows.size(); i++) split(decodes.rows[i].row, decodes.rows[i].result, decodes.shared(i));
    const auto cost = [&](const AttentionTask& t) {
        const int64_t context = step.seq_lens[t.row] - queries_of(step, t.row);
        return (t.part >= 0 ? kPart : context + t.begin + t.count) * t.count;
    };
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                     [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
}

}  // namespace octavo
