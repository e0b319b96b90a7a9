#include "hooks/mtp_head.h"

#include <algorithm>

namespace mesh {

mtp_head::mtp_head(const mtp_functions & functions, llama_context * model, llama_context * head, size_t sequences)
    : functions_(functions), model_(model), head_(head),
      width_(static_cast<size_t>(llama_model_n_embd_out(llama_get_model(model)))),
      batch_(llama_batch_ext_init(head)), texts_(sequences) {}

mtp_head::~mtp_head() {
    llama_batch_ext_free(batch_);
}

// --- what the model has read ---

void mtp_head::model_read(const common_batch & tokens) {
    const float * states = functions_.states(model_);
    if (states == nullptr) {
        return;
    }
    // Of a long prompt only the end is kept: the rest need not be copied.
    std::vector<size_t> after(texts_.size());
    for (const auto & token : tokens.tokens) {
        ++after[static_cast<size_t>(token.seq_id)];
    }
    for (size_t i = 0; i < tokens.tokens.size(); ++i) {
        const auto & token = tokens.tokens[i];
        const auto sequence = static_cast<size_t>(token.seq_id);
        if (--after[sequence] >= KEPT) {
            continue;
        }
        text & read = texts_[sequence];
        while (!read.empty() && read.back().position >= token.pos[0]) {
            read.pop_back();
        }
        // An image has no tokens that the head could read; it goes on behind it.
        const bool goes_on = !read.empty() && read.back().position + 1 == token.pos[0];
        if (!goes_on || token.id == LLAMA_TOKEN_NULL) {
            read.clear();
        }
        const float * state = states + i * width_;
        read.push_back({token.pos[0], token.id, {state, state + width_}});
        if (read.size() > KEPT) {
            read.pop_front();
        }
    }
}

void mtp_head::forget(llama_seq_id id) {
    texts_[static_cast<size_t>(id)].clear();
    functions_.remove(llama_get_memory(head_), id, -1, -1);
}

// --- what the head has read ---

bool mtp_head::follows(llama_seq_id id, llama_pos next) const {
    const text & read = texts_[static_cast<size_t>(id)];
    return !read.empty() && read.front().position < next && read.back().position >= next - 1;
}

// The first token of a text has no state before it; of the first one that is kept, the state before is gone.
llama_pos mtp_head::first_missing(llama_seq_id id, llama_pos next) const {
    const text & read = texts_[static_cast<size_t>(id)];
    const llama_pos first = read.front().position + (read.front().position > 0 ? 1 : 0);
    const llama_pos known = llama_memory_seq_pos_max(llama_get_memory(head_), id) + 1;
    return std::min(next, known >= first ? known : first);
}

size_t mtp_head::missing(llama_seq_id id, llama_pos next) const {
    return follows(id, next) ? static_cast<size_t>(next - first_missing(id, next)) : 0;
}

// The engine takes positions that follow each other: what the head read before a gap goes, and so does what it read from
// `next` on.
void mtp_head::add_missing(llama_seq_id id, llama_pos next, size_t count) {
    const text & read = texts_[static_cast<size_t>(id)];
    const std::vector<float> nothing(width_);
    const llama_pos first = first_missing(id, next);
    const llama_pos known = llama_memory_seq_pos_max(llama_get_memory(head_), id) + 1;
    functions_.remove(llama_get_memory(head_), id, known < first ? -1 : first, -1);
    for (llama_pos position = first; position < first + static_cast<llama_pos>(count); ++position) {
        const auto at = static_cast<size_t>(position - read.front().position);
        const float * before = position > 0 ? read[at - 1].state.data() : nothing.data();
        add(id, position, read[at].token, before, false);
    }
}

int32_t mtp_head::add(llama_seq_id id, llama_pos position, llama_token token, const float * state, bool output) {
    const int32_t index = llama_batch_ext_add_token(batch_, id, token);
    llama_batch_ext_set_pos(batch_, index, &position);
    llama_batch_ext_set_embd_state(batch_, index, {state, 1, width_});
    llama_batch_ext_set_output_logits(batch_, index, output);
    ++added_;
    return index;
}

bool mtp_head::catch_up(llama_seq_id id, llama_pos next, size_t left) {
    const size_t count = missing(id, next);
    const size_t most = static_cast<size_t>(llama_n_batch(head_));
    add_missing(id, next, std::min(most, count - std::min(count, left)));
    if (!read_batch()) {
        forget(id);
        return false;
    }
    return true;
}

bool mtp_head::read_batch() {
    const bool read = added_ == 0 || llama_process(head_, LLAMA_PROCESS_TYPE_DECODE, batch_) == 0;
    llama_synchronize(head_);
    llama_batch_ext_clear(batch_);
    added_ = 0;
    return read;
}

// --- drafts ---

llama_token mtp_head::likeliest(int32_t index) const {
    const float * logits = llama_get_logits_ith(head_, index);
    const int32_t count = llama_vocab_n_tokens(llama_model_get_vocab(llama_get_model(head_)));
    return static_cast<llama_token>(std::max_element(logits, logits + count) - logits);
}

void mtp_head::draft(std::vector<request> requests) {
    // In a batch of its own: of one where some tokens have no output, the engine takes the wrong states.
    for (const request & one : requests) {
        add_missing(one.id, one.next, missing(one.id, one.next));
    }
    if (!read_batch()) {
        for (const request & one : requests) {
            forget(one.id);
        }
        return;
    }
    std::vector<int32_t> indices;
    for (const request & one : requests) {
        const text & read = texts_[static_cast<size_t>(one.id)];
        const auto before = static_cast<size_t>(one.next - 1 - read.front().position);
        indices.push_back(add(one.id, one.next, one.last, read[before].state.data(), true));
    }
    while (!requests.empty() && read_batch()) {
        std::vector<request> going_on;
        std::vector<int32_t> next_indices;
        for (size_t i = 0; i < requests.size(); ++i) {
            request one = requests[i];
            const llama_token token = likeliest(indices[i]);
            one.drafted->push_back(token);
            if (one.drafted->size() < one.depth) {
                // Its own state stands for that of the model, which is not known yet.
                ++one.next;
                next_indices.push_back(add(one.id, one.next, token, functions_.state(head_, indices[i]), true));
                going_on.push_back(one);
            }
        }
        requests = std::move(going_on);
        indices = std::move(next_indices);
    }
}

}  // namespace mesh
