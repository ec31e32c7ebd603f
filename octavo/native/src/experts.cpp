// The operations of a mixture of experts. The products themselves are those of dense layers: words.cpp and blocks.cpp.

#include "experts.h"

#include <algorithm>
#include <cmath>

#include "linear.h"
#include "routing.h"

namespace octavo {

namespace {

constexpr int kRowsPerTask = 4;

int64_t choices_of(Program& program, const OctavoOp& op) {
    return (int64_t)program.step().tokens * experts_of(op).top_k;
}

// Numbers of all choices or rows, which are adjacent.
template <class T>
T* numbers(const Program& program, int buffer) {
    return program.at<T>(buffer, 0);
}

// Calls body(row) for the rows of a task, of `count` in all.
template <class Body>
void for_rows(int64_t task, int64_t count, const Body& body) {
    const int64_t end = std::min(count, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; row++) body(row);
}

int64_t tasks_by_tokens(Program& program, const OctavoOp&) {
    return (program.step().tokens + kRowsPerTask - 1) / kRowsPerTask;
}

int64_t tasks_by_choices(Program& program, const OctavoOp& op) {
    return (choices_of(program, op) + kRowsPerTask - 1) / kRowsPerTask;
}

// --- choosing experts, and sorting the choices by expert -----------------------------------------------------------

void route(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const OctavoExperts& experts = experts_of(op);
    Router router(experts, static_cast<float*>(program.scratch(thread, Router::floats(experts) * sizeof(float))));
    for_rows(task, program.step().tokens, [&](int64_t token) {
        const int64_t first = token * experts.top_k;
        router.choose(program.at<const float>(op.input, token), numbers<int32_t>(program, experts.chosen) + first,
                      numbers<float>(program, experts.weights) + first);
    });
}

int64_t one_task(Program&, const OctavoOp&) { return 1; }

void place(Program& program, const OctavoOp& op, int64_t, int thread) {
    const OctavoExperts& experts = experts_of(op);
    const int64_t choices = choices_of(program, op), chunk = chunk_rows(experts.expand[0]);
    const int32_t* chosen = numbers<const int32_t>(program, experts.chosen);
    int32_t* const next = static_cast<int32_t*>(program.scratch(thread, experts.owned * sizeof(int32_t)));
    std::fill(next, next + experts.owned, 0);
    const auto owned = [&](int e) { return e >= 0 && e < experts.owned; };
    for (int64_t i = 0; i < choices; i++)
        if (const int e = chosen[i] - experts.first; owned(e)) next[e]++;
    experts.begin[0] = experts.chunks[0] = 0;
    for (int e = 0; e < experts.owned; e++) {
        experts.begin[e + 1] = experts.begin[e] + next[e];
        experts.chunks[e + 1] = experts.chunks[e] + (int32_t)((next[e] + chunk - 1) / chunk);
        next[e] = experts.begin[e];
    }
    int32_t *const rows = numbers<int32_t>(program, experts.rows), *const of = numbers<int32_t>(program, experts.choices);
    for (int64_t i = 0; i < choices; i++) {
        const int e = chosen[i] - experts.first;
        rows[i] = owned(e) ? next[e]++ : -1;
        if (owned(e)) of[rows[i]] = (int32_t)i;
    }
}

// --- rows in the form that an expert's product multiplies ----------------------------------------------------------

// Converts `size` values for this product, times a factor, in its order of inputs.
void convert(const Program& program, const OctavoOp& product, const float* x, float factor, float* changed, void* to) {
    const int32_t* order = static_cast<const int32_t*>(product.third);
    const int size = product.columns;
    if (order != nullptr || factor != 1.0f) {
        for (int c = 0; c < size; c++) changed[c] = x[order ? order[c] : c] * factor;
        x = changed;
    }
    if (has_blocks(product) && product.planes > 0)
        return program.quantize_row(x, size, product.planes, product.zero_point, to);
    if (takes_floats(product))
        std::copy(x, x + size, static_cast<float*>(to));
    else
        for (int c = 0; c < size; c += W) store(static_cast<bf16*>(to) + c, load(x + c));
}

// Room for the largest row, in whole vectors.
float* wide_row(Program& program, const OctavoOp& op, int thread, int copies) {
    return static_cast<float*>(program.scratch(thread, (size_t)copies * (op.columns + kPanel) * sizeof(float)));
}

// Returns a choice's number among the experts of this rank.
int expert_of(const Program& program, const OctavoExperts& experts, int32_t choice) {
    return numbers<const int32_t>(program, experts.chosen)[choice] - experts.first;
}

// Copies of the tokens' rows, in the order of experts.
void gather(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const OctavoExperts& experts = experts_of(op);
    const int32_t* choices = numbers<const int32_t>(program, experts.choices);
    float* const changed = wide_row(program, op, thread, 1);
    for_rows(task, experts.begin[experts.owned], [&](int64_t row) {
        const int32_t choice = choices[row];
        const OctavoOp& product = experts.expand[expert_of(program, experts, choice)];
        const float factor = experts.on_inputs ? numbers<const float>(program, experts.weights)[choice] : 1.0f;
        convert(program, product, program.at<const float>(op.input, choice / experts.top_k), factor, changed,
                program.at<char>(op.output, row));
    });
}

// Rows of the first products, for the second ones.
void round(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const OctavoExperts& experts = experts_of(op);
    const int32_t* choices = numbers<const int32_t>(program, experts.choices);
    float* const changed = wide_row(program, op, thread, 1);
    for_rows(task, experts.begin[experts.owned], [&](int64_t row) {
        const OctavoOp& product = experts.reduce[expert_of(program, experts, choices[row])];
        convert(program, product, program.at<const float>(op.input, row), 1.0f, changed, program.at<char>(op.output, row));
    });
}

// --- the first half of low-rank additions: s = A x -----------------------------------------------------------------

// Returns a row of floats, widened into `wide` if it is narrow.
const float* floats(const Program& program, const OctavoOp& op, int64_t row, float* wide) {
    if (op.dtype == kFloat) return program.at<const float>(op.input, row);
    const bf16* narrow = program.at<const bf16>(op.input, row);
    for (int c = 0; c < op.columns; c += W) store(wide + c, load(narrow + c));
    return wide;
}

// For the rows of an expert's product whose tokens have an addition. `of_tokens`: the inputs are the tokens' rows.
void shrink(Program& program, const OctavoOp& op, const OctavoOp* products, int64_t task, int thread, bool of_tokens) {
    const OctavoExperts& experts = experts_of(op);
    const int32_t* choices = numbers<const int32_t>(program, experts.choices);
    float* const wide = wide_row(program, op, thread, 1);
    for_rows(task, experts.begin[experts.owned], [&](int64_t row) {
        const int32_t choice = choices[row], token = choice / experts.top_k;
        const OctavoLowRank& table = *products[expert_of(program, experts, choice)].low_rank;
        const int index = index_of(table, program.step().of_logits)[token];
        if (index < 0) return;
        const float* x = floats(program, op, of_tokens ? token : row, wide);
        if (of_tokens && experts.on_inputs) {
            const float factor = numbers<const float>(program, experts.weights)[choice];
            for (int c = 0; c < op.columns; c++) wide[c] = x[c] * factor;
            x = wide;
        }
        program.shrink_row(table, index, x, op.columns, program.at<float>(op.output, row));
    });
}

void shrink_expand(Program& program, const OctavoOp& op, int64_t task, int thread) {
    shrink(program, op, experts_of(op).expand, task, thread, true);
}

void shrink_reduce(Program& program, const OctavoOp& op, int64_t task, int thread) {
    shrink(program, op, experts_of(op).reduce, task, thread, false);
}

// --- products ------------------------------------------------------------------------------------------------------

int64_t product_tasks(Program&, const OctavoOp& op) {
    const OctavoExperts& experts = experts_of(op);
    return experts.chunks[experts.owned] * pairs_of(op);
}

// Runs a pair of panels of one expert with a chunk of its rows.
void multiply(Program& program, const OctavoOp& op, const OctavoOp* products, int64_t task, int thread) {
    const OctavoExperts& experts = experts_of(op);
    const int32_t chunk = (int32_t)(task / pairs_of(op));
    const int expert = (int)(std::upper_bound(experts.chunks, experts.chunks + experts.owned, chunk) - experts.chunks) - 1;
    const int64_t size = chunk_rows(experts.expand[0]);
    const int64_t first = experts.begin[expert] + (chunk - experts.chunks[expert]) * size;
    const int count = (int)std::min<int64_t>(size, experts.begin[expert + 1] - first);
    const OctavoOp& product = products[expert];
    const int panel = (int)(task % pairs_of(op)) * kPair;
    reinterpret_cast<Multiply>(const_cast<void*>(product.kernel))(program, product, panel, (int)first, count, thread);
}

void expand(Program& program, const OctavoOp& op, int64_t task, int thread) {
    multiply(program, op, experts_of(op).expand, task, thread);
}

void reduce(Program& program, const OctavoOp& op, int64_t task, int thread) {
    multiply(program, op, experts_of(op).reduce, task, thread);
}

// --- the weighted sum ----------------------------------------------------------------------------------------------

constexpr int kSlice = 512;  // columns of a task

int64_t slices_of(const OctavoOp& op) { return (op.columns + kSlice - 1) / kSlice; }

int64_t combine_tasks(Program& program, const OctavoOp& op) { return program.step().tokens * slices_of(op); }

void combine(Program& program, const OctavoOp& op, int64_t task, int) {
    const OctavoExperts& experts = experts_of(op);
    const int64_t token = task / slices_of(op), choice = token * experts.top_k;
    const int begin = (int)(task % slices_of(op)) * kSlice, end = std::min(op.columns, begin + kSlice);
    const int32_t* rows = numbers<const int32_t>(program, experts.rows) + choice;
    const float* weights = numbers<const float>(program, experts.weights) + choice;
    const float* shared = experts.shared < 0 ? nullptr : program.at<const float>(experts.shared, token);
    const float gate =
        experts.shared_gate < 0 ? 1.0f : 1.0f / (1.0f + std::exp(-*program.at<const float>(experts.shared_gate, token)));
    float* const to = program.at<float>(op.output, token);
    for (int c = begin; c < end; c += W) {
        Vec sum{};
        for (int k = 0; k < experts.top_k; k++) {
            if (rows[k] < 0) continue;
            const Vec y = load(program.at<const float>(op.input, rows[k]) + c);
            sum += experts.on_inputs ? y : y * weights[k];
        }
        if (shared != nullptr) sum += load(shared + c) * gate;
        store(to + c, op.epilogue == kAdd ? load(to + c) + sum * op.scale : sum * op.scale);
    }
}

const OpCode kCodes[] = {{tasks_by_tokens, route},   {one_task, place},      {tasks_by_choices, gather},
                         {product_tasks, expand},    {tasks_by_choices, round}, {product_tasks, reduce},
                         {combine_tasks, combine},   {tasks_by_choices, shrink_expand},
                         {tasks_by_choices, shrink_reduce}};

}  // namespace

}  // namespace octavo

extern "C" const octavo::OpCode* octavo_experts_code(int kind) { return octavo::kCodes + (kind - octavo::kRoute); }
