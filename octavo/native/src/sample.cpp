// Samples one token for each row of logits: penalties, temperature, min_p, top_k, top_p and the draw, without sorting
// the vocabulary. A row's token does not depend on the other rows.
//
// Tokens are ranked by logit, ties by the lower id. If the maxima of short stretches show that only few tokens can be
// kept, those are ranked, in double precision; otherwise the lowest kept logit is found by bisection.

#include "sample.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "pool.h"
#include "simd.h"

namespace octavo {

namespace {

constexpr int kStretch = 64;    // logits per stretch, of which the maximum is examined first
constexpr int kFewTokens = 1024;  // at most this many are ranked
constexpr int kGuess = 64;      // tokens examined first for top_p
constexpr float kLowest = std::numeric_limits<float>::lowest();  // the lowest logit of an allowed token

// The output function of SplitMix64 (Steele, Lea and Flood 2014), as in octavo/sampling/rng.py.
uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

double uniform(uint64_t seed, uint64_t position) {
    constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;
    return (double)(mix(mix(seed + kGamma) + (position + 1) * kGamma) >> 11) * 0x1p-53;
}

// Maps floats to integers of the same order, and back.
int32_t order_of(float x) {
    int32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? (int32_t)(0x80000000u - (uint32_t)bits) : bits;
}

float float_of(int32_t order) {
    const int32_t bits = order < 0 ? (int32_t)(0x80000000u - (uint32_t)order) : order;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

struct Candidate {
    float logit;
    int32_t id;
    double weight;
};

// A thread's buffers for a row; reused, since they are as large as the vocabulary.
struct Workspace {
    std::vector<float> weights, maxima, sorted, possible;
    std::vector<int32_t> counts;  // of each token; 0 between two rows
    std::vector<Candidate> candidates;
    std::vector<std::pair<int32_t, float>> changed;
};

// The tokens that may be drawn: all with logits above the floor, and those at the floor up to an id.
struct Kept {
    float floor;
    int32_t last_tie;
};

// Copies a row's logits, with minus infinity for each token whose bit is missing in a mask (which may be null). A copy,
// because log-probabilities are still to be computed from the logits.
float* possible_logits(const float* x, int size, const uint32_t* one, const uint32_t* other, Workspace& space) {
    constexpr int kBits = 32;
    std::vector<float>& y = space.possible;
    if (y.size() < (size_t)size) y.resize(size);
    for (int begin = 0; begin < size; begin += kBits) {
        uint32_t bits = (one ? one[begin / kBits] : ~0u) & (other ? other[begin / kBits] : ~0u);
        if (size - begin < kBits) {
            for (int i = begin; i < size; i++, bits >>= 1) y[i] = bits & 1 ? x[i] : kNegInf;
        } else if (bits == 0) {
            std::fill_n(y.data() + begin, kBits, kNegInf);
        } else {
            for (int i = begin; i < begin + kBits; i += W, bits >>= W) store(y.data() + i, load_where(x + i, bits));
        }
    }
    return y.data();
}

class Row {
public:
    Row(float* logits, int size, const OctavoSampling& how, Workspace& space)
        : x_(logits), size_(size), how_(how), space_(space) {}

    // Applies bias, bans and penalties in place; keeps the original logits for `restore`.
    void change(const int32_t* tokens, int64_t length) {
        space_.changed.clear();
        for (int i = 0; i < how_.num_bias; i++) set(how_.bias_ids[i], x_[how_.bias_ids[i]] + how_.bias_values[i]);
        const int64_t generated = length - how_.num_prompt;
        if (generated < how_.min_tokens)
            for (int i = 0; i < how_.num_banned; i++) set(how_.banned_ids[i], kNegInf);
        for (int i = 0; i < how_.bad_words_size; i += 1 + how_.bad_words[i]) {
            const int32_t *word = how_.bad_words + i + 1, begun = how_.bad_words[i] - 1;
            if (generated >= begun && std::equal(word, word + begun, tokens + length - begun)) set(word[begun], kNegInf);
        }
        std::vector<int32_t>& counts = space_.counts;
        if (counts.size() < (size_t)size_) counts.resize(size_);
        if (how_.repetition != 1) {
            const float penalty = (float)how_.repetition;
            for (int64_t i = 0; i < length; i++)
                if (tokens[i] >= 0 && !counts[tokens[i]]++) {  // placeholders of embeddings are negative
                    const float x = x_[tokens[i]];
                    set(tokens[i], x > 0 ? x / penalty : x * penalty);
                }
            for (int64_t i = 0; i < length; i++)
                if (tokens[i] >= 0) counts[tokens[i]] = 0;
        }
        if (how_.frequency != 0 || how_.presence != 0) {
            for (int64_t i = how_.num_prompt; i < length; i++) counts[tokens[i]]++;
            for (int64_t i = how_.num_prompt; i < length; i++)
                if (int32_t& count = counts[tokens[i]]) {
                    set(tokens[i], x_[tokens[i]] - ((float)count * (float)how_.frequency + (float)how_.presence));
                    count = 0;
                }
        }
    }

    void restore() {
        for (auto it = space_.changed.rbegin(); it != space_.changed.rend(); ++it) x_[it->first] = it->second;
    }

    // Finds the largest logit, NaN if any is NaN, and the maximum of each stretch.
    float find_peak() {
        space_.maxima.clear();
        Int flaw{};
        bool bad = false;
        peak_ = kNegInf;
        for (int begin = 0; begin < size_; begin += kStretch) {
            const int end = std::min(size_, begin + kStretch), whole = begin + (end - begin) / W * W;
            Vec most = splat(kNegInf);
            for (int i = begin; i < whole; i += W) {
                const Vec v = load(x_ + i);
                flaw |= v != v;
                most = maximum(most, v);
            }
            float top = horizontal_max(most);
            for (int i = whole; i < end; i++) {
                bad |= x_[i] != x_[i];
                top = std::max(top, x_[i]);
            }
            space_.maxima.push_back(top);
            peak_ = std::max(peak_, top);
        }
        for (int i = 0; i < W; i++) bad |= flaw[i] != 0;
        return bad ? std::numeric_limits<float>::quiet_NaN() : peak_;
    }

    // Returns the first token with the largest logit.
    int64_t largest() const {
        const int64_t stretch = std::find(space_.maxima.begin(), space_.maxima.end(), peak_) - space_.maxima.begin();
        return std::find(x_ + stretch * kStretch, x_ + size_, peak_) - x_;
    }

    int64_t draw(double u) {
        const int k = how_.top_k > 0 && how_.top_k < size_ ? how_.top_k : 0;
        const bool open = !k && how_.min_p <= 0;  // no filter but top_p
        const bool few = size_ <= kFewTokens;
        double total = open ? weigh() : 0;
        if (open && how_.top_p >= 1) return draw_by_id(u);
        // A lower bound of the kept logits: any value that k logits reach, and that of min_p.
        float bound = few ? kLowest : kNegInf;
        if (!few && (open || (k && k <= kFewTokens))) bound = nth_logit(open ? kGuess : k);
        if (how_.min_p > 0) {
            const double least = peak_ + how_.temperature * std::log(how_.min_p);
            bound = std::max(bound, (float)(least - 1e-5 * (1 + std::abs(least))));
        }
        if (bound > kNegInf && collect(bound)) {
            const int64_t token = draw_ranked(u, k, total);
            if (token >= 0) return token;
        }
        if (!open) total = weigh();
        return draw_bisected(u, bisect(k, total));
    }

private:
    void set(int32_t id, float value) {
        space_.changed.emplace_back(id, x_[id]);
        x_[id] = value;
    }

    // Returns a value that at least n logits reach, from the maxima of stretches.
    float nth_logit(int n) {
        if ((size_t)n > space_.maxima.size())
            return largest_floor(kLowest, [&](float f) { return count_above(f) >= n; });
        std::vector<float>& sorted = space_.sorted;
        sorted = space_.maxima;
        std::nth_element(sorted.begin(), sorted.begin() + (n - 1), sorted.end(), std::greater<float>());
        return sorted[n - 1];
    }

    // Collects the tokens with logits from `bound` on; returns false if there are too many.
    bool collect(float bound) {
        space_.candidates.clear();
        for (size_t s = 0; s < space_.maxima.size(); s++) {
            if (space_.maxima[s] < bound) continue;
            const int begin = (int)s * kStretch, end = std::min(size_, begin + kStretch);
            for (int i = begin; i < end; i++)
                if (x_[i] >= bound) space_.candidates.push_back({x_[i], i, 0});
            if (space_.candidates.size() > (size_t)kFewTokens) return false;
        }
        return true;
    }

    // Draws from the candidates; returns -1 if top_p extends beyond them. `total`: weight of all tokens, 0 if unknown.
    int64_t draw_ranked(double u, int k, double total) {
        std::vector<Candidate>& c = space_.candidates;
        std::sort(c.begin(), c.end(), [](const Candidate& a, const Candidate& b) {
            return a.logit > b.logit || (a.logit == b.logit && a.id < b.id);
        });
        if (k && (size_t)k < c.size()) c.resize(k);
        double sum = 0;
        size_t count = 0;
        for (; count < c.size(); count++) {
            c[count].weight = weight_of(c[count].logit);
            if (c[count].weight < how_.min_p) break;
            sum += c[count].weight;
        }
        if (how_.top_p < 1) {
            const double goal = how_.top_p * (total > 0 ? total : sum);
            if (goal > sum) return -1;
            double before = 0;
            size_t kept = 0;
            for (; kept < count && (kept == 0 || before < goal); kept++) before += c[kept].weight;
            sum = before, count = kept;
        }
        double goal = u * sum;
        for (size_t i = 0; i < count; i++) {
            goal -= c[i].weight;
            if (goal < 0) return c[i].id;
        }
        return c[count - 1].id;
    }

    // Computes exp((logit - peak) / temperature) of all tokens, and their sum.
    double weigh() {
        std::vector<float>& w = space_.weights;
        if (w.size() < (size_t)size_ + W) w.resize(size_ + W);
        const float inverse = (float)(1 / how_.temperature);
        for (size_t s = 0; s < space_.maxima.size(); s++) {
            const int begin = (int)s * kStretch, end = std::min(size_, begin + kStretch);
            if (space_.maxima[s] == kNegInf) std::fill(w.data() + begin, w.data() + end, 0.0f);
            for (int i = begin; i < end && space_.maxima[s] > kNegInf; i += W) {
                Vec x = splat(kNegInf);
                std::memcpy(&x, x_ + i, std::min(W, size_ - i) * sizeof(float));
                store(w.data() + i, exponential((x - peak_) * inverse));
            }
        }
        return sum_above(kNegInf);
    }

    // Returns the total weight of the tokens whose logits are at least `floor`.
    double sum_above(float floor) const {
        double sum = 0;
        for (size_t s = 0; s < space_.maxima.size(); s++)
            if (space_.maxima[s] >= floor) sum += sum_of(s, floor);
        return sum;
    }

    double sum_of(size_t stretch, float floor) const {
        const int begin = (int)stretch * kStretch, end = std::min(size_, begin + kStretch);
        const int whole = begin + (end - begin) / W * W;
        Vec sums{};
        for (int i = begin; i < whole; i += W)
            sums += select(load(x_ + i) >= floor, load(space_.weights.data() + i), Vec{});
        double sum = horizontal_sum(sums);
        for (int i = whole; i < end; i++) sum += x_[i] >= floor ? space_.weights[i] : 0;
        return sum;
    }

    int64_t count_above(float floor) const {
        int64_t count = 0;
        for (size_t s = 0; s < space_.maxima.size(); s++) {
            if (space_.maxima[s] < floor) continue;
            const int begin = (int)s * kStretch, end = std::min(size_, begin + kStretch);
            for (int i = begin; i < end; i++) count += x_[i] >= floor;
        }
        return count;
    }

    // Returns the largest value that is at most the largest logit and for which `enough` holds; `low` if there is none.
    template <class Enough>
    float largest_floor(float low, const Enough& enough) const {
        int64_t least = order_of(low), most = order_of(peak_);
        while (least < most) {
            const int64_t middle = least + (most - least + 1) / 2;
            if (enough(float_of((int32_t)middle)))
                least = middle;
            else
                most = middle - 1;
        }
        return float_of((int32_t)least);
    }

    // Returns the id of the `number`th token, from 1, with this logit; of the last one if there are fewer.
    int32_t tie_number(float floor, int64_t number) const {
        int32_t last = -1;
        for (int i = 0; i < size_ && number > 0; i++)
            if (x_[i] == floor) last = i, number--;
        return last;
    }

    // Applies min_p, top_k and top_p, each to the tokens that the previous one keeps.
    Kept bisect(int k, double total) const {
        Kept kept{kLowest, size_};
        if (how_.min_p > 0) {
            const float* w = space_.weights.data();
            float least = peak_;
            for (int i = 0; i < size_; i++)
                if (w[i] >= (float)how_.min_p) least = std::min(least, x_[i]);
            kept.floor = least;
        }
        if (k && count_above(kept.floor) > k) {
            kept.floor = largest_floor(kept.floor, [&](float f) { return count_above(f) >= k; });
            kept.last_tie = tie_number(kept.floor, k - count_above(above(kept.floor)));
        }
        if (how_.top_p >= 1) return kept;
        const float next = above(kept.floor);
        double all = sum_above(next);
        for (int i = 0; i <= std::min(kept.last_tie, size_ - 1); i++) all += x_[i] == kept.floor ? space_.weights[i] : 0;
        const double goal = how_.top_p * (how_.min_p > 0 || k ? all : total);
        if (sum_above(next) < goal && kept.last_tie < size_) {  // ends among the ties that top_k keeps
            kept.last_tie = std::min(kept.last_tie, ties_for(kept.floor, goal - sum_above(next)));
            return kept;
        }
        kept.floor = largest_floor(kept.floor, [&](float f) { return sum_above(f) >= goal; });
        kept.last_tie = ties_for(kept.floor, goal - sum_above(above(kept.floor)));
        return kept;
    }

    double weight_of(float logit) const { return std::exp(((double)logit - (double)peak_) / how_.temperature); }

    static float above(float x) { return std::nextafter(x, INFINITY); }

    // Returns the last of the first tokens with this logit whose total weight reaches `missing`; at least one.
    int32_t ties_for(float floor, double missing) const {
        const double weight = weight_of(floor);
        return tie_number(floor, std::max<int64_t>(1, weight > 0 ? (int64_t)std::ceil(missing / weight - 1e-6) : 1));
    }

    // Draws among the kept tokens by rank: the token at which the running sum of weights, best first, exceeds u of the
    // total.
    int64_t draw_bisected(double u, Kept kept) const {
        int64_t ties = 0;
        for (int i = 0; i < size_ && i <= kept.last_tie; i++) ties += x_[i] == kept.floor;
        const double goal = u * (sum_above(above(kept.floor)) + (double)ties * weight_of(kept.floor));
        const float logit = largest_floor(kept.floor, [&](float f) { return sum_above(f) > goal; });
        const double weight = weight_of(logit), rest = std::max(goal - sum_above(above(logit)), 0.0);
        const int64_t number = 1 + (weight > 0 ? (int64_t)(rest / weight) : 0);
        const int32_t id = tie_number(logit, logit == kept.floor ? std::min(number, ties) : number);
        return id >= 0 ? id : largest();  // no token because of rounding
    }

    // Draws by weight, in the order of token ids.
    int64_t draw_by_id(double u) {
        const std::vector<float>& w = space_.weights;
        std::vector<float>& sums = space_.sorted;
        sums.clear();
        double whole = 0;
        for (size_t s = 0; s < space_.maxima.size(); s++) {
            sums.push_back((float)sum_of(s, kNegInf));
            whole += sums.back();
        }
        double goal = u * whole;
        size_t stretch = 0;
        while (stretch + 1 < sums.size() && goal >= sums[stretch]) goal -= sums[stretch++];
        int64_t last = -1;
        for (; stretch < sums.size(); stretch++) {
            const int begin = (int)stretch * kStretch, end = std::min(size_, begin + kStretch);
            for (int i = begin; i < end; i++) {
                if (w[i] <= 0) continue;
                last = i;
                goal -= w[i];
                if (goal < 0) return i;
            }
            if (last >= 0) return last;  // u exceeds the sum because of rounding
        }
        return last >= 0 ? last : largest();
    }

    float* x_;
    const int size_;
    const OctavoSampling& how_;
    Workspace& space_;
    float peak_ = kNegInf;
};

struct Rows {
    const OctavoSample& s;
    std::atomic<int> next{0};

    void sample(int row) const {
        thread_local Workspace space;
        const int64_t slot = s.slots[row];
        const OctavoSampling& how = s.sampling[slot];
        const int64_t length = s.length[slot] + s.ahead[row];
        float* logits = s.logits + row * s.logit_stride;
        const uint32_t* allowed = s.allowed ? s.allowed[row] : nullptr;
        if (allowed || how.allowed) logits = possible_logits(logits, s.columns, allowed, how.allowed, space);
        Row one(logits, s.columns, how, space);
        if (how.changes) one.change(s.tokens + slot * s.token_stride, length);
        const float peak = s.peaks[row] = one.find_peak();
        if (!std::isfinite(peak))
            s.chosen[row] = 0;
        else if (how.temperature <= 0)
            s.chosen[row] = one.largest();
        else
            s.chosen[row] = one.draw(uniform(how.seed, (uint64_t)(length - how.num_prompt)));
        if (how.changes) one.restore();
    }
};

}  // namespace

}  // namespace octavo

extern "C" {

void octavo_sample(void* pool, const OctavoSample* sample) {
    octavo::Rows rows{*sample};
    const auto work = [](void* self, int) {
        octavo::Rows& all = *static_cast<octavo::Rows*>(self);
        for (int row; (row = all.next.fetch_add(1)) < all.s.count;) all.sample(row);
    };
    static_cast<octavo::Pool*>(pool)->run(work, &rows);
}

}  // extern "C"
