// The operations of recurrent layers between their products: convolutions, state spaces, the delta rule, gated norms.

#include "causal_conv.h"
#include "gated_norm.h"
#include "ssd.h"

namespace octavo {

namespace {

enum RecurrentKind { kConv = 25, kGatedNorm, kSsd };  // of `OpKind`

using Run = void (*)(Program&, const OctavoOp&, int64_t, int);

// The form of an operation for the dtype of its results.
template <Run Floats, Run Bfloats>
void run(Program& program, const OctavoOp& op, int64_t task, int thread) {
    (op.dtype == kBfloat ? Bfloats : Floats)(program, op, task, thread);
}

const OpCode kCodes[] = {
    {conv_tasks, run<run_conv<float>, run_conv<bf16>>},
    {tasks_by_tokens, run<run_gated_norm<float>, run_gated_norm<bf16>>},
    {ssd_tasks, run_ssd},
};

}  // namespace

}  // namespace octavo

extern "C" const octavo::OpCode* octavo_recurrent_code(int kind) { return octavo::kCodes + (kind - octavo::kConv); }
