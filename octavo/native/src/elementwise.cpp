// Embedding, normalization, and rotary positions with writes to the KV cache: all operations between two products.

#include <algorithm>
#include <cmath>

#include "blocks.h"
#include "codes.h"
#include "norm.h"
#include "temperature.h"

namespace octavo {

namespace {

constexpr int kRowsPerTask = 4;

// Returns the rows of a task: fewer in small steps, so that every thread has one.
int rows_of_task(const Program& program) {
    return std::clamp(program.step().tokens / program.threads(), 1, kRowsPerTask);
}

int64_t tasks_by_rows(Program& program, const OctavoOp&) {
    const int rows = rows_of_task(program);
    return (program.step().tokens + rows - 1) / rows;
}

template <class Body>
void for_rows(const Program& program, int64_t task, const Body& body) {
    const int rows = rows_of_task(program), end = std::min(program.step().tokens, ((int)task + 1) * rows);
    for (int row = (int)task * rows; row < end; row++) body(row);
}

// A task of some rows and a part of their columns, in steps of few tokens. Threads take parts in the order in which they
// have taken the columns of the product before, so each mostly reads what is in its own cache.
struct ColumnTasks {
    static constexpr int kMostTokens = 32;
    static constexpr int kColumns = 2 * kBlock;  // parts are multiples, for blocks whose minima are in pairs

    int64_t row_tasks;
    int parts, units;

    ColumnTasks(Program& program, const OctavoOp& op, int most)
        : row_tasks(tasks_by_rows(program, op)), units((op.columns + kColumns - 1) / kColumns) {
        parts = program.step().tokens > kMostTokens ? 1 : std::clamp(most, 1, units);
    }

    int64_t count() const { return row_tasks * parts; }
    int64_t rows(int64_t task) const { return task % row_tasks; }
    int begin(int64_t task) const { return (int)(task / row_tasks * units / parts) * kColumns; }
    int end(int64_t task, const OctavoOp& op) const {
        return std::min(op.columns, (int)((task / row_tasks + 1) * units / parts) * kColumns);
    }
};

// Quantizes columns [begin, end) of a row, given from `begin` on.
void quantize_part(Program& program, const OctavoOp& op, const float* x, int begin, int end, int row) {
    const int64_t block = activation_bytes(op) / (op.columns / kBlock);
    quantize_row(x, end - begin, op.planes, op.zero_point, program.at<char>(op.output, row) + begin / kBlock * block);
}

// --- embedding: a row of the table, which may be plain [row][channel] or packed in panels for the head -------------
// A table of `rows` rows is a part of the vocabulary, from `begin` on; the rows of other tokens are zero.

template <class T>
void embed_row(const OctavoOp& op, int64_t id, float* to) {
    const T* table = static_cast<const T*>(op.weight);
    if (!op.packed) {
        for (int c = 0; c < op.columns; c++) to[c] = to_float(table[id * op.columns + c]);
        return;
    }
    constexpr int per = kPerWord<T>;
    const T* panel = table + id / kPanel * op.columns * kPanel + id % kPanel * per;
    for (int c = 0; c < op.columns; c += per)
        for (int i = 0; i < per; i++) to[c + i] = to_float(panel[(int64_t)c * kPanel + i]);
}

void embed_blocks(const OctavoOp& op, int64_t id, float* to) {
    const Record record(op);
    const int column = (int)(id % kPanel);
    const char* from = static_cast<const char*>(op.weight) + id / kPanel * (op.columns / kBlock) * record.size;
    for (int b = 0; b < op.columns / kBlock; b++, from += record.size) {
        const uint16_t* halves = reinterpret_cast<const uint16_t*>(from + record.values);
        const float scale = half_to_float(halves[column]);
        const float minimum = op.minima ? half_to_float(halves[kPanel + column]) : 0.0f;
        for (int i = 0; i < kBlock; i++) {
            const int word = i / 4, byte = column * 4 + i % 4;
            const int value = op.dtype == kInt8 ? (uint8_t)from[word * kPanel * 4 + byte]
                                                : (uint8_t)from[word / 2 * kPanel * 4 + byte] >> (word % 2 * 4) & 15;
            to[b * kBlock + i] = scale * (float)(value - op.zero_point) + minimum;
        }
    }
}

struct CodedRow {
    const OctavoOp& op;
    int64_t id;
    float* to;

    template <int Dtype>
    void run() const {
        const CodeRecord record(op);
        const float factor = has_scales(op) ? *static_cast<const float*>(op.book) : 1.0f;
        const Widener<Dtype> widener(numbers_of(op));
        const int column = (int)(id % kPanel);
        const char* from = static_cast<const char*>(op.weight) + id / kPanel * code_panel_bytes(op);
        for (int first = 0; first < op.columns; first += op.scaled, from += record.size) {
            const uint16_t* halves = reinterpret_cast<const uint16_t*>(from + record.codes);
            const float scale = has_scales(op) ? half_to_float(halves[column]) * factor : 1.0f;
            const float minimum = op.minima ? half_to_float(halves[kPanel + column]) * factor : 0.0f;
            for (int k = 0; k < op.scaled; k++) {
                const char* four = from + k / kFour * Widener<Dtype>::kBytes;
                to[first + k] = scale * widener.number(four, k % kFour, column) + minimum;
            }
        }
    }
};

void run_embed(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const int64_t* ids = op.by_position ? program.step().positions : program.step().input_ids;
    for_rows(program, task, [&](int row) {
        float* const to = program.at<float>(op.output, row);
        float* const found =
            op.epilogue == kAdd ? static_cast<float*>(program.scratch(thread, op.columns * sizeof(float))) : to;
        const int64_t id = ids[row] - op.begin;
        if (op.rows > 0 && (id < 0 || id >= op.rows))
            std::fill(found, found + op.columns, 0.0f);
        else if (has_blocks(op))
            embed_blocks(op, id, found);
        else if (has_codes(op))
            for_codes(op, CodedRow{op, id, found});
        else if (op.dtype == kBfloat)
            embed_row<bf16>(op, id, found);
        else
            embed_row<float>(op, id, found);
        if (op.scale != 1.0f)
            for (int c = 0; c < op.columns; c++) found[c] *= op.scale;
        if (op.epilogue == kAdd)
            for (int c = 0; c < op.columns; c++) to[c] += found[c];
    });
}

// --- norms ---------------------------------------------------------------------------------------------------------

// Normalizes the groups of a row, or adds `scale` times the normalized row to the output.
void norm_floats(const OctavoOp& op, const Norm& norm, const float* x, float* to, float* normed) {
    x += op.begin;
    if (op.epilogue != kAdd) {
        for (int g = 0; g < op.groups; g++) norm_row(x + g * norm.size, norm.of_group(g), to + op.begin + g * norm.size);
        return;
    }
    norm_row(x, norm, normed);
    for (int c = 0; c < norm.size; c += W) store(to + c, load(to + c) + load(normed + c) * op.scale);
}

// A row that is quantized is divided if there are fewer rows than threads: each computes the whole row's scale.
ColumnTasks norm_division(Program& program, const OctavoOp& op) {
    return {program, op, has_blocks(op) ? program.threads() / std::max(1, program.step().tokens) : 1};
}

int64_t norm_tasks(Program& program, const OctavoOp& op) { return norm_division(program, op).count(); }

void run_norm(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const Norm norm(op);
    const ColumnTasks division = norm_division(program, op);
    const int begin = division.begin(task), end = division.end(task, op);
    float* const normed = static_cast<float*>(program.scratch(thread, op.columns * sizeof(float)));
    for_rows(program, division.rows(task), [&](int row) {
        const float* x = program.at<float>(op.input, row);
        if (op.dtype == kFloat) return norm_floats(op, norm, x, program.at<float>(op.output, row), normed);
        if (op.dtype == kBfloat) return norm_row(x, norm, program.at<bf16>(op.output, row));
        norm_columns(x, norm, normed, begin, end);
        quantize_part(program, op, normed + begin, begin, end, row);
    });
}

// --- activations to integers, or to bfloat16 -----------------------------------------------------------------------

template <class T>
void narrow(const float* from, int size, T* to) {
    for (int c = 0; c < size; c += W) store(to + c, load(from + c));
}

ColumnTasks quantize_division(Program& program, const OctavoOp& op) { return {program, op, program.threads()}; }

int64_t quantize_tasks(Program& program, const OctavoOp& op) { return quantize_division(program, op).count(); }

void run_quantize(Program& program, const OctavoOp& op, int64_t task, int thread) {
    const int32_t* order = static_cast<const int32_t*>(op.third);
    float* const wide = static_cast<float*>(program.scratch(thread, 2 * op.columns * sizeof(float)));
    const ColumnTasks division = quantize_division(program, op);
    const int begin = division.begin(task), end = division.end(task, op);
    for_rows(program, division.rows(task), [&](int row) {
        const float* x = program.at<float>(op.input, row);
        if (op.dtype == kBfloat) {
            const bf16* narrow = program.at<bf16>(op.input, row);
            for (int c = order ? 0 : begin; c < (order ? op.columns : end); c += W) store(wide + c, load(narrow + c));
            x = wide;
        }
        if (order != nullptr) {
            float* const ordered = wide + op.columns;
            for (int c = begin; c < end; c++) ordered[c] = x[order[c]];
            x = ordered;
        }
        if (op.planes == 0) return narrow(x + begin, end - begin, program.at<bf16>(op.output, row) + begin);
        quantize_part(program, op, x + begin, begin, end, row);
    });
}

// --- copies --------------------------------------------------------------------------------------------------------

// Copies the values of float32 rows to the places `third` of longer rows, or from place `begin` on.
void run_copy(Program& program, const OctavoOp& op, int64_t task, int) {
    const int32_t* places = static_cast<const int32_t*>(op.third);
    for_rows(program, task, [&](int row) {
        const float* x = program.at<float>(op.input, row) + op.groups;
        float* const to = program.at<float>(op.output, row) + op.begin;
        if (places != nullptr)
            for (int c = 0; c < op.columns; c++) to[places[c]] = x[c] * op.scale;
        else if (op.epilogue == kAdd)
            for (int c = 0; c < op.columns; c++) to[c] += x[c] * op.scale;
        else if (op.epilogue == kGate)
            for (int c = 0; c < op.columns; c++) to[c] *= x[c] * op.scale;
        else if (op.scale == 1.0f)
            std::copy(x, x + op.columns, to);
        else
            for (int c = 0; c < op.columns; c++) to[c] = x[c] * op.scale;
    });
}

// --- rotary positions (Su et al. 2021), and keys and values to their places in the cache ---------------------------

// Rotates a head in place; channel i is paired with channel i + rotary_dim / 2.
void rotate(float* head, const OctavoOp& op, const float* cos_sin) {
    const int half = op.rotary_dim / 2;
    int c = 0;
    for (; c + W <= half; c += W) {
        const Vec x = load(head + c), y = load(head + half + c), cos = load(cos_sin + c), sin = load(cos_sin + half + c);
        store(head + c, x * cos - y * sin);
        store(head + half + c, y * cos + x * sin);
    }
    for (; c < half; c++) {
        const float x = head[c], y = head[half + c];
        head[c] = x * cos_sin[c] - y * cos_sin[half + c];
        head[half + c] = y * cos_sin[c] + x * cos_sin[half + c];
    }
}

// Rotates a head in place, before or after its own norm if it has one.
void turn(float* head, const OctavoOp& op, const float* norm, const float* cos_sin) {
    if (norm != nullptr && !op.rotates_first) norm_row(head, Norm(norm, op.head_dim, op.eps), head);
    rotate(head, op, cos_sin);
    if (norm != nullptr && op.rotates_first) norm_row(head, Norm(norm, op.head_dim, op.eps), head);
}

// Addresses of a token's key and value as attention.h reads them. Keys: [token panel][word of channels][token]; values:
// [channel panel][word of tokens][channel]; 8-bit ones are followed by their scales.
template <class T>
struct Place {
    const OctavoOp& op;
    T *keys, *values;
    int block_size, offset;

    Place(const OctavoOp& op, int64_t slot, int head, int block_size)
        : op(op), block_size(block_size), offset((int)(slot % block_size)) {
        const int64_t half = (int64_t)block_size * op.head_dim;
        const int64_t scales = sizeof(T) == 1 ? block_size * sizeof(float) : 0;
        char* const block = static_cast<char*>(op.cache) + slot / block_size * op.block_stride;
        keys = reinterpret_cast<T*>(block) + head * 2 * (half + scales);
        values = keys + half;
    }

    void put_key(const T* k) const {
        constexpr int per = kPerWord<T>;
        T* to = keys + offset / kPanel * kPanel * op.head_dim + offset % kPanel * per;
        for (int c = 0; c < op.head_dim; c += per) std::memcpy(to + c * kPanel, k + c, sizeof(uint32_t));
    }

    // A word of values holds several tokens. Later ones are zeroed, since they are read, and multiplied with 0, before
    // they are written.
    void put_value(const T* v, bool blank) const {
        constexpr int per = kPerWord<T>;
        for (int panel = 0; panel < op.head_dim / kPanel; panel++, v += kPanel) {
            T* to = values + (panel * block_size + offset / per * per) * kPanel + offset % per;
            for (int c = 0; c < kPanel; c++) to[c * per] = v[c];
            if (!blank) continue;
            for (int c = 0; c < kPanel; c++)
                for (int i = 1; i < per; i++) to[c * per + i] = T{};
        }
    }
};

// Converts a vector to bytes, with `offset` added to each; returns their scale.
float to_bytes(const float* x, int size, int offset, uint8_t* to) {
    Vec peak{}, flaw{};
    for (int c = 0; c < size; c += W) {
        const Vec v = load(x + c);
        peak = maximum(peak, maximum(v, -v));
        flaw += v - v;
    }
    const float top = horizontal_max(peak), inverse = top > 0 ? 127.0f / top : 0.0f;
    for (int c = 0; c < size; c++) to[c] = (uint8_t)((int)std::nearbyint(x[c] * inverse) + offset);
    return top / 127.0f + horizontal_sum(flaw);  // propagates NaN and infinity
}

void put_bytes(const OctavoOp& op, int64_t slot, int head, int block_size, const float* k, const float* v,
               uint8_t* bytes) {
    const Place<uint8_t> place(op, slot, head, block_size);
    float* scales = reinterpret_cast<float*>(place.values + (int64_t)block_size * op.head_dim) + place.offset;
    scales[0] = to_bytes(k, op.head_dim, 128, bytes);
    place.put_key(bytes);
    scales[block_size] = to_bytes(v, op.head_dim, 0, bytes);
    place.put_value(bytes, false);
}

template <class T>
void rope_row(Program& program, const OctavoOp& op, int row, int thread) {
    const OctavoStep& step = program.step();
    const float* cos_sin = step.rotations != nullptr
                               ? step.rotations + (int64_t)row * op.rotary_dim
                               : static_cast<const float*>(op.weight) + step.positions[row] * op.rotary_dim;
    const int dim = op.head_dim;
    float* heads = program.at<float>(op.input, row);
    T* queries = program.at<T>(op.output, row);
    const float factor =
        op.scale != 0.0f ? temperature(op.scale, op.window, op.begin, step.positions[row]) : 1.0f;
    for (int h = 0; h < op.heads; h++) {
        turn(heads + h * dim, op, static_cast<const float*>(op.second), cos_sin);
        if (op.scale != 0.0f)
            for (int c = 0; c < dim; c++) heads[h * dim + c] *= factor;
        narrow(heads + h * dim, dim, queries + h * dim);
    }
    const int64_t slot = step.slot(op.group, row);
    const bool starts_word = slot % kPerWord<T> == 0;
    const bool followed = row + 1 < step.tokens && step.slot(op.group, row + 1) == slot + 1;
    float *keys = heads + op.heads * dim, *values = keys + op.kv_heads * dim;
    T *key = static_cast<T*>(program.scratch(thread, 2 * dim * sizeof(T))), *value = key + dim;
    for (int h = 0; h < op.kv_heads; h++) {
        turn(keys + h * dim, op, static_cast<const float*>(op.third), cos_sin);
        if (op.cache_dtype == kInt8) {
            uint8_t* bytes = reinterpret_cast<uint8_t*>(key);
            put_bytes(op, slot, h, step.block_size, keys + h * dim, values + h * dim, bytes);
            continue;
        }
        const Place<T> place(op, slot, h, step.block_size);
        narrow(keys + h * dim, dim, key);
        narrow(values + h * dim, dim, value);
        place.put_key(key);
        place.put_value(value, starts_word && !followed);
    }
}

void run_rope(Program& program, const OctavoOp& op, int64_t task, int thread) {
    for_rows(program, task, [&](int row) {
        if (op.dtype == kBfloat)
            rope_row<bf16>(program, op, row, thread);
        else
            rope_row<float>(program, op, row, thread);
    });
}

}  // namespace

OpCode embed_code() { return {tasks_by_rows, run_embed}; }

OpCode quantize_code() { return {quantize_tasks, run_quantize}; }

OpCode norm_code() { return {norm_tasks, run_norm}; }

OpCode copy_code() { return {tasks_by_rows, run_copy}; }

OpCode rope_code() { return {tasks_by_rows, run_rope}; }

}  // namespace octavo
