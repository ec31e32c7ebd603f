// A program: the operations of a model's forward pass in order, run over a batch of any size by one team of threads.
//
// Python builds it once from the model's layers and runs it with one call per step. Threads claim the tasks of one
// operation after another; the next operation begins when all tasks of the previous one are done.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "amx.h"
#include "low_rank.h"
#include "pool.h"
#include "sample.h"

extern "C" {

struct OctavoLowRank;

// One operation. The fields in use depend on its kind; octavo/native/builder.py sets and documents them.
struct OctavoOp {
    int32_t kind, dtype, input, output;
    int32_t rows, columns, epilogue, packed;
    int32_t heads, kv_heads, head_dim, rotary_dim;
    int32_t window, zero_point, minima, output_dtype, planes;
    int32_t function;            // of a product's results (results.h)
    int32_t centered;            // the norm subtracts the mean
    int32_t groups, begin;       // groups of `columns` values that a norm computes separately, or the first value that
                                 // is copied; the first group's start, or where copied values begin, or what a
                                 // rotation adds to positions for the factors of queries
    int32_t own_weights;         // each of these groups has weights (and biases) of its own
    int32_t by_position;         // rows of a table are looked up by the tokens' positions, not by their ids
    int32_t cache_dtype, group;  // `group`: of the layer's KV cache, whose block tables the operation reads
    int32_t beside;              // the next operation does not read its results, so it begins without a barrier
    int32_t chunked;             // windows begin at multiples of their size
    int32_t scaled;              // inputs that share a scale, of weights that are codes (codes.h)
    int32_t rotates_first;       // a rotation precedes the norms of heads
    float eps, scale, soft_cap, limit;
    const void *weight, *second, *third;
    void* cache;
    const void* book;    // of weights that are codes (codes.h)
    const void* kernel;  // its function in a separate library (octavo/native/bindings.py), or null
    const OctavoLowRank* low_rank;  // additions to a product, of which each row may have one; or null for none
    const void* code;     // of an operation in a separate library: its OpCode; else null
    const void* details;  // of such an operation: further parameters, in a structure of its library; of one between
                          // ranks: their `Exchange`; else null
    const float* curve;   // the parameters of the function kXielu
    int64_t block_stride;  // bytes from one block of `cache` to the next
};

// One step's batch: pointers to the arrays documented in octavo/nn/step.py. `external`: buffers that the caller owns.
// Block tables and slots are those of the first cache group; those of further groups follow at equal distances.
struct OctavoStep {
    const int64_t *input_ids, *positions, *slots;
    const int32_t *query_start, *seq_lens, *block_tables;
    const int32_t *unseen, *ahead;  // or null
    const float* rotations;  // a row of cosines and sines for each token, or null: those at its position
    void* external[3];
    int64_t table_stride;
    int64_t group_tables, group_slots;  // entries from one cache group's to the next one's
    int32_t tokens, rows, block_size;
    int32_t of_logits;  // its tokens are only those that get logits, as `OctavoLowRank::of_logits`

    const int32_t* table(int group, int row) const { return block_tables + group * group_tables + row * table_stride; }
    int64_t slot(int group, int64_t token) const { return slots[group * group_slots + token]; }
};

// A step of the known tokens that are not computed, usually one, and some drafts for each of `count` slots; see
// decode.cpp. The first six are those of octavo/worker/slots.py. A row of logits per token: `results` in all.
struct OctavoDecode {
    int32_t* tokens;
    int64_t *length, *computed;
    const int64_t* num_drafts;
    const int32_t* block_tables;
    const OctavoSampling* sampling;
    const int64_t* slots;   // [count], the slots to compute
    const int64_t* drafts;  // [count], tokens of each row after the first: known ones, drafts, padding
    const uint32_t* const* allowed;  // [results] or null, as `OctavoSample::allowed`
    void* external[3];
    int64_t* chosen;  // [results], the sampled tokens
    float* peaks;     // [results], their logits
    int64_t* kept;    // [count], tokens appended to each slot: the accepted drafts and one more
    int64_t token_stride, table_stride, group_stride, logit_stride;  // `group_stride`: between groups' block tables
    int32_t count, results, block_size, operations;
    int32_t columns;  // of logits; 0 in a stage of a pipeline without a head, whose result is external[0]
    int32_t groups;
    int32_t rewinds;  // a row with a rejected draft is computed again, since a recurrent state can't take it back
    int32_t times;    // steps in a row, each for the tokens that the one before has drawn; further ones have no drafts
};

}  // extern "C"

namespace octavo {

enum Kind {  // of the main library
    kEmbed, kNorm, kLinear, kRope, kAttend, kMerge, kQuantize, kShrink, kShare, kAllReduce, kAllGather, kCopy,
    kKinds
};
enum Dtype { kFloat, kBfloat, kInt8, kInt4, kCode4, kCode6, kE4m3, kE5m2, kBf16, kF16 };
enum Epilogue { kStore, kAdd, kGate };
constexpr int kExternals = 3;

struct Free {
    void operator()(void* p) const { std::free(p); }
};

// Memory aligned to a cache line, of at least the size last requested; growing loses the contents.
class Scratch {
public:
    void* need(size_t bytes) {
        if (bytes > size_) {
            size_ = (bytes + bytes / 4 + 63) / 64 * 64;
            memory_.reset();
            memory_.reset(std::aligned_alloc(64, size_));
            if (!memory_) throw std::bad_alloc();
        }
        return memory_.get();
    }
    void* get() const { return memory_.get(); }

private:
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};

// A task of one thread: queries of one row that share a key-value head, over all keys or one part of them. Or a part
// that several rows of one query have in common, whose keys are read once for all of them.
struct AttentionTask {
    int32_t row, kv_head, begin, count;
    int32_t part;        // -1: all parts, in order
    int64_t result;      // start of this row's partial results, counted in query heads; -1 without parts
    int32_t sharers;     // start of its `count` rows among the plan's; -1: only `row`
};

// A row of one query that shares a part with others, and the start of its partial results.
struct Sharer {
    int32_t row;
    int64_t result;
};

// Division of a step's attention into tasks.
struct AttentionPlan {
    std::vector<AttentionTask> tasks, merges;
    std::vector<Sharer> sharers;
    int64_t partial_heads = 0;  // query heads with partial results, counted once per part

    void clear() {
        tasks.clear();
        merges.clear();
        sharers.clear();
        partial_heads = 0;
    }
};

// A thread's own share of an operation's tasks: it takes them in order, so that it reads memory in order, and then
// helps the other threads with theirs.
struct alignas(64) Share {
    std::atomic<int64_t> taken{0};
};

struct alignas(64) Progress {
    std::atomic<int64_t> done{0};  // tasks of an operation, by all threads
};

class Exchange;

class Program {
public:
    // `widths`: bytes of a buffer's rows; `rows`: of each token, or null for one.
    Program(Pool& pool, const OctavoOp* ops, int count, const int64_t* widths, const int32_t* rows, int buffers);

    // Runs the operations [first, last). Returns false, with undefined results, if another rank was not there in time.
    bool run(int first, int last, const OctavoStep& step);

    // Sets where to record each operation's end and, as the last element, the start of the first; null for nowhere. In
    // nanoseconds of the first thread's clock.
    void time_to(int64_t* ends) { ends_ = ends; }

    const OctavoStep& step() const { return *step_; }
    Pool& pool() const { return pool_; }
    int threads() const { return pool_.threads(); }

    // Returns a buffer's row: a token's, unless tokens have several.
    template <class T>
    T* at(int buffer, int64_t row) const {
        return reinterpret_cast<T*>(static_cast<char*>(bases_[buffer]) + row * widths_[buffer]);
    }

    void* scratch(int thread, size_t bytes) { return thread_scratch_[thread].need(bytes); }

    amx::Registers& registers(int thread) { return registers_[thread]; }

    // Returns the round of the ranks' exchange that an operation takes part in.
    uint32_t round_of(const OctavoOp& op) const { return rounds_[&op - ops_.data()]; }

    const AttentionPlan& attention(const OctavoOp& op) const { return attention_[plan_of_[&op - ops_.data()]]; }
    const RowsByAddition& by_addition() const { return by_addition_; }

    // Returns the results of kShrink for one token.
    float* shrunk(int64_t token) const { return static_cast<float*>(shrunk_.get()) + token * by_addition_.width; }

    // Functions for kernels in separate libraries: `expand` and `shrink_row` of low_rank.cpp, `map_results` of results.cpp
    // and `quantize_row` of quantize.cpp.
    using OfSums = void (*)(const Program&, const OctavoOp&, int panel, int panels, int first, int count, float* sums);
    const OfSums add_low_rank, map_results;
    void (*const shrink_row)(const OctavoLowRank& table, int index, const float* x, int columns, float* to);
    void (*const quantize_row)(const float* x, int columns, int planes, int zero_point, void* row);

    float* partials(int64_t floats) { return static_cast<float*>(partials_.need(floats * sizeof(float))); }
    float* partials() const { return static_cast<float*>(partials_.get()); }

private:
    void work(int thread);
    int64_t take(int operation, int64_t tasks, int thread);
    bool finished(int first, int last);
    void find_plans();
    void prepare(int first, int last);
    void begin_rounds(int first, int last);

    Pool& pool_;
    std::vector<OctavoOp> ops_;
    std::vector<int64_t> widths_;
    std::vector<int32_t> rows_;  // of a token, in each buffer
    std::vector<void*> bases_;
    std::vector<Scratch> buffers_, thread_scratch_;
    std::vector<amx::Registers> registers_;  // [thread]
    std::unique_ptr<Share[]> shares_;  // [operation][thread]
    std::unique_ptr<Progress[]> progress_;  // [operation]
    std::vector<AttentionPlan> attention_;  // of each cache group and shape of heads
    std::vector<int> plan_of_;              // [operation]
    Scratch partials_, shrunk_;
    Exchange* exchange_ = nullptr;  // of this run; null if its operations are all of this rank
    std::vector<uint32_t> rounds_;  // [operation]
    RowsByAddition by_addition_;
    const OctavoStep* step_ = nullptr;
    int first_ = 0, last_ = 0;
    int64_t* ends_ = nullptr;
};

// Number of tasks of an operation in this step, and a function to run one. `plan` divides the step's attention over one
// cache group into tasks; it is called once a step for each group that has such an operation.
struct OpCode {
    int64_t (*tasks)(Program&, const OctavoOp&);
    void (*run)(Program&, const OctavoOp&, int64_t task, int thread);
    void (*plan)(const Program&, const OctavoOp&, AttentionPlan&) = nullptr;
};

OpCode embed_code(), norm_code(), linear_code(), rope_code(), attend_code(), merge_code(), quantize_code(),
    shrink_code(), share_code(), all_reduce_code(), all_gather_code(), copy_code();

// `OpCode::plan` of attention.
void plan_attention(const Program& program, const OctavoOp& op, AttentionPlan& plan);

}  // namespace octavo
