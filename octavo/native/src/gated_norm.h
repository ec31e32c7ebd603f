// RMSNorm over groups of values, with a SiLU gate before or after it, or none; see octavo/nn/recurrent/gated_norm.py.
#pragma once

#include "recurrent.h"

extern "C" {

// octavo/native/recurrent.py sets and documents the fields.
struct OctavoGatedNorm {
    const float* weight;
    float eps;
    int32_t size, groups, own_weights, begin, to, gates, gate, gate_first;
};

}  // extern "C"

namespace octavo {

inline int64_t tasks_by_tokens(Program& program, const OctavoOp&) { return program.step().tokens; }

// Normalizes a group of a row; `gate` is null for none. `kept` has room for the group.
template <class T>
void norm_group(const OctavoGatedNorm& norm, const float* x, const float* gate, const float* weight, float* kept, T* to) {
    Vec squares{};
    for_vectors(norm.size, [&](int c, int n) {
        Vec v = load_first(x + c, n);
        if (gate != nullptr && norm.gate_first) v = v * silu(load_first(gate + c, n));
        store(kept + c, v);
        squares = fused(squares, v, v);
    });
    const float scale = 1.0f / std::sqrt(horizontal_sum(squares) / (float)norm.size + norm.eps);
    for_vectors(norm.size, [&](int c, int n) {
        Vec v = load(kept + c) * scale;
        if (weight != nullptr) v = v * load_first(weight + c, n);
        if (gate != nullptr && !norm.gate_first) v = v * silu(load_first(gate + c, n));
        store_first(to + c, n, v);
    });
}

// If the results are in other rows than the inputs, these have whole panels, with zeros at the end.
template <class T>
void run_gated_norm(Program& program, const OctavoOp& op, int64_t token, int thread) {
    const OctavoGatedNorm& norm = *static_cast<const OctavoGatedNorm*>(op.details);
    float* const kept = static_cast<float*>(program.scratch(thread, (norm.size + kPanel) * sizeof(float)));
    for (int g = 0; g < norm.groups; g++) {
        const int first = g * norm.size;
        const float* x = program.at<float>(op.input, token) + norm.begin + first;
        const float* gate = norm.gates < 0 ? nullptr : program.at<float>(norm.gates, token) + norm.gate + first;
        const float* weight = norm.weight == nullptr ? nullptr : norm.weight + (norm.own_weights ? first : 0);
        norm_group(norm, x, gate, weight, kept, program.at<T>(op.output, token) + norm.to + first);
    }
    if (op.output == op.input) return;
    const int end = norm.to + norm.groups * norm.size;
    T* const to = program.at<T>(op.output, token);
    std::fill(to + end, to + (end + kPanel - 1) / kPanel * kPanel, T{});
}

}  // namespace octavo
