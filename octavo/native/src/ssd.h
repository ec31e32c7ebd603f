// The state space of Mamba-2, with a scalar decay per head (Dao & Gu 2024, https://arxiv.org/abs/2405.21060); see
// octavo/nn/recurrent/ssd.py.
#pragma once

#include "recurrent.h"

extern "C" {

// octavo/native/recurrent.py sets and documents the fields.
struct OctavoSsd {
    const float *decay, *skip, *bias;
    octavo::States states;
    float low, high;
    int32_t heads, head_dim, state, groups, sizes, raw;
};

}  // extern "C"

namespace octavo {

inline const OctavoSsd& ssd_of(const OctavoOp& op) { return *static_cast<const OctavoSsd*>(op.details); }

inline int64_t ssd_tasks(Program& program, const OctavoOp& op) { return program.step().rows * ssd_of(op).heads; }

// Advances the states of a head's channels by a token: S = decay * S + size * x b^T, and x becomes S c + skip * x.
struct SsdToken {
    float* states;  // [channels][state]
    float* x;
    const float *b, *c;
    float decay, size, skip;
    int state;

    template <int M>
    void run(int first) const {
        Vec sums[M] = {}, inputs[M];
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) inputs[m] = splat(x[first + m] * size);
        float* own = states + (int64_t)first * state;
        int n = 0;
        for (; n + W <= state; n += W) {
            const Vec into = load(b + n), read = load(c + n);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const Vec next = fused(load(own + m * state + n) * decay, inputs[m], into);
                store(own + m * state + n, next);
                sums[m] = fused(sums[m], next, read);
            }
        }
        if (const int rest = state - n; rest > 0) {
            const Vec into = load_first(b + n, rest), read = load_first(c + n, rest);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const Vec next = fused(load_first(own + m * state + n, rest) * decay, inputs[m], into);
                store_first(own + m * state + n, rest, next);
                sums[m] = fused(sums[m], next, read);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) x[first + m] = horizontal_sum(sums[m]) + x[first + m] * skip;
    }
};

// Computes a row's tokens for a head. The rows of the input have the heads' channels, then each group's inputs to and
// outputs from states; the results take the channels' places.
inline void run_ssd(Program& program, const OctavoOp& op, int64_t task, int) {
    const OctavoSsd& ssd = ssd_of(op);
    const Sequence row(program.step(), op.group, (int)(task / ssd.heads));
    if (row.count == 0) return;
    const int head = (int)(task % ssd.heads), group = head / (ssd.heads / ssd.groups);
    const int64_t size = (int64_t)ssd.head_dim * ssd.state;
    float* const states = ssd.states.first + row.block * ssd.states.stride + head * size;
    if (row.begins) std::fill(states, states + size, 0.0f);
    const int into = ssd.heads * ssd.head_dim + group * ssd.state, read = into + ssd.groups * ssd.state;
    for (int t = row.first; t < row.first + row.count; t++) {
        const float raw = program.at<float>(ssd.sizes, t)[ssd.raw + head] + ssd.bias[head];
        const float step = std::min(std::max(softplus(splat(raw))[0], ssd.low), ssd.high);
        const float decay = exponential(splat(step * ssd.decay[head]))[0];
        float* x = program.at<float>(op.input, t);
        const SsdToken token{states, x + head * ssd.head_dim, x + into, x + read, decay, step, ssd.skip[head], ssd.state};
        for_row_tiles<kTogether>(ssd.head_dim, token);
    }
}

}  // namespace octavo
