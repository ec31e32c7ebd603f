// y = x W^T + b, in tasks of a pair of panels and a chunk of rows. What multiplies them is compiled for models that need
// it: words.cpp or blocks.cpp.

#include "linear.h"

#include <algorithm>

#include "blocks.h"

namespace octavo {

int64_t panel_bytes(const OctavoOp& op) {
    if (op.dtype == kInt8 || op.dtype == kInt4) return (int64_t)(op.columns / kBlock) * Record(op).size;
    return (int64_t)op.columns * kPanel * (op.dtype == kBfloat ? 2 : 4);
}

namespace {

constexpr int64_t kChunkBytes = 384 << 10;  // of inputs that a task goes over: they stay in the second-level cache
#if defined(OCTAVO_AMX)
constexpr int kChunkRows = 2 * amx::kRows;  // a chunk is a multiple of it: the rows of the largest tile
#else
constexpr int kChunkRows = 2 * kWideRows;
#endif

int64_t chunk_rows(const OctavoOp& op) {
    const bool words = op.dtype == kFloat || op.dtype == kBfloat;
    const int64_t row = words ? (int64_t)op.columns * (op.dtype == kFloat ? 4 : 2) : activation_bytes(op);
    return std::max<int64_t>(4 * kChunkRows, kChunkBytes / row / kChunkRows * kChunkRows);
}

int64_t tasks(Program& program, const OctavoOp& op) {
    const int64_t chunk = chunk_rows(op);
    return (program.step().tokens + chunk - 1) / chunk * pairs_of(op);
}

void run(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const int64_t chunk = chunk_rows(op), first = task / pairs_of(op) * chunk;
    const int panel = (int)(task % pairs_of(op)) * kPair;
    const int count = (int)std::min<int64_t>(chunk, program.step().tokens - first);
    reinterpret_cast<Multiply>(const_cast<void*>(op.kernel))(program, op, panel, (int)first, count, thread);
}

}  // namespace

OpCode linear_code() { return {tasks, run}; }

}  // namespace octavo
