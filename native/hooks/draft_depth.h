#pragma once

// How many tokens to draft: as many as pay on this plan, with this text, at this moment.
//
// A step of the engine takes a number of tokens at once. With drafts it yields
// one token and those of them that the model would have chosen itself. What a step
// costs is measured, links included, and so is how often drafts are right; the depth
// is the one with the most tokens per second, and none where drafts do not pay.
// Time is passed in; nothing here asks a clock.

#include <array>
#include <cstddef>
#include <vector>

namespace mesh {

// What steps cost by their number of tokens: the mean of what was seen lately, and a line through it.
class step_costs {
  public:
    void seen(size_t tokens, double seconds);

    // Whether a step without drafts has been seen: before that there is nothing to compare with.
    bool known() const;

    double of(size_t tokens) const;

  private:
    struct bin {
        double tokens = 0;
        double seconds = 0;
        double weight = 0;
    };

    static constexpr size_t BINS = 12;
    std::array<bin, BINS> bins{};
    double constant = 0;
    double each = 0;

    void fit();
};

// How often a drafted token is right, given that those before it were; and how far that has been tried.
class acceptance {
  public:
    explicit acceptance(double expected);

    void seen(size_t drafted, size_t accepted);

    // Not used this time. Hope grows a little, so that what failed is tried again some day; less where a try is dear.
    void skipped(double share = 1);

    // What was seen, and hope.
    double rate() const;

    double seen_rate() const;

    // Drafts start short and may grow as long as they are right: a first guess may be far off.
    size_t trusted() const {
        return trust;
    }

  private:
    double right;
    double tried;
    double hope = 0;  // of so many more that are right
    size_t trust;
};

// One way to get a draft.
struct draft_source {
    double rate;    // of acceptance, for each token
    size_t limit;   // tokens that it can give
    double each_s;  // that a drafted token costs before it is verified
    double once_s;  // that a draft costs beside its tokens
    double redo_s;  // that a draft which is not all right costs: the step that the engine makes again
};

// What a step has beside the draft that is asked about.
struct shared_step {
    size_t tokens;
    double yield;       // tokens that these give
    double drafting_s;  // that others' drafts have taken
};

struct draft_choice {
    size_t depth;
    double tokens_per_s;  // of the whole step
};

// Tokens that a draft is expected to yield beyond the one that every step gives.
double expected_tokens(double rate, size_t depth);

// The best depth of one source; depth 0 with the rate of a step without it where that is better.
draft_choice best_depth(const step_costs & costs, const draft_source & source, const shared_step & beside);

}  // namespace mesh
