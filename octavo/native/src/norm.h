// RMSNorm (Zhang and Sennrich 2019): x / sqrt(mean(x^2) + eps) * weight.
#pragma once

#include <cmath>

#include "simd.h"

namespace octavo {

inline float inverse_rms(const float* x, int size, float eps) {
    Vec sums[2] = {};
    int c = 0;
    for (; c + 2 * W <= size; c += 2 * W)
        for (int i = 0; i < 2; i++) {
            const Vec v = load(x + c + i * W);
            sums[i] = v * v + sums[i];
        }
    float sum = horizontal_sum(sums[0] + sums[1]);
    for (; c < size; c++) sum += x[c] * x[c];
    return 1.0f / std::sqrt(sum / (float)size + eps);
}

template <class T>
void norm_row(const float* x, const float* weight, int size, float eps, T* to) {
    const float scale = inverse_rms(x, size, eps);
    for (int c = 0; c < size; c += W) store(to + c, load(x + c) * scale * load(weight + c));
}

}  // namespace octavo
