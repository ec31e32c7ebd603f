// Paged attention: reads keys and values through block tables, in one pass with the softmax on the fly (Milakov and
// Gimelshein 2018, https://arxiv.org/abs/1805.02867), in tiles of queries so that a key is read once for many of them
// (Dao et al. 2022, https://arxiv.org/abs/2205.14135). This file has the products over a cache in floating point.
//
// Every query's sums run in an order that depends only on its own position: kTile keys at a time, kPart keys to a part,
// parts merged front to back. So results are bitwise equal regardless of the rest of the batch, of the chunks of a
// prompt, of the assignment of work to threads, and of rows that share a part.

#include "attention.h"
#include "attention_tiles.h"

namespace octavo {

namespace {

template <class T>
struct FloatReader : Reader<T, FloatReader<T>> {
    using Base = Reader<T, FloatReader<T>>;
    using Base::dim, Base::rows, Base::places, Base::soon, Base::scores, Base::part;

    // Rows of a register tile over a pair of panels; fewer where compile time matters more than speed. Of float32 there
    // are three even with 16 registers, so that every word of keys or values that is loaded is used three times.
    static constexpr int kMaxRows = sizeof(T) == 2 ? 2 * kWideRows : std::max(3, kWideRows);
    static constexpr int kMaxOddRows = 4;  // over the last panel of an odd number

    uint32_t* queries;  // [rows][dim] as words, interleaved tile by tile
    uint32_t* weights;  // [rows][kTile] as words

    FloatReader(Program& program, const OctavoOp& op, const AttentionTask& task, const AttentionTask& after, int thread)
        : Base(program, op, task, after, thread, op.head_dim + kTile) {
        queries = reinterpret_cast<uint32_t*>(this->take(rows * dim));
        weights = reinterpret_cast<uint32_t*>(this->take(rows * kTile));
    }

    void fetch() {
        const int words = dim / kPerWord<T>;
        each_row_tile(rows, kMaxRows, [&](int first, int count) {
            uint32_t* to = queries + (int64_t)first * words;
            for (int m = 0; m < count; m++) {
                const T* query = this->template query<T>(first + m);
                for (int k = 0; k < words; k++) std::memcpy(to + k * count + m, query + k * kPerWord<T>, 4);
            }
        });
    }

    void attend_tile(int begin, int end) {
        const int panels = (end - begin + kPanel - 1) / kPanel;
        for (int p = 0; p < panels; p += 2) for_row_tiles<kMaxRows>(rows, Score{*this, p});
        for (int m = 0; m < rows; m++)
            this->template weigh<sizeof(T) == 2 ? 3 : 6>(m, begin, end, scores + m * kTile,
                                                           reinterpret_cast<T*>(weights) + m * kTile);
        int panel = 0;
        for (; panel + 2 <= dim / kPanel; panel += 2)
            for_row_tiles<kMaxRows>(rows, Gather<2>{*this, panel, begin, end});
        if (panel < dim / kPanel) for_row_tiles<kMaxOddRows>(rows, Gather<1>{*this, panel, begin, end});
    }

    struct Score {
        const FloatReader& r;
        int panel;
        template <int M>
        void run(int first) const {
            Tile<M, 2> tile;
            tile.clear();
            const int words = r.dim / kPerWord<T>;
            const uint32_t* keys[] = {r.places[panel].keys, r.places[panel + 1].keys};
            const uint32_t* next[] = {r.soon[panel].keys, r.soon[panel + 1].keys};
            const Interleaved<M> rows{r.queries + (int64_t)first * words};
            multiply<T>(tile, rows, keys, words, Base::ahead(next));
            tile.write(r.scores + first * kTile + panel * kPanel, kTile);
        }
    };

    template <int P>
    struct Gather {
        const FloatReader& r;
        int panel, begin, end;
        static constexpr int per = kPerWord<T>;

        template <int M>
        void run(int first) const {
            Tile<M, P> tile;
            tile.clear();
            const int seen = std::max(begin, r.first_panel);
            Rowwise<M> weights(r.weights + first * (kTile / per) + (seen - begin) / per, kTile / per);
            for (int at = seen, place = (seen - begin) / kPanel; at < end; at += kPanel, place++) {
                const uint32_t *values[P], *next[P];
                for (int p = 0; p < P; p++) values[p] = r.values_of(r.places[place], panel + p);
                for (int p = 0; p < P; p++) next[p] = r.values_of(r.soon[place], panel + p);
                // Beyond the context's end a block has arbitrary contents; even their product with 0 may be NaN.
                const int words = (std::min(kPanel, end - at) + per - 1) / per;
                add_words<T>(tile, weights, values, words, Base::ahead(next));
            }
            tile.add_to(r.part.sums + (int64_t)first * r.dim + panel * kPanel, r.dim);
        }
    };
};

#if defined(OCTAVO_AMX)
using BfloatReader = TileReader;
#else
using BfloatReader = FloatReader<bf16>;
#endif

int64_t attend_tasks(Program& program, const OctavoOp& op) { return (int64_t)program.attention(op).tasks.size(); }

void run_attend(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const std::vector<AttentionTask>& tasks = program.attention(op).tasks;
    const AttentionTask &what = tasks[task], &after = tasks[std::min<int64_t>(task + 1, (int64_t)tasks.size() - 1)];
    if (op.cache_dtype == kInt8)
        reinterpret_cast<AttendInt8>(const_cast<void*>(op.kernel))(program, op, what, after, thread);
    else if (op.cache_dtype == kBfloat)
        BfloatReader(program, op, what, after, thread).run();
    else
        FloatReader<float>(program, op, what, after, thread).run();
}

int64_t merge_tasks(Program& program, const OctavoOp& op) { return (int64_t)program.attention(op).merges.size(); }

void run_merge(Program& program, const OctavoOp& op, int64_t task, int thread) {
    Work(program, op, program.attention(op).merges[task], thread).merge_parts();
}

}  // namespace

OpCode attend_code() { return {attend_tasks, run_attend, plan_attention}; }

OpCode merge_code() { return {merge_tasks, run_merge}; }

}  // namespace octavo
