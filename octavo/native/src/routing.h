// Choosing experts from a router's logits; the same as octavo/nn/ops/routing.py.
#pragma once

#include <algorithm>
#include <cmath>

#include "experts.h"
#include "simd.h"

namespace octavo {

// Whether a score comes before another. NaN comes first, so that it is not lost: it becomes a weight.
inline bool precedes(float a, float b) { return a > b || (a != a && b == b); }

// Returns the first of the best values that are not taken; the first one that is not taken if all are equal.
inline int best_of(const float* values, const bool* taken, int count) {
    int best = -1;
    for (int i = 0; i < count; i++)
        if (!taken[i] && (best < 0 || precedes(values[i], values[best]))) best = i;
    return best;
}

// Replaces `size` values, a multiple of 16, by their softmax.
inline void softmax(float* x, int size) {
    Vec peaks = splat(kNegInf), sums{};
    for (int i = 0; i < size; i += W) peaks = maximum(peaks, load(x + i));
    const float peak = horizontal_max(peaks);
    for (int i = 0; i < size; i += W) {
        const Vec e = exponential(load(x + i) - peak);
        sums += e;
        store(x + i, e);
    }
    const float sum = horizontal_sum(sums);
    for (int i = 0; i < size; i += W) store(x + i, load(x + i) / sum);
}

// Chooses the experts of one token.
class Router {
public:
    // `memory`: for `floats(experts)` numbers.
    Router(const OctavoExperts& experts, float* memory)
        : e_(experts), size_(padded(experts.count)), scores_(memory), ranks_(scores_ + size_), best_(ranks_ + size_),
          taken_(reinterpret_cast<bool*>(best_ + size_)) {}

    static int padded(int count) { return (count + kPanel - 1) / kPanel * kPanel; }
    static int64_t floats(const OctavoExperts& experts) { return 4 * (int64_t)padded(experts.count); }

    void choose(const float* logits, int32_t* chosen, float* weights) {
        if (e_.scores == kMixer) return mix(logits, chosen, weights);
        read(logits);
        if (e_.scores == kSoftmax) softmax(scores_, size_);
        if (e_.scores == kSigmoid)
            for (int i = 0; i < size_; i += W) store(scores_ + i, 1.0f / (1.0f + exponential(-load(scores_ + i))));
        const float* ranks = ranked();
        std::fill(taken_, taken_ + e_.count, false);
        for (int k = 0; k < e_.top_k; k++) {
            chosen[k] = best_of(ranks, taken_, e_.count);
            taken_[chosen[k]] = true;
            weights[k] = scores_[chosen[k]];
        }
        if (e_.scores == kChosen) softmax_of_few(weights);
        finish(chosen, weights);
    }

private:
    // Reads the logits, with -inf behind them.
    void read(const float* logits) {
        std::copy(logits, logits + e_.count, scores_);
        std::fill(scores_ + e_.count, scores_ + size_, kNegInf);
    }

    // Returns what experts are chosen by: the scores, corrected, and -inf outside the best groups.
    const float* ranked() {
        if (e_.correction == nullptr && e_.groups == 1) return scores_;
        for (int i = 0; i < e_.count; i++) ranks_[i] = scores_[i] + (e_.correction ? e_.correction[i] : 0.0f);
        if (e_.groups == 1) return ranks_;
        const int size = e_.count / e_.groups;
        for (int g = 0; g < e_.groups; g++) best_[g] = group_score(ranks_ + g * size, size);
        std::fill(taken_, taken_ + e_.groups, false);
        for (int i = 0; i < e_.top_groups; i++) taken_[best_of(best_, taken_, e_.groups)] = true;
        for (int i = 0; i < e_.count; i++)
            if (!taken_[i / size]) ranks_[i] = kNegInf;
        return ranks_;
    }

    float group_score(const float* ranks, int size) const {
        float first = kNegInf, second = kNegInf;
        for (int i = 0; i < size; i++) {
            if (precedes(ranks[i], first))
                second = first, first = ranks[i];
            else if (precedes(ranks[i], second))
                second = ranks[i];
        }
        return e_.group_best == 2 ? first + second : first;
    }

    // The first weight is the largest.
    void softmax_of_few(float* weights) const {
        float sum = 0.0f;
        for (int k = e_.top_k - 1; k >= 0; k--) sum += weights[k] = std::exp(weights[k] - weights[0]);
        for (int k = 0; k < e_.top_k; k++) weights[k] /= sum;
    }

    // SparseMixer without noise: each expert's weight is its share among those near it that are not chosen yet.
    void mix(const float* logits, int32_t* chosen, float* weights) {
        std::fill(taken_, taken_ + e_.count, false);
        for (int k = 0; k < e_.top_k; k++) {
            const int expert = best_of(logits, taken_, e_.count);
            const float best = logits[expert];
            read(logits);
            for (int i = 0; i < e_.count; i++) {
                const float distance = (best - logits[i]) / std::max(std::fabs(logits[i]), best);
                if (taken_[i] || distance > 2 * e_.jitter) scores_[i] = kNegInf;
            }
            softmax(scores_, size_);
            chosen[k] = expert;
            weights[k] = scores_[expert];
            taken_[expert] = true;
        }
        finish(chosen, weights);
    }

    void finish(const int32_t* chosen, float* weights) const {
        float sum = 0.0f;
        for (int k = 0; k < e_.top_k; k++) sum += weights[k];
        if (sum < e_.floor) sum = e_.floor;
        for (int k = 0; k < e_.top_k; k++) {
            if (e_.normalized) weights[k] /= sum;
            weights[k] *= e_.scaling;
            if (e_.scales != nullptr) weights[k] *= e_.scales[chosen[k]];
        }
    }

    const OctavoExperts& e_;
    const int size_;
    float *scores_, *ranks_, *best_;
    bool* taken_;
};

}  // namespace octavo
