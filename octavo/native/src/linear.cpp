// y = x W^T + b, in tasks of a pair of panels and a chunk of rows. The kernels are in separate libraries, compiled for
// models that need them: words.cpp or blocks.cpp.

#include "linear.h"

#include <algorithm>

#include "blocks.h"
#include "codes.h"

namespace octavo {

int64_t panel_bytes(const OctavoOp& op) {
    if (has_blocks(op)) return (int64_t)(op.columns / kBlock) * Record(op).size;
    if (has_codes(op)) return code_panel_bytes(op);
    return (int64_t)op.columns * kPanel * (op.dtype == kBfloat ? 2 : 4);
}

namespace {

int64_t tasks(Program& program, const OctavoOp& op) {
    const int64_t chunk = chunk_rows(op);
    return (program.step().tokens + chunk - 1) / chunk * pairs_of(op);
}

void run(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const int64_t chunk = chunk_rows(op), first = task / pairs_of(op) * chunk;
    const int panel = (int)(task % pairs_of(op)) * kPair;
    const int count = (int)std::min<int64_t>(chunk, program.step().tokens - first);
    if (op.low_rank != nullptr) prefetch_low_rank(program, op, panel, std::min(kPair, panels_of(op) - panel), first, count);
    reinterpret_cast<Multiply>(const_cast<void*>(op.kernel))(program, op, panel, (int)first, count, thread);
}

}  // namespace

OpCode linear_code() { return {tasks, run}; }

}  // namespace octavo
