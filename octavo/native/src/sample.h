#pragma once

#include <cstdint>

extern "C" {

// Sampling parameters of the request in a slot: the rows of PARAMETERS in octavo/sampling/parameters.py, in their
// order.
struct OctavoSampling {
    double temperature, top_p, min_p;  // a temperature of 0 takes the most likely token
    double repetition, frequency, presence;
    uint64_t seed;
    const int64_t *banned_ids, *bias_ids;
    const float* bias_values;
    const uint32_t* allowed;   // a bit per token, set if it is allowed; null if all are
    const int32_t* bad_words;  // each as its length and its tokens
    int32_t top_k, num_prompt, min_tokens, num_banned, num_bias, bad_words_size;
    int32_t changes;  // whether any parameter other than those of the draw and of allowed tokens is set
};

// Rows of logits, and their slots. `sampling`, `tokens` and `length` are of all slots.
struct OctavoSample {
    float* logits;          // [count][logit_stride]; modified temporarily and restored
    const int64_t* slots;   // [count]
    const int64_t* ahead;   // [count], drafts of the slot that count as tokens so far
    const uint32_t* const* allowed;  // [count], of this step, as `OctavoSampling::allowed`; or null
    const OctavoSampling* sampling;
    const int32_t* tokens;  // [slots][token_stride]
    const int64_t* length;
    int64_t* chosen;        // [count]
    float* peaks;           // [count]: the largest logit, NaN if one is NaN
    int64_t logit_stride, token_stride;
    int32_t count, columns;
};

void octavo_sample(void* pool, const OctavoSample* sample);

}  // extern "C"
