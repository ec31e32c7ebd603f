#include "pool.h"

namespace octavo {

namespace {

constexpr int kIdleLooks = 20000;  // about the time that Python takes between two programs of a step

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads) {
    for (int thread = 1; thread < threads_; thread++) workers_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
        gate_.fetch_add(kJob);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(void (*work)(void*, int), void* data) {
    if (threads_ == 1) return work(data, 0);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = work;
        data_ = data;
        left_.store(0, std::memory_order_relaxed);
        const uint64_t job = gate_.load(std::memory_order_relaxed) / kJob + 1;
        gate_.store(job * kJob | kOpen, std::memory_order_release);
    }
    wake_.notify_all();
    work(data, 0);
    const uint64_t guests = gate_.fetch_and(~kOpen, std::memory_order_acq_rel) % kJob / kGuest;
    wait_until([&] { return left_.load(std::memory_order_acquire) == guests; });
}

// Joins the job of `gate`; returns false if it is closed or `gate` is outdated.
bool Pool::enter(uint64_t gate) {
    const uint64_t job = gate / kJob;
    while (gate / kJob == job && gate & kOpen)
        if (gate_.compare_exchange_weak(gate, gate + kGuest, std::memory_order_acq_rel)) return true;
    return false;
}

void Pool::serve(int thread) {
    for (uint64_t seen = 0; !ended_;) {
        const auto called = [&] { return gate_.load(std::memory_order_acquire) / kJob != seen; };
        if (!spin(kIdleLooks, called)) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, called);
        }
        const uint64_t gate = gate_.load(std::memory_order_acquire);
        seen = gate / kJob;
        if (!enter(gate)) continue;
        work_(data_, thread);
        left_.fetch_add(1, std::memory_order_acq_rel);
    }
}

}  // namespace octavo
