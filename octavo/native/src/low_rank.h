// Low-rank additions to products: y += B A x, where each row of the batch may have another A and B, or none. Adapters of
// a model are such additions (Hu et al. 2021).
//
// kShrink computes s = A x; the product's epilogue adds B s before its bias and its gate, so the addition takes no
// barrier of its own where it can run beside the operation that prepares the product's input. For the products of
// experts, operations of experts.cpp compute s. A row's result does not depend on the other rows.
#pragma once

#include <cstdint>
#include <vector>

extern "C" {

struct OctavoOp;
struct OctavoStep;

// The additions to one product, by index. Their weights are in blocks of the KV cache, [slices][blocks][slice_bytes]:
// byte b of an addition's range is byte b % slice_bytes of slice (b / slice_bytes) % slices of block
// blocks[b / slice_bytes / slices]. Offsets count tiles of `tile_bytes`, which divide slices; every row begins on a tile.
struct OctavoLowRank {
    const char* memory;
    const int32_t* blocks;      // [index][block_stride], blocks of each addition's range
    const int32_t* places;      // [index][parts][4]: rows of A [rank, inputs], rows of B^T [rank, outputs], rank, factors
    const int32_t* outputs;     // [parts]
    const int32_t* of_tokens;   // [tokens], the index of each token's addition; negative for none
    const int32_t* of_logits;   // the same for the tokens that get logits
    int64_t slice_stride;       // bytes between slices
    int32_t slice_bytes, slices, tile_bytes, block_stride, parts;
    int32_t dtype;              // of A and B
    // Of an expert's product, whose rows are choices of experts (experts.h): choices of each token, the buffer with the
    // choice of each row, and that of s. `top_k` is 0 for products whose rows are the step's.
    int32_t top_k, choices, shrunk;
};

}  // extern "C"

namespace octavo {

class Program;

// The rows of a step that have an addition, ordered by it.
struct RowsByAddition {
    static constexpr int kMost = 16;  // rows of a group, for which A is read once

    struct Group {
        int32_t index, first, count;  // `first`: in `rows`
    };

    std::vector<int32_t> rows;
    std::vector<Group> groups;
    const int32_t* index = nullptr;  // [tokens], each row's addition
    int64_t width = 0;               // the largest sum of an addition's ranks over the parts of a product

    // For the operations [op, end) in this step.
    void find(const OctavoOp* op, const OctavoOp* end, const OctavoStep& step);
};

// Returns the index of each token's addition in a step.
inline const int32_t* index_of(const OctavoLowRank& table, bool of_logits) {
    return of_logits ? table.of_logits : table.of_tokens;
}

// Computes s = A x for one row of the addition with this index.
void shrink_row(const OctavoLowRank& table, int index, const float* x, int columns, float* to);

// Adds the additions of rows [first, first + count) to sums [count][panels * kPanel], of the product's panels from
// `panel` on.
void expand(const Program& program, const OctavoOp& op, int panel, int panels, int first, int count, float* sums);

// Prefetches what `expand` will read.
void prefetch_low_rank(const Program& program, const OctavoOp& op, int panel, int panels, int first, int count);

}  // namespace octavo
