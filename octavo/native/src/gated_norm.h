// RMSNorm over groups of values, with a SiLU gate before or after it, or none; see octavo/nn/recurrent/gated_norm.py.
// Ranks that divide a group add up their sums of squares before.
#pragma once

#include "recurrent.h"

extern "C" {

// octavo/native/recurrent.py sets and documents the fields.
struct OctavoGatedNorm {
    const float* weight;
    float eps;
    int32_t size, groups, own_weights, begin, to, gates, gate, gate_first, squares, place, whole;
};

}  // extern "C"

namespace octavo {

inline const OctavoGatedNorm& norm_of(const OctavoOp& op) { return *static_cast<const OctavoGatedNorm*>(op.details); }

inline int64_t tasks_by_tokens(Program& program, const OctavoOp&) { return program.step().tokens; }

// A group of a row; `gate` and `weight` are null for none.
struct NormGroup {
    const OctavoGatedNorm& norm;
    const float *x, *gate, *weight;

    NormGroup(const Program& program, const OctavoOp& op, int64_t token, int group)
        : norm(norm_of(op)), x(program.at<float>(op.input, token) + norm.begin + group * norm.size),
          gate(norm.gates < 0 ? nullptr : program.at<float>(norm.gates, token) + norm.gate + group * norm.size),
          weight(norm.weight == nullptr ? nullptr : norm.weight + (norm.own_weights ? group * norm.size : 0)) {}

    // Writes what is normalized to `kept`, in whole vectors; returns its sum of squares.
    float keep(float* kept) const {
        Vec squares{};
        for_vectors(norm.size, [&](int c, int n) {
            Vec v = load_first(x + c, n);
            if (gate != nullptr && norm.gate_first) v = v * silu(load_first(gate + c, n));
            store(kept + c, v);
            squares = fused(squares, v, v);
        });
        return horizontal_sum(squares);
    }

    template <class T>
    void finish(const float* kept, float scale, T* to) const {
        for_vectors(norm.size, [&](int c, int n) {
            Vec v = load(kept + c) * scale;
            if (weight != nullptr) v = v * load_first(weight + c, n);
            if (gate != nullptr && !norm.gate_first) v = v * silu(load_first(gate + c, n));
            store_first(to + c, n, v);
        });
    }
};

inline float* room_of_group(Program& program, const OctavoOp& op, int thread) {
    return static_cast<float*>(program.scratch(thread, (norm_of(op).size + kPanel) * sizeof(float)));
}

// If the results are in other rows than the inputs, these have whole panels, with zeros at the end.
template <class T>
void run_gated_norm(Program& program, const OctavoOp& op, int64_t token, int thread) {
    const OctavoGatedNorm& norm = norm_of(op);
    float* const kept = room_of_group(program, op, thread);
    T* const to = program.at<T>(op.output, token);
    for (int g = 0; g < norm.groups; g++) {
        const NormGroup group(program, op, token, g);
        const float own = group.keep(kept);
        const float sum = norm.squares < 0 ? own : program.at<float>(norm.squares, token)[norm.place];
        group.finish(kept, 1.0f / std::sqrt(sum / (float)norm.whole + norm.eps), to + norm.to + g * norm.size);
    }
    if (op.output == op.input) return;
    const int end = norm.to + norm.groups * norm.size;
    std::fill(to + end, to + (end + kPanel - 1) / kPanel * kPanel, T{});
}

// The sum of squares of this rank's part of a group, and zeros in the places of other groups.
inline void run_squares(Program& program, const OctavoOp& op, int64_t token, int thread) {
    float* const to = program.at<float>(op.output, token);
    std::fill(to, to + op.columns, 0.0f);
    to[norm_of(op).place] = NormGroup(program, op, token, 0).keep(room_of_group(program, op, thread));
}

}  // namespace octavo
