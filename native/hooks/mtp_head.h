#pragma once

// Drafts with the layer that some models have behind their last one, for the token after the next (MTP).
//
// It reads each token together with the model's state at the token before. Those states are at hand only while the model
// reads, so they are kept, of the last tokens of each sequence: the head reads them when it is asked to draft. A head that
// is not asked costs a copy of each state. What it has not read when it is asked, beyond what is kept, it does without.
//
// An EAGLE3 head (eagle3_head.h) is one, too, that reads other states.

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
    virtual ~mtp_head();

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

  protected:
    mtp_functions functions_;
    llama_context * model_;
    llama_context * head_;

    // The model has read a batch: whether there are states of it, and what is to be kept of each token's.
    virtual bool states_read();
    virtual std::vector<float> state_read(size_t index) const;

    // What the head reads of kept states, valid until the next call; empty where the engine refuses.
    virtual std::vector<const float *> as_read(const std::vector<const float *> & states);

    // How the engine is told of such a state.
    virtual void set_state(llama_batch_ext * batch, int32_t index, const float * state) const;

    // Whether it reads the first token of a text, too, which has no state before it.
    virtual bool reads_first() const;

  private:
    static constexpr size_t KEPT = 512;  // states of each sequence: some megabytes

    struct read_token {
        llama_pos position;
        llama_token token;
        std::vector<float> state;
    };

    using text = std::deque<read_token>;

    llama_batch_ext * batch_;       // for the head, empty between calls
    size_t added_ = 0;              // tokens of it
    const float * read_ = nullptr;  // the states of what the model has just read
    std::vector<text> texts_;

    llama_pos first_missing(llama_seq_id id, llama_pos next) const;
    bool add_missing(llama_seq_id id, llama_pos next, size_t count);
    std::vector<const float *> states_before(llama_seq_id id, llama_pos first, size_t count);
    int32_t add(llama_seq_id id, llama_pos position, llama_token token, const float * state, bool output);
    bool read_batch();
    llama_token likeliest(int32_t index) const;
};

}  // namespace mesh
