// Memory that processes on one machine share, in which they add up and gather arrays: the collectives of a model that
// is divided over several ranks.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "program.h"

namespace octavo {

// One rank's view. The ranks meet in numbered rounds: each writes to its own place, and once all have arrived, reads
// those of the others. Each rank has two places, for even and odd rounds. So one meeting a round suffices: a rank that
// has arrived in a round has read what it needed of the previous one, whose places the next round overwrites.
//
// Layout: a `Counter` for each rank, then, from the next page on, the places: [round % 2][rank][capacity].
class Exchange {
public:
    // `memory`: descriptor of a file in memory, empty at first and the same for all ranks; it is duplicated.
    // `limit_s`: most seconds to wait for another rank, while this process runs; 0 for no limit. Throws std::bad_alloc if it can't be mapped.
    Exchange(int memory, int rank, int ranks, double limit_s);
    ~Exchange();
    Exchange(const Exchange&) = delete;

    int ranks() const { return ranks_; }

    // Makes places large enough for `bytes`. Every rank calls it with the same number, between rounds. It may wait for
    // the others. Throws std::bad_alloc.
    void reserve(size_t bytes);

    // Returns the number of the next round.
    uint32_t next() { return ++round_; }

    // Returns a rank's place in a round; the ranks' order is the same everywhere.
    char* place(int rank, uint32_t round) const {
        return memory_ + places_ + ((size_t)(round % 2) * ranks_ + rank) * capacity_;
    }
    char* own(uint32_t round) const { return place(rank_, round); }

    // Says that this rank has written to its place, and waits until all have. Several threads may call it, which take
    // part in no other round meanwhile. Returns false, at once from then on, if a rank was not there in time.
    bool meet(uint32_t round);

    // Returns the rank that was not there in time; -1 for none.
    int missing() const { return missing_.load(std::memory_order_acquire); }

private:
    // A rank's last round, and the threads of other ranks that sleep until it arrives in the next one.
    struct alignas(64) Counter {
        std::atomic<uint32_t> round, sleepers;
    };

    Counter& counter(int rank) const { return reinterpret_cast<Counter*>(memory_)[rank]; }
    bool sleep_until(Counter& counter, uint32_t round);
    void map(size_t capacity);

    const int memory_file_, rank_, ranks_;
    const double limit_s_;
    const size_t places_;
    size_t capacity_ = 0, size_ = 0;
    char* memory_ = nullptr;
    uint32_t round_ = 0;
    std::atomic<int> missing_{-1};
};

inline Exchange& exchange_of(const OctavoOp& op) { return *static_cast<Exchange*>(const_cast<void*>(op.details)); }

// Bytes of a row in a place.
inline size_t exchanged_bytes(const OctavoOp& op) { return ((size_t)op.columns * sizeof(float) + 63) / 64 * 64; }

}  // namespace octavo
