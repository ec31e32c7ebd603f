// Latent attention (DeepSeek-V2, https://arxiv.org/abs/2405.04434) in its absorbed form: queries are multiplied by each
// head's key matrix, attend to the latents themselves, and the results are multiplied by the value matrix. A latent is
// then read once for all heads of a task.
//
// Prompts take this form, too: where a chunk begins, and what else is in a batch, must not change a token's bits. As in
// attention.h, a query's sums run over kTile keys at a time and kPart keys to a part, and parts are merged front to
// back.
#include <algorithm>

#include "attention.h"
#include "norm.h"
#include "rows.h"
#include "temperature.h"

extern "C" {

// The parameters of a layer; octavo/native/latent.py sets and documents them.
struct OctavoLatent {
    const float *cos_sin, *norm;
    const void* expansion;
    void* cache;
    float eps, scale, sharpening;
    int32_t heads, rank, rope_dim, nope_dim, value_dim, begin, interval, first;
};

}  // extern "C"

namespace octavo {

namespace {

constexpr int kTaskTokens = 32;    // of the products with the expansion's matrices
constexpr int kTaskQueries = 48;   // queries of heads in a task of attention, at most
constexpr int kSplitTokens = 8;    // rows with at most this many tokens are split over their context

enum LatentKind { kLatentStore = 21, kAbsorb, kLatentAttend, kLatentMerge, kLatentExpand };  // of `OpKind`

struct Layer {
    const OctavoLatent& own;
    const int width, query_dim, expanded_dim;

    explicit Layer(const OctavoOp& op)
        : own(*static_cast<const OctavoLatent*>(op.details)),
          width(own.rank + own.rope_dim),
          query_dim(own.nope_dim + own.rope_dim),
          expanded_dim(own.nope_dim + own.value_dim) {}

    // Returns row `row` of a head's matrix: of the keys', then of the values'.
    template <class T>
    const T* matrix(int head, int row) const {
        return static_cast<const T*>(own.expansion) + ((int64_t)head * expanded_dim + row) * own.rank;
    }
};

// Rotates `dim` channels from `x` to `to`; channel i is paired with channel i + dim / 2. A copy without a table.
template <class T>
void turn(const float* x, int dim, const float* cos_sin, int64_t position, T* to) {
    const int half = dim / 2;
    float turned[2 * kPanel];
    for (int c = 0; c < half; c += kPanel) {
        const int count = std::min(kPanel, half - c);
        for (int i = 0; i < count; i++) {
            const float a = x[c + i], b = x[half + c + i];
            const float cos = cos_sin ? cos_sin[position * dim + c + i] : 1.0f;
            const float sin = cos_sin ? cos_sin[position * dim + half + c + i] : 0.0f;
            turned[i] = a * cos - b * sin;
            turned[kPanel + i] = b * cos + a * sin;
        }
        for (int i = 0; i < count; i++) {
            if constexpr (sizeof(T) == 2) {
                const Half low = narrow(splat(turned[i])), high = narrow(splat(turned[kPanel + i]));
                to[c + i].bits = low[0], to[half + c + i].bits = high[0];
            } else {
                to[c + i] = turned[i], to[half + c + i] = turned[kPanel + i];
            }
        }
    }
}

// --- latents to the cache ------------------------------------------------------------------------------------------

constexpr int kRowsPerTask = 4;

int64_t store_tasks(Program& program, const OctavoOp&) {
    return (program.step().tokens + kRowsPerTask - 1) / kRowsPerTask;
}

template <class T>
void store_latents(Program& program, const OctavoOp& op, int64_t task) {
    const Layer layer(op);
    const OctavoLatent& own = layer.own;
    const OctavoStep& step = program.step();
    const int end = (int)std::min<int64_t>(step.tokens, (task + 1) * kRowsPerTask);
    for (int token = (int)task * kRowsPerTask; token < end; token++) {
        const float* x = program.at<float>(op.input, token) + own.begin;
        T* cell = static_cast<T*>(own.cache) + step.slot(op.group, token) * layer.width;
        norm_row(x, Norm(own.norm, own.rank, own.eps), cell);
        turn(x + own.rank, own.rope_dim, own.cos_sin, step.positions[token], cell + own.rank);
    }
}

// --- products with the expansion's matrices ------------------------------------------------------------------------

// Tasks of a head and some tokens.
int64_t head_tasks(Program& program, const OctavoOp& op) {
    return (program.step().tokens + kTaskTokens - 1) / kTaskTokens * Layer(op).own.heads;
}

// Runs body(layer, head, first token, tokens) for a task.
template <class Body>
void for_head(Program& program, const OctavoOp& op, int64_t task, const Body& body) {
    const Layer layer(op);
    const int head = (int)(task % layer.own.heads), first = (int)(task / layer.own.heads) * kTaskTokens;
    body(layer, head, first, std::min(kTaskTokens, program.step().tokens - first));
}

template <class T>
int64_t stride_of(const Program& program, int buffer) {
    return program.at<T>(buffer, 1) - program.at<T>(buffer, 0);
}

// A head's queries times its key matrix, followed by their rotated channels; all times the temperature's factor.
template <class T>
void absorb(Program& program, const OctavoOp& op, int64_t task, int thread) {
    for_head(program, op, task, [&](const Layer& layer, int head, int first, int count) {
        const OctavoLatent& own = layer.own;
        float* const scratch =
            static_cast<float*>(program.scratch(thread, own.nope_dim * kTileColumns * W * sizeof(float)));
        const float* q = program.at<float>(op.input, first) + head * layer.query_dim;
        float* to = program.at<float>(op.output, first) + head * layer.width;
        const int64_t stride = stride_of<float>(program, op.input), to_stride = stride_of<float>(program, op.output);
        for (int i = 0; i < count; i++) {
            std::fill_n(to + i * to_stride, own.rank, 0.0f);
            turn(q + i * stride + own.nope_dim, own.rope_dim, own.cos_sin, program.step().positions[first + i],
                 to + i * to_stride + own.rank);
        }
        mix_rows(q, stride, count, own.nope_dim, own.rank, [&](int row) { return layer.matrix<T>(head, row); }, scratch,
                 to, to_stride);
        if (own.sharpening == 0.0f) return;
        for (int i = 0; i < count; i++) {
            float* const row = to + i * to_stride;
            const float factor =
                temperature(own.sharpening, own.interval, own.first, program.step().positions[first + i]);
            for (int c = 0; c < layer.width; c += W) store(row + c, load(row + c) * factor);
        }
    });
}

// A head's mixed latents times its value matrix.
template <class T>
void expand(Program& program, const OctavoOp& op, int64_t task, int thread) {
    for_head(program, op, task, [&](const Layer& layer, int head, int first, int count) {
        const OctavoLatent& own = layer.own;
        const int room = kTileColumns * own.rank;
        float* const scratch =
            static_cast<float*>(program.scratch(thread, (room + kTaskTokens * own.value_dim) * sizeof(float)));
        float* const values = scratch + room;
        dot_rows(program.at<float>(op.input, first) + head * own.rank, stride_of<float>(program, op.input), count,
                 own.value_dim, own.rank, [&](int row) { return layer.matrix<T>(head, own.nope_dim + row); }, scratch,
                 values, own.value_dim);
        for (int i = 0; i < count; i++) {
            T* to = program.at<T>(op.output, first + i) + head * own.value_dim;
            for (int c = 0; c < own.value_dim; c += W) store(to + c, load(values + i * own.value_dim + c));
        }
    });
}

// --- attention -----------------------------------------------------------------------------------------------------

// Queries of a task: heads of consecutive tokens of a row, counted through.
struct Queries {
    Program& program;
    const OctavoOp& op;
    const Layer layer;
    const OctavoStep& step;
    const AttentionTask& task;
    const int rank, count;
    const int past;  // tokens of the sequence before the row's first one
    float* free;
    Running part, whole;
    float *scores, *keys, *values;  // [count][kTile]; scratch of the products

    Queries(Program& program, const OctavoOp& op, const AttentionTask& task, int thread)
        : program(program),
          op(op),
          layer(op),
          step(program.step()),
          task(task),
          rank(layer.own.rank),
          count(task.count),
          past(step.seq_lens[task.row] - queries_of(step, task.row)) {
        constexpr int kPieces = 10;
        const int64_t floats = (int64_t)count * (2 * rank + kTile + 4) + kTileColumns * (layer.width + kTile * W) +
                               kPieces * kPanel;
        free = static_cast<float*>(program.scratch(thread, floats * sizeof(float)));
        part.sums = take(count * rank);
        whole.sums = take(count * rank);
        scores = take(count * kTile);
        keys = take(kTileColumns * layer.width);
        values = take(kTile * kTileColumns * W);
        for (float** each : {&part.peaks, &part.totals, &whole.peaks, &whole.totals}) *each = take(count);
    }

    float* take(int64_t floats) {
        float* piece = free;
        free += (floats + kPanel - 1) / kPanel * kPanel;
        return piece;
    }

    int visible_end(int m) const { return past + (task.begin + m) / layer.own.heads + 1; }

    const float* queries() const {
        return program.at<float>(op.input, step.query_start[task.row]) + (int64_t)task.begin * layer.width;
    }

    float* partial(int part, int m) const {
        const int64_t all = (int64_t)queries_of(step, task.row) * layer.own.heads;
        return program.partials() + (task.result + part * all + task.begin + m) * (rank + 2);
    }

    // Adds the latents of positions [first, last) to `part`.
    template <class T>
    void attend(int first, int last) {
        part.clear(count, rank);
        last = std::min(last, visible_end(count - 1));
        const int32_t* table = step.table(op.group, task.row);
        for (int begin = first; begin < last; begin += kTile) {
            const int end = std::min(begin + kTile, last);
            const auto latent = [&](int key) {
                const int at = begin + key;
                const int64_t cell = (int64_t)table[at / step.block_size] * step.block_size + at % step.block_size;
                return static_cast<const T*>(layer.own.cache) + cell * layer.width;
            };
            dot_rows(queries(), layer.width, count, end - begin, layer.width, latent, keys, scores, kTile);
            for (int m = 0; m < count; m++) weigh(m, std::min(visible_end(m), end) - begin, scores + m * kTile);
            mix_rows(scores, kTile, count, end - begin, rank, latent, values, part.sums, rank);
        }
    }

    // Converts row m's scores of the first `visible` keys of a tile to weights, and all others to 0.
    void weigh(int m, int visible, float* s) {
        visible = std::max(visible, 0);
        const float scale = layer.own.scale * kLog2E;
        const int stop = (visible + W - 1) / W * W;
        std::fill(s + visible, s + stop, kNegInf);
        Vec peak = splat(kNegInf);
        for (int j = 0; j < stop; j += W) peak = maximum(peak, load(s + j));
        if (visible > 0 && horizontal_max(peak) * scale > part.peaks[m]) raise_peak(m, horizontal_max(peak) * scale);
        const float top = part.peaks[m];
        Vec total{};
        for (int j = 0; j < stop; j += W) {
            const Vec weights = powers_of_2<6>(load(s + j) * scale - top);
            store(s + j, weights);
            total += weights;
        }
        if (visible > 0) part.totals[m] += horizontal_sum(total);
        std::fill(s + stop, s + kTile, 0.0f);
    }

    void raise_peak(int m, float peak) {
        const float before = part.peaks[m];
        part.peaks[m] = peak;
        if (before == kNegInf) return;  // nothing was summed yet
        const float factor = exponential2(before - peak);
        float* sums = part.sums + (int64_t)m * rank;
        for (int c = 0; c < rank; c += W) store(sums + c, load(sums + c) * factor);
        part.totals[m] *= factor;
    }

    template <class T>
    void run() {
        if (task.part >= 0) {
            attend<T>(task.part * kPart, (task.part + 1) * kPart);
            for (int m = 0; m < count; m++) {
                float* to = partial(task.part, m);
                to[0] = part.peaks[m], to[1] = part.totals[m];
                std::copy_n(part.sums + (int64_t)m * rank, rank, to + 2);
            }
            return;
        }
        whole.clear(count, rank);
        for (int first = 0; first < visible_end(count - 1); first += kPart) {
            attend<T>(first, first + kPart);
            whole.merge(count, rank, part, rank);
        }
        finish();
    }

    void merge_parts() {
        whole.clear(count, rank);
        for (int i = 0; i < parts_of(step, task.row); i++) {
            float* const kept = partial(i, 0);
            const int64_t stride = rank + 2;
            for (int m = 0; m < count; m++) part.peaks[m] = kept[m * stride], part.totals[m] = kept[m * stride + 1];
            whole.merge(count, rank, {part.peaks, part.totals, kept + 2}, stride);
        }
        finish();
    }

    void finish() const {
        float* to = program.at<float>(op.output, step.query_start[task.row]) + (int64_t)task.begin * rank;
        for (int m = 0; m < count; m++) {
            const float* from = whole.sums + (int64_t)m * rank;
            const float inverse = 1.0f / whole.totals[m];
            for (int c = 0; c < rank; c += W) store(to + (int64_t)m * rank + c, load(from + c) * inverse);
        }
    }
};

// Divides a step's attention into tasks of about equal size. Heads of a token are divided, too, if there would be
// fewer tasks than threads.
void plan_latents(const Program& program, const OctavoOp& op, AttentionPlan& plan) {
    const OctavoStep& step = program.step();
    const int heads = Layer(op).own.heads;
    int64_t all = 0;
    for (int row = 0; row < step.rows; row++) {
        const bool split = queries_of(step, row) <= kSplitTokens;
        all += (int64_t)queries_of(step, row) * heads * (split ? parts_of(step, row) : 1);
    }
    const int64_t even = all / (2 * program.threads()) / kTileRows * kTileRows;
    const int most = (int)std::min<int64_t>(kTaskQueries, std::max<int64_t>(even, 2 * kTileRows));
    for (int row = 0; row < step.rows; row++) {
        const int count = queries_of(step, row) * heads;
        const bool split = queries_of(step, row) <= kSplitTokens && step.seq_lens[row] > kPart;
        const int64_t result = split ? plan.partial_heads : -1;
        const auto add = [&](std::vector<AttentionTask>& tasks, int part) {
            each_row_tile(count, most, [&](int first, int size) { tasks.push_back({row, 0, first, size, part, result, -1}); });
        };
        if (!split) {
            add(plan.tasks, -1);
            continue;
        }
        for (int part = 0; part < parts_of(step, row); part++) add(plan.tasks, part);
        add(plan.merges, -1);
        plan.partial_heads += (int64_t)parts_of(step, row) * count;
    }
    const auto cost = [&](const AttentionTask& t) {
        return (int64_t)t.count * (t.part < 0 ? step.seq_lens[t.row] : kPart);
    };
    std::stable_sort(plan.tasks.begin(), plan.tasks.end(),
                     [&](const auto& a, const auto& b) { return cost(a) > cost(b); });
}

int64_t attend_tasks(Program& program, const OctavoOp& op) { return (int64_t)program.attention(op).tasks.size(); }

template <class T>
void attend(Program& program, const OctavoOp& op, int64_t task, int thread) {
    Queries(program, op, program.attention(op).tasks[task], thread).template run<T>();
}

int64_t merge_tasks(Program& program, const OctavoOp& op) { return (int64_t)program.attention(op).merges.size(); }

void merge(Program& program, const OctavoOp& op, int64_t task, int thread) {
    Queries(program, op, program.attention(op).merges[task], thread).merge_parts();
}

using Run = void (*)(Program&, const OctavoOp&, int64_t, int);

// The form of an operation for the dtype of matrices and latents.
template <Run Floats, Run Bfloats>
void run(Program& program, const OctavoOp& op, int64_t task, int thread) {
    (op.dtype == kBfloat ? Bfloats : Floats)(program, op, task, thread);
}

template <class T>
void store_task(Program& program, const OctavoOp& op, int64_t task, int) {
    store_latents<T>(program, op, task);
}

}  // namespace

}  // namespace octavo

extern "C" const void* octavo_latent_code(int kind) {
    using namespace octavo;
    static const OpCode codes[] = {
        {store_tasks, run<store_task<float>, store_task<bf16>>},
        {head_tasks, run<absorb<float>, absorb<bf16>>},
        {attend_tasks, run<attend<float>, attend<bf16>>, plan_latents},
        {merge_tasks, merge},
        {head_tasks, run<expand<float>, expand<bf16>>},
    };
    return &codes[kind - kLatentStore];
}
