// The operations of recurrent layers between their products: convolutions, state spaces, the delta rule, gated norms.

#include "causal_conv.h"
#include "delta_rule.h"
#include "gated_norm.h"
#include "selective.h"
#include "ssd.h"

namespace octavo {

namespace {

enum RecurrentKind { kConv = 26, kGatedNorm, kSsd, kDelta, kSigmoidGate, kScan, kSquares };  // of `OpKind`

using Run = void (*)(Program&, const OctavoOp&, int64_t, int);

// The form of an operation for the dtype of its results.
template <Run Floats, Run Bfloats>
void run(Program& program, const OctavoOp& op, int64_t task, int thread) {
    (op.dtype == kBfloat ? Bfloats : Floats)(program, op, task, thread);
}

// The gate of attention beside such layers: rows of the output times the sigmoid of rows of the input, with a value for
// each channel, or for all channels of a head.
template <class T>
void run_gate(Program& program, const OctavoOp& op, int64_t token, int) {
    const float* gate = program.at<float>(op.input, token);
    T* to = program.at<T>(op.output, token);
    if (op.head_dim > 1) {
        for (int h = 0; h < op.columns; h++, to += op.head_dim) {
            const Vec factor = sigmoid(splat(gate[h]));
            for (int c = 0; c < op.head_dim; c += W) store(to + c, load(to + c) * factor);
        }
        return;
    }
    for (int c = 0; c < op.columns; c += W) store(to + c, load(to + c) * sigmoid(load(gate + c)));
}

const OpCode kCodes[] = {
    {conv_tasks, run<run_conv<float>, run_conv<bf16>>},
    {tasks_by_tokens, run<run_gated_norm<float>, run_gated_norm<bf16>>},
    {ssd_tasks, run_ssd},
    {delta_tasks, run_delta},
    {tasks_by_tokens, run<run_gate<float>, run_gate<bf16>>},
    {scan_tasks, run<run_scan<float>, run_scan<bf16>>},
    {tasks_by_tokens, run_squares},
};

}  // namespace

}  // namespace octavo

extern "C" const octavo::OpCode* octavo_recurrent_code(int kind) { return octavo::kCodes + (kind - octavo::kConv); }
