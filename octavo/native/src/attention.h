// Common parts of attention over all kinds of cache: queries and keys of a task, their addresses, the online softmax,
// and merging the results of parts.
//
// The cache is [block][kv head][keys, values]. A block's keys are stored as panels of 16 tokens, its values as panels
// of 16 channels (see tile.h), so that both products are those of any packed matrix. 8-bit keys and values are followed
// by their scales in float32, first of all tokens' keys, then of their values.
#pragma once

#include <algorithm>
#include <iterator>

#include "program.h"
#include "tile.h"

namespace octavo {

constexpr int kTile = 128;  // keys between two updates of the running softmax
constexpr int kPart = 512;  // keys that one task reads of a row with few queries
constexpr int kMaxPanels = kTile / kPanel;
constexpr int kBlockRows = 32;  // rows that are computed together, at most
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kSlack = 8;  // a score may exceed its row's peak by this before sums are rescaled (in powers of two)

// Running softmax of some rows: peak score (in powers of two), sum of weights, weighted sum of values.
struct Running {
    float *peaks, *totals, *sums;  // [count], [count], [count][dim]

    void clear(int count, int dim) {
        std::fill_n(peaks, count, kNegInf);
        std::fill_n(totals, count, 0.0f);
        std::fill_n(sums, (int64_t)count * dim, 0.0f);
    }

    // Merges those of a part, whose sums are `stride` apart: both sides are rescaled to the higher peak.
    void merge(int count, int dim, const Running& part, int64_t stride) {
        for (int m = 0; m < count; m += W) {
            const Vec before = load(peaks + m), peak = load(part.peaks + m), top = maximum(before, peak);
            float mine[W], its[W];  // of a side that has seen nothing yet, and of one that agrees: 0 and 1
            store(mine, powers_of_2<6>(select(before == top, Vec{}, before - top)));
            store(its, powers_of_2<6>(select(peak == top, Vec{}, peak - top)));
            for (int i = 0; i < std::min(W, count - m); i++) {
                float *to = sums + (int64_t)(m + i) * dim, *const total = totals + m + i;
                const float* from = part.sums + (m + i) * stride;
                for (int c = 0; c < dim; c += W) store(to + c, load(to + c) * mine[i] + load(from + c) * its[i]);
                *total = *total * mine[i] + part.totals[m + i] * its[i];
            }
            store(peaks + m, top);
        }
    }
};

inline int queries_of(const OctavoStep& step, int row) { return step.query_start[row + 1] - step.query_start[row]; }

inline int parts_of(const OctavoStep& step, int row) { return (step.seq_lens[row] + kPart - 1) / kPart; }

// The number of keys up to that of a task's last query, which is of one row.
inline int causal_end(const OctavoStep& step, const AttentionTask& task) {
    return step.seq_lens[task.row] - queries_of(step, task.row) + task.begin + task.count;
}

// The end of a task's context, or of the part that its rows share.
inline int end_of(const OctavoStep& step, const AttentionTask& task) {
    if (task.sharers >= 0) return (task.part + 1) * kPart;
    int end = causal_end(step, task);
    if (step.ahead != nullptr) {
        const int32_t* const ahead = step.ahead + step.query_start[task.row] + task.begin;
        for (int i = 0, own = end - task.count; i < task.count; i++) end = std::max(end, own + i + 1 + ahead[i]);
    }
    return end;
}

// A task's rows, which are its queries times the heads that share the key-value head, and their running sums.
struct Work {
    Program& program;
    const OctavoOp& op;
    const OctavoStep& step;
    const AttentionTask& task;
    const Sharer* const sharers;  // [count], the queries' rows; null if all are of one
    const int dim, group, rows;
    const int room;               // rows of scratch: whole blocks
    const int end;                // of the context
    const int last_end;           // `visible_end` of the last query, if all are of one row
    // The panel of 16 tokens with the first key that any row attends to. What precedes it may lie in blocks that have
    // left the window and hold other data by now, such as a recurrent state: even its product with 0 may be NaN.
    const int first_panel;

    // Scratch of the thread.
    float* free;
    Running part, whole;
    Vec* totals;    // [rows]: the running totals of `part`, lane by lane
    float* scores;  // [rows][kTile]

    // `more`: further floats of scratch per row; `once`: floats for all rows together; allocated in at most kPieces
    // pieces.
    Work(Program& program, const OctavoOp& op, const AttentionTask& task, int thread, int more = 0, int once = 0)
        : program(program),
          op(op),
          step(program.step()),
          task(task),
          sharers(task.sharers < 0 ? nullptr : &program.attention(op).sharers[task.sharers]),
          dim(op.head_dim),
          group(op.heads / op.kv_heads),
          rows(task.count * group),
          room((rows + kBlockRows - 1) / kBlockRows * kBlockRows),
          end(end_of(step, task)),
          last_end(sharers ? end : causal_end(step, task)),
          first_panel(op.window > 0 ? first_visible() / kPanel * kPanel : 0) {
        constexpr int kPieces = 16;
        const int64_t floats = (int64_t)room * (2 * dim + kTile + W + 4 + more) + once + kPieces * kPanel;
        free = static_cast<float*>(program.scratch(thread, floats * sizeof(float)));
        part.sums = take(room * dim);
        whole.sums = take(rows * dim);
        scores = take(room * kTile);
        totals = reinterpret_cast<Vec*>(take(rows * W));
        for (float** each : {&part.peaks, &part.totals, &whole.peaks, &whole.totals}) *each = take(rows);
    }

    // Returns a piece of the scratch, in whole cache lines.
    float* take(int64_t floats) {
        float* piece = free;
        free += (floats + kPanel - 1) / kPanel * kPanel;
        return piece;
    }

    int64_t token(int query) const {
        return sharers ? step.query_start[sharers[query].row] : step.query_start[task.row] + task.begin + query;
    }
    // The number of keys up to row m's own.
    int visible_end(int m) const {
        return sharers ? step.seq_lens[sharers[m / group].row] : last_end - task.count + m / group + 1;
    }
    // The end of the keys that row m attends to.
    int attended_end(int m) const {
        return visible_end(m) + (step.ahead == nullptr ? 0 : step.ahead[token(m / group)]);
    }
    int visible_begin(int m) const {
        if (op.window <= 0) return 0;
        return op.chunked ? (visible_end(m) - 1) / op.window * op.window : std::max(0, visible_end(m) - op.window);
    }

    // The first key that any row attends to.
    int first_visible() const {
        int first = visible_begin(0);
        for (int m = group; m < rows; m += group) first = std::min(first, visible_begin(m));
        return first;
    }

    // Row m's result for a part: its peak score, its sum of weights, its weighted sum of values.
    float* partial(int part, int m) const {
        const int row = sharers ? sharers[m / group].row : task.row, count = sharers ? group : rows;
        const int64_t first = sharers ? sharers[m / group].result : task.result;
        const int64_t before = (int64_t)task.kv_head * parts_of(step, row) + part;
        return program.partials() + (first + before * count + (sharers ? m % group : m)) * (dim + 2);
    }

    template <class T>
    const T* query(int m) const {
        return program.at<T>(op.input, token(m / group)) + (task.kv_head * group + m % group) * dim;
    }

    // Converts scores s of row m to weights, possibly in place. Exact to 8e-5 or 2e-7, with polynomials of degree D = 3
    // or 6.
    template <int D, class T>
    void weigh(int m, int begin, int end, float* s, T* to) {
        const int low = std::max(visible_begin(m) - begin, 0), high = std::min(attended_end(m), end) - begin;
        if (high <= low) {
            for (int j = 0; j < kTile; j += W) store(to + j, Vec{});
            return;
        }
        float scale = op.scale * kLog2E;
        if (op.soft_cap > 0) {
            for (int j = 0; j < high; j += W)
                store(s + j, hyperbolic_tangent(load(s + j) * (op.scale / op.soft_cap)));
            scale = op.soft_cap * kLog2E;
        }
        if (op.second != nullptr) {
            add_bias(m, begin, high, scale, s);
            scale = 1.0f;
        }
        constexpr int kStep = 4 * kPanel;  // keys at once; with fewer, loop overhead would dominate
        const int stop = (high + kStep - 1) / kStep * kStep;
        for (int j = 0; (low > 0 || high < stop) && j < stop; j += W)
            if (j < low || j + W > high) store(s + j, hide(load(s + j), low - j, high - j));
        if (step.unseen != nullptr) hide_others(m, begin, high, s);
        if (stop < kTile)
            weigh_columns<D, kStep>(m, scale, s, to);
        else
            weigh_columns<D, kTile>(m, scale, s, to);
        for (int j = stop; j < kTile; j += W) store(to + j, Vec{});
    }

    // Hides the drafts on other paths than row m's. Each tile has others: a tile that ends before a query is longer than
    // any tree.
    void hide_others(int m, int begin, int high, float* s) const {
        const int own = visible_end(m) - 1 - begin;
        for (uint32_t word = (uint32_t)step.unseen[token(m / group)]; word != 0; word &= word - 1) {
            const int j = own - __builtin_ctz(word);
            if (j >= 0 && j < high) s[j] = kNegInf;
        }
    }

    // Multiplies scores with `scale` and adds the linear bias: the head's slope times the key's distance.
    void add_bias(int m, int begin, int count, float scale, float* s) const {
        const float slope = static_cast<const float*>(op.second)[task.kv_head * group + m % group] * kLog2E;
        Vec distance;
        for (int i = 0; i < W; i++) distance[i] = (float)(begin + i - (visible_end(m) - 1));
        for (int j = 0; j < count; j += W, distance += (float)W) store(s + j, load(s + j) * scale + distance * slope);
    }

    template <int D, int Columns, class T>
    __attribute__((always_inline)) void weigh_columns(int m, float scale, const float* s, T* to) {
        Vec peak = splat(kNegInf);
#pragma GCC unroll 16
        for (int j = 0; j < Columns; j += W) peak = maximum(peak, load(s + j));
        if (exceeds(peak * scale, part.peaks[m] + kSlack)) raise_peak(m, horizontal_max(peak) * scale);
        const float top = part.peaks[m];
        constexpr int per = kPerWord<T>;
        Vec sum{};
#pragma GCC unroll 16
        for (int j = 0; j < Columns; j += W * per) {
            Vec weights[per];
            for (int n = 0; n < per; n++) weights[n] = powers_of_2<D>(load(s + j + n * W) * scale - top);
            const Word words = join<T>(weights);
            std::memcpy(to + j, &words, sizeof words);
            sum = multiply_add<T>(sum, words, ones<T>());  // of the rounded weights, so that common rounding cancels
        }
        totals[m] += sum;
    }

    // Rescales the sums so far to a higher peak.
    void raise_peak(int m, float peak) {
        const float before = part.peaks[m];
        part.peaks[m] = peak;
        if (before == kNegInf) return;  // nothing was summed yet
        const float factor = exponential2(before - peak);
        float* o = part.sums + (int64_t)m * dim;
        for (int c = 0; c < dim; c += W) store(o + c, load(o + c) * factor);
        totals[m] *= factor;
    }

    // Sets lanes outside [low, high) to minus infinity.
    static Vec hide(Vec v, int low, int high) {
        Int lane;
        for (int i = 0; i < W; i++) lane[i] = i;
        return select((lane >= low) & (lane < high), v, splat(kNegInf));
    }

    void keep_part() const {
        for (int m = 0; m < rows; m++) {
            float* to = partial(task.part, m);
            to[0] = part.peaks[m];
            to[1] = part.totals[m];
            std::copy_n(part.sums + (int64_t)m * dim, dim, to + 2);
        }
    }

    void merge_parts() {
        whole.clear(rows, dim);
        for (int i = 0; i < parts_of(step, task.row); i++) {
            float* const kept = partial(i, 0);
            const int64_t stride = dim + 2;
            for (int m = 0; m < rows; m++) part.peaks[m] = kept[m * stride], part.totals[m] = kept[m * stride + 1];
            whole.merge(rows, dim, {part.peaks, part.totals, kept + 2}, stride);
        }
        finish(whole);
    }

    void finish(const Running& of) const { op.dtype == kBfloat ? finish_as<bf16>(of) : finish_as<float>(of); }

    // The weight of a row's sink, which has no value.
    float sink(int m, float peak) const {
        if (op.third == nullptr) return 0;
        const float score = static_cast<const float*>(op.third)[task.kv_head * group + m % group] * kLog2E - peak;
        return exponential2(std::min(score, 126.0f));
    }

    template <class T>
    void finish_as(const Running& of) const {
        for (int m = 0; m < rows; m++) {
            T* to = program.at<T>(op.output, token(m / group)) + (task.kv_head * group + m % group) * dim;
            const float *from = of.sums + (int64_t)m * dim, inverse = 1.0f / (of.totals[m] + sink(m, of.peaks[m]));
            for (int c = 0; c < dim; c += W) store(to + c, load(from + c) * inverse);
        }
    }
};

struct Place {
    const uint32_t *keys, *values;  // the values of the first channel panel
    const float *key_scales, *value_scales;
};

// One row's context in the cache, for one key-value head.
template <class T>
struct Context {
    const char* cache;
    const int32_t* table;
    int64_t half, block_stride;  // bytes of a block's keys, or values; from one block to the next
    int dim, block_size, end;

    Context(const Work& work, const AttentionTask& task)
        : table(work.step.table(work.op.group, task.row)),
          half((int64_t)work.step.block_size * work.dim * sizeof(T)),
          dim(work.dim),
          block_size(work.step.block_size),
          end(end_of(work.step, task)) {
        const int64_t head = 2 * (half + (sizeof(T) == 1 ? block_size * sizeof(float) : 0));
        block_stride = work.op.block_stride;
        cache = static_cast<const char*>(work.op.cache) + task.kv_head * head;
    }

    // Finds the keys and values of a tile from `at` on, 16 tokens each; beyond the context's end, those of its last.
    void find(int at, Place (&places)[kMaxPanels]) const {
        at = std::min(at, (end - 1) / kPanel * kPanel);
        int index = at / block_size, offset = at % block_size;
        const char* block = cache + table[index] * block_stride;
        for (Place& place : places) {
            const float* scales = reinterpret_cast<const float*>(block + 2 * half) + offset;
            place = {reinterpret_cast<const uint32_t*>(block + offset * dim * sizeof(T)),
                     reinterpret_cast<const uint32_t*>(block + half + offset * kPanel * sizeof(T)), scales,
                     scales + block_size};
            if ((at += kPanel) >= end) continue;
            if ((offset += kPanel) < block_size) continue;
            offset = 0;
            block = cache + table[++index] * block_stride;
        }
    }
};

// Iterates over a task's keys, a tile at a time. `Own` implements the cache's number format: fetch() prepares the
// queries, attend_tile(begin, end) adds keys and values to `part`.
template <class T, class Own>
struct Reader : Work {
    const AttentionTask& after;      // the task that this thread most likely takes next
    const Context<T> context, next;  // of this task, and of that one
    const int next_begin;            // the first key of the next task
    Place places[kMaxPanels], soon[kMaxPanels];  // of a tile of keys and of the tile after it

    Reader(Program& program, const OctavoOp& op, const AttentionTask& task, const AttentionTask& after, int thread,
           int more, int once = 0)
        : Work(program, op, task, thread, more, once),
          after(after),
          context(*this, task),
          next(*this, after),
          next_begin(std::max(after.part, 0) * kPart) {}

    const uint32_t* values_of(const Place& place, int channel_panel) const {
        return place.values + channel_panel * (step.block_size * kPanel / kPerWord<T>);
    }

    // Few rows are bound by memory, so the same words of the next tile are prefetched. With many rows this costs
    // nothing.
    template <int P>
    static Ahead<P> ahead(const uint32_t* const (&next)[P]) {
        Ahead<P> ahead;
        for (int p = 0; p < P; p++) ahead.from[p] = reinterpret_cast<const char*>(next[p]);
        ahead.step = kPanel * 4;
        return ahead;
    }

    // Adds keys [first, last) of the context to `part`.
    void attend(int first, int last) {
        part.clear(rows, dim);
        std::fill_n(totals, rows, Vec{});
        last = std::min(last, end);
        if (op.window > 0) first = std::max(first, first_panel / kTile * kTile);
        context.find(first, soon);
        for (int begin = first; begin < last; begin += kTile) {
            const int stop = std::min(begin + kTile, last);
            std::copy(std::begin(soon), std::end(soon), places);
            stop < last ? context.find(stop, soon) : next.find(next_begin, soon);
            static_cast<Own*>(this)->attend_tile(begin, stop);
        }
        for (int m = 0; m < rows; m++) part.totals[m] = horizontal_sum(totals[m]);
    }

    // Prefetches a task's rows of a buffer into the second-level cache. (Inline as Ahead::fetch is.)
    template <int Write>
    __attribute__((always_inline)) void fetch_rows(int buffer, const AttentionTask& task) const {
        const int64_t size = (int64_t)group * dim * (op.dtype == kBfloat ? 2 : 4);
        for (int query = task.begin; query < task.begin + task.count; query++) {
            const int64_t token = task.sharers < 0
                                      ? step.query_start[task.row] + query
                                      : step.query_start[program.attention(op).sharers[task.sharers + query].row];
            const char* row = program.at<char>(buffer, token) + task.kv_head * size;
            for (int64_t line = 0; line < size; line += 64) __builtin_prefetch(row + line, Write, 2);
        }
    }

    void run() {
        static_cast<Own*>(this)->fetch();
        if (task.part < 0) {  // this takes a while
            fetch_rows<0>(op.input, after);
            fetch_rows<1>(op.output, task);
        }
        if (task.part >= 0) {
            attend(task.part * kPart, (task.part + 1) * kPart);
            keep_part();
            return;
        }
        if (end <= kPart) {
            attend(0, end);
            finish(part);
            return;
        }
        whole.clear(rows, dim);
        for (int first = 0; first < end; first += kPart) {
            attend(first, first + kPart);
            whole.merge(rows, dim, part, dim);
        }
        finish(whole);
    }
};

// A task over a cache of 8-bit numbers: `octavo_attend_int8`.
using AttendInt8 = void (*)(Program& program, const OctavoOp& op, const AttentionTask& task, const AttentionTask& after,
                            int thread);

}  // namespace octavo
