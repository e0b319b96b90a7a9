#pragma once

// Drafts with the layer that some models have behind their last one, for the token after the next (MTP).
//
// It reads each token together with the model's state at the token before. Those states are at hand only while the model
// reads, so they are kept, of the last tokens of each sequence: the head reads them when it is asked to draft. A head that
// is not asked costs a copy of each state. What it has not read when it is asked, beyond what is kept, it does without.

#include "common.h"
#include "llama.h"

#include <cstddef>
#include <deque>
#include <vector>

namespace mesh {

// Where the engine has these functions. They are C++, with symbols that engine_symbols.h knows.
struct mtp_functions {
    float * (*states)(llama_context *);            // of the tokens of the last batch
    float * (*state)(llama_context *, int32_t i);  // of one of them
    bool (*remove)(llama_memory_t, llama_seq_id, llama_pos, llama_pos);
};

class mtp_head {
  public:
    mtp_head(const mtp_functions & functions, llama_context * model, llama_context * head, size_t sequences);
    ~mtp_head();

    mtp_head(const mtp_head &) = delete;
    mtp_head & operator=(const mtp_head &) = delete;

    // The model has read these tokens.
    void model_read(const common_batch & tokens);

    // A sequence is another text now.
    void forget(llama_seq_id id);

    // Whether a draft from this position on can be made, and how many tokens before it would be read first.
    bool follows(llama_seq_id id, llama_pos next) const;
    size_t missing(llama_seq_id id, llama_pos next) const;

    // Reads tokens before `next`, one batch at most, and leaves so many. False where the engine refuses.
    bool catch_up(llama_seq_id id, llama_pos next, size_t left);

    struct request {
        llama_seq_id id;
        llama_pos next;    // the position of `last`
        llama_token last;  // that the model has chosen, and not read
        size_t depth;
        std::vector<llama_token> * drafted;
    };

    // For all of them at once; what is missing is read first.
    void draft(std::vector<request> requests);

  private:
    static constexpr size_t KEPT = 512;  // states of each sequence: some megabytes

    struct read_token {
        llama_pos position;
        llama_token token;
        std::vector<float> state;
    };

    using text = std::deque<read_token>;

    mtp_functions functions_;
    llama_context * model_;
    llama_context * head_;
    size_t width_;
    llama_batch_ext * batch_;  // for the head, empty between calls
    size_t added_ = 0;         // tokens of it
    std::vector<text> texts_;

    llama_pos first_missing(llama_seq_id id, llama_pos next) const;
    void add_missing(llama_seq_id id, llama_pos next, size_t count);
    int32_t add(llama_seq_id id, llama_pos position, llama_token token, const float * state, bool output);
    bool read_batch();
    llama_token likeliest(int32_t index) const;
};

}  // namespace mesh
