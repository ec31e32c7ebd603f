// The operations of recurrent layers between their products: convolutions, state spaces, the delta rule, gated norms.

#include "causal_conv.h"

namespace octavo {

namespace {

enum RecurrentKind { kConv = 25 };  // of `OpKind`

using Run = void (*)(const Program&, const OctavoOp&, int64_t);

// The form of an operation for the dtype of its results.
template <Run Floats, Run Bfloats>
void run(Program& program, const OctavoOp& op, int64_t task, int) {
    (op.dtype == kBfloat ? Bfloats : Floats)(program, op, task);
}

const OpCode kCodes[] = {{conv_tasks, run<run_conv<float>, run_conv<bf16>>}};

}  // namespace

}  // namespace octavo

extern "C" const octavo::OpCode* octavo_recurrent_code(int kind) { return octavo::kCodes + (kind - octavo::kConv); }
