#include "hooks/mtp_head.h"

#include <algorithm>

namespace mesh {

mtp_head::mtp_head(const mtp_functions & functions, llama_context * model, llama_context * head, size_t sequences)
    : functions_(functions), model_(model), head_(head), batch_(llama_batch_ext_init(head)), texts_(sequences) {}

mtp_head::~mtp_head() {
    llama_batch_ext_free(batch_);
}

// --- states ---

namespace {

size_t width_of(llama_context * context) {
    return static_cast<size_t>(llama_model_n_embd_out(llama_get_model(context)));
}

}  // namespace

bool mtp_head::states_read() {
    read_ = functions_.states(model_);
    return read_ != nullptr;
}

std::vector<float> mtp_head::state_read(size_t index) const {
    const float * state = read_ + index * width_of(model_);
    return {state, state + width_of(model_)};
}

std::vector<const float *> mtp_head::as_read(const std::vector<const float *> & states) {
    return states;
}

void mtp_head::set_state(llama_batch_ext * batch, int32_t index, const float * state) const {
    llama_batch_ext_set_embd_state(batch, index, {state, 1, width_of(model_)});
}

bool mtp_head::reads_first() const {
    return true;
}

// --- what the model has read ---

void mtp_head::model_read(const common_batch & tokens) {
    if (!states_read()) {
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
        read.push_back({token.pos[0], token.id, state_read(i)});
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
    const bool whole = read.front().position == 0 && reads_first();
    const llama_pos first = read.front().position + (whole ? 0 : 1);
    const llama_pos known = llama_memory_seq_pos_max(llama_get_memory(head_), id) + 1;
    return std::min(next, known >= first ? known : first);
}

size_t mtp_head::missing(llama_seq_id id, llama_pos next) const {
    return follows(id, next) ? static_cast<size_t>(next - first_missing(id, next)) : 0;
}

// For the tokens from `first` on, what the head reads of the tokens before them.
std::vector<const float *> mtp_head::states_before(llama_seq_id id, llama_pos first, size_t count) {
    const text & read = texts_[static_cast<size_t>(id)];
    const auto at = static_cast<size_t>(first - read.front().position);
    std::vector<const float *> states;
    for (size_t i = 0; i < count; ++i) {
        states.push_back(read[at + i - 1].state.data());
    }
    return states.empty() ? states : as_read(states);
}

// The engine takes positions that follow each other: what the head read before a gap goes, and so does what it read from
// `next` on.
bool mtp_head::add_missing(llama_seq_id id, llama_pos next, size_t count) {
    const text & read = texts_[static_cast<size_t>(id)];
    llama_pos first = first_missing(id, next);
    const llama_pos end = first + static_cast<llama_pos>(count);
    const llama_pos known = llama_memory_seq_pos_max(llama_get_memory(head_), id) + 1;
    functions_.remove(llama_get_memory(head_), id, known < first ? -1 : first, -1);
    if (first == 0 && count > 0) {
        const std::vector<float> nothing(read.front().state.size());
        add(id, 0, read.front().token, nothing.data(), false);
        ++first;
    }
    const std::vector<const float *> states = states_before(id, first, static_cast<size_t>(end - first));
    for (size_t i = 0; i < states.size(); ++i) {
        const llama_pos position = first + static_cast<llama_pos>(i);
        add(id, position, read[static_cast<size_t>(position - read.front().position)].token, states[i], false);
    }
    return states.size() == static_cast<size_t>(end - first);
}

int32_t mtp_head::add(llama_seq_id id, llama_pos position, llama_token token, const float * state, bool output) {
    const int32_t index = llama_batch_ext_add_token(batch_, id, token);
    llama_batch_ext_set_pos(batch_, index, &position);
    set_state(batch_, index, state);
    llama_batch_ext_set_output_logits(batch_, index, output);
    ++added_;
    return index;
}

bool mtp_head::catch_up(llama_seq_id id, llama_pos next, size_t left) {
    const size_t count = missing(id, next);
    const size_t most = static_cast<size_t>(llama_n_batch(head_));
    const bool added = add_missing(id, next, std::min(most, count - std::min(count, left)));
    if (!read_batch() || !added) {
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
    bool added = true;
    for (const request & one : requests) {
        added = add_missing(one.id, one.next, missing(one.id, one.next)) && added;
    }
    if (!read_batch() || !added) {
        for (const request & one : requests) {
            forget(one.id);
        }
        return;
    }
    std::vector<int32_t> indices;
    std::vector<request> going;
    for (const request & one : requests) {
        const std::vector<const float *> before = states_before(one.id, one.next, 1);
        if (before.empty()) {
            forget(one.id);
        } else {
            indices.push_back(add(one.id, one.next, one.last, before.front(), true));
            going.push_back(one);
        }
    }
    requests = std::move(going);
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
