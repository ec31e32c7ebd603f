#pragma once

#include <cstdint>

extern "C" {

// How the request in a slot is sampled: the rows of PARAMETERS in octavo/sampling/parameters.py, in their order.
struct OctavoSampling {
    double temperature, top_p, min_p;  // a temperature of 0 takes the most likely token
    double repetition, frequency, presence;
    uint64_t seed;
    const int64_t *banned_ids, *bias_ids;
    const float* bias_values;
    const uint32_t* allowed;   // a bit for each token, set where it is possible; null if all are
    const int32_t* bad_words;  // of each its length and its tokens
    int32_t top_k, num_prompt, min_tokens, num_banned, num_bias, bad_words_size;
    int32_t changes;  // anything that is not about the draw or what is allowed applies
};

// Rows of logits and whose they are. `sampling`, `tokens` and `length` are those of all slots.
struct OctavoSample {
    float* logits;          // [count][logit_stride]; changed for a moment, and as they were in the end
    const int64_t* slots;   // [count]
    const uint32_t* const* allowed;  // [count], of this step, as `OctavoSampling::allowed`; or null
    const OctavoSampling* sampling;
    const int32_t* tokens;  // [slots][token_stride]
    const int64_t* length;
    int64_t* chosen;        // [count]
    float* peaks;           // [count]: the largest logit, NaN where one is NaN
    int64_t logit_stride, token_stride;
    int32_t count, columns;
};

void octavo_sample(void* pool, const OctavoSample* sample);

}  // extern "C"
