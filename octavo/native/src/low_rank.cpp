#include "low_rank.h"

#include <algorithm>

#include "linear.h"
#include "norm.h"

namespace octavo {

namespace {

enum Field { kA, kB, kRank, kFactors, kPlaces };

// Walks through an addition's range, whose consecutive bytes are in one place up to the end of a slice.
class Walk {
public:
    Walk() = default;
    Walk(const OctavoLowRank& table, int index, int64_t byte)
        : table_(&table), blocks_(table.blocks + (int64_t)index * table.block_stride),
          slice_((int)(byte / table.slice_bytes)), offset_(byte % table.slice_bytes) {
        find();
    }

    const char* at() const { return from_ + offset_; }

    // Bytes from here to the end of the slice.
    int64_t left() const { return table_->slice_bytes - offset_; }

    // To another row or to the end of this one; the next call may be past the last row, which is never read.
    void advance(int64_t bytes) {
        offset_ += bytes;
        if (offset_ < table_->slice_bytes) return;
        slice_ += (int)(offset_ / table_->slice_bytes);
        offset_ %= table_->slice_bytes;
        find();
    }

private:
    void find() {
        const int block = slice_ / table_->slices;
        if (block >= table_->block_stride) return;  // behind the last row
        from_ = table_->memory + slice_ % table_->slices * table_->slice_stride +
                blocks_[block] * (int64_t)table_->slice_bytes;
    }

    const OctavoLowRank* table_ = nullptr;
    const int32_t* blocks_ = nullptr;
    const char* from_ = nullptr;
    int slice_ = 0;
    int64_t offset_ = 0;
};

int element_bytes(const OctavoLowRank& table) { return table.dtype == kBfloat ? sizeof(bf16) : sizeof(float); }

int64_t row_stride(const OctavoLowRank& table, int64_t elements) {
    const int64_t bytes = elements * element_bytes(table);
    return (bytes + table.tile_bytes - 1) / table.tile_bytes * table.tile_bytes;
}

// An addition's places for each part.
const int32_t (*places_of(const OctavoLowRank& table, int index))[kPlaces] {
    return reinterpret_cast<const int32_t(*)[kPlaces]>(table.places + (int64_t)index * table.parts * kPlaces);
}

int ranks_of(const OctavoLowRank& table, int index) {
    int sum = 0;
    for (int part = 0; part < table.parts; part++) sum += places_of(table, index)[part][kRank];
    return sum;
}

// --- s = A x -------------------------------------------------------------------------------------------------------

constexpr int kFewRows = 2;   // up to this many rows of the batch have little work, which is divided finely
constexpr int kFewRanks = 4;  // rows of A of a task then, and otherwise
constexpr int kRanks = 8;

int64_t ranks_of_task(Program& program) {
    const RowsByAddition& by = program.by_addition();
    if ((int)by.groups.size() >= 4 * program.threads()) return std::max<int64_t>(by.width, 1);
    return by.rows.size() <= kFewRows ? kFewRanks : kRanks;
}

int64_t tasks_of_group(Program& program, const OctavoOp& op) {
    const RowsByAddition& by = program.by_addition();
    const int64_t ranks = by.groups.size() == 1 ? ranks_of(*op.low_rank, by.groups[0].index) : by.width;
    const int64_t each = ranks_of_task(program);
    return (ranks + each - 1) / each;
}

int64_t shrink_tasks(Program& program, const OctavoOp& op) {
    const size_t groups = program.by_addition().groups.size();
    return groups ? (int64_t)groups * tasks_of_group(program, op) : 0;
}

// Sums of M rows times R rows of A.
template <int M, int R>
using Sums = Vec[M][R];

// Adds the products of one vector of inputs. (Always inline, without a branch: only then does GCC contract each product
// and its sum to one instruction wherever it is inlined, so that the bits are the same for any M and R.)
template <class T, int M, int R>
__attribute__((always_inline)) inline void add_products(Sums<M, R>& sums, const float* const* x, const T* const (&a)[R],
                                                        int64_t input, int64_t c) {
    Vec values[M];
#pragma GCC unroll 4
    for (int m = 0; m < M; m++) values[m] = load(x[m] + input + c);
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
        const Vec weights = load(a[r] + c);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m][r] = values[m] * weights + sums[m][r];
    }
}

// Writes M rows times R rows of A, each in the same order of sums for any M and R: even and odd vectors apart.
template <class T, int M, int R>
void dot_products(const float* const* x, const Walk* from, int columns, float* const* to) {
    Sums<M, R> even = {}, odd = {};
    Walk rows[R];
    for (int r = 0; r < R; r++) rows[r] = from[r];
    for (int begin = 0; begin < columns;) {
        int64_t bytes = (columns - begin) * (int64_t)sizeof(T);
        for (const Walk& row : rows) bytes = std::min(bytes, row.left());
        const int64_t count = bytes / (int64_t)sizeof(T), pairs = count / (2 * W) * (2 * W);
        const T* a[R];
        for (int r = 0; r < R; r++) a[r] = reinterpret_cast<const T*>(rows[r].at());
        for (int64_t c = 0; c < pairs; c += 2 * W) {
            add_products<T, M, R>(even, x, a, begin, c);
            add_products<T, M, R>(odd, x, a, begin, c + W);
        }
        if (pairs < count) add_products<T, M, R>(even, x, a, begin, pairs);  // the end: slices hold even numbers
        for (Walk& row : rows) row.advance(bytes);
        begin += (int)count;
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) to[m][r] = horizontal_sum(even[m][r] + odd[m][r]);
}

// The rows of a group as float32, normalized if the operation has a norm: pointers to them, or copies.
struct GroupInputs {
    const float* x[RowsByAddition::kMost];
    float* to[RowsByAddition::kMost];

    GroupInputs(Program& program, const OctavoOp& op, const RowsByAddition::Group& group, int thread) {
        const int32_t* rows = program.by_addition().rows.data() + group.first;
        const Norm norm(op);
        const bool normed = norm.centered || norm.weight != nullptr;
        float* copy = nullptr;
        if (normed || op.dtype == kBfloat)
            copy = static_cast<float*>(program.scratch(thread, (size_t)group.count * op.columns * sizeof(float)));
        for (int i = 0; i < group.count; i++, copy += copy ? op.columns : 0) {
            to[i] = program.shrunk(rows[i]);
            x[i] = copy ? copy : program.at<const float>(op.input, rows[i]);
            if (op.dtype == kBfloat) {
                const bf16* narrow = program.at<const bf16>(op.input, rows[i]);
                for (int c = 0; c < op.columns; c += W) store(copy + c, load(narrow + c));
            } else if (normed)
                norm_row(program.at<const float>(op.input, rows[i]), norm, copy);
        }
    }
};

// Multiplies rows with `count` rows of A, from `a` on; results from `place` on.
template <class T>
void shrink_rows(const float* const* rows_x, float* const* rows_to, int rows, Walk a, int64_t stride, int count, int columns,
                 int place) {
    for (int r = 0; r < count;) {
        Walk next[4] = {a, a, a, a};
        const int taken = count - r < 4 ? 1 : 4;
        for (int i = 1; i < taken; i++) (next[i] = next[i - 1]).advance(stride);
        for (int m = 0; m < rows;) {
            float* to[4];
            const int together = std::min(rows - m, 4) == 3 ? 2 : std::min(rows - m, 4);
            const float* const* x = rows_x + m;
            for (int i = 0; i < taken;) {
                for (int k = 0; k < together; k++) to[k] = rows_to[m + k] + place + r + i;
                const bool pair = together == 2 && i + 2 <= taken;
                if (together == 1 && taken == 4)
                    dot_products<T, 1, 4>(x, next, columns, to), i += 4;
                else if (pair)
                    dot_products<T, 2, 2>(x, next + i, columns, to), i += 2;
                else
                    (together == 4 ? dot_products<T, 4, 1> : together == 2 ? dot_products<T, 2, 1> : dot_products<T, 1, 1>)(x, next + i, columns,
                                                                                                to), i++;
            }
            m += together;
        }
        r += taken;
        a = next[taken - 1];
        a.advance(stride);
    }
}

void run_shrink(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const OctavoLowRank& table = *op.low_rank;
    const int64_t per_group = tasks_of_group(program, op), each = ranks_of_task(program);
    const RowsByAddition::Group& group = program.by_addition().groups[task / per_group];
    const int begin = (int)(task % per_group * each), end = std::min<int>(begin + (int)each, ranks_of(table, group.index));
    if (begin >= end) return;
    const GroupInputs inputs(program, op, group, thread);
    const int64_t stride = row_stride(table, op.columns);
    const int32_t(*places)[kPlaces] = places_of(table, group.index);
    for (int part = 0, first = 0; part < table.parts; first += places[part++][kRank]) {
        const int from = std::max(begin, first), to = std::min(end, first + places[part][kRank]);
        if (from >= to) continue;
        const Walk a(table, group.index, places[part][kA] * (int64_t)table.tile_bytes + (from - first) * stride);
        (table.dtype == kBfloat ? shrink_rows<bf16> : shrink_rows<float>)(inputs.x, inputs.to, group.count, a, stride,
                                                                         to - from, op.columns, from);
    }
}

// --- y += B s ------------------------------------------------------------------------------------------------------

// Where a panel of a product gets an addition from.
struct PanelSource {
    int part, column;

    PanelSource(const OctavoOp& op, int panel) : part(0), column(panel * kPanel) {
        if (op.epilogue == kGate) {
            part = panel % 2;
            column = panel / 2 * kPanel;
            return;
        }
        const OctavoLowRank& table = *op.low_rank;
        for (; part + 1 < table.parts && column >= table.outputs[part]; part++) column -= table.outputs[part];
    }
};

// Adds M rows' additions of one index to a panel of their sums.
template <class T, int M>
void expand_rows(Walk b, int64_t stride, int rank, const float* const* s, float* const* sums) {
    Vec added[M][VP] = {};
    for (int r = 0; r < rank; r++, b.advance(stride)) {
        const T* from = reinterpret_cast<const T*>(b.at());
#pragma GCC unroll 4
        for (int v = 0; v < VP; v++) {
            const Vec weights = load(from + v * W);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) added[m][v] = s[m][r] * weights + added[m][v];
        }
    }
    for (int m = 0; m < M; m++)
        for (int v = 0; v < VP; v++) store(sums[m] + v * W, load(sums[m] + v * W) + added[m][v]);
}

// The additions of a product's rows, and where s of each is.
struct ProductRows {
    const Program& program;
    const OctavoLowRank& table;
    const int32_t* of_tokens;  // the index of each token's addition
    const int32_t* choices;    // of each row of an expert's product; null if rows are tokens

    ProductRows(const Program& program, const OctavoLowRank& table)
        : program(program), table(table), of_tokens(index_of(table, program.step().of_logits)),
          choices(table.top_k > 0 ? program.at<const int32_t>(table.choices, 0) : nullptr) {}

    int index(int row) const { return of_tokens[choices ? choices[row] / table.top_k : row]; }

    const float* shrunk(int row) const { return choices ? program.at<const float>(table.shrunk, row) : program.shrunk(row); }

    // Calls body(index, row, count) for runs of rows with the same addition.
    template <class Body>
    void for_runs(int first, int count, int most, const Body& body) const {
        for (int row = first; row < first + count;) {
            const int own = index(row);
            int end = row + 1;
            while (end < first + count && end - row < most && index(end) == own) end++;
            if (own >= 0) body(own, row, end - row);
            row = end;
        }
    }
};

}  // namespace

void RowsByAddition::find(const OctavoOp* op, const OctavoOp* end, const OctavoStep& step) {
    rows.clear();
    groups.clear();
    width = 0;
    op = std::find_if(op, end, [](const OctavoOp& one) { return one.kind == kShrink; });
    if (op == end) return;
    index = step.of_logits ? op->low_rank->of_logits : op->low_rank->of_tokens;
    for (int row = 0; row < step.tokens; row++)
        if (index[row] >= 0) rows.push_back(row);
    std::stable_sort(rows.begin(), rows.end(), [&](int a, int b) { return index[a] < index[b]; });
    for (int i = 0; i < (int)rows.size(); i++) {
        const int32_t found = index[rows[i]];
        if (groups.empty() || groups.back().index != found || groups.back().count == kMost)
            groups.push_back({found, i, 0});
        groups.back().count++;
    }
    int64_t widest = 0;
    for (; op != end; op++) {
        if (op->kind != kShrink) continue;
        for (const Group& group : groups) widest = std::max<int64_t>(widest, ranks_of(*op->low_rank, group.index));
    }
    width = (widest + kPanel - 1) / kPanel * kPanel;
}

void shrink_row(const OctavoLowRank& table, int index, const float* x, int columns, float* to) {
    const int32_t(*places)[kPlaces] = places_of(table, index);
    for (int part = 0, first = 0; part < table.parts; first += places[part++][kRank]) {
        if (places[part][kRank] == 0) continue;
        const Walk a(table, index, places[part][kA] * (int64_t)table.tile_bytes);
        (table.dtype == kBfloat ? shrink_rows<bf16> : shrink_rows<float>)(&x, &to, 1, a, row_stride(table, columns),
                                                                         places[part][kRank], columns, first);
    }
}

void expand(const Program& program, const OctavoOp& op, int panel, int panels, int first, int count, float* sums) {
    const OctavoLowRank& table = *op.low_rank;
    const ProductRows product(program, table);
    for (int p = 0; p < panels; p++) {
        const PanelSource source(op, panel + p);
        const int64_t stride = row_stride(table, table.outputs[source.part]);
        product.for_runs(first, count, 4, [&](int index, int row, int rows) {
            const int32_t(*places)[kPlaces] = places_of(table, index);
            const int32_t* place = places[source.part];
            int before = 0;
            for (int part = 0; part < source.part; part++) before += places[part][kRank];
            const float* s[4];
            float* to[4];
            for (int m = 0; m < rows; m++) {
                s[m] = product.shrunk(row + m) + before;
                to[m] = sums + ((int64_t)(row - first + m) * panels + p) * kPanel;
            }
            const int64_t column = source.column * (int64_t)element_bytes(table);
            const auto add = [&](auto example) {
                using T = decltype(example);
                const Walk b(table, index, place[kB] * (int64_t)table.tile_bytes + column);
                constexpr decltype(&expand_rows<T, 1>) by_rows[] = {expand_rows<T, 1>, expand_rows<T, 2>,
                                                                    expand_rows<T, 3>, expand_rows<T, 4>};
                by_rows[rows - 1](b, stride, place[kRank], s, to);
            };
            if (place[kRank] > 0) table.dtype == kBfloat ? add(bf16{}) : add(0.0f);
            if (place[kFactors] < 0) return;
            const int64_t factors = place[kFactors] * (int64_t)table.tile_bytes + source.column * sizeof(float);
            const float* factor = reinterpret_cast<const float*>(Walk(table, index, factors).at());
            for (int m = 0; m < rows; m++)
                for (int v = 0; v < VP; v++) store(to[m] + v * W, load(to[m] + v * W) * load(factor + v * W));
        });
    }
}

void prefetch_low_rank(const Program& program, const OctavoOp& op, int panel, int panels, int first, int count) {
    constexpr int kMostRuns = 8;  // of further ones, the first would be evicted
    const OctavoLowRank& table = *op.low_rank;
    for (int p = 0; p < panels; p++) {
        const PanelSource source(op, panel + p);
        const int64_t column = source.column * (int64_t)element_bytes(table);
        if (p > 0 && source.part == PanelSource(op, panel).part && column % 64) continue;  // in the same line
        int runs = 0;
        ProductRows(program, table).for_runs(first, count, count, [&](int index, int, int) {
            const int32_t* place = places_of(table, index)[source.part];
            if (runs++ >= kMostRuns || place[kRank] == 0) return;
            Walk b(table, index, place[kB] * (int64_t)table.tile_bytes + column);
            const int64_t stride = row_stride(table, table.outputs[source.part]);
            for (int r = 0; r < place[kRank]; r++, b.advance(stride)) __builtin_prefetch(b.at());
        });
    }
}

OpCode shrink_code() { return {shrink_tasks, run_shrink}; }

}  // namespace octavo
