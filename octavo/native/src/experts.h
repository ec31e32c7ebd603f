// Mixtures of experts: a router chooses some experts for each token, whose outputs are weighted and summed.
//
// A *choice* is a token's place for one of its experts: number token * top_k + place. Choices are sorted by expert, so
// that each expert multiplies the rows of all its tokens at once and its weights are read once. Each row is multiplied
// by itself as in any product (tile.h), and a token's outputs are added in the order of its own choices: its result
// does not depend on the other tokens.
#pragma once

#include "program.h"

extern "C" {

// One layer's experts; `OctavoOp::details` of all their operations.
struct OctavoExperts {
    const OctavoOp *expand, *reduce;  // [owned], each expert's products: to its inner values, and to its output
    const float* correction;          // [count], added to the scores to choose experts, not to weigh them; or null
    const float* scales;              // [count], factors of the weights of experts; or null
    int32_t *begin, *chunks;          // [owned + 1], of kPlace: each expert's first row, and its first chunk of rows
    int32_t count, top_k;
    int32_t scores;                   // octavo::Scores
    int32_t groups, top_groups, group_best;  // a group's score is the sum of its best 1 or 2
    int32_t normalized, on_inputs;    // the weights multiply the inputs of experts instead of their outputs
    float floor, scaling, jitter;
    int32_t chosen, weights, rows, choices;  // buffers [tokens * top_k]: of each choice the expert, its weight and its
                                             // row, -1 if another rank has the expert; of each row its choice
    int32_t shared, shared_gate;  // buffers [tokens]: added to the sum, times the sigmoid of the other; -1 without
    int32_t first, owned;         // the experts of this rank: `owned` of `count`, from `first` on
};

}  // extern "C"

namespace octavo {

// kChosen: the softmax of the chosen experts' logits. kMixer: SparseMixer (https://arxiv.org/abs/2409.12136).
enum Scores { kSoftmax, kSigmoid, kChosen, kMixer };

// In this order: choose experts; sort the choices; collect each expert's rows; multiply them; round what the second
// products multiply; multiply; sum. Low-rank additions to either product are begun before it (low_rank.h).
enum ExpertsKind {
    kRoute = kKinds, kPlace, kGather, kExpand, kRound, kReduce, kCombine, kShrinkExpand, kShrinkReduce
};

inline const OctavoExperts& experts_of(const OctavoOp& op) { return *static_cast<const OctavoExperts*>(op.details); }

}  // namespace octavo
