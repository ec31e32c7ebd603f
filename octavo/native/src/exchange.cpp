#include "exchange.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <new>
#include <thread>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#include "pool.h"
#include "simd.h"

namespace octavo {

namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPage = 4096;
constexpr size_t kGrain = 64 << 10;  // places grow by multiples of it
constexpr int kLooks = 4000;         // about 50 us, the time that ranks of equal work differ by
constexpr auto kAwake = std::chrono::milliseconds(2);  // in which a thread only yields
constexpr auto kNap = std::chrono::milliseconds(100);  // after which it looks at the clock

size_t whole(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

bool reached(const std::atomic<uint32_t>& counter, uint32_t round) {
    return (int32_t)(counter.load(std::memory_order_acquire) - round) >= 0;  // numbers wrap around
}

// Sleeps until another process changes the number, for a limited time.
void sleep_while(std::atomic<uint32_t>& number, uint32_t value) {
#if defined(__linux__)
    const timespec nap{0, std::chrono::nanoseconds(kNap).count()};
    syscall(SYS_futex, &number, FUTEX_WAIT, value, &nap, nullptr, 0);
#else
    std::this_thread::yield();
#endif
}

void wake_all(std::atomic<uint32_t>& number) {
#if defined(__linux__)
    syscall(SYS_futex, &number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

}  // namespace

Exchange::Exchange(int memory, int rank, int ranks, double limit_s)
    : memory_file_(dup(memory)),
      rank_(rank),
      ranks_(ranks),
      limit_s_(limit_s),
      places_(whole(ranks * sizeof(Counter), kPage)) {
    try {
        map(0);
    } catch (...) {
        close(memory_file_);
        throw;
    }
}

Exchange::~Exchange() {
    munmap(memory_, size_);
    close(memory_file_);
}

// Maps the file, which only grows. Its new bytes are zero.
void Exchange::map(size_t capacity) {
    const size_t size = places_ + 2 * ranks_ * capacity;
    struct stat file;
    if (fstat(memory_file_, &file) != 0) throw std::bad_alloc();
    if ((size_t)file.st_size < size && ftruncate(memory_file_, (off_t)size) != 0) throw std::bad_alloc();
    void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, memory_file_, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    if (memory_ != nullptr) munmap(memory_, size_);
    memory_ = static_cast<char*>(mapped);
    size_ = size;
    capacity_ = capacity;
}

void Exchange::reserve(size_t bytes) {
    if (bytes <= capacity_) return;
    // Places move when they grow, so all ranks must have read those of the last round.
    if (meet(next())) map(whole(bytes + bytes / 4, kGrain));
}

bool Exchange::meet(uint32_t round) {
    Counter& own = counter(rank_);
    if (!reached(own.round, round)) {
        own.round.store(round, std::memory_order_seq_cst);
        if (own.sleepers.load(std::memory_order_seq_cst) > 0) wake_all(own.round);
    }
    for (int i = 1; i < ranks_; i++) {
        const int rank = (rank_ + i) % ranks_;
        Counter& other = counter(rank);
        if (spin(kLooks, [&] { return reached(other.round, round) || missing() >= 0; })) continue;
        if (!sleep_until(other, round)) missing_.store(rank, std::memory_order_release);
    }
    return missing() < 0;
}

// Waits for a rank; returns false if it was not there in time.
bool Exchange::sleep_until(Counter& other, uint32_t round) {
    Clock::duration waited{};
    for (Clock::time_point last = Clock::now(); !reached(other.round, round) && missing() < 0;) {
        const Clock::time_point now = Clock::now();
        waited += std::min<Clock::duration>(now - last, 2 * kNap);  // both ranks may have been stopped for a while
        last = now;
        if (limit_s_ > 0 && waited > std::chrono::duration<double>(limit_s_)) return false;
        if (waited < kAwake) {
            std::this_thread::yield();
            continue;
        }
        other.sleepers.fetch_add(1, std::memory_order_seq_cst);
        const uint32_t seen = other.round.load(std::memory_order_seq_cst);
        if ((int32_t)(seen - round) < 0) sleep_while(other.round, seen);
        other.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }
    return true;
}

namespace {

// Calls body(row, first, count) for a task's piece of a row.
constexpr int kPiece = 2048;  // floats

int64_t pieces_of(const OctavoOp& op) { return (op.columns + kPiece - 1) / kPiece; }

int64_t exchange_tasks(Program& program, const OctavoOp& op) { return program.step().tokens * pieces_of(op); }

template <class Body>
void for_piece(const OctavoOp& op, int64_t task, const Body& body) {
    const int64_t row = task / pieces_of(op), first = task % pieces_of(op) * kPiece;
    body(row, first, std::min<int64_t>(kPiece, op.columns - first));
}

// --- a product's partial results, copied to this rank's place ------------------------------------------------------

void run_share(Program& program, const OctavoOp& op, int64_t task, int) {
    for_piece(op, task, [&](int64_t row, int64_t first, int64_t count) {
        char* const to = exchange_of(op).own(program.round_of(op)) + row * exchanged_bytes(op);
        std::memcpy(to + first * sizeof(float), program.at<float>(op.input, row) + first, count * sizeof(float));
    });
}

// --- the sum over ranks, in their order, so that it has the same bits everywhere -----------------------------------

template <class T>
Vec summed(const T* first, size_t stride, int ranks, int64_t c) {
    Vec sum = load(first + c);
    for (int rank = 1; rank < ranks; rank++) sum += load(first + rank * stride + c);
    return sum;
}

void run_all_reduce(Program& program, const OctavoOp& op, int64_t task, int) {
    Exchange& exchange = exchange_of(op);
    const uint32_t round = program.round_of(op);
    if (!exchange.meet(round)) return;
    const size_t stride = (exchange.place(1, round) - exchange.place(0, round)) / sizeof(float);
    for_piece(op, task, [&](int64_t row, int64_t first, int64_t count) {
        const float* from = reinterpret_cast<float*>(exchange.place(0, round) + row * exchanged_bytes(op)) + first;
        float* const to = program.at<float>(op.output, row) + first;
        for (int64_t c = 0; c < count; c += W) {
            const Vec sum = summed(from, stride, exchange.ranks(), c);
            store(to + c, op.epilogue == kAdd ? load(to + c) + sum * op.scale : sum);
        }
    });
}

// --- the ranks' columns side by side -------------------------------------------------------------------------------

void run_all_gather(Program& program, const OctavoOp& op, int64_t task, int) {
    Exchange& exchange = exchange_of(op);
    const uint32_t round = program.round_of(op);
    if (!exchange.meet(round)) return;
    for_piece(op, task, [&](int64_t row, int64_t first, int64_t count) {
        for (int rank = 0; rank < exchange.ranks(); rank++) {
            const char* from = exchange.place(rank, round) + row * exchanged_bytes(op);
            float* const to = program.at<float>(op.output, row) + (int64_t)rank * op.columns + first;
            std::memcpy(to, from + first * sizeof(float), count * sizeof(float));
        }
    });
}

// Writes the sum of all ranks' `count` numbers to `x`, float32 inside. Returns whether all were there.
template <class T>
bool all_reduce(Exchange& exchange, T* x, int64_t count) {
    const size_t bytes = count * sizeof(T);
    exchange.reserve(bytes);
    const uint32_t round = exchange.next();
    if (exchange.missing() >= 0) return false;
    std::memcpy(exchange.own(round), x, bytes);
    if (!exchange.meet(round)) return false;
    const T* const from = reinterpret_cast<T*>(exchange.place(0, round));
    const size_t stride = reinterpret_cast<T*>(exchange.place(1, round)) - from;
    int64_t c = 0;
    for (; c + W <= count; c += W) store(x + c, summed(from, stride, exchange.ranks(), c));
    if (c == count) return true;
    T last[W] = {};  // of the end, which is no whole vector
    Vec sum{};
    for (int rank = 0; rank < exchange.ranks(); rank++) {
        std::memcpy(last, from + rank * stride + c, (count - c) * sizeof(T));
        sum = rank == 0 ? load(last) : sum + load(last);
    }
    store(last, sum);
    std::memcpy(x + c, last, (count - c) * sizeof(T));
    return true;
}

}  // namespace

OpCode share_code() { return {exchange_tasks, run_share}; }

OpCode all_reduce_code() { return {exchange_tasks, run_all_reduce}; }

OpCode all_gather_code() { return {exchange_tasks, run_all_gather}; }

}  // namespace octavo

using namespace octavo;

extern "C" {

// Returns null if the memory can't be mapped.
void* octavo_exchange_create(int memory, int rank, int ranks, double limit_s) {
    try {
        return new Exchange(memory, rank, ranks, limit_s);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void octavo_exchange_destroy(void* exchange) { delete static_cast<Exchange*>(exchange); }

// Returns the rank that was not there in time; -1 for none.
int octavo_exchange_missing(void* exchange) { return static_cast<Exchange*>(exchange)->missing(); }

// Replaces `count` numbers, float32 or bfloat16, by their sums over all ranks. Returns 0, 1 if memory lacks, or 2 if a
// rank was not there in time.
int octavo_exchange_all_reduce(void* exchange, void* x, int64_t count, int dtype) {
    Exchange& e = *static_cast<Exchange*>(exchange);
    try {
        const bool all = dtype == kBfloat ? all_reduce(e, static_cast<bf16*>(x), count)
                                          : all_reduce(e, static_cast<float*>(x), count);
        return all ? 0 : 2;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// Writes all ranks' `bytes` of `x` to `result`, in rank order. Returns as above.
int octavo_exchange_all_gather(void* exchange, const void* x, void* result, int64_t bytes) {
    Exchange& e = *static_cast<Exchange*>(exchange);
    try {
        e.reserve(bytes);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    const uint32_t round = e.next();
    if (e.missing() >= 0) return 2;
    std::memcpy(e.own(round), x, bytes);
    if (!e.meet(round)) return 2;
    for (int rank = 0; rank < e.ranks(); rank++)
        std::memcpy(static_cast<char*>(result) + rank * bytes, e.place(rank, round), bytes);
    return 0;
}

}  // extern "C"
