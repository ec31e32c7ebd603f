// Functions of a product's results, other than those that its register tile computes: activations, soft caps, limits and
// factors. They are compiled once, not with every size of tile.
#pragma once

#include "program.h"

namespace octavo {

// kPlain: the results as they are; with kGate, silu. kClampedGate: of kGate only, a function of both panels. The others
// are functions of `OctavoOp::scale` times the result.
enum Function { kPlain, kIdentity, kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kCap, kClip, kClampedGate, kXielu };

// Adds the bias to sums [count][panels * kPanel], applies the function (of kGate: to the first of each pair of panels,
// which the second one multiplies), and stores the results or adds them to the output.
void map_results(const Program& program, const OctavoOp& op, int panel, int panels, int first, int count, float* sums);

}  // namespace octavo
