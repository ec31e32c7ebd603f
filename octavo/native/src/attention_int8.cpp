// Attention over a cache of 8-bit integers with a scale per token and head, by integer products: queries and weights
// become 16-bit integers in two planes of bytes, so that the cache's own rounding dominates the error.
//
// Keys are stored with 128 added to each number, because only one factor of a byte product is signed; the sums' initial
// values subtract it again. A token's scale multiplies a whole score. The scale of its values multiplies its weight.
#include "attention.h"

namespace octavo {

namespace {

typedef int8_t Byte __attribute__((vector_size(W)));

constexpr int kPlanes = 2;
constexpr int kKeyOffset = 128;

// Sums of byte products, two for each of M rows: of the high bytes and of the low bytes.
template <int M, int P>
struct ByteTile : Tile<M * kPlanes, P, Int> {
    // Row m's sums, vector j.
    Vec total(int m, int j) const {
        const auto value = [](Int v) { return __builtin_convertvector(v, Vec); };
        return value(this->sums[2 * m][j]) * 256.0f + value(this->sums[2 * m + 1][j]);
    }
};

// Returns what to add to a scale, so that NaN and infinity are not lost in the integers.
float flaw(Vec sum_of_differences) { return horizontal_sum(sum_of_differences); }

struct Int8Reader : Reader<char, Int8Reader> {
    // Rows of a register tile; more would take longer to compile and be no faster.
    static constexpr int kMaxRows = W < 16 ? 1 : 4;

    uint32_t* queries;  // [rows][dim][kPlanes] bytes as words, interleaved tile by tile
    uint8_t* weights;   // [rows][kPlanes][kTile]
    float *query_scales, *weight_scales;   // [rows]
    int32_t *high_starts, *low_starts;     // [rows]: where the sums of scores begin

    Int8Reader(Program& program, const OctavoOp& op, const AttentionTask& task, const AttentionTask& after, int thread)
        : Reader(program, op, task, after, thread, op.head_dim + kTile + 4) {
        queries = reinterpret_cast<uint32_t*>(take(rows * dim / 2));
        weights = reinterpret_cast<uint8_t*>(take(rows * kTile / 2));
        query_scales = take(rows);
        weight_scales = take(rows);
        high_starts = reinterpret_cast<int32_t*>(take(rows));
        low_starts = reinterpret_cast<int32_t*>(take(rows));
    }

    void fetch() {
        const int words = dim / 4;
        each_row_tile(rows, kMaxRows, [&](int first, int count) {
            uint32_t* to = queries + (int64_t)first * words * kPlanes;
            for (int m = 0; m < count; m++) {
                uint8_t* planes = reinterpret_cast<uint8_t*>(whole.sums);  // not yet in use
                narrow_query(first + m, planes, planes + dim);
                for (int k = 0; k < words; k++)
                    for (int i = 0; i < kPlanes; i++)
                        std::memcpy(to + (k * count + m) * kPlanes + i, planes + i * dim + k * 4, 4);
            }
        });
    }

    void narrow_query(int m, uint8_t* high, uint8_t* low) {
        op.dtype == kBfloat ? narrow_query(m, query<bf16>(m), high, low) : narrow_query(m, query<float>(m), high, low);
    }

    template <class T>
    void narrow_query(int m, const T* x, uint8_t* high, uint8_t* low) {
        constexpr float most = 32639.0f;  // the largest number whose high byte, rounded to nearest, is a signed byte
        Vec peak{}, differences{};
        for (int c = 0; c < dim; c += W) {
            const Vec v = load(x + c);
            peak = maximum(peak, maximum(v, -v));
            differences += v - v;
        }
        const float top = horizontal_max(peak), inverse = top > 0 ? most / top : 0.0f;
        Int highs{}, lows{};
        for (int c = 0; c < dim; c += W) {
            const Int value = rounded(load(x + c) * inverse), upper = (value + 128) >> 8;
            put(upper, high + c);
            put(value, low + c);  // modulo 256: the rest after the high byte
            highs += upper;
            lows += value - upper * 256;
        }
        query_scales[m] = top / most + flaw(differences);
        high_starts[m] = -kKeyOffset * horizontal_sum(highs);
        low_starts[m] = -kKeyOffset * horizontal_sum(lows);
    }

    static Int rounded(Vec x) {
        const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
        return (Int)(x + magic) - (Int)magic;
    }

    static void put(Int values, uint8_t* to) {
        const Byte bytes = __builtin_convertvector(values, Byte);
        std::memcpy(to, &bytes, sizeof bytes);
    }

    void attend_tile(int begin, int end) {
        const int panels = (end - begin + kPanel - 1) / kPanel;
        for (const Place& place : soon)
            for (const float* scales : {place.key_scales, place.value_scales}) __builtin_prefetch(scales, 0, 2);
        for (int p = 0; p < panels; p += 2) for_row_tiles<kMaxRows>(rows, Score{*this, p});
        for (int m = 0; m < rows; m++) {
            weigh<6>(m, begin, end, scores + m * kTile, scores + m * kTile);
            narrow_weights(m, panels);
        }
        int panel = 0;
        for (; panel + 2 <= dim / kPanel; panel += 2)
            for_row_tiles<kMaxRows>(rows, Gather<2>{*this, panel, panels});
        if (panel < dim / kPanel) for_row_tiles<kMaxRows>(rows, Gather<1>{*this, panel, panels});
    }

    struct Score {
        const Int8Reader& r;
        int panel;
        template <int M>
        void run(int first) const {
            ByteTile<M, 2> tile;
            for (int m = 0; m < M; m++)
                for (int j = 0; j < 2 * VP; j++) {
                    tile.sums[2 * m][j] = r.high_starts[first + m] - Int{};
                    tile.sums[2 * m + 1][j] = r.low_starts[first + m] - Int{};
                }
            const int words = r.dim / 4;
            const Place* places = r.places + panel;
            const uint32_t* keys[] = {places[0].keys, places[1].keys};
            const uint32_t* next[] = {r.soon[panel].keys, r.soon[panel + 1].keys};
            const Interleaved<M * kPlanes> rows{r.queries + (int64_t)first * words * kPlanes};
            multiply<UnsignedBySigned>(tile, rows, keys, words, ahead(next));
            for (int m = 0; m < M; m++) {
                float* to = r.scores + (first + m) * kTile + panel * kPanel;
                for (int j = 0; j < 2 * VP; j++) {
                    const Vec scale = load(places[j / VP].key_scales + j % VP * W) * r.query_scales[first + m];
                    store(to + j * W, tile.total(m, j) * scale);
                }
            }
        }
    };

    // Row m's weights times the scales of the values, as unsigned 16-bit integers. Beyond the context's end a scale is
    // arbitrary; even its product with 0 may be NaN.
    void narrow_weights(int m, int panels) {
        constexpr float most = 65535.0f;
        float* from = scores + m * kTile;
        uint8_t* to = weights + m * kPlanes * kTile;
        Vec peak{}, differences{};
        for (int p = 0; p < panels; p++)
            for (int v = 0; v < kPanel; v += W) {
                const Vec weight = load(from + p * kPanel + v);
                const Vec scaled = select(weight > 0.0f, weight * load(places[p].value_scales + v), Vec{});
                peak = maximum(peak, scaled);
                differences += scaled - scaled;
                store(from + p * kPanel + v, scaled);
            }
        const float top = horizontal_max(peak), inverse = top > 0 ? most / top : 0.0f;
        for (int j = 0; j < panels * kPanel; j += W) {
            const Int value = rounded(load(from + j) * inverse);
            put(value >> 8, to + j);
            put(value, to + kTile + j);
        }
        weight_scales[m] = top / most + flaw(differences);
    }

    template <int P>
    struct Gather {
        const Int8Reader& r;
        int panel, panels;

        template <int M>
        void run(int first) const {
            ByteTile<M, P> tile{};
            constexpr int words = kPanel / 4;
            const uint32_t* weights = reinterpret_cast<const uint32_t*>(r.weights + first * kPlanes * kTile);
            for (int place = 0; place < panels; place++) {
                const uint32_t *values[P], *next[P];
                for (int p = 0; p < P; p++) values[p] = r.values_of(r.places[place], panel + p);
                for (int p = 0; p < P; p++) next[p] = r.values_of(r.soon[place], panel + p);
                const Rowwise<M * kPlanes> rows(weights + place * words, kTile / 4);
                multiply<SignedByUnsigned>(tile, rows, values, words, ahead(next));
            }
            for (int m = 0; m < M; m++) {
                float* sums = r.part.sums + (int64_t)(first + m) * r.dim + panel * kPanel;
                for (int j = 0; j < P * VP; j++)
                    store(sums + j * W, load(sums + j * W) + tile.total(m, j) * r.weight_scales[first + m]);
            }
        }
    };
};

}  // namespace

}  // namespace octavo

extern "C" void octavo_attend_int8(octavo::Program& program, const OctavoOp& op, const octavo::AttentionTask& task,
                                   const octavo::AttentionTask& after, int thread) {
    octavo::Int8Reader(program, op, task, after, thread).run();
}
