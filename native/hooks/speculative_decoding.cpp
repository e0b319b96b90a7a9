// Stands between the engine and its speculative decoding.
//
// llama-server asks `common_speculative_draft` for drafts before every step and tells
// `common_speculative_accept` what became of them; both are replaced here, so that
// draft_policy.h decides what is drafted, and how much. Text that repeats itself is drafted
// here, and so is what a head says that reads the model's states (mtp_head.h, eagle3_head.h); the draft
// model by the engine. Two more things the engine would do for a draft model are not done:
//
// - it reads every token when the model does, wanted or not. Here it reads what it has
//   missed when it is asked to draft, so that a draft that does not pay costs nothing and
//   the first token does not wait for it;
// - what it read while drafting is thrown away and read again. Here it stays, and the engine
//   cuts off what the model did not accept, as it does from its own cache.
//
// Works where this library has been loaded before the engine, and has been told to.

#include "hooks/speculative_decoding.h"

#include "ggml-mesh.h"
#include "hooks/draft_policy.h"
#include "hooks/eagle3_head.h"
#include "hooks/engine_symbols.h"
#include "hooks/mtp_head.h"
#include "hooks/saved_states.h"

#include "common.h"
#include "llama.h"
#include "speculative.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#ifdef __linux__

namespace {

using draft_params = common_speculative_draft_params;

// The engine's own functions.
struct originals {
    void (*draft)(void *);
    void (*accept)(void *, llama_seq_id, uint16_t);
    void (*begin)(void *, llama_seq_id, const llama_tokens *);
    bool (*process)(void *, const common_batch *);
    void * (*init)(void *, uint32_t);
    draft_params * (*params)(void *, llama_seq_id);
    llama_context * (*context)(void *);
    bool (*remove)(llama_memory_t, llama_seq_id, llama_pos, llama_pos);
    size_t (*restore)(llama_context *, const uint8_t *, size_t, llama_seq_id, llama_state_seq_flags);
    void * (*sampler_init)(const llama_model *, common_params_sampling *);
    bool (*set_sampler)(llama_context *, llama_seq_id, llama_sampler *);
    void (*set_nextn)(llama_context *, bool, bool);
    void (*set_layer_inputs)(llama_context *, uint32_t, bool);
    mesh::mtp_functions mtp{};
    mesh::eagle3_functions eagle3{};

    originals() {
        mesh::find_in_engine(draft, SPECULATIVE_DRAFT);
        mesh::find_in_engine(accept, SPECULATIVE_ACCEPT);
        mesh::find_in_engine(begin, SPECULATIVE_BEGIN);
        mesh::find_in_engine(process, SPECULATIVE_PROCESS);
        mesh::find_in_engine(init, SPECULATIVE_INIT);
        mesh::find_in_engine(params, SPECULATIVE_PARAMS);
        mesh::find_in_engine(context, DRAFT_CONTEXT);
        mesh::find_in_engine(remove, MEMORY_REMOVE);
        mesh::find_in_engine(restore, STATE_RESTORE);
        mesh::find_in_engine(sampler_init, SAMPLER_INIT);
        mesh::find_in_engine(set_sampler, SET_SAMPLER);
        mesh::find_in_engine(set_nextn, SET_NEXTN);
        mesh::find_in_engine(mtp.states, NEXTN_STATES);
        mesh::find_in_engine(mtp.state, NEXTN_STATE);
        mtp.remove = remove;
        mesh::find_in_engine(set_layer_inputs, SET_LAYER_INPUTS);
        mesh::find_in_engine(eagle3.layer_inputs, LAYER_INPUTS);
        mesh::find_in_engine(eagle3.layers, TARGET_LAYERS);
        mesh::find_in_engine(eagle3.layer_count, TARGET_LAYER_COUNT);
    }
};

const originals & engine() {
    static const originals functions;
    return functions;
}

double now_s() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// The one of this process; the engine calls from a thread of its own, whoever counts from another.
class director {
  public:
    void allow(mesh::speculation_limits what) {
        const std::lock_guard<std::mutex> lock(mutex);
        limits = what;
    }

    void draft_model(llama_context * context) {
        const std::lock_guard<std::mutex> lock(mutex);
        model = context;
        const llama_model * kind = context != nullptr ? llama_get_model(context) : nullptr;
        // A state that cannot be cut back is kept by the engine in ways of its own.
        lazy = kind != nullptr && !llama_model_is_recurrent(kind) && !llama_model_is_hybrid(kind);
    }

    // The engine loads its model anew, as after it slept: what we knew of its contexts is gone, and it may do without
    // drafts from here on.
    void stop() {
        const std::lock_guard<std::mutex> lock(mutex);
        before = inner != nullptr ? inner->counters : before;
        inner.reset();
        head.reset();
        state_reader = nullptr;
        drafter = nullptr;
    }

    // The states of all that this context reads are asked for: a head drafts from them.
    void states_of(llama_context * context) {
        const std::lock_guard<std::mutex> lock(mutex);
        state_reader = context;
    }

    void start(size_t sequences) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (limits.model + limits.text > 0) {
            if (state_reader != nullptr && model != nullptr && limits.model > 0) {
                head = make_head(sequences);
                limits.at_hand = limits.model + 1;  // a draft's own states are none of the model's
            }
            inner = std::make_unique<mesh::draft_policy>(limits, sequences);
            inner->counters = before;
            kept.assign(sequences, NOT_KEPT);
            lost.assign(sequences, false);
            plain.assign(sequences, false);
        }
    }

    bool active() {
        const std::lock_guard<std::mutex> lock(mutex);
        return inner != nullptr;
    }

    bool has_head() {
        const std::lock_guard<std::mutex> lock(mutex);
        return head != nullptr;
    }

    // A request is about to start, on the sequence that is named next. Of drafted tokens the engine tells no
    // probabilities: who asks for them gets every token by itself.
    // Takes no lock: drafters of the engine make samplers, too.
    void sampler_made(const common_params_sampling & sampling) {
        probabilities = sampling.n_probs > 0;
    }

    void sampler_set(llama_context * context, llama_seq_id id) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (context != model && id >= 0 && static_cast<size_t>(id) < plain.size()) {
            plain[static_cast<size_t>(id)] = probabilities;
        }
    }

    void begin(llama_seq_id id) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (inner != nullptr) {
            inner->begin(static_cast<size_t>(id));
            lost[static_cast<size_t>(id)] = false;
            processed = NOT_ONE;
            taken_back_at = 0;
        }
    }

    // True where the engine need not let the draft model read this batch.
    bool process(const common_batch & batch) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (inner == nullptr) {
            return false;
        }
        // Only steps in which every token was waited for say what a token costs: prompts are another matter.
        const bool waited =
            std::all_of(batch.tokens.begin(), batch.tokens.end(), [](const auto & token) { return token.output; });
        if (taken_back_at > 0 && !redone && waited) {
            redone = true;
        } else {
            processed = processed == 0 && waited ? batch.size() : NOT_ONE;
        }
        if (head != nullptr) {
            head->model_read(batch);
        }
        return model == nullptr || lazy || head != nullptr;
    }

    void accept(llama_seq_id id, size_t count) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (inner != nullptr) {
            inner->accepted(static_cast<size_t>(id), count);
        }
    }

    // The state of a sequence is what it was at an earlier token. After a step that is how a draft is taken back; before
    // one, a prompt goes on from there.
    void rolled_back(llama_context * context, llama_seq_id id) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (inner != nullptr && context != model && processed > 0 && static_cast<size_t>(id) < kept.size()) {
            inner->taken_back(static_cast<size_t>(id));
            taken_back_at = taken_back_at > 0 ? taken_back_at : now_s();
        }
    }

    // What the engine would need to take a draft back could not be saved: it is to verify none.
    void drop_draft(llama_seq_id id) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (inner != nullptr && drafter != nullptr && static_cast<size_t>(id) < plain.size()) {
            const draft_params & asked = *engine().params(drafter, id);
            drafted -= std::min(drafted, asked.result->size());
            asked.result->clear();
            inner->dropped(static_cast<size_t>(id));
            plain[static_cast<size_t>(id)] = true;  // nor would the next one be saved
        }
    }

    // True where what the draft model has just read is to stay.
    bool keeps(llama_memory_t memory, llama_seq_id id, llama_pos from) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (inner == nullptr || model == nullptr || memory != llama_get_memory(model)) {
            return false;
        }
        if (id < 0 || static_cast<size_t>(id) >= kept.size()) {
            return false;
        }
        const bool stays = kept[static_cast<size_t>(id)] == from;
        kept[static_cast<size_t>(id)] = NOT_KEPT;
        return stays;
    }

    // A sequence gets another text, kept from an earlier time. Where the draft model has read nothing of it, its
    // part is empty, and the engine would leave what is there: the end of some other text.
    void replaced(llama_seq_id id) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (head != nullptr) {
            head->forget(id);
        } else if (inner != nullptr && model != nullptr && lazy) {
            engine().remove(llama_get_memory(model), id, -1, -1);
        }
    }

    void draft(void * spec);

    size_t take_drafted() {
        const std::lock_guard<std::mutex> lock(mutex);
        return std::exchange(drafted, 0);
    }

    mesh::speculation_counters counters() {
        const std::lock_guard<std::mutex> lock(mutex);
        return inner != nullptr ? inner->counters : before;
    }

  private:
    static constexpr int32_t NOT_ONE = -1;
    static constexpr llama_pos NOT_KEPT = -2;

    std::mutex mutex;
    mesh::speculation_limits limits;
    std::unique_ptr<mesh::draft_policy> inner;
    std::unique_ptr<mesh::mtp_head> head;    // drafts instead of a draft model
    mesh::speculation_counters before;       // of models that were unloaded
    llama_context * model = nullptr;         // that drafts
    llama_context * state_reader = nullptr;  // that a head drafts for
    bool lazy = false;
    std::vector<llama_pos> kept;             // by sequence: from where the engine is about to cut, once
    std::vector<bool> lost;                  // sequences in which the draft model does not know where it is
    std::vector<bool> plain;                 // sequences in which nothing is drafted
    std::atomic<bool> probabilities{false};  // whether the sampler made last has to tell them
    int32_t processed = NOT_ONE;             // tokens of the one batch since the last decision
    double decided_at = 0;
    double taken_back_at = 0;  // when a draft was, since then
    bool redone = false;       // and the step was made that reads again what was right
    void * drafter = nullptr;  // the engine's, that was asked last
    size_t drafted = 0;        // for the step that is being made

    std::unique_ptr<mesh::mtp_head> make_head(size_t sequences) const;
    bool follows(const draft_params & asked, llama_seq_id id) const;
    size_t missing(const draft_params & asked, llama_seq_id id) const;
    bool catch_up(const draft_params & asked, llama_seq_id id);
    bool catch_up_head(const draft_params & asked, llama_seq_id id);
    void draft_by_head(void * spec, const std::vector<llama_seq_id> & ids);
};

director & the_director() {
    static director one;
    return one;
}

std::unique_ptr<mesh::mtp_head> director::make_head(size_t sequences) const {
    const mesh::eagle3_functions & eagle3 = engine().eagle3;
    if (eagle3.layer_count != nullptr && eagle3.layer_count(llama_get_model(model)) > 0) {
        return std::make_unique<mesh::eagle3_head>(engine().mtp, eagle3, state_reader, model, sequences);
    }
    return std::make_unique<mesh::mtp_head>(engine().mtp, state_reader, model, sequences);
}

// Whether the draft model can read this text, if it has not yet.
bool director::follows(const draft_params & asked, llama_seq_id id) const {
    if (head != nullptr) {
        return head->follows(id, asked.pos0);
    }
    // Images have positions and no tokens; a text with them cannot be counted off.
    const bool counted = asked.prompt->size() == static_cast<size_t>(asked.pos0);
    return model != nullptr && (!lazy || (counted && !lost[static_cast<size_t>(id)]));
}

// Tokens before the last one that the draft model has not read.
size_t director::missing(const draft_params & asked, llama_seq_id id) const {
    if (head != nullptr) {
        return head->missing(id, asked.pos0);
    }
    if (model == nullptr || !lazy) {
        return 0;
    }
    const llama_pos next = llama_memory_seq_pos_max(llama_get_memory(model), id) + 1;
    return static_cast<size_t>(std::max(0, asked.pos0 - next));
}

// The head reads the last tokens as it drafts.
bool director::catch_up_head(const draft_params & asked, llama_seq_id id) {
    const size_t before = missing(asked, id);
    if (before <= limits.at_hand) {
        return true;
    }
    const double start = now_s();
    const bool read = head->catch_up(id, asked.pos0, limits.at_hand);
    const size_t left = missing(asked, id);
    inner->reading_took(now_s() - start, before - std::min(before, left));
    return read && left <= limits.at_hand;
}

void director::draft_by_head(void * spec, const std::vector<llama_seq_id> & ids) {
    std::vector<mesh::mtp_head::request> requests;
    for (const llama_seq_id id : ids) {
        draft_params & asked = *engine().params(spec, id);
        asked.drafting = false;
        requests.push_back({id, asked.pos0, asked.id_last, static_cast<size_t>(asked.n_max), asked.result});
    }
    head->draft(std::move(requests));
}

// Lets the draft model read one batch of what it has missed. True when it is up to date.
bool director::catch_up(const draft_params & asked, llama_seq_id id) {
    if (head != nullptr) {
        return catch_up_head(asked, id);
    }
    if (!lazy) {
        return true;
    }
    const size_t left = missing(asked, id);
    const size_t first = asked.prompt->size() - left;
    // A cache of two kinds knows where the shorter part ends; a checkpoint puts back that one alone.
    engine().remove(llama_get_memory(model), id, static_cast<llama_pos>(first), -1);
    if (left == 0) {
        return true;
    }
    const size_t count = std::min(left, static_cast<size_t>(llama_n_batch(model)));
    llama_batch batch = llama_batch_init(static_cast<int32_t>(count), 0, 1);
    batch.n_tokens = static_cast<int32_t>(count);
    for (size_t i = 0; i < count; ++i) {
        batch.token[i] = (*asked.prompt)[first + i];
        batch.pos[i] = static_cast<llama_pos>(first + i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = id;
        batch.logits[i] = 0;
    }
    const double start = now_s();
    const bool read = llama_decode(model, batch) == 0;
    llama_synchronize(model);
    llama_batch_free(batch);
    inner->reading_took(now_s() - start, count);
    lost[static_cast<size_t>(id)] = !read;
    return read && count == left;
}

void director::draft(void * spec) {
    const std::lock_guard<std::mutex> lock(mutex);
    const double now = now_s();
    drafter = spec;
    if (processed > 0) {
        const double end = taken_back_at > 0 ? taken_back_at : now;
        inner->stepped(static_cast<size_t>(processed), end - decided_at, redone ? now - end : 0);
    }
    taken_back_at = 0;
    redone = false;
    std::vector<mesh::draft_policy::request> requests;
    for (size_t i = 0; i < kept.size(); ++i) {
        const llama_seq_id id = static_cast<llama_seq_id>(i);
        const draft_params & asked = *engine().params(spec, id);
        if (asked.drafting) {
            const size_t room = plain[i] ? 0 : static_cast<size_t>(std::max(0, asked.n_max));
            requests.push_back({i, room, asked.prompt, asked.id_last, missing(asked, id), follows(asked, id)});
        }
    }
    const std::vector<mesh::decision> decisions = inner->decide(requests);
    std::vector<llama_seq_id> by_model;
    for (size_t i = 0; i < requests.size(); ++i) {
        const llama_seq_id id = static_cast<llama_seq_id>(requests[i].sequence);
        draft_params & asked = *engine().params(spec, id);
        const mesh::decision & made = decisions[i];
        asked.drafting = false;
        if (made.source == mesh::drafted_by::text) {
            inner->text_of(requests[i].sequence).continuation(made.match, made.depth, *asked.result);
            inner->drafted(requests[i].sequence, asked.result->size());
        } else if (made.source == mesh::drafted_by::model && catch_up(asked, id)) {
            asked.drafting = true;
            asked.n_max = static_cast<int32_t>(made.depth);
            by_model.push_back(id);
        }
    }
    if (!by_model.empty()) {
        const double start = now_s();
        if (head != nullptr) {
            draft_by_head(spec, by_model);
        } else {
            engine().draft(spec);
        }
        const double took = now_s() - start;
        size_t deepest = 0;
        for (const llama_seq_id id : by_model) {
            const size_t sequence = static_cast<size_t>(id);
            const draft_params & asked = *engine().params(spec, id);
            inner->drafted(sequence, asked.result->size());
            deepest = std::max(deepest, asked.result->size());
            kept[sequence] = lazy && head == nullptr ? asked.pos0 : NOT_KEPT;
        }
        inner->drafting_took(took, deepest);
    }
    for (const auto & request : requests) {
        drafted += engine().params(spec, static_cast<llama_seq_id>(request.sequence))->result->size();
    }
    processed = 0;
    decided_at = now_s();
}

}  // namespace

size_t mesh::take_drafted() {
    return the_director().take_drafted();
}

void mesh::drop_draft(llama_seq_id id) {
    the_director().drop_draft(id);
}

extern "C" {

GGML_MESH_API void mesh_set_nextn(llama_context * context, bool value, bool masked) __asm__(SET_NEXTN);
GGML_MESH_API void
mesh_set_layer_inputs(llama_context * context, uint32_t layer, bool value) __asm__(SET_LAYER_INPUTS);
GGML_MESH_API void mesh_speculative_draft(void * spec) __asm__(SPECULATIVE_DRAFT);
GGML_MESH_API void mesh_speculative_accept(void * spec, llama_seq_id id, uint16_t count) __asm__(SPECULATIVE_ACCEPT
);
GGML_MESH_API void
mesh_speculative_begin(void * spec, llama_seq_id id, const llama_tokens * prompt) __asm__(SPECULATIVE_BEGIN);
GGML_MESH_API bool mesh_speculative_process(void * spec, const common_batch * batch) __asm__(SPECULATIVE_PROCESS);
GGML_MESH_API void * mesh_speculative_init(void * params, uint32_t sequences) __asm__(SPECULATIVE_INIT);
GGML_MESH_API llama_context * mesh_draft_context(void * self) __asm__(DRAFT_CONTEXT);
GGML_MESH_API bool
mesh_memory_remove(llama_memory_t memory, llama_seq_id id, llama_pos from, llama_pos to) __asm__(MEMORY_REMOVE);
GGML_MESH_API size_t mesh_state_restore(
    llama_context * context, const uint8_t * from, size_t size, llama_seq_id id, llama_state_seq_flags flags
) __asm__(STATE_RESTORE);
GGML_MESH_API void *
mesh_sampler_init(const llama_model * model, common_params_sampling * sampling) __asm__(SAMPLER_INIT);
GGML_MESH_API bool
mesh_set_sampler(llama_context * context, llama_seq_id id, llama_sampler * sampler) __asm__(SET_SAMPLER);

void mesh_set_nextn(llama_context * context, bool value, bool masked) {
    engine().set_nextn(context, value, masked);
    if (value && !masked) {
        the_director().states_of(context);
    }
}

void mesh_set_layer_inputs(llama_context * context, uint32_t layer, bool value) {
    engine().set_layer_inputs(context, layer, value);
    if (value) {
        the_director().states_of(context);
    }
}

void mesh_speculative_draft(void * spec) {
    if (spec == nullptr || !the_director().active()) {
        engine().draft(spec);
        return;
    }
    the_director().draft(spec);
}

void mesh_speculative_accept(void * spec, llama_seq_id id, uint16_t count) {
    if (!the_director().active()) {
        engine().accept(spec, id, count);
        return;
    }
    // The engine's own drafters are not told: the one that we use learns nothing from it.
    the_director().accept(id, count);
}

void mesh_speculative_begin(void * spec, llama_seq_id id, const llama_tokens * prompt) {
    // The engine's own way with a head would complain that it has not read along.
    if (!the_director().has_head()) {
        engine().begin(spec, id, prompt);
    }
    the_director().begin(id);
}

bool mesh_speculative_process(void * spec, const common_batch * batch) {
    return the_director().process(*batch) || engine().process(spec, batch);
}

void * mesh_speculative_init(void * params, uint32_t sequences) {
    the_director().stop();
    void * spec = engine().init(params, sequences);
    if (spec != nullptr) {
        the_director().start(sequences);
    }
    return spec;
}

llama_context * mesh_draft_context(void * self) {
    llama_context * context = engine().context(self);
    the_director().draft_model(context);
    return context;
}

bool mesh_memory_remove(llama_memory_t memory, llama_seq_id id, llama_pos from, llama_pos to) {
    return (to < 0 && the_director().keeps(memory, id, from)) || engine().remove(memory, id, from, to);
}

size_t mesh_state_restore(
    llama_context * context, const uint8_t * from, size_t size, llama_seq_id id, llama_state_seq_flags flags
) {
    if (flags == LLAMA_STATE_SEQ_FLAGS_NONE) {
        the_director().replaced(id);
    } else {
        the_director().rolled_back(context, id);
    }
    return mesh::restore_state(engine().restore, context, from, size, id, flags);
}

void * mesh_sampler_init(const llama_model * model, common_params_sampling * sampling) {
    the_director().sampler_made(*sampling);
    return engine().sampler_init(model, sampling);
}

bool mesh_set_sampler(llama_context * context, llama_seq_id id, llama_sampler * sampler) {
    the_director().sampler_set(context, id);
    return engine().set_sampler(context, id, sampler);
}

int ggml_mesh_speculate(int model_depth, int text_depth) {
    if (!mesh::engine_has(mesh::feature::draft_policy)) {
        return 1;
    }
    the_director().allow(
        {static_cast<size_t>(std::max(0, model_depth)), static_cast<size_t>(std::max(0, text_depth))}
    );
    return 0;
}

int ggml_mesh_speculation_counters(ggml_mesh_speculation * counters) {
    const mesh::speculation_counters now = the_director().counters();
    counters->steps = now.steps;
    counters->tokens = now.tokens;
    counters->drafted = now.drafted;
    counters->accepted = now.accepted;
    counters->text_drafted = now.text_drafted;
    counters->text_accepted = now.text_accepted;
    counters->seconds = now.seconds;
    counters->plain_seconds = now.plain_seconds;
    counters->depth = static_cast<unsigned int>(now.depth);
    return 0;
}

}  // extern "C"

#else  // not __linux__

extern "C" {

// The engine's functions cannot be replaced here: it drafts by itself, as deep as it is told.
int ggml_mesh_speculate(int, int) {
    return 1;
}

int ggml_mesh_speculation_counters(ggml_mesh_speculation * counters) {
    *counters = {};
    return 1;
}

}  // extern "C"

#endif
