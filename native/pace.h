#pragma once

// How much of prompts the engine reads in one step while others wait for their next token: as much as it reads in a
// given time. How fast that goes depends on the machine, the model and on how much of a prompt has been read, so
// every step is the measure for the one after it.
//
// Knows nothing of the engine; pacing.cpp brings the two together.

#include <algorithm>
#include <cstddef>

namespace mesh {

class pace {
  public:
    // So many tokens at least, or a multiple of it: with fewer, kernels are slow for what they do.
    pace(size_t least, double seconds) : least_(std::max<size_t>(least, 1)), seconds_(seconds) {}

    // Tokens of the next step, where the engine takes `most`, and has `drafted` so many of them: those it takes in any
    // case, and dies where they do not fit.
    size_t limit(size_t drafted, size_t most) const {
        if (drafted >= most) {
            return most;
        }
        const size_t room = most - drafted;
        const double in_time = per_s_ * seconds_ - static_cast<double>(drafted);
        if (in_time >= static_cast<double>(room)) {
            return most;
        }
        const size_t whole = in_time > 0 ? static_cast<size_t>(in_time) / least_ * least_ : 0;
        return drafted + std::min(room, std::max(least_, whole));
    }

    // A step is over: so many tokens, and how many of them somebody waited for. The others were of prompts.
    void stepped(size_t tokens, size_t outputs, double took) {
        // The end of a prompt may be a few tokens, which take as long as a step without them.
        if (tokens >= outputs + MEASURED && took > 0) {
            per_s_ = static_cast<double>(tokens) / took;
        }
    }

  private:
    static constexpr size_t MEASURED = 32;

    size_t least_;
    double seconds_;
    double per_s_ = 0;
};

}  // namespace mesh
