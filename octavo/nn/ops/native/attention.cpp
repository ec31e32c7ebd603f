// Paged attention on CPU: reads keys and values through block tables, one pass, softmax on the fly (Milakov and
// Gimelshein 2018, https://arxiv.org/abs/1805.02867), tiles of queries so that a key is read once for many of them
// (Dao et al. 2022, https://arxiv.org/abs/2205.14135).
//
// The cache is [block][kv head][keys, values]. Keys of a block lie transposed, [channel][offset], so that one vector
// holds a channel of W neighbouring tokens and scores need no sums across a vector; values lie [offset][channel].
//
// Every query's sums run in an order that depends only on its own position: kTile keys at a time, kPart keys to a
// part, parts merged front to back. So a result is the same bit for bit, whatever else is in the batch, however the
// prompt was cut into chunks, and however the work was dealt out to threads.

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <vector>

#include "simd.h"

using namespace octavo;

namespace {

constexpr int kTile = 64;           // keys between two updates of the running softmax
constexpr int kPart = 512;          // keys that one task reads of a row with few queries
constexpr int kVecs = kTile / W;
constexpr int kRows = 48;           // rows (queries x heads that share a kv head) of a tile, about
constexpr int64_t kSerial = 40000;  // multiply-adds below which waking another thread costs more than it saves

}  // namespace

extern "C" {

struct AttendArgs {
    const void* q;    // [tokens][heads][head_dim], strides in elements, channels adjacent
    void* out;        // [tokens][heads][head_dim], contiguous
    const void* cache;
    const int32_t* query_start;   // [rows + 1]
    const int32_t* seq_lens;      // [rows]
    const int32_t* block_tables;  // [rows][table_stride]
    int64_t q_token_stride, q_head_stride, table_stride;
    int32_t rows, heads, kv_heads, head_dim, block_size;
    int32_t window;   // 0: none
    int32_t bfloat;   // 1: bfloat16, 0: float32, of q, out and cache alike
    int32_t threads;
    float scale, soft_cap;  // soft_cap 0: none
};

struct WriteArgs {
    const void *k, *v;  // [tokens][kv_heads][head_dim], channels adjacent
    void* cache;
    const int64_t* slots;  // [tokens]
    int64_t k_token_stride, k_head_stride, v_token_stride, v_head_stride;
    int32_t tokens, kv_heads, head_dim, block_size, bfloat, threads;
};

typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

}  // extern "C"

namespace {

Parallel g_parallel = nullptr;

// Runs body(i) for all i < count on up to `threads` threads of the pool that torch computes with.
template <class Body>
void parallel_for(int64_t count, int threads, const Body& body) {
    struct Job {
        const Body& body;
        int64_t count;
        std::atomic<int64_t> next;
    } job{body, count, {0}};
    auto run = [](void* data) {
        Job& job = *static_cast<Job*>(data);
        for (int64_t i; (i = job.next.fetch_add(1, std::memory_order_relaxed)) < job.count;) job.body(i);
    };
    threads = (int)std::min<int64_t>(threads, count);
    if (threads > 1 && g_parallel != nullptr)
        g_parallel(run, &job, (unsigned)threads, 0);
    else
        run(&job);
}

// s[m][NB vectors] = q[m] . k, for M rows; the j-th vector's channel c is at k[j] + c * stride.
template <class T, int M>
inline void score_tile(const float* q, int dim, const T* const* k, int64_t stride, float* s) {
    Vec acc[M][NB] = {};
    for (int c = 0; c < dim; c++) {
        Vec key[NB];
#pragma GCC unroll 4
        for (int j = 0; j < NB; j++) key[j] = load(k[j] + c * stride);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const Vec x = splat(q[m * dim + c]);
#pragma GCC unroll 4
            for (int j = 0; j < NB; j++) acc[m][j] += x * key[j];
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int j = 0; j < NB; j++) store(s + m * kTile + j * W, acc[m][j]);
}

// o[m][N vectors] += sum over t of p[m][t] v[t], for M rows.
template <class T, int M, int N>
inline void mix_tile(const float* p, const T* const* v, int begin, int end, int channel, float* o, int dim) {
    Vec acc[M][N];
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) acc[m][j] = load(o + m * dim + channel + j * W);
    for (int t = begin; t < end; t++) {
        Vec value[N];
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) value[j] = load(v[t] + channel + j * W);
#pragma GCC unroll 6
        for (int m = 0; m < M; m++) {
            const Vec x = splat(p[m * kTile + t]);
#pragma GCC unroll 4
            for (int j = 0; j < N; j++) acc[m][j] += x * value[j];
        }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
        for (int j = 0; j < N; j++) store(o + m * dim + channel + j * W, acc[m][j]);
}

template <class T, int M>
void score_rows(const float* q, int dim, const T* const* k, int64_t stride, float* s) {
    for (int j = 0; j < kVecs; j += NB) score_tile<T, M>(q, dim, k + j, stride, s + j * W);
}

template <class T, int M>
void mix_rows(const float* p, const T* const* v, int begin, int end, float* o, int dim) {
    int c = 0;
    for (; c + 4 * W <= dim; c += 4 * W) mix_tile<T, M, 4>(p, v, begin, end, c, o, dim);
    for (; c + 2 * W <= dim; c += 2 * W) mix_tile<T, M, 2>(p, v, begin, end, c, o, dim);
    for (; c < dim; c += W) mix_tile<T, M, 1>(p, v, begin, end, c, o, dim);
}

template <class T>
struct Kernels {
    typedef void (*Score)(const float*, int, const T* const*, int64_t, float*);
    typedef void (*Mix)(const float*, const T* const*, int, int, float*, int);
#if defined(__AVX512F__)
    static constexpr Score score[MR] = {score_rows<T, 1>, score_rows<T, 2>, score_rows<T, 3>,
                                        score_rows<T, 4>, score_rows<T, 5>, score_rows<T, 6>};
    static constexpr Mix mix[MR] = {mix_rows<T, 1>, mix_rows<T, 2>, mix_rows<T, 3>,
                                    mix_rows<T, 4>, mix_rows<T, 5>, mix_rows<T, 6>};
#elif defined(__AVX__)
    static constexpr Score score[MR] = {score_rows<T, 1>, score_rows<T, 2>, score_rows<T, 3>};
    static constexpr Mix mix[MR] = {mix_rows<T, 1>, mix_rows<T, 2>, mix_rows<T, 3>};
#else
    static constexpr Score score[MR] = {score_rows<T, 1>, score_rows<T, 2>, score_rows<T, 3>, score_rows<T, 4>};
    static constexpr Mix mix[MR] = {mix_rows<T, 1>, mix_rows<T, 2>, mix_rows<T, 3>, mix_rows<T, 4>};
#endif
};

// Rows of one sequence that share a kv head: what they ask, and their running maximum, sum and output.
struct Rows {
    int count, dim;
    float *q, *s, *o, *peak, *total;
    int *first, *last;  // keys [first, last) are visible
};

// One sequence's keys and values under one kv head.
template <class T>
struct Context {
    const T* cache;
    const int32_t* table;
    int64_t block_stride;
    int block_size, dim;

    const T* keys(int index) const { return cache + table[index] * block_stride; }

    // body(t, keys of t's block, values of t's block, t's offset in it) for base + t in [base + begin, base + end).
    template <class Body>
    void each(int base, int begin, int end, const Body& body) const {
        int index = (base + begin) / block_size, offset = (base + begin) % block_size;
        for (int t = begin; t < end; index++, offset = 0) {
            const T *k = keys(index), *v = k + (int64_t)block_size * dim;
            for (; t < end && offset < block_size; t++, offset++) body(t, k, v, offset);
        }
    }
};

void soften(float* s, float cap) {
    for (int j = 0; j < kVecs; j++) store(s + j * W, cap * hyperbolic_tangent(load(s + j * W) / cap));
}

void hide(float* s, int base, int first, int last) {
    Int at;
    for (int i = 0; i < W; i++) at[i] = base + i;
    for (int j = 0; j < kVecs; j++, at += W) {
        const Int visible = (at >= first) & (at < last);
        store(s + j * W, select(visible, load(s + j * W), splat(kNegInf)));
    }
}

// Turns one row of scores into weights, and brings maximum, sum and output up to date with the new maximum.
void renormalise(float* s, float* o, int dim, float& peak, float& total) {
    Vec top = load(s);
    for (int j = 1; j < kVecs; j++) top = maximum(top, load(s + j * W));
    const float new_peak = std::max(peak, horizontal_max(top));
    const float safe = new_peak == kNegInf ? 0.0f : new_peak;  // -inf - -inf would be NaN
    Vec sum = {};
    for (int j = 0; j < kVecs; j++) {
        const Vec weight = exponential(load(s + j * W) - safe);
        store(s + j * W, weight);
        sum += weight;
    }
    const float fade = peak == new_peak ? 1.0f : exponential(peak - safe);
    total = total * fade + horizontal_sum(sum);
    peak = new_peak;
    if (fade != 1.0f)
        for (int c = 0; c < dim; c += W) store(o + c, load(o + c) * fade);
}

// Copies a tile's keys and values as float32: keys [vector][channel][W], values [token][channel].
template <class T>
void unpack(const Context<T>& context, int base, int begin, int end, float* keys, float* values) {
    const int size = context.block_size, dim = context.dim;
    if (size % W == 0)
        for (int t = 0; t < end; t += W) {
            const T* from = context.keys((base + t) / size) + (base + t) % size;
            for (int c = 0; c < dim; c++) store(keys + ((int64_t)t / W * dim + c) * W, load(from + (int64_t)c * size));
        }
    else
        context.each(base, 0, end, [&](int t, const T* k, const T*, int offset) {
            float* to = keys + (int64_t)(t / W) * dim * W + t % W;
            for (int c = 0; c < dim; c++) to[c * W] = to_float(k[(int64_t)c * size + offset]);
        });
    context.each(base, begin, end, [&](int t, const T*, const T* v, int offset) {
        for (int c = 0; c < dim; c += W) store(values + (int64_t)t * dim + c, load(v + (int64_t)offset * dim + c));
    });
}

template <class T>
void score_and_mix(Rows& rows, const T* const* k, int64_t stride, const T* const* v, int base, int begin, int end,
                   float soft_cap) {
    const int groups = (rows.count + MR - 1) / MR;
    for (int g = 0; g < groups; g++) {
        const int m0 = rows.count * g / groups, m1 = rows.count * (g + 1) / groups;
        float* s = rows.s;
        Kernels<T>::score[m1 - m0 - 1](rows.q + m0 * rows.dim, rows.dim, k, stride, s);
        for (int m = m0; m < m1; m++, s += kTile) {
            if (soft_cap != 0) soften(s, soft_cap);
            if (rows.first[m] > base || rows.last[m] < base + kTile) hide(s, base, rows.first[m], rows.last[m]);
            renormalise(s, rows.o + m * rows.dim, rows.dim, rows.peak[m], rows.total[m]);
        }
        Kernels<T>::mix[m1 - m0 - 1](rows.s, v, begin, end, rows.o + m0 * rows.dim, rows.dim);
    }
}

// Attends to the keys in [first, last) that the rows may see; `first` is a multiple of kTile.
template <class T>
void attend_part(const Context<T>& context, Rows& rows, int first, int last, float soft_cap, float* scratch) {
    std::fill_n(rows.peak, rows.count, kNegInf);
    std::fill_n(rows.total, rows.count, 0.0f);
    std::fill_n(rows.o, rows.count * rows.dim, 0.0f);
    const int low = *std::min_element(rows.first, rows.first + rows.count);
    const int high = std::min(last, *std::max_element(rows.last, rows.last + rows.count));
    const bool direct = context.block_size % W == 0 && (rows.count <= MR || sizeof(T) == sizeof(float));
    for (int base = std::max(first, low / kTile * kTile); base < high; base += kTile) {
        // Cells outside [begin, end) may hold anything; the values' loops must not touch them, for 0 x NaN is NaN.
        const int begin = std::max(low - base, 0), end = std::min(high - base, kTile);
        if (direct) {
            const T *k[kVecs], *v[kTile];
            for (int j = 0; j < kVecs; j++) {
                const int token = base + std::min(j * W, (end - 1) / W * W);
                k[j] = context.keys(token / context.block_size) + token % context.block_size;
            }
            context.each(base, begin, end, [&](int t, const T*, const T* values, int offset) {
                v[t] = values + (int64_t)offset * context.dim;
            });
            score_and_mix(rows, k, context.block_size, v, base, begin, end, soft_cap);
        } else {
            float *keys = scratch, *values = scratch + kTile * context.dim;
            unpack(context, base, begin, end, keys, values);
            const float *k[kVecs], *v[kTile];
            for (int j = 0; j < kVecs; j++) k[j] = keys + (int64_t)j * context.dim * W;
            for (int t = begin; t < end; t++) v[t] = values + (int64_t)t * context.dim;
            score_and_mix(rows, k, W, v, base, begin, end, soft_cap);
        }
    }
}

// Takes a later part's (peak, total, o) into the sums so far.
void merge(float& peak, float& total, float* o, float part_peak, float part_total, const float* part, int dim) {
    const float new_peak = std::max(peak, part_peak);
    const float safe = new_peak == kNegInf ? 0.0f : new_peak;
    const float fade = exponential(peak - safe), weight = exponential(part_peak - safe);
    peak = new_peak;
    total = total * fade + part_total * weight;
    for (int c = 0; c < dim; c += W) store(o + c, load(o + c) * fade + load(part + c) * weight);
}

struct Task {
    int row, kv_head, begin, count;  // queries [begin, begin + count) of the row
    int part, parts;                 // part of `parts` if the row is split, else 0 of 1
    int64_t merged;                  // index into the results to be merged; -1 if not split
};

template <class T>
class Attention {
   public:
    explicit Attention(const AttendArgs& args) : a(args), group(args.heads / args.kv_heads) {
        tile = std::max(1, kRows / group);
        row_floats = a.head_dim + 2;
    }

    void run() {
        const int64_t work = plan();
        std::vector<float> results(split_rows * row_floats);
        std::vector<std::atomic<int>> arrived(split_groups);
        for (auto& count : arrived) count.store(0, std::memory_order_relaxed);
        partial = results.data();
        arrivals = arrived.data();
        parallel_for((int64_t)tasks.size(), work < kSerial ? 1 : a.threads, [&](int64_t i) { attend(tasks[i]); });
    }

   private:
    const AttendArgs& a;
    const int group;
    int tile, row_floats;
    std::vector<Task> tasks;
    int64_t split_rows = 0, split_groups = 0;
    float* partial = nullptr;
    std::atomic<int>* arrivals = nullptr;

    // Deals the batch into tasks, the long ones first, and returns its multiply-adds.
    int64_t plan() {
        int64_t work = 0;
        for (int row = 0; row < a.rows; row++) {
            const int count = a.query_start[row + 1] - a.query_start[row], length = a.seq_lens[row];
            work += (int64_t)count * length * a.heads * a.head_dim;
            const int parts = count <= tile ? (length + kPart - 1) / kPart : 1;
            for (int end = count; end > 0; end -= tile)
                for (int head = 0; head < a.kv_heads; head++) {
                    const int begin = std::max(0, end - tile);
                    for (int part = 0; part < parts; part++)
                        tasks.push_back({row, head, begin, end - begin, part, parts, parts > 1 ? split_groups : -1});
                    if (parts > 1) {
                        offsets.push_back(split_rows);
                        split_groups++;
                        split_rows += (int64_t)parts * count * group;
                    }
                }
        }
        auto cost = [&](const Task& t) {
            const int64_t keys = t.parts > 1 ? kPart : a.seq_lens[t.row] - count_of(t.row) + t.begin + t.count;
            return keys * t.count;
        };
        std::stable_sort(tasks.begin(), tasks.end(), [&](const Task& x, const Task& y) { return cost(x) > cost(y); });
        return work;
    }

    int count_of(int row) const { return a.query_start[row + 1] - a.query_start[row]; }

    void attend(const Task& task) {
        const int dim = a.head_dim, count = task.count * group;
        static thread_local std::vector<float> floats;
        static thread_local std::vector<int> ints;
        floats.resize((size_t)count * (3 * dim + 4) + MR * kTile + 2 * kTile * dim);
        ints.resize(2 * (size_t)count);
        float* next = floats.data();
        auto take = [&](int64_t n) { return next += n, next - n; };
        Rows rows{count, dim, take(count * dim), take(MR * kTile), take(count * dim), take(count), take(count),
                  ints.data(), ints.data() + count};
        float *sums = take(count * dim), *peaks = take(count), *totals = take(count), *scratch = take(2 * kTile * dim);
        const int last = ask(task, rows);
        const int64_t head_stride = 2LL * a.block_size * dim;
        const Context<T> context{static_cast<const T*>(a.cache) + task.kv_head * head_stride,
                                 a.block_tables + task.row * a.table_stride, head_stride * a.kv_heads, a.block_size,
                                 dim};
        if (task.merged >= 0) {
            attend_part(context, rows, task.part * kPart, (task.part + 1) * kPart, a.soft_cap, scratch);
            keep(task, rows);
            if (arrivals[task.merged].fetch_add(1, std::memory_order_acq_rel) + 1 < task.parts) return;
            std::fill_n(peaks, count, kNegInf);
            std::fill_n(totals, count, 0.0f);
            std::fill_n(sums, count * dim, 0.0f);
            for (int part = 0; part < task.parts; part++)
                for (int m = 0; m < count; m++) {
                    const float* kept = result(task, part, m);
                    merge(peaks[m], totals[m], sums + m * dim, kept[0], kept[1], kept + 2, dim);
                }
            finish(task, sums, totals);
        } else if (last <= kPart) {
            attend_part(context, rows, 0, last, a.soft_cap, scratch);
            finish(task, rows.o, rows.total);
        } else {
            std::fill_n(peaks, count, kNegInf);
            std::fill_n(totals, count, 0.0f);
            std::fill_n(sums, count * dim, 0.0f);
            for (int first = 0; first < last; first += kPart) {
                attend_part(context, rows, first, first + kPart, a.soft_cap, scratch);
                for (int m = 0; m < count; m++)
                    merge(peaks[m], totals[m], sums + m * dim, rows.peak[m], rows.total[m], rows.o + m * dim, dim);
            }
            finish(task, sums, totals);
        }
    }

    // Fills in the scaled queries and what each may see; returns the end of what any may see.
    int ask(const Task& task, Rows& rows) const {
        const int dim = a.head_dim, position = a.seq_lens[task.row] - count_of(task.row) + task.begin;
        for (int i = 0; i < task.count; i++)
            for (int h = 0; h < group; h++) {
                const int m = i * group + h;
                const T* from = static_cast<const T*>(a.q) + token(task, i) * a.q_token_stride +
                                (task.kv_head * group + h) * a.q_head_stride;
                for (int c = 0; c < dim; c += W) store(rows.q + m * dim + c, load(from + c) * a.scale);
                rows.last[m] = position + i + 1;
                rows.first[m] = a.window > 0 ? std::max(0, rows.last[m] - a.window) : 0;
            }
        return position + task.count;
    }

    int64_t token(const Task& task, int i) const { return (int64_t)a.query_start[task.row] + task.begin + i; }

    float* result(const Task& task, int part, int m) {
        return partial + (offsets[task.merged] + (int64_t)part * task.count * group + m) * row_floats;
    }

    void keep(const Task& task, const Rows& rows) {
        for (int m = 0; m < rows.count; m++) {
            float* to = result(task, task.part, m);
            to[0] = rows.peak[m];
            to[1] = rows.total[m];
            std::copy_n(rows.o + m * rows.dim, rows.dim, to + 2);
        }
    }

    void finish(const Task& task, const float* o, const float* total) const {
        const int dim = a.head_dim;
        for (int i = 0; i < task.count; i++)
            for (int h = 0; h < group; h++) {
                const int m = i * group + h;
                T* to = static_cast<T*>(a.out) + (token(task, i) * a.heads + task.kv_head * group + h) * dim;
                for (int c = 0; c < dim; c += W) store(to + c, load(o + m * dim + c) / total[m]);
            }
    }

    std::vector<int64_t> offsets;
};

template <class T>
void write(const WriteArgs& a) {
    constexpr int kStep = 16;
    const int64_t half = (int64_t)a.block_size * a.head_dim;
    auto body = [&](int64_t step) {
        const int end = (int)std::min<int64_t>(a.tokens, (step + 1) * kStep);
        for (int head = 0; head < a.kv_heads; head++)
            for (int t = (int)step * kStep; t < end; t++) {
                const int64_t block = a.slots[t] / a.block_size, offset = a.slots[t] % a.block_size;
                const T* k = static_cast<const T*>(a.k) + t * a.k_token_stride + head * a.k_head_stride;
                const T* v = static_cast<const T*>(a.v) + t * a.v_token_stride + head * a.v_head_stride;
                T* keys = static_cast<T*>(a.cache) + (block * a.kv_heads + head) * 2 * half;
                for (int c = 0; c < a.head_dim; c++) keys[(int64_t)c * a.block_size + offset] = k[c];
                std::copy_n(v, a.head_dim, keys + half + offset * a.head_dim);
            }
    };
    const int64_t steps = (a.tokens + kStep - 1) / kStep;
    parallel_for(steps, (int64_t)a.tokens * a.kv_heads * a.head_dim < kSerial ? 1 : a.threads, body);
}

}  // namespace

extern "C" {

// The runtime's GOMP_parallel, or null to compute on the calling thread.
void octavo_use_threads(Parallel parallel) { g_parallel = parallel; }

int octavo_vector_width() { return W; }

void octavo_attend(const AttendArgs* args) {
    if (args->bfloat)
        Attention<bf16>(*args).run();
    else
        Attention<float>(*args).run();
}

void octavo_write(const WriteArgs* args) {
    if (args->bfloat)
        write<bf16>(*args);
    else
        write<float>(*args);
}

// One query over one key: the result must be the value. 0 if it is.
int octavo_self_test() {
    std::vector<float> q(64, 0.5f), cache(2 * 16 * 64, std::numeric_limits<float>::quiet_NaN()), out(64, -1.0f);
    std::vector<float> k(64, 0.25f), v(64, 2.0f);
    const int32_t starts[] = {0, 1}, lengths[] = {1}, table[] = {0};
    const int64_t slots[] = {0};
    WriteArgs w{k.data(), v.data(), cache.data(), slots, 64, 64, 64, 64, 1, 1, 64, 16, 0, 1};
    octavo_write(&w);
    AttendArgs a{q.data(), out.data(), cache.data(), starts, lengths, table, 64, 64, 1, 1, 1, 1, 64, 16, 0, 0, 1, 0.125f, 0};
    octavo_attend(&a);
    for (float x : out)
        if (!(std::abs(x - 2.0f) < 1e-6f)) return 1;
    return 0;
}

}  // extern "C"
