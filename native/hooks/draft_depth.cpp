#include "hooks/draft_depth.h"

#include <algorithm>
#include <cmath>

namespace mesh {

namespace {

constexpr double FRESH = 0.15;   // weight of a new observation
constexpr double OUTLIER = 3.0;  // beyond so many times the mean something else took the time
constexpr double FULL_WEIGHT = 8.0;
constexpr double FADING = 0.98;          // of the weights of what is not seen any more
constexpr double FIRST_GUESS = 0.3;      // of a step, for one more token, before a second point is known
constexpr double WORTH_IT = 1.03;        // less is within what is measured by chance
constexpr double EXPECTED_WEIGHT = 3.0;  // observations that an expectation counts as
constexpr double MEMORY = 0.97;          // of each observation: some thirty of them count
constexpr double HOPE = 0.02;            // of a token being right, for each time that it was not tried
constexpr size_t FIRST_TRUST = 2;

// Few depths: an engine builds a graph for every number of tokens, and keeps few of them.
constexpr size_t DEPTHS[] = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32};
constexpr size_t EDGES[] = {1, 2, 3, 4, 5, 7, 9, 13, 17, 25, 33};

size_t bin_of(size_t tokens) {
    size_t bin = 0;
    while (bin < std::size(EDGES) && tokens > EDGES[bin]) {
        ++bin;
    }
    return bin;
}

}  // namespace

void step_costs::seen(size_t tokens, double seconds) {
    static_assert(std::size(EDGES) + 1 == BINS);
    bin & here = bins[bin_of(tokens)];
    if (here.weight == 0) {
        here = {static_cast<double>(tokens), seconds, 1};
    } else {
        const double fresh = std::max(FRESH, 1 / (here.weight + 1));
        here.tokens += fresh * (static_cast<double>(tokens) - here.tokens);
        here.seconds += fresh * (std::min(seconds, OUTLIER * here.seconds) - here.seconds);
        here.weight = std::min(here.weight + 1, FULL_WEIGHT);
    }
    for (bin & other : bins) {
        if (&other != &here && other.weight > 1) {
            other.weight = std::max(1.0, other.weight * FADING);
        }
    }
    fit();
}

bool step_costs::known() const {
    return std::any_of(bins.begin(), bins.end(), [](const bin & one) { return one.weight > 0; });
}

// The least squares, with both parts at least nothing: no step gets cheaper by more tokens.
void step_costs::fit() {
    double weight = 0;
    double tokens = 0;
    double seconds = 0;
    for (const bin & one : bins) {
        weight += one.weight;
        tokens += one.weight * one.tokens;
        seconds += one.weight * one.seconds;
    }
    tokens /= weight;
    seconds /= weight;
    double spread = 0;
    double together = 0;
    for (const bin & one : bins) {
        spread += one.weight * (one.tokens - tokens) * (one.tokens - tokens);
        together += one.weight * (one.tokens - tokens) * (one.seconds - seconds);
    }
    // One point alone: a step is taken to be dearer by a share of itself for each further token.
    each = spread > 0.01 ? together / spread : seconds * FIRST_GUESS / (1 + FIRST_GUESS * (tokens - 1));
    each = std::clamp(each, 0.0, seconds / std::max(1.0, tokens));
    constant = std::max(0.0, seconds - each * tokens);
}

double step_costs::of(size_t tokens) const {
    const double line = constant + each * static_cast<double>(tokens);
    const bin & here = bins[bin_of(tokens)];
    if (here.weight < 2) {
        return line;
    }
    // What was seen often counts more than the line, which is no more than a guess between points.
    const double seen = here.seconds + each * (static_cast<double>(tokens) - here.tokens);
    return line + here.weight / FULL_WEIGHT * (seen - line);
}

acceptance::acceptance(double expected)
    : right(EXPECTED_WEIGHT * expected), tried(EXPECTED_WEIGHT), trust(FIRST_TRUST) {}

void acceptance::seen(size_t drafted, size_t accepted) {
    const size_t tries = accepted + (accepted < drafted ? 1 : 0);
    const double fading = std::pow(MEMORY, static_cast<double>(tries));
    right = right * fading + static_cast<double>(accepted);
    tried = tried * fading + static_cast<double>(tries);
    hope = 0;
    trust = std::max(FIRST_TRUST, accepted == drafted ? std::max(trust, 2 * drafted + FIRST_TRUST) : trust / 2);
}

void acceptance::skipped(double share) {
    hope = std::min(tried - right, hope + share * HOPE);
}

double acceptance::rate() const {
    return (right + hope) / tried;
}

double acceptance::seen_rate() const {
    return right / tried;
}

double expected_tokens(double rate, size_t depth) {
    double sum = 0;
    double chance = 1;
    for (size_t i = 0; i < depth; ++i) {
        chance *= rate;
        sum += chance;
    }
    return sum;
}

draft_choice best_depth(const step_costs & costs, const draft_source & source, const shared_step & beside) {
    const double plain = beside.yield / (costs.of(beside.tokens) + beside.drafting_s);
    draft_choice best{0, plain};
    for (const size_t depth : DEPTHS) {
        if (depth > source.limit) {
            break;
        }
        const double drafting_s = source.once_s + source.each_s * static_cast<double>(depth);
        // Made again, a step gives what a plain one does, beside the tokens that were right.
        const double redone = source.redo_s > 0 ? 1 - std::pow(source.rate, depth) : 0;
        const double seconds =
            costs.of(beside.tokens + depth) + beside.drafting_s + drafting_s + redone * source.redo_s;
        const double rate = (beside.yield * (1 + redone) + expected_tokens(source.rate, depth)) / seconds;
        if (rate > best.tokens_per_s && rate > WORTH_IT * plain) {
            best = {depth, rate};
        }
    }
    return best;
}

}  // namespace mesh
