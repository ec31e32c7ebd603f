// The state space of Mamba, with a decay per channel and state (Gu & Dao 2023, https://arxiv.org/abs/2312.00752), and the
// gate behind it; see octavo/nn/recurrent/selective.py.
#pragma once

#include "recurrent.h"

extern "C" {

// octavo/native/recurrent.py sets and documents the fields.
struct OctavoScan {
    const float *decay, *skip;
    octavo::States states;
    int32_t channels, state, sizes, parts, into, read, gates, gate;
};

}  // extern "C"

namespace octavo {

constexpr int kScanChannels = 64;  // of a task

inline const OctavoScan& scan_of(const OctavoOp& op) { return *static_cast<const OctavoScan*>(op.details); }

inline int64_t scan_parts(const OctavoOp& op) { return (scan_of(op).channels + kScanChannels - 1) / kScanChannels; }

inline int64_t scan_tasks(Program& program, const OctavoOp& op) { return program.step().rows * scan_parts(op); }

// Advances the states of a task's channels by a token: S = exp(step * decay) * S + input * b; `sums` becomes S c.
struct ScanToken {
    float* states;       // [channels][state]
    const float* decay;  // the same
    const float *steps, *inputs, *b, *c;
    int state;
    float* sums;

    template <int M>
    void run(int first) const {
        Vec found[M] = {};
        const int64_t begin = (int64_t)first * state;
        for_vectors(state, [&](int at, int n) {
            const Vec into = load_first(b + at, n), read = load_first(c + at, n);
#pragma GCC unroll 4
            for (int m = 0; m < M; m++) {
                const int64_t place = begin + (int64_t)m * state + at;
                const Vec kept = exponential(load_first(decay + place, n) * steps[first + m]);
                const Vec next = fused(load_first(states + place, n) * kept, splat(inputs[first + m]), into);
                store_first(states + place, n, next);
                found[m] = fused(found[m], next, read);
            }
        });
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[first + m] = horizontal_sum(found[m]);
    }
};

// Computes a row's tokens for some channels. The last vector of results is whole, with zeros beyond the channels.
template <class T>
void run_scan(Program& program, const OctavoOp& op, int64_t task, int) {
    const OctavoScan& scan = scan_of(op);
    const Sequence row(program.step(), op.group, (int)(task / scan_parts(op)));
    if (row.count == 0) return;
    const int begin = (int)(task % scan_parts(op)) * kScanChannels, count = std::min(kScanChannels, scan.channels - begin);
    const int64_t place = (int64_t)begin * scan.state, size = (int64_t)count * scan.state;
    float* const states = scan.states.first + row.block * scan.states.stride + place;
    if (row.begins) std::fill(states, states + size, 0.0f);
    alignas(64) float steps[kScanChannels], inputs[kScanChannels], sums[kScanChannels] = {};
    for (int t = row.first; t < row.first + row.count; t++) {
        const float* x = program.at<float>(op.input, t) + begin;
        const float *raw = program.at<float>(scan.sizes, t) + begin, *parts = program.at<float>(scan.parts, t);
        for_vectors(count, [&](int c, int n) {
            const Vec step = softplus(load_first(raw + c, n));
            store(steps + c, step);
            store(inputs + c, step * load_first(x + c, n));
        });
        const ScanToken token{states,           scan.decay + place, steps,      inputs,
                              parts + scan.into, parts + scan.read, scan.state, sums};
        for_row_tiles<kTogether>(count, token);
        const float* gate = program.at<float>(scan.gates, t) + scan.gate + begin;
        T* to = program.at<T>(op.output, t) + begin;
        for_vectors(count, [&](int c, int n) {
            const Vec y = fused(load(sums + c), load_first(scan.skip + begin + c, n), load_first(x + c, n));
            store(to + c, y * silu(load_first(gate + c, n)));
        });
    }
}

}  // namespace octavo
