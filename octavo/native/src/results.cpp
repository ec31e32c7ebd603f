#include "results.h"

#include "linear.h"

namespace octavo {

namespace {

// x times the normal distribution function, by the complementary error function of |x| / sqrt(2) (Abramowitz and Stegun
// 7.1.26), which does not cancel where it is small.
Vec gelu(Vec x) {
    const Vec size = maximum(x, -x), t = 1.0f / (1.0f + size * 0.2316418960f);
    constexpr float c[] = {0.0f, 0.127414796f, -0.142248368f, 0.7107068705f, -0.7265760135f, 0.5307027145f};
    const Vec above = polynomial(t, c) * exponential(x * x * -0.5f);
    return x * select(x < 0.0f, above, 1.0f - above);
}

// x / 2 * (1 + tanh(u)) = x / (1 + e^-2u), u = sqrt(2 / pi) (x + 0.044715 x^3)
Vec gelu_tanh(Vec x) {
    const Vec twice = x * (1.0f + x * x * 0.044715f) * 1.59576912160573071f;
    return x / (1.0f + exponential(-twice));
}

// e^x - 1 - x, of x <= 0; by its series where the difference would cancel.
Vec exponential_tail(Vec x) {
    constexpr float c[] = {0.5f, 1.0f / 6, 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040};
    return select(x > -0.25f, x * x * polynomial(x, c), exponential(x) - 1.0f - x);
}

// octavo/nn/ops/activation.py documents the function and its parameters.
Vec xielu(Vec x, const float* curve) {
    const Vec v = minimum(x, splat(curve[3]));
    const Vec below = (exponential_tail(v) + (v - x)) * curve[1];
    return select(x > 0.0f, x * x * curve[0], below) + x * curve[2];
}

template <class Body>
void each(float* x, int size, const Body& body) {
    for (int c = 0; c < size; c += W) store(x + c, body(load(x + c)));
}

// Applies the operation's function in place. NaN stays NaN.
void apply(const OctavoOp& op, float* x, int size) {
    const Vec limit = splat(op.limit);
    if (op.scale != 1.0f) each(x, size, [&](Vec v) { return v * op.scale; });
    switch (op.function) {
        case kSilu: return each(x, size, silu);
        case kGelu: return each(x, size, gelu);
        case kGeluTanh: return each(x, size, gelu_tanh);
        case kRelu: return each(x, size, [](Vec v) { return maximum(Vec{}, v); });
        case kRelu2: return each(x, size, [](Vec v) { return maximum(Vec{}, v) * maximum(Vec{}, v); });
        case kXielu: return each(x, size, [&](Vec v) { return xielu(v, op.curve); });
        case kCap: return each(x, size, [&](Vec v) { return limit * hyperbolic_tangent(v / limit); });
        case kClip: return each(x, size, [&](Vec v) { return minimum(limit, maximum(-limit, v)); });
    }
}

// Stores a row of results: products of pairs of panels, or the values themselves.
template <class T>
void put(const OctavoOp& op, const float* from, int size, T* to) {
    if (op.epilogue == kGate)
        for (int c = 0; c < kPanel; c += W) store(to + c, load(from + c) * load(from + kPanel + c));
    else
        for (int c = 0; c < size; c += W) store(to + c, load(from + c));
}

// gpt-oss's gate, of a pair of panels: g * sigmoid(scale * g) * (u + 1), where g is at most the limit, and u within it.
void clamped_gate(const OctavoOp& op, float* x) {
    const Vec limit = splat(op.limit);
    for (int c = 0; c < kPanel; c += W) {
        const Vec first = minimum(limit, load(x + c)), second = minimum(limit, maximum(-limit, load(x + kPanel + c)));
        store(x + c, first / (1.0f + exponential(first * -op.scale)));
        store(x + kPanel + c, second + 1.0f);
    }
}

}  // namespace

void map_results(const Program& program, const OctavoOp& op, int panel, int panels, int first, int count, float* sums) {
    const int size = panels * kPanel, place = op.epilogue == kGate ? panel / 2 * kPanel : panel * kPanel;
    for (int m = 0; m < count; m++, sums += size) {
        if (op.second != nullptr) {
            const float* bias = static_cast<const float*>(op.second) + panel * kPanel;
            for (int c = 0; c < size; c += W) store(sums + c, load(sums + c) + load(bias + c));
        }
        if (op.function == kClampedGate)
            clamped_gate(op, sums);
        else
            apply(op, sums, op.epilogue == kGate ? kPanel : size);
        if (op.output_dtype == kBfloat) {
            put(op, sums, size, program.at<bf16>(op.output, first + m) + place);
            continue;
        }
        float* to = program.at<float>(op.output, first + m) + place;
        if (op.epilogue == kAdd)
            for (int c = 0; c < size; c += W) store(to + c, load(to + c) + load(sums + c));
        else
            put(op, sums, size, to);
    }
}

}  // namespace octavo
