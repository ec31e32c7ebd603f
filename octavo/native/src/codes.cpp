// Products of float32 activations with weights stored as codes. Of each group of inputs, the numbers of the codes are
// multiplied and summed, and the sum is then multiplied with the group's scale, in the same order for any number of
// rows.

#include <algorithm>

#include "codes.h"
#include "linear.h"
#include "rows.h"

namespace octavo {

namespace {

constexpr int kFewRows = 2;              // rows that are multiplied while codes are widened in registers
constexpr int kSlice = 128;              // inputs that are widened in memory: 16 KB for a pair of panels
constexpr int kMaxRows = 2 * kWideRows;  // rows of a tile over a pair of panels
constexpr int kMaxOddRows = 4;           // over the last panel of an odd number

inline float sum_of(const float* x, int count) {
    Vec sum{};
    int k = 0;
    for (; k + W <= count; k += W) sum += load(x + k);
    float rest = 0.0f;
    for (; k < count; k++) rest += x[k];
    return horizontal_sum(sum) + rest;
}

// Adds the sums of a group, times its scales, and the minima.
template <int M, int P>
__attribute__((always_inline)) inline void add_group(const OctavoOp& op, const CodeRecord& record,
                                                    const char* const (&panels)[P], int group, const Tile<M, P>& sums,
                                                    const float* const (&rows)[M], Tile<M, P>& totals) {
    float of_rows[M] = {};
    if (op.minima)
        for (int m = 0; m < M; m++) of_rows[m] = sum_of(rows[m] + group * op.scaled, op.scaled);
    for (int p = 0; p < P; p++) {
        const CodeScales of(op, record, panels[p], group);
        for (int m = 0; m < M; m++)
            for (int v = 0; v < VP; v++) {
                Vec& total = totals.sums[m][p * VP + v];
                total = fused(total, sums.sums[m][p * VP + v], of.scales[v]);
                if (op.minima) total = fused(total, of.minima[v], splat(of_rows[m]));
            }
    }
}

template <int M>
inline void rows_of(const Program& program, const OctavoOp& op, int first, const float* (&rows)[M]) {
    for (int m = 0; m < M; m++) rows[m] = program.at<const float>(op.input, first + m);
}

// Few rows: all of a task's.
template <int Dtype, int P>
struct FewRows {
    Program& program;
    const OctavoOp& op;
    const char* const (&panels)[P];
    int panel, begin;

    template <int M>
    void run(int row) const {
        const CodeRecord record(op);
        const Widener<Dtype> widener(numbers_of(op));
        const float* rows[M];
        rows_of(program, op, begin + row, rows);
        Tile<M, P> totals;
        totals.clear();
        for (int k = 0; k < op.columns; k += op.scaled) {
            const Tile<M, P> sums = group_sums<M>(record, widener, rows, k);
            add_group(op, record, panels, k / op.scaled, sums, rows, totals);
        }
        finish(program, op, totals, panel, begin + row);
    }

private:
    template <int M>
    __attribute__((always_inline)) Tile<M, P> group_sums(const CodeRecord& record, const Widener<Dtype>& widener,
                                                         const float* const (&rows)[M], int k) const {
        constexpr int bytes = Widener<Dtype>::kBytes;
        const int64_t place = (int64_t)(k / op.scaled) * record.size;
        // This thread will probably read the next panels next. Their lines are prefetched one by one: the processor has
        // room for few requests at a time, and waits with more.
        const int64_t next = P * code_panel_bytes(op);
        Tile<M, P> sums;
        sums.clear();
        for (int i = 0; i < op.scaled; i += kFour)
#pragma GCC unroll 2
            for (int p = 0; p < P; p++) {
                const char* const from = panels[p] + place + i / kFour * bytes;
                for (int line = 0; line < bytes; line += 64) __builtin_prefetch(from + next + line, 0, 2);
                widener(from, [&](int n, Vec (&v)[VP]) __attribute__((always_inline)) {
#pragma GCC unroll 2
                    for (int m = 0; m < M; m++) {
                        const Vec x = splat(rows[m][k + i + n]);
#pragma GCC unroll 4
                        for (int j = 0; j < VP; j++) {
                            Vec& sum = sums.sums[m][p * VP + j];
                            sum = fused(sum, v[j], x);
                        }
                    }
                });
            }
        return sums;
    }
};

// Rows [begin, begin + count) times a slice of widened panels. Sums of earlier slices are in memory, and of a group that
// goes on in the next slice.
template <int P>
struct Slice {
    const Program& program;
    const OctavoOp& op;
    const char* const (&panels)[P];
    int panel, begin, first, inputs;
    const float* widened;  // [panel][input][column]
    float* totals;         // [row][panel][column]
    float* unfinished;

    template <int M>
    void run(int row) const {
        const CodeRecord record(op);
        const int64_t place = (int64_t)row * P * kPanel;
        const uint32_t* a = program.at<const uint32_t>(op.input, begin + row);
        const int64_t stride = program.at<const uint32_t>(op.input, begin + row + 1) - a;
        const float* rows[M];
        rows_of(program, op, begin + row, rows);
        Tile<M, P> total, sums;
        read(total, first ? totals + place : nullptr);
        for_groups(op, first, inputs, [&](int k, int count) {
            const uint32_t* weights[P];
            for (int p = 0; p < P; p++)
                weights[p] = reinterpret_cast<const uint32_t*>(widened + (p * inputs + k - first) * kPanel);
            read(sums, k % op.scaled ? unfinished + place : nullptr);
            multiply<float>(sums, Rowwise<M>(a + k, stride), weights, count, Ahead<P>{});
            if ((k + count) % op.scaled) return sums.write(unfinished + place, P * kPanel);
            add_group(op, record, panels, k / op.scaled, sums, rows, total);
        });
        if (first + inputs < op.columns) return total.write(totals + place, P * kPanel);
        finish(program, op, total, panel, begin + row);
    }

private:
    template <int M>
    static void read(Tile<M, P>& tile, const float* from) {
        for (int m = 0; m < M; m++)
            for (int j = 0; j < P * VP; j++) tile.sums[m][j] = from ? load(from + (m * P * VP + j) * W) : Vec{};
    }
};

template <int P, int Most>
struct Task {
    Program& program;
    const OctavoOp& op;
    int panel, first, count, thread;

    template <int Dtype>
    void run() const {
        const int64_t bytes = code_panel_bytes(op);
        const char* panels[P];
        for (int p = 0; p < P; p++) panels[p] = static_cast<const char*>(op.weight) + (panel + p) * bytes;
        if (count <= kFewRows) return dispatch<kFewRows>(count, 0, FewRows<Dtype, P>{program, op, panels, panel, first});
        const int64_t results = (int64_t)count * P * kPanel;
        float* const widened =
            static_cast<float*>(program.scratch(thread, sizeof(float) * (kSlice * P * kPanel + 2 * results)));
        float* const totals = widened + kSlice * P * kPanel;
        for (int k = 0; k < op.columns; k += kSlice) {
            const int inputs = std::min(kSlice, op.columns - k);
            for (int p = 0; p < P; p++) widen_slice<Dtype>(panels[p], k, inputs, widened + p * inputs * kPanel);
            for_row_tiles<Most>(count, Slice<P>{program, op, panels, panel, first, k, inputs, widened, totals,
                                                totals + results});
        }
    }

private:
    template <int Dtype>
    __attribute__((noinline)) void widen_slice(const char* from, int first, int inputs, float* to) const {
        const CodeRecord record(op);
        const Widener<Dtype> widener(numbers_of(op));
        for_groups(op, first, inputs, [&](int begin, int count) {
            widen_group(op, record, widener, from, begin, count,
                        [&](int k, Vec (&v)[VP]) __attribute__((always_inline)) {
                            for (int j = 0; j < VP; j++) store(to + (k - first) * kPanel + j * W, v[j]);
                        });
        });
    }
};

}  // namespace

}  // namespace octavo

extern "C" void octavo_multiply_codes(octavo::Program& program, const OctavoOp& op, int panel, int first, int count,
                                      int thread) {
    using namespace octavo;
    if (panel + kPair <= panels_of(op))
        for_codes(op, Task<kPair, kMaxRows>{program, op, panel, first, count, thread});
    else
        for_codes(op, Task<1, kMaxOddRows>{program, op, panel, first, count, thread});
}
