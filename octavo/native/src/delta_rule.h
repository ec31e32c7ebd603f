// The gated delta rule (Yang et al. 2024, https://arxiv.org/abs/2412.06464); see octavo/nn/recurrent/delta_rule.py.
#pragma once

#include "recurrent.h"

extern "C" {

// octavo/native/recurrent.py sets and documents the fields.
struct OctavoDelta {
    const float *decay, *bias;
    octavo::States states;
    int32_t key_heads, key_dim, heads, head_dim, gates, rate, raw;
};

}  // extern "C"

namespace octavo {

constexpr int kValues = 64;   // of a task
constexpr int kVectors = 4;   // of values that are advanced in one loop

inline const OctavoDelta& delta_of(const OctavoOp& op) { return *static_cast<const OctavoDelta*>(op.details); }

inline int64_t delta_parts(const OctavoOp& op) { return (delta_of(op).head_dim + kValues - 1) / kValues; }

inline int64_t delta_tasks(Program& program, const OctavoOp& op) {
    return (int64_t)program.step().rows * delta_of(op).heads * delta_parts(op);
}

inline float sum_of_squares(const float* x, int size) {
    Vec sum{};
    for_vectors(size, [&](int c, int n) {
        const Vec v = load_first(x + c, n);
        sum = fused(sum, v, v);
    });
    return horizontal_sum(sum);
}

// A head's query and key of a token, and factors that give them their lengths; its decay and its rate.
struct DeltaToken {
    const float *query, *key;
    float query_factor, key_factor, decay, rate;
    int size;

    DeltaToken(const Program& program, const OctavoOp& op, int token, int head) {
        const OctavoDelta& delta = delta_of(op);
        const float* x = program.at<float>(op.input, token);
        const int own = head / (delta.heads / delta.key_heads) * delta.key_dim;
        size = delta.key_dim;
        query = x + own, key = x + delta.key_heads * size + own;
        key_factor = 1.0f / std::sqrt(sum_of_squares(key, size) + 1e-6f);
        query_factor = 1.0f / std::sqrt((sum_of_squares(query, size) + 1e-6f) * (float)size);
        const float* gates = program.at<float>(delta.gates, token);
        const float step = softplus(splat(gates[delta.raw + head] + delta.bias[head]))[0];
        decay = exponential(splat(step * delta.decay[head]))[0];
        rate = sigmoid(splat(gates[delta.rate + head]))[0];
    }

    // Advances the state of V vectors of values; only n values of the last one count. The outputs replace the values.
    // states: [size], rows `stride` apart.
    template <int V>
    void run(float* states, int stride, float* values, int n) const {
        const auto get = [n](const float* p) { return V == 1 ? load_first(p, n) : load(p); };
        const auto put = [n](float* p, Vec v) { V == 1 ? store_first(p, n, v) : store(p, v); };
        Vec found[V] = {}, results[V] = {}, writes[V];
        for (int i = 0; i < size; i++)
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) found[j] = fused(found[j], splat(key[i]), get(states + (int64_t)i * stride + j * W));
#pragma GCC unroll 4
        for (int j = 0; j < V; j++)
            writes[j] = (get(values + j * W) - found[j] * (decay * key_factor)) * (rate * key_factor);
        for (int i = 0; i < size; i++)
#pragma GCC unroll 4
            for (int j = 0; j < V; j++) {
                float* state = states + (int64_t)i * stride + j * W;
                const Vec next = fused(get(state) * decay, splat(key[i]), writes[j]);
                put(state, next);
                results[j] = fused(results[j], splat(query[i]), next);
            }
#pragma GCC unroll 4
        for (int j = 0; j < V; j++) put(values + j * W, results[j] * query_factor);
    }
};

// Computes a row's tokens for some values of a head. The rows of the input have queries, keys and values; the results
// take the values' places.
inline void run_delta(Program& program, const OctavoOp& op, int64_t task, int) {
    const OctavoDelta& delta = delta_of(op);
    const int64_t parts = delta_parts(op), of_row = task % (delta.heads * parts);
    const Sequence row(program.step(), op.group, (int)(task / (delta.heads * parts)));
    if (row.count == 0) return;
    const int head = (int)(of_row / parts), begin = (int)(of_row % parts) * kValues, stride = delta.head_dim;
    const int end = std::min(begin + kValues, stride);
    float* const states =
        delta.states.first + row.block * delta.states.stride + (int64_t)head * delta.key_dim * stride;
    if (row.begins)
        for (int i = 0; i < delta.key_dim; i++) std::fill(states + i * stride + begin, states + i * stride + end, 0.0f);
    const int place = 2 * delta.key_heads * delta.key_dim + head * stride;
    for (int t = row.first; t < row.first + row.count; t++) {
        const DeltaToken token(program, op, t, head);
        float* values = program.at<float>(op.input, t) + place;
        int c = begin;
        for (; c + kVectors * W <= end; c += kVectors * W) token.run<kVectors>(states + c, stride, values + c, W);
        for (; c < end; c += W) token.run<1>(states + c, stride, values + c, std::min(W, end - c));
    }
}

}  // namespace octavo
