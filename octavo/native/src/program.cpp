#include "program.h"

#include <algorithm>
#include <chrono>
#include <tuple>

#include "blocks.h"
#include "exchange.h"
#include "linear.h"
#include "results.h"
#include "simd.h"

namespace octavo {

namespace {

const OpCode& code_of(const OctavoOp& op) {
    static const OpCode table[kKinds] = {embed_code(),    norm_code(),   linear_code(), rope_code(),
                                         attend_code(),   merge_code(),  quantize_code(), shrink_code(),
                                         share_code(),   all_reduce_code(), all_gather_code(), copy_code()};
    return op.code != nullptr ? *static_cast<const OpCode*>(op.code) : table[op.kind];
}

}  // namespace

Program::Program(Pool& pool, const OctavoOp* ops, int count, const int64_t* widths, const int32_t* rows, int buffers)
    : add_low_rank(expand),
      map_results(octavo::map_results),
      shrink_row(octavo::shrink_row),
      quantize_row(octavo::quantize_row),
      pool_(pool),
      ops_(ops, ops + count),
      widths_(widths, widths + buffers),
      rows_(buffers, 1),
      bases_(buffers),
      buffers_(buffers),
      thread_scratch_(pool.threads()),
      registers_(pool.threads()),
      shares_(new Share[(size_t)count * pool.threads()]),
      progress_(new Progress[count]),
      rounds_(count) {
    if (rows != nullptr) rows_.assign(rows, rows + buffers);
    find_plans();
}

// Gives operations that attend alike, over the same cache group, a plan in common.
void Program::find_plans() {
    std::vector<const OctavoOp*> firsts;
    const auto find = [&](auto same) {
        return (int)(std::find_if(firsts.begin(), firsts.end(), same) - firsts.begin());
    };
    const auto shape = [](const OctavoOp& op) { return std::tie(op.group, op.heads, op.kv_heads, op.head_dim); };
    for (const OctavoOp& op : ops_) {
        const int plan = find([&](const OctavoOp* first) { return shape(*first) == shape(op); });
        if (plan == (int)firsts.size() && code_of(op).plan != nullptr) firsts.push_back(&op);
        plan_of_.push_back(plan < (int)firsts.size() ? plan : 0);
    }
    attention_.resize(std::max<size_t>(1, firsts.size()));
}

bool Program::run(int first, int last, const OctavoStep& step) {
    step_ = &step;
    first_ = first;
    last_ = last;
    prepare(first, last);
    if (exchange_ != nullptr && exchange_->missing() >= 0) return false;
    pool_.run([](void* self, int thread) { static_cast<Program*>(self)->work(thread); }, this);
    return exchange_ == nullptr || exchange_->missing() < 0;
}

void Program::prepare(int first, int last) {
    for (size_t i = 0; i < bases_.size(); i++)
        bases_[i] = i < kExternals ? step_->external[i]
                                   : buffers_[i].need((size_t)step_->tokens * rows_[i] * widths_[i]);
    for (int i = first * threads(); i < last * threads(); i++) shares_[i].taken.store(0, std::memory_order_relaxed);
    for (int i = first; i < last; i++) progress_[i].done.store(0, std::memory_order_relaxed);
    for (int plan = 0; plan < (int)attention_.size(); plan++) {
        const auto attends = [&](const OctavoOp& op) {
            return plan_of_[&op - ops_.data()] == plan && code_of(op).plan != nullptr;
        };
        const auto found = std::find_if(ops_.begin() + first, ops_.begin() + last, attends);
        if (found == ops_.begin() + last) continue;
        attention_[plan].clear();
        code_of(*found).plan(*this, *found, attention_[plan]);
        partials(attention_[plan].partial_heads * (found->head_dim + 2));
    }
    by_addition_.find(ops_.data() + first, ops_.data() + last, *step_);
    shrunk_.need((size_t)by_addition_.width * step_->tokens * sizeof(float));
    begin_rounds(first, last);
}

// Numbers the rounds in which the ranks exchange results, and makes room for the largest.
void Program::begin_rounds(int first, int last) {
    size_t row = 0;
    exchange_ = nullptr;
    for (int i = first; i < last; i++)
        if (ops_[i].kind == kShare) {
            exchange_ = &exchange_of(ops_[i]);
            row = std::max(row, exchanged_bytes(ops_[i]));
        }
    if (exchange_ == nullptr) return;
    exchange_->reserve(row * step_->tokens);
    for (int i = first; i < last; i++) {
        if (ops_[i].kind == kShare) rounds_[i] = exchange_->next();
        if (ops_[i].kind == kAllReduce || ops_[i].kind == kAllGather) rounds_[i] = rounds_[i - 1];
    }
}

namespace {

constexpr int kSoonOps = 4;                // operations to search for the next product
constexpr int64_t kSoonBytes = 256 << 10;  // of its weights to prefetch; they must still be cached when it begins
constexpr int kSoonTokens = 32;            // in larger steps, activations need the cache

// Memory that a thread will read soon, prefetched into its second-level cache while it waits for the others.
struct Soon {
    int op = -1;
    const char* from = nullptr;
    int64_t bytes = 0;

    __attribute__((always_inline)) void fetch() {
        constexpr int kLines = 4;
        for (int i = 0; i < kLines && bytes > 0; i++, from += 64, bytes -= 64) __builtin_prefetch(from, 0, 2);
    }
};

// Returns what this thread's own part of the next product reads first.
Soon next_weights(const std::vector<OctavoOp>& ops, int first, int last, int thread, int threads) {
    for (int i = first; i < std::min(first + kSoonOps, last); i++) {
        const OctavoOp& op = ops[i];
        if (op.kind != kLinear) continue;
        const int64_t bytes = panel_bytes(op), tasks = pairs_of(op);
        const int64_t begin = tasks * thread / threads * kPair, end = tasks * (thread + 1) / threads * kPair;
        return {i, static_cast<const char*>(op.weight) + begin * bytes, std::min(kSoonBytes, (end - begin) * bytes)};
    }
    return {last, nullptr, 0};
}

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

}  // namespace

void Program::work(int thread) {
    int64_t* const ends = thread == 0 ? ends_ : nullptr;
    if (ends) ends[ops_.size()] = now();
    Soon soon;
    int since = first_;  // the first operation since the last barrier
    for (int i = first_; i < last_; i++) {
        const OctavoOp& op = ops_[i];
        const OpCode& code = code_of(op);
        const int64_t tasks = code.tasks(*this, op);
        std::atomic<int64_t>& done = progress_[i].done;
        if (const int64_t mine = take(i, tasks, thread)) done.fetch_add(mine, std::memory_order_acq_rel);
        if (op.beside && i + 1 < last_) {
            if (ends) ends[i] = now();
            continue;
        }
        if (soon.op <= i && step_->tokens <= kSoonTokens) soon = next_weights(ops_, i + 1, last_, thread, threads());
        wait_until([&] {
            if (done.load(std::memory_order_acquire) == tasks && finished(since, i)) return true;
            soon.fetch();
            return false;
        });
        since = i + 1;
        if (ends) ends[i] = now();
    }
    registers_[thread].release();
}

// Returns whether all tasks of the operations [first, last) are done.
bool Program::finished(int first, int last) {
    for (int i = first; i < last; i++)
        if (progress_[i].done.load(std::memory_order_acquire) != code_of(ops_[i]).tasks(*this, ops_[i])) return false;
    return true;
}

// Runs the unclaimed tasks of operation i; returns their number.
int64_t Program::take(int i, int64_t tasks, int thread) {
    const OctavoOp& op = ops_[i];
    const OpCode& code = code_of(op);
    int64_t count = 0;
    for (int offset = 0; offset < threads(); offset++) {
        const int owner = (thread + offset) % threads();
        const int64_t first = tasks * owner / threads(), end = tasks * (owner + 1) / threads();
        std::atomic<int64_t>& taken = shares_[i * threads() + owner].taken;
        if (first + taken.load(std::memory_order_relaxed) >= end) continue;
        for (int64_t task; (task = first + taken.fetch_add(1, std::memory_order_relaxed)) < end; count++)
            code.run(*this, op, task, thread);
    }
    return count;
}

}  // namespace octavo

using namespace octavo;

extern "C" {

void* octavo_pool_create(int threads) { return new Pool(threads); }

void octavo_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

void* octavo_program_create(void* pool, const OctavoOp* ops, int count, const int64_t* widths, const int32_t* rows,
                            int buffers) {
    return new Program(*static_cast<Pool*>(pool), ops, count, widths, rows, buffers);
}

void octavo_program_destroy(void* program) { delete static_cast<Program*>(program); }

// Returns 0, 1 if the step's buffers can't be allocated, or 2 if another rank was not there in time.
int octavo_program_run(void* program, int first, int last, const OctavoStep* step) {
    try {
        return static_cast<Program*>(program)->run(first, last, *step) ? 0 : 2;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

void octavo_program_time(void* program, int64_t* ends) { static_cast<Program*>(program)->time_to(ends); }

// Normalizes rows of equal numbers on two threads, which must give the norm's weights. Returns 0 if it does.
int octavo_self_test() {
    constexpr int kSize = 32, kRows = 9;
    float weight[kSize], rows[kRows * kSize], result[kRows * kSize] = {};
    for (int i = 0; i < kSize; i++) weight[i] = (float)i - 7.5f;
    for (int i = 0; i < kRows * kSize; i++) rows[i] = (float)(1 << i / kSize);
    OctavoOp op{};
    op.kind = kNorm, op.input = 0, op.output = 1, op.columns = kSize, op.groups = 1, op.weight = weight;
    const int64_t widths[kExternals] = {kSize * 4, kSize * 4};
    OctavoStep step{};
    step.tokens = kRows, step.external[0] = rows, step.external[1] = result;
    Pool pool(2);
    Program(pool, &op, 1, widths, nullptr, kExternals).run(0, 1, step);
    for (int i = 0; i < kRows; i++)
        if (!std::equal(weight, weight + kSize, result + i * kSize)) return 1;
    return 0;
}

int octavo_abi() { return (int)(sizeof(OctavoOp) * 1000000 + sizeof(OctavoStep) * 1000 + sizeof(OctavoDecode)); }

}  // extern "C"
