// AMX: eight registers that hold tiles of up to 16 rows of 64 bytes, and instructions that multiply two of them.
//
// A tile of the right-hand side is 16 words of the inner dimension, each of 16 columns: 1 KiB of a panel in its memory
// layout (tile.h). A tile of the left-hand side is up to 16 rows of 16 words. The registers were requested from the
// system before the library was loaded (octavo/native/isa.py).
#pragma once

#include <cstdint>

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define OCTAVO_AMX 1
#endif

namespace octavo {
namespace amx {

constexpr int kRows = 16;  // of a tile
constexpr int kRowBytes = 64;
constexpr int kWords = 16;  // of the inner dimension that one instruction multiplies

// The tile registers, for blocks of two by two: accumulators of two tiles of rows by two panels, and the operands.
// Their numbers are sum(half, p), row(half) and panel(p).
constexpr int sum(int half, int p) { return 2 * half + p; }
constexpr int row(int half) { return 4 + half; }
constexpr int panel(int p) { return 6 + p; }

// The operand of LDTILECFG: https://www.felixcloutier.com/x86/ldtilecfg
struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // For `count` rows in two halves, up to 16 in the first, and `words` words of the inner dimension at a time.
    Config(int count, int words) {
        for (int half = 0; half < 2; half++) {
            const int of_half = half == 0 ? (count < kRows ? count : kRows) : count - kRows;
            if (of_half <= 0) continue;
            for (int p = 0; p < 2; p++) shape(sum(half, p), of_half, kRowBytes);
            shape(row(half), of_half, words * 4);
        }
        for (int p = 0; p < 2; p++) shape(panel(p), words, kRowBytes);
    }

    void shape(int tile, int count, int bytes) { rows[tile] = (uint8_t)count, row_bytes[tile] = (uint16_t)bytes; }
};

// A thread's tile registers. They are configured only if the configuration changes, since the processor then waits for
// all pending loads. They are released before the thread sleeps, so that the system need not save their 8 KiB.
class alignas(64) Registers {
public:
    // Configures for blocks of `count` rows, 1 to 32. The contents of the registers are lost.
    void shape(int count, int words = kWords) {
#if defined(OCTAVO_AMX)
        if (count == count_ && words == words_) return;
        const Config config(count, words);
        asm volatile("ldtilecfg %0" ::"m"(config));
        count_ = count, words_ = words;
#endif
    }

    void release() {
#if defined(OCTAVO_AMX)
        if (count_ > 0) asm volatile("tilerelease" ::: "memory");
        count_ = 0;
#endif
    }

private:
    int count_ = 0, words_ = 0;
};

#if defined(OCTAVO_AMX)

// (Not the compilers' intrinsics: those take numbers of tiles as literals only, and GCC's don't say that they read
// memory.)
template <int Tile>
inline void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// Loads rows that are `stride` bytes apart.
template <int Tile>
inline void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}

// Adds rows times a panel, both in bfloat16, to float32 sums: the products of the words' first and second halves are
// summed separately, then together, then added to the accumulator. Denormal numbers count as zeros.
template <int Sum, int Row, int Panel>
inline void add_bfloat() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Row), "i"(Panel));
}

// Adds the products of `steps` times kWords words of rows, `stride` bytes apart, and of panels. Calls `meanwhile`
// before each step.
template <int Halves, int P, class Meanwhile>
__attribute__((always_inline)) inline void add_words(const char* rows, int64_t stride,
                                                     const uint32_t* const (&panels)[P], int steps,
                                                     const Meanwhile& meanwhile) {
    const char* second = rows + kRows * stride;
    const uint32_t *first_panel = panels[0], *last_panel = panels[P - 1];
    for (int step = 0; step < steps; step++) {
        meanwhile(step);
        load<panel(0)>(first_panel, kRowBytes);
        load<row(0)>(rows, stride);
        add_bfloat<sum(0, 0), row(0), panel(0)>();
        if constexpr (P == 2) {
            load<panel(1)>(last_panel, kRowBytes);
            add_bfloat<sum(0, 1), row(0), panel(1)>();
        }
        if constexpr (Halves == 2) {
            load<row(1)>(second, stride);
            add_bfloat<sum(1, 0), row(1), panel(0)>();
            if constexpr (P == 2) add_bfloat<sum(1, 1), row(1), panel(1)>();
        }
        rows += kRowBytes, second += kRowBytes;
        first_panel += kWords * kPanel, last_panel += kWords * kPanel;
    }
}

template <int Halves, int P>
inline void clear_sums() {
    clear<sum(0, 0)>();
    if constexpr (P == 2) clear<sum(0, 1)>();
    if constexpr (Halves == 2) clear<sum(1, 0)>();
    if constexpr (Halves == 2 && P == 2) clear<sum(1, 1)>();
}

// Loads sums from rows that are `stride` floats apart.
template <int Halves, int P>
inline void load_sums(const float* from, int64_t stride) {
    const float* const second = from + kRows * stride;
    load<sum(0, 0)>(from, stride * 4);
    if constexpr (P == 2) load<sum(0, 1)>(from + kPanel, stride * 4);
    if constexpr (Halves == 2) load<sum(1, 0)>(second, stride * 4);
    if constexpr (Halves == 2 && P == 2) load<sum(1, 1)>(second + kPanel, stride * 4);
}

// Stores sums to rows that are `stride` floats apart.
template <int Halves, int P>
inline void store_sums(float* to, int64_t stride) {
    float* const second = to + kRows * stride;
    store<sum(0, 0)>(to, stride * 4);
    if constexpr (P == 2) store<sum(0, 1)>(to + kPanel, stride * 4);
    if constexpr (Halves == 2) store<sum(1, 0)>(second, stride * 4);
    if constexpr (Halves == 2 && P == 2) store<sum(1, 1)>(second + kPanel, stride * 4);
}

#endif

}  // namespace amx
}  // namespace octavo
