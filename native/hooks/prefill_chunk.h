#pragma once

// How much of prompts the engine reads in one step while others wait for their next token: as much as it reads in a
// given time. How fast that goes depends on the machine, the model and on how much of a prompt has been read, so
// every step is the measure for the one after it.
//
// Knows nothing of the engine; chunked_prefill.cpp brings the two together.

#include <algorithm>
#include <cstddef>

namespace mesh {

class prefill_chunk {
  public:
    // The usual number of tokens, or a multiple of it: with fewer, kernels are slow for what they do. Where even those
    // take far too long, less is read, down to the fewest: who waits for a token comes first.
    prefill_chunk(size_t usual, size_t fewest, double seconds)
        : usual_(std::max<size_t>(usual, 1)), fewest_(std::clamp<size_t>(fewest, 1, usual_)), seconds_(seconds) {}

    // Tokens of the next step, where the engine takes `most`, and has `drafted` so many of them: those it takes in any
    // case, and dies where they do not fit.
    size_t limit(size_t drafted, size_t most) const {
        if (drafted >= most) {
            return most;
        }
        const size_t room = most - drafted;
        const size_t fitting = in_time(seconds_, drafted);
        if (fitting >= room) {
            return most;
        }
        const size_t whole = fitting / usual_ * usual_;
        return drafted + std::min(room, whole > 0 ? whole : few());
    }

    // A step is over: so many tokens, and how many of them somebody waited for. The others were of prompts.
    void stepped(size_t tokens, size_t outputs, double took) {
        // The end of a prompt may be a few tokens, which take as long as a step without them.
        if (tokens >= outputs + MEASURED && took > 0) {
            per_s_ = static_cast<double>(tokens) / took;
        }
    }

  private:
    static constexpr size_t MEASURED = 8;
    static constexpr double MANY = 1e9;    // more than any engine takes
    static constexpr double PATIENCE = 2;  // so many times as long as it should take, before fewer tokens are read

    size_t usual_;
    size_t fewest_;
    double seconds_;
    double per_s_ = 0;

    // Tokens of prompts that are read in that time, beside the drafts.
    size_t in_time(double seconds, size_t drafted) const {
        const double left = per_s_ * seconds - static_cast<double>(drafted);
        return left > 0 ? static_cast<size_t>(std::min(left, MANY)) : 0;
    }

    // The usual number would take too long, or the drafts do: a prompt gets its share of a step that is long anyway.
    size_t few() const {
        return per_s_ > 0 ? std::clamp(in_time(PATIENCE * seconds_, 0), fewest_, usual_) : usual_;
    }
};

}  // namespace mesh
