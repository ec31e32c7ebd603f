// The compute threads: asleep between programs, spinning between the operations of one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

// Meets all threads of a team. Spins, since the others are microseconds away; gives the core up if they are not,
// because then the machine is shared and the core may be what they wait for.
class Barrier {
public:
    explicit Barrier(int threads) : threads_(threads) {}
    void wait();

private:
    const int threads_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> round_{0};
};

class Pool {
public:
    explicit Pool(int threads);
    ~Pool();
    int threads() const { return threads_; }
    Barrier& barrier() { return barrier_; }

    // Runs work(data, thread) once on every thread, the caller's included, and returns when all are done.
    void run(void (*work)(void*, int), void* data);

private:
    void serve(int thread);
    bool awaits(uint32_t seen) const;

    const int threads_;
    Barrier barrier_;
    void (*work_)(void*, int) = nullptr;
    void* data_ = nullptr;
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> busy_{0};
    std::atomic<bool> ended_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

}  // namespace octavo
