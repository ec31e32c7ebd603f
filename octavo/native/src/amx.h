// AMX: eight registers that hold tiles of up to 16 rows of 64 bytes, and instructions that multiply two of them.
//
// A tile of the right-hand side is 16 words of the inner dimension, each of 16 columns: 1 KiB of a panel as it lies in
// memory (tile.h). One of the left-hand side is up to 16 rows of as many words. The system has been asked for the
// registers when the library was loaded (octavo/native/isa.py).
#pragma once

#include <cstdint>

#include "simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define OCTAVO_AMX 1

namespace octavo {
namespace amx {

constexpr int kRows = 16;        // of a tile
constexpr int kRowBytes = 64;
constexpr int kWords = 16;       // of the inner dimension that one instruction multiplies
constexpr int kRegisters = 8;

// The tile registers, in the shapes of blocks of two by two: accumulators of two tiles of rows by two panels, and what
// they are sums of. Which numbers they have: sum(half, p), row(half) and panel(p).
constexpr int sum(int half, int p) { return 2 * half + p; }
constexpr int row(int half) { return 4 + half; }
constexpr int panel(int p) { return 6 + p; }

// What LDTILECFG reads: https://www.felixcloutier.com/x86/ldtilecfg
struct alignas(64) Config {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};

    // Of `count` rows in two halves, up to 16 in the first; `words` words of the inner dimension at a time.
    explicit Config(int count, int words = kWords) {
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

// The registers in use while it lives. To release them saves the system their 8 KiB at each change of threads.
class Session {
public:
    explicit Session(const Config& config) { configure(config); }
    ~Session() { asm volatile("tilerelease" ::: "memory"); }
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;

    // Other shapes; what the registers hold is lost.
    void configure(const Config& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
};

// (Not the compilers' intrinsics: those take numbers of tiles as literals only, and GCC's don't say that they read
// memory.)
template <int Tile>
inline void clear() {
    asm volatile("tilezero %%tmm%c0" ::"i"(Tile));
}

// Rows that lie `stride` bytes apart.
template <int Tile>
inline void load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile) : "memory");
}

template <int Tile>
inline void store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(Tile) : "memory");
}

// Adds rows times a panel, both in bfloat16, to float32: the products of the words' first and second halves are summed
// up apart, then together, then added to what is there. Denormal numbers count as zeros.
template <int Sum, int Row, int Panel>
inline void add_bfloat() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Row), "i"(Panel));
}

// Adds rows of signed bytes times a panel of unsigned ones to integers of 32 bits.
template <int Sum, int Row, int Panel>
inline void add_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sum), "i"(Row), "i"(Panel));
}

}  // namespace amx
}  // namespace octavo

#endif
