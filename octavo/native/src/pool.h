// The compute threads: asleep between programs, looking for work while one runs.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// Returns once `done` holds. Spins at first, since other threads need microseconds; then yields between checks, because
// on a shared machine they may be waiting for this core.
template <class Done>
void wait_until(const Done& done);

// Threads that help the caller with jobs. A job never waits for a thread that has not joined it: on a shared machine a
// thread may lose its core for milliseconds, in which the others finish the job.
class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    int threads() const { return threads_; }

    // Runs work(data, thread) on the calling thread, as thread 0, and once on each other thread that joins meanwhile.
    // Returns when all threads that joined have finished.
    void run(void (*work)(void*, int), void* data);

private:
    void serve(int thread);
    bool enter(uint64_t gate);

    // Bits of the gate: the lowest is set while the job is open, the next 15 count threads that joined, the rest counts
    // jobs.
    static constexpr uint64_t kOpen = 1, kGuest = 2, kJob = 1 << 16;

    const int threads_;
    void (*work_)(void*, int) = nullptr;
    void* data_ = nullptr;
    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<uint64_t> left_{0};
    std::atomic<bool> ended_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace octavo

#include "simd.h"

namespace octavo {

template <class Done>
bool spin(int looks, const Done& done) {
    for (int i = 0; i < looks; i++) {
        if (done()) return true;
        pause();
    }
    return done();
}

template <class Done>
void wait_until(const Done& done) {
    constexpr int kLooks = 4000;  // about 50 us
    while (!spin(kLooks, done)) std::this_thread::yield();
}

}  // namespace octavo
