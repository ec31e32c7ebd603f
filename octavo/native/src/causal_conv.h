// Causal depthwise convolutions over the tokens of a sequence, with gates before and after; see octavo/nn/recurrent/conv.py.
#pragma once

#include "recurrent.h"

extern "C" {

// octavo/native/recurrent.py sets and documents the fields.
struct OctavoConv {
    const float *weight, *bias;
    octavo::States states;
    int32_t channels, stride, taps, begin, before, after, activates;
};

}  // extern "C"

namespace octavo {

constexpr int kConvChannels = 128;  // of a task
constexpr int kMostTaps = 8;

inline const OctavoConv& conv_of(const OctavoOp& op) { return *static_cast<const OctavoConv*>(op.details); }

inline int64_t conv_parts(const OctavoOp& op) { return (conv_of(op).channels + kConvChannels - 1) / kConvChannels; }

inline int64_t conv_tasks(Program& program, const OctavoOp& op) { return program.step().rows * conv_parts(op); }

// The last inputs of a vector of channels, oldest first.
struct Window {
    Vec past[kMostTaps];

    // Reads the state of `n` channels, [channels][taps - 1].
    void read(const float* state, int n, int count) {
        alignas(64) float lanes[kMostTaps][W] = {};
        for (int i = 0; i < n; i++)
            for (int tap = 0; tap < count; tap++) lanes[tap][i] = state[i * count + tap];
        for (int tap = 0; tap < count; tap++) past[tap] = load(lanes[tap]);
    }

    void clear(int count) { std::fill(past, past + count, Vec{}); }

    void write(float* state, int n, int count) const {
        alignas(64) float lanes[kMostTaps][W];
        for (int tap = 0; tap < count; tap++) store(lanes[tap], past[tap]);
        for (int i = 0; i < n; i++)
            for (int tap = 0; tap < count; tap++) state[i * count + tap] = lanes[tap][i];
    }
};

// Computes a row's tokens for the vector of channels from c on; results beyond the channels are zeros. Taps: their
// number, or 0 for any.
template <int Taps, class T>
void convolve(const Program& program, const OctavoOp& op, const Sequence& row, int c) {
    const OctavoConv& conv = conv_of(op);
    const int taps = Taps > 0 ? Taps : conv.taps, count = taps - 1, n = std::min(W, conv.channels - c);
    float* const state = conv.states.first + row.block * conv.states.stride + (int64_t)c * count;
    Window window;
    if (row.begins)
        window.clear(count);
    else
        window.read(state, n, count);
    Vec weights[kMostTaps];
    for (int tap = 0; tap < taps; tap++) weights[tap] = load(conv.weight + (int64_t)tap * conv.stride + c);
    const Vec bias = conv.bias != nullptr ? load(conv.bias + c) : Vec{};
    for (int t = row.first; t < row.first + row.count; t++) {
        const float* from = program.at<float>(op.input, t);
        Vec x = load_first(from + conv.begin + c, n);
        if (conv.before >= 0) x = load_first(from + conv.before + c, n) * x;
        window.past[count] = x;
        Vec y = bias;
        for (int tap = 0; tap < taps; tap++) y = fused(y, weights[tap], window.past[tap]);
        for (int tap = 0; tap < count; tap++) window.past[tap] = window.past[tap + 1];
        if (conv.activates) y = silu(y);
        if (conv.after >= 0) y = y * load_first(from + conv.after + c, n);
        store(program.at<T>(op.output, t) + c, y);
    }
    window.write(state, n, count);
}

template <class T>
void run_conv(Program& program, const OctavoOp& op, int64_t task, int) {
    const OctavoConv& conv = conv_of(op);
    const Sequence row(program.step(), op.group, (int)(task / conv_parts(op)));
    if (row.count == 0) return;
    const int begin = (int)(task % conv_parts(op)) * kConvChannels;
    const auto run = conv.taps == 3 ? convolve<3, T> : conv.taps == 4 ? convolve<4, T> : convolve<0, T>;
    for (int c = begin; c < std::min(begin + kConvChannels, conv.channels); c += W) run(program, op, row, c);
}

}  // namespace octavo
