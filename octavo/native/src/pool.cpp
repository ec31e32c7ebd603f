#include "pool.h"

#include "simd.h"

namespace octavo {

namespace {

constexpr int kSpins = 4000;       // about 50 us of looking before giving the core up
constexpr int kIdleSpins = 20000;  // between two programs of a step, Python takes about so long

// True once `done` holds; false if it did not within so many looks.
template <class Done>
bool spin(int looks, const Done& done) {
    for (int i = 0; i < looks; i++) {
        if (done()) return true;
        pause();
    }
    return done();
}

}  // namespace

void Barrier::wait() {
    if (threads_ == 1) return;
    const uint32_t round = round_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
        arrived_.store(0, std::memory_order_relaxed);
        round_.store(round + 1, std::memory_order_release);
        return;
    }
    const auto opened = [&] { return round_.load(std::memory_order_acquire) != round; };
    while (!spin(kSpins, opened)) std::this_thread::yield();
}

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), barrier_(threads_) {
    for (int thread = 1; thread < threads_; thread++) workers_.emplace_back([this, thread] { serve(thread); });
}

Pool::~Pool() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
        round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::run(void (*work)(void*, int), void* data) {
    if (threads_ > 1) {
        std::lock_guard<std::mutex> lock(mutex_);
        work_ = work;
        data_ = data;
        busy_.store(threads_ - 1, std::memory_order_relaxed);
        round_.fetch_add(1, std::memory_order_release);
    }
    if (threads_ > 1) wake_.notify_all();
    work(data, 0);
    const auto done = [&] { return busy_.load(std::memory_order_acquire) == 0; };
    if (threads_ > 1)
        while (!spin(kSpins, done)) std::this_thread::yield();
}

bool Pool::awaits(uint32_t seen) const { return round_.load(std::memory_order_acquire) == seen; }

void Pool::serve(int thread) {
    for (uint32_t seen = 0;; seen++) {
        if (!spin(kIdleSpins, [&] { return !awaits(seen); })) {
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return !awaits(seen); });
        }
        if (ended_) return;
        work_(data_, thread);
        busy_.fetch_sub(1, std::memory_order_acq_rel);
    }
}

}  // namespace octavo
