// Factors of queries that keep attention sharp in long contexts (https://arxiv.org/abs/2501.19399).
#pragma once

#include <cmath>
#include <cstdint>

namespace octavo {

// Returns 1 + scale * ln(1 + floor((position + first) / interval)).
inline float temperature(float scale, int64_t interval, int64_t first, int64_t position) {
    return 1.0f + scale * (float)std::log1p((double)((position + first) / interval));
}

}  // namespace octavo
