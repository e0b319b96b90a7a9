#pragma once

// Drafts with an EAGLE3 head: a layer in a file of its own that reads the inputs of three of the model's layers.
//
// The head's encoder makes one state of these, and its layer reads that as an MTP head reads the model's. The inputs are
// kept, and encoded when the head is asked to draft. Positions are those of the tokens, one more than the engine's own
// drafter has: only their distances count.

#include "hooks/mtp_head.h"

namespace mesh {

struct eagle3_functions {
    float * (*layer_inputs)(llama_context *, uint32_t layer);  // of the tokens of the last batch
    const int32_t * (*layers)(const llama_model *);            // that the head reads
    uint32_t (*layer_count)(const llama_model *);
};

class eagle3_head : public mtp_head {
  public:
    eagle3_head(
        const mtp_functions & functions, const eagle3_functions & own, llama_context * model, llama_context * head,
        size_t sequences
    );
    ~eagle3_head() override;

  protected:
    bool states_read() override;
    std::vector<float> state_read(size_t index) const override;
    std::vector<const float *> as_read(const std::vector<const float *> & states) override;
    void set_state(llama_batch_ext * batch, int32_t index, const float * state) const override;
    bool reads_first() const override;

  private:
    eagle3_functions own_;
    size_t input_width_;  // of a layer of the model
    size_t width_;        // of the head's own states
    llama_batch_ext * batch_;
    std::vector<const float *> inputs_;  // of what the model has just read, by layer
    std::vector<float> encoded_;

    bool encode(const float * const * states, size_t count);
};

}  // namespace mesh
