// RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight; and LayerNorm (Ba et al. 2016):
// (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias.
#pragma once

#include <cmath>

#include "program.h"
#include "simd.h"

namespace octavo {

// Parameters of a norm over `size` values.
struct Norm {
    const float *weight, *bias;  // null: 1 and 0. An RMSNorm has a weight and no bias.
    int size, stride;  // `stride`: from one group's weights to the next one's
    float eps;
    bool centered;  // LayerNorm

    explicit Norm(const OctavoOp& op)
        : weight(static_cast<const float*>(op.weight)), bias(static_cast<const float*>(op.second)), size(op.columns),
          stride(op.own_weights ? size : 0), eps(op.eps), centered(op.centered) {}

    Norm(const float* weight, int size, float eps)
        : weight(weight), bias(nullptr), size(size), stride(0), eps(eps), centered(false) {}

    Norm of_group(int group) const {
        Norm own = *this;
        if (weight != nullptr) own.weight += group * stride;
        if (bias != nullptr) own.bias += group * stride;
        return own;
    }
};

// Returns the sum of body(value) over the values.
template <class Body>
inline float sum_over(const float* x, int size, const Body& body) {
    Vec sums[2] = {};
    int c = 0;
    for (; c + 2 * W <= size; c += 2 * W)
        for (int i = 0; i < 2; i++) sums[i] = body(load(x + c + i * W), sums[i]);
    float sum = horizontal_sum(sums[0] + sums[1]);
    for (; c < size; c += W) sum += horizontal_sum(body(load(x + c), Vec{}));
    return sum;
}

inline float inverse_root(float sum_of_squares, const Norm& norm) {
    return 1.0f / std::sqrt(sum_of_squares / (float)norm.size + norm.eps);
}

// Computes the channels [begin, end) of a normalized row.
template <class T>
void norm_columns(const float* x, const Norm& norm, T* to, int begin, int end) {
    const int size = norm.size;
    if (!norm.centered) {
        const float scale = inverse_root(sum_over(x, size, [](Vec v, Vec sum) { return v * v + sum; }), norm);
        for (int c = begin; c < end; c += W) store(to + c, load(x + c) * scale * load(norm.weight + c));
        return;
    }
    float mean = sum_over(x, size, [](Vec v, Vec sum) { return v + sum; }) / (float)size;
    // Less the rounding of that sum, which shows if the mean is far larger than the deviation.
    mean += sum_over(x, size, [mean](Vec v, Vec sum) { return v - mean + sum; }) / (float)size;
    const auto square = [mean](Vec v, Vec sum) { return (v - mean) * (v - mean) + sum; };
    const float scale = inverse_root(sum_over(x, size, square), norm);
    for (int c = begin; c < end; c += W) {
        Vec y = (load(x + c) - mean) * scale;
        if (norm.weight != nullptr) y = y * load(norm.weight + c);
        if (norm.bias != nullptr) y = y + load(norm.bias + c);
        store(to + c, y);
    }
}

template <class T>
void norm_row(const float* x, const Norm& norm, T* to) {
    norm_columns(x, norm, to, 0, norm.size);
}

}  // namespace octavo
