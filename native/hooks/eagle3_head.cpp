#include "hooks/eagle3_head.h"

#include <algorithm>

namespace mesh {

eagle3_head::eagle3_head(
    const mtp_functions & functions, const eagle3_functions & own, llama_context * model, llama_context * head,
    size_t sequences
)
    : mtp_head(functions, model, head, sequences), own_(own),
      input_width_(static_cast<size_t>(llama_model_n_embd(llama_get_model(model)))),
      width_(static_cast<size_t>(llama_model_n_embd(llama_get_model(head)))), batch_(llama_batch_ext_init(head)) {}

eagle3_head::~eagle3_head() {
    llama_batch_ext_free(batch_);
}

bool eagle3_head::states_read() {
    const llama_model * head = llama_get_model(head_);
    const int32_t last = llama_model_n_layer(llama_get_model(model_));
    inputs_.clear();
    for (uint32_t i = 0; i < own_.layer_count(head); ++i) {
        const int32_t layer = own_.layers(head)[i];
        // What would be the input of a layer behind the last one has a place of its own.
        inputs_.push_back(
            layer < last ? own_.layer_inputs(model_, static_cast<uint32_t>(layer)) : functions_.states(model_)
        );
    }
    return std::all_of(inputs_.begin(), inputs_.end(), [](const float * input) { return input != nullptr; });
}

std::vector<float> eagle3_head::state_read(size_t index) const {
    std::vector<float> state;
    state.reserve(inputs_.size() * input_width_);
    for (const float * input : inputs_) {
        const float * row = input + index * input_width_;
        state.insert(state.end(), row, row + input_width_);
    }
    return state;
}

std::vector<const float *> eagle3_head::as_read(const std::vector<const float *> & states) {
    encoded_.clear();
    // The encoder takes no more than a micro-batch at once.
    const size_t most = llama_n_ubatch(head_);
    for (size_t i = 0; i < states.size(); i += most) {
        if (!encode(states.data() + i, std::min(most, states.size() - i))) {
            return {};
        }
    }
    std::vector<const float *> found;
    for (size_t i = 0; i < states.size(); ++i) {
        found.push_back(encoded_.data() + i * width_);
    }
    return found;
}

bool eagle3_head::encode(const float * const * states, size_t count) {
    // It has no use for positions, but the engine wants some.
    llama_pos position = llama_memory_seq_pos_max(llama_get_memory(head_), 0);
    for (size_t i = 0; i < count; ++i) {
        const int32_t index = llama_batch_ext_add_embd(batch_, 0, {states[i], 1, inputs_.size() * input_width_});
        ++position;
        llama_batch_ext_set_pos(batch_, index, &position);
        llama_batch_ext_set_output_logits(batch_, index, true);
    }
    const bool done = llama_process(head_, LLAMA_PROCESS_TYPE_ENCODE, batch_) == 0;
    llama_synchronize(head_);
    llama_batch_ext_clear(batch_);
    const float * rows = done ? functions_.states(head_) : nullptr;
    if (rows != nullptr) {
        encoded_.insert(encoded_.end(), rows, rows + count * width_);
    }
    return rows != nullptr;
}

void eagle3_head::set_state(llama_batch_ext * batch, int32_t index, const float * state) const {
    llama_batch_ext_set_embd_token(batch, index, {state, 1, width_});
}

// A pair of its training is a token and the state of the one before it.
bool eagle3_head::reads_first() const {
    return false;
}

}  // namespace mesh
