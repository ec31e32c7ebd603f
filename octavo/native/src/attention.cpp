// Paged attention: reads keys and values through block tables, in one pass with the softmax on the fly (Milakov and
// Gimelshein 2018, https://arxiv.org/abs/1805.02867), in tiles of queries so that a key is read once for many of them
// (Dao et al. 2022, https://arxiv.org/abs/2205.14135).
//
// The cache is [block][kv head][keys, values]. A block's keys lie as panels of 16 tokens, its values as panels of 16
// channels (see tile.h), so that both products are those of any packed matrix.
//
// Every query's sums run in an order that depends on its own position alone: kTile keys at a time, kPart keys to a
// part, parts merged front to back. So the same bits come out whatever else is in the batch, however a prompt was cut
// into chunks, and however the work was dealt out to threads.

#include <algorithm>

#include "program.h"
#include "tile.h"

namespace octavo {

namespace {

constexpr int kTile = 128;               // keys between two updates of the running softmax
constexpr int kPart = 512;               // keys that one task reads of a row with few queries
constexpr int kQueryRows = 48;           // rows of a task (queries x heads that share a kv head), about
constexpr int kSplitQueries = 8;         // rows with at most so many queries are split over their context
constexpr int kMaxPanels = kTile / kPanel;

// Running softmax of some rows: peak score (in powers of two), sum of weights, weighted sum of values.
struct Running {
    float *peaks, *totals, *sums;  // [count], [count], [count][dim]

    void clear(int count, int dim) {
        std::fill_n(peaks, count, kNegInf);
        std::fill_n(totals, count, 0.0f);
        std::fill_n(sums, (int64_t)count * dim, 0.0f);
    }

    // Takes in row m of a part: both sides are rescaled to the higher peak.
    void merge(int m, int dim, float peak, float total, const float* part) {
        if (peak == kNegInf) return;
        const float top = std::max(peak, peaks[m]);
        const float mine = exponential2(peaks[m] - top), its = exponential2(peak - top);
        float* to = sums + (int64_t)m * dim;
        for (int c = 0; c < dim; c += W) store(to + c, load(to + c) * mine + load(part + c) * its);
        totals[m] = totals[m] * mine + total * its;
        peaks[m] = top;
    }
};

struct Place {
    const uint32_t *keys, *values;  // the values of the first channel panel
};

// One row's context in the cache, for one key-value head.
template <class T>
struct Context {
    const T* cache;
    const int32_t* table;
    int64_t half;          // elements of a block's keys, or values
    int64_t block_stride;  // elements from one block to the next
    int dim, block_size, end;

    Context(const OctavoOp& op, const OctavoStep& step, const AttentionTask& task)
        : table(step.block_tables + task.row * step.table_stride),
          half((int64_t)step.block_size * op.head_dim),
          block_stride(op.kv_heads * 2 * half),
          dim(op.head_dim),
          block_size(step.block_size),
          end(step.seq_lens[task.row] - queries_of(step, task.row) + task.begin + task.count) {
        cache = static_cast<const T*>(op.cache) + task.kv_head * 2 * half;
    }

    static int queries_of(const OctavoStep& step, int row) { return step.query_start[row + 1] - step.query_start[row]; }

    // Where the keys and values of the 16 tokens from `at` on lie; past the context's end, those of its last ones.
    Place place(int at) const {
        at = std::min(at, (end - 1) / kPanel * kPanel);
        const T* block = cache + table[at / block_size] * block_stride;
        const int offset = at % block_size;
        return {reinterpret_cast<const uint32_t*>(block + offset * dim),
                reinterpret_cast<const uint32_t*>(block + half + offset * kPanel)};
    }
};

template <class T>
struct Reader {
    // Rows of a register tile over a pair of panels; fewer where speed matters less than the time to compile.
    static constexpr int kMaxRows = sizeof(T) == 2 ? 2 * kWideRows : kWideRows;
    static constexpr int kMaxOddRows = 4;  // over the last panel of an odd number

    const OctavoOp& op;
    const OctavoStep& step;
    const AttentionTask& task;
    const Context<T> context, next;  // of this task, and of the one that this thread most likely takes next
    const int dim, group, rows;      // rows = queries of the task x heads that share the kv head
    const int position;              // of the first query
    const int next_begin;            // the first key of the next task

    // Scratch of the thread.
    uint32_t* queries;  // [rows][dim] as words, interleaved tile by tile
    uint32_t* weights;  // [rows][kTile] as words
    float* scores;      // [rows][kTile]
    Vec* totals;        // [rows]: the running totals of `part`, lane by lane
    Running part, whole;
    Place places[kMaxPanels], soon[kMaxPanels];  // of a tile of keys and of the tile after it

    Reader(Program& program, const OctavoOp& op, const AttentionTask& task, const AttentionTask& after, int thread)
        : op(op),
          step(program.step()),
          task(task),
          context(op, step, task),
          next(op, step, after),
          dim(op.head_dim),
          group(op.heads / op.kv_heads),
          rows(task.count * group),
          position(context.end - task.count),
          next_begin(std::max(after.part, 0) * kPart) {
        const int64_t floats = (int64_t)rows * (3 * dim + 2 * kTile + W + 4);
        float* free = static_cast<float*>(program.scratch(thread, floats * sizeof(float)));
        const auto take = [&](int64_t n) { return (free += n) - n; };
        part.sums = take(rows * dim);
        whole.sums = take(rows * dim);
        queries = reinterpret_cast<uint32_t*>(take(rows * dim));
        scores = take(rows * kTile);
        weights = reinterpret_cast<uint32_t*>(take(rows * kTile));
        totals = reinterpret_cast<Vec*>(take(rows * W));
        part.peaks = take(rows);
        part.totals = take(rows);
        whole.peaks = take(rows);
        whole.totals = take(rows);
    }

    int64_t token(int query) const { return step.query_start[task.row] + task.begin + query; }
    int visible_end(int m) const { return position + m / group + 1; }
    int visible_begin(int m) const { return op.window > 0 ? std::max(0, visible_end(m) - op.window) : 0; }

    struct Fetch {
        const Reader& r;
        const Program& program;
        template <int M>
        void run(int first) const {
            const int words = r.dim / kPerWord<T>;
            uint32_t* to = r.queries + (int64_t)first * words;
            for (int m = 0; m < M; m++) {
                const int row = first + m, head = r.task.kv_head * r.group + row % r.group;
                const T* query = program.at<T>(r.op.input, r.token(row / r.group)) + head * r.dim;
                for (int k = 0; k < words; k++) std::memcpy(to + k * M + m, query + k * kPerWord<T>, 4);
            }
        }
    };

    const uint32_t* values_of(const Place& place, int channel_panel) const {
        return place.values + channel_panel * (step.block_size * kPanel / kPerWord<T>);
    }

    void find(int begin, int last) {
        const bool more = begin + kTile < last;
        for (int p = 0; p < kMaxPanels; p++) {
            places[p] = context.place(begin + p * kPanel);
            soon[p] = more ? context.place(begin + kTile + p * kPanel) : next.place(next_begin + p * kPanel);
        }
    }

    // While few rows are computed memory is what they wait for, so the same words of the next tile are fetched. With
    // many rows the keys are in a cache already.
    template <bool Few, int P>
    static auto ahead(const uint32_t* const (&next)[P]) {
        if constexpr (!Few) {
            return Nothing{};
        } else {
            Ahead<P> ahead;
            for (int p = 0; p < P; p++) ahead.from[p] = reinterpret_cast<const char*>(next[p]);
            ahead.step = kPanel * 4;
            return ahead;
        }
    }

    // Keys [first, last) of the context into `part`.
    void attend(int first, int last) {
        part.clear(rows, dim);
        std::fill_n(totals, rows, Vec{});
        last = std::min(last, context.end);
        if (op.window > 0) first = std::max(first, visible_begin(0) / kTile * kTile);
        for (int begin = first; begin < last; begin += kTile) {
            const int end = std::min(begin + kTile, last);
            find(begin, last);
            rows <= kMaxRows ? attend_tile<true>(begin, end) : attend_tile<false>(begin, end);
        }
        for (int m = 0; m < rows; m++) part.totals[m] = horizontal_sum(totals[m]);
    }

    template <bool Few>
    void attend_tile(int begin, int end) {
        const int panels = (end - begin + kPanel - 1) / kPanel;
        for (int p = 0; p < panels; p += 2) for_row_tiles<kMaxRows>(rows, Score<Few>{*this, p});
        for (int m = 0; m < rows; m++) weigh(m, begin, end);
        int panel = 0;
        for (; panel + 2 <= dim / kPanel; panel += 2)
            for_row_tiles<kMaxRows>(rows, Gather<2, Few>{*this, panel, begin, end});
        if (panel < dim / kPanel) for_row_tiles<kMaxOddRows>(rows, Gather<1, Few>{*this, panel, begin, end});
    }

    template <bool Few>
    struct Score {
        const Reader& r;
        int panel;
        template <int M>
        void run(int first) const {
            Tile<M, 2> tile;
            tile.clear();
            const int words = r.dim / kPerWord<T>;
            const uint32_t* keys[] = {r.places[panel].keys, r.places[panel + 1].keys};
            const uint32_t* next[] = {r.soon[panel].keys, r.soon[panel + 1].keys};
            multiply<T>(tile, Interleaved<M>{r.queries + (int64_t)first * words}, keys, words, ahead<Few>(next));
            tile.write(r.scores + first * kTile + panel * kPanel, kTile);
        }
    };

    // Scores of row m to weights, and what was summed so far to the new peak.
    void weigh(int m, int begin, int end) {
        constexpr float log2e = 1.44269504088896341f;
        float* s = scores + m * kTile;
        T* to = reinterpret_cast<T*>(weights) + m * kTile;
        const int low = std::max(visible_begin(m) - begin, 0), high = std::min(visible_end(m), end) - begin;
        if (high <= low) {
            for (int j = 0; j < kTile; j += W) store(to + j, Vec{});
            return;
        }
        float scale = op.scale * log2e;
        if (op.soft_cap > 0) {
            for (int j = 0; j < high; j += W)
                store(s + j, hyperbolic_tangent(load(s + j) * (op.scale / op.soft_cap)) * (op.soft_cap * log2e));
            scale = 1.0f;
        }
        for (int j = 0; j < high; j += W)
            if (j < low || j + W > high) store(s + j, hide(load(s + j), low - j, high - j));
        Vec peak = splat(kNegInf);
        for (int j = 0; j < high; j += W) peak = maximum(peak, load(s + j));
        const float before = part.peaks[m], top = std::max(before, horizontal_max(peak) * scale);
        Vec sum{};
        int j = 0;
        for (; j < high; j += W) {
            const Vec weight = exp2_of_negative<sizeof(T) == 2 ? 3 : 6>(load(s + j) * scale - top);
            store(to + j, weight);
            sum += weight;
        }
        for (; j < kTile; j += W) store(to + j, Vec{});
        if (top > before) {
            const float factor = before == kNegInf ? 0.0f : exponential2(before - top);
            float* o = part.sums + (int64_t)m * dim;
            for (int c = 0; c < dim; c += W) store(o + c, load(o + c) * factor);
            totals[m] *= factor;
            part.peaks[m] = top;
        }
        totals[m] += sum;
    }

    // Lanes outside [low, high) to minus infinity, whatever they hold.
    static Vec hide(Vec v, int low, int high) {
        Int lane;
        for (int i = 0; i < W; i++) lane[i] = i;
        return select((lane >= low) & (lane < high), v, splat(kNegInf));
    }

    template <int P, bool Few>
    struct Gather {
        const Reader& r;
        int panel, begin, end;
        static constexpr int per = kPerWord<T>;

        template <int M>
        void run(int first) const {
            Tile<M, P> tile;
            float* sums = r.part.sums + (int64_t)first * r.dim + panel * kPanel;
            tile.read(sums, r.dim);
            const uint32_t* weights = r.weights + first * (kTile / per);
            int place = 0;
            for (int at = begin; at + kPanel <= end; at += kPanel, place++) add(tile, weights, place, kPanel / per);
            // Past the context's end a block holds anything, which not even zero may be multiplied with.
            const int left = end - begin - place * kPanel;
            if (left > 0) add(tile, weights, place, (left + per - 1) / per);
            tile.write(sums, r.dim);
        }

        // The values of 16 tokens, or the first words of them.
        template <int M>
        __attribute__((always_inline)) void add(Tile<M, P>& tile, const uint32_t* weights, int place, int words) const {
            const uint32_t *values[P], *next[P];
            for (int p = 0; p < P; p++) values[p] = r.values_of(r.places[place], panel + p);
            for (int p = 0; p < P; p++) next[p] = r.values_of(r.soon[place], panel + p);
            const Rowwise<M> rows(weights + place * (kPanel / per), kTile / per);
            multiply<T>(tile, rows, values, words, ahead<Few>(next));
        }
    };

    void finish(const Program& program, const Running& of) const {
        for (int m = 0; m < rows; m++) {
            T* to = program.at<T>(op.output, token(m / group)) + (task.kv_head * group + m % group) * dim;
            const float* from = of.sums + (int64_t)m * dim;
            for (int c = 0; c < dim; c += W) store(to + c, load(from + c) / of.totals[m]);
        }
    }

    void keep(float* partials) const {
        for (int m = 0; m < rows; m++) {
            float* to = partials + (task.result + (int64_t)task.part * rows + m) * (dim + 2);
            to[0] = part.peaks[m];
            to[1] = part.totals[m];
            std::copy_n(part.sums + (int64_t)m * dim, dim, to + 2);
        }
    }

    void run(Program& program) {
        for_row_tiles<kMaxRows>(rows, Fetch{*this, program});
        const int last = context.end;
        if (task.part >= 0) {
            attend(task.part * kPart, (task.part + 1) * kPart);
            keep(program.partials());
            return;
        }
        if (last <= kPart) {
            attend(0, last);
            finish(program, part);
            return;
        }
        whole.clear(rows, dim);
        for (int first = 0; first < last; first += kPart) {
            attend(first, first + kPart);
            for (int m = 0; m < rows; m++)
                whole.merge(m, dim, part.peaks[m], part.totals[m], part.sums + (int64_t)m * dim);
        }
        finish(program, whole);
    }

    void merge(Program& program) {
        whole.clear(rows, dim);
        const int parts = (context.end + kPart - 1) / kPart;
        for (int i = 0; i < parts; i++)
            for (int m = 0; m < rows; m++) {
                const float* kept = program.partials() + (task.result + (int64_t)i * rows + m) * (dim + 2);
                whole.merge(m, dim, kept[0], kept[1], kept + 2);
            }
        finish(program, whole);
    }
};

int64_t attend_tasks(Program& program, const OctavoOp&) { return (int64_t)program.attention_tasks().size(); }

void run_attend(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const std::vector<AttentionTask>& tasks = program.attention_tasks();
    const AttentionTask &what = tasks[task], &after = tasks[std::min<int64_t>(task + 1, (int64_t)tasks.size() - 1)];
    if (op.dtype == kBfloat)
        Reader<bf16>(program, op, what, after, thread).run(program);
    else
        Reader<float>(program, op, what, after, thread).run(program);
}

int64_t merge_tasks(Program& program, const OctavoOp&) { return (int64_t)program.merges().size(); }

void run_merge(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const AttentionTask& what = program.merges()[task];
    if (op.dtype == kBfloat)
        Reader<bf16>(program, op, what, what, thread).merge(program);
    else
        Reader<float>(program, op, what, what, thread).merge(program);
}

}  // namespace

void plan_attention(const OctavoStep& step, const OctavoOp& op, std::vector<AttentionTask>& tasks,
                    std::vector<AttentionTask>& merges, int64_t& partial_heads) {
    const int group = op.heads / op.kv_heads, most = std::max(1, kQueryRows / group);
    for (int row = 0; row < step.rows; row++) {
        const int count = step.query_start[row + 1] - step.query_start[row], length = step.seq_lens[row];
        if (count <= kSplitQueries && length > kPart) {
            const int parts = (length + kPart - 1) / kPart;
            for (int head = 0; head < op.kv_heads; head++) {
                for (int part = 0; part < parts; part++)
                    tasks.push_back({row, head, 0, count, part, partial_heads});
                merges.push_back({row, head, 0, count, -1, partial_heads});
                partial_heads += (int64_t)parts * count * group;
            }
            continue;
        }
        for (int end = count; end > 0; end -= most)
            for (int head = 0; head < op.kv_heads; head++)
                tasks.push_back({row, head, std::max(0, end - most), std::min(end, most), -1, -1});
    }
    const auto cost = [&](const AttentionTask& t) {
        const int64_t context = step.seq_lens[t.row] - (step.query_start[t.row + 1] - step.query_start[t.row]);
        return (t.part >= 0 ? kPart : context + t.begin + t.count) * t.count;
    };
    std::stable_sort(tasks.begin(), tasks.end(), [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
}

OpCode attend_code() { return {attend_tasks, run_attend}; }

OpCode merge_code() { return {merge_tasks, run_merge}; }

}  // namespace octavo
