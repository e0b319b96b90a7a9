// Stands between the engine and the states that it saves, on plans with workers.
//
// llama-server asks for the size of a state, makes room for it, and has it written there; later it gives these bytes
// back. What it gets here is a reference, where something of the state lies on workers (host/saved_states.h). A
// checkpoint that cannot be put back would end the process, unless it came from a file: then the engine reads the
// prompt again. So that is what we tell it.
//
// Works where this library has been loaded before the engine, and has been told to.

#include "hooks/saved_states.h"

#include "ggml-mesh.h"
#include "hooks/engine_symbols.h"
#include "hooks/speculative_decoding.h"
#include "host/saved_states.h"

#include "common.h"
#include "llama.h"

#include <map>
#include <optional>
#include <tuple>

#ifdef __linux__

namespace {

using flags_t = llama_state_seq_flags;

// The engine's own functions.
struct originals {
    size_t (*size)(llama_context *, llama_seq_id, flags_t);
    size_t (*save)(llama_context *, uint8_t *, size_t, llama_seq_id, flags_t);
    void (*save_checkpoint)(common_prompt_checkpoint *, llama_context *, llama_seq_id, flags_t);
    bool (*load_checkpoint)(const common_prompt_checkpoint *, llama_context *, llama_seq_id, flags_t);
    void (*copy)(llama_memory_t, llama_seq_id, llama_seq_id, llama_pos, llama_pos);

    originals() {
        mesh::find_in_engine(size, STATE_SIZE);
        mesh::find_in_engine(save, STATE_SAVE);
        mesh::find_in_engine(save_checkpoint, CHECKPOINT_SAVE);
        mesh::find_in_engine(load_checkpoint, CHECKPOINT_LOAD);
        mesh::find_in_engine(copy, MEMORY_COPY);
    }
};

const originals & engine() {
    static const originals functions;
    return functions;
}

// The engine asks for a size and at once for the bytes: what was found out for the one is there for the other.
struct asked_state {
    llama_context * context;
    llama_seq_id id;
    flags_t flags;
    mesh::captured_state state;
};

std::optional<asked_state> & last_asked() {
    static thread_local std::optional<asked_state> last;
    return last;
}

// Sizes that were found out. The engine asks again and again for those of texts that nobody goes on with, whose bytes
// it has: then nothing is captured.
struct known_size {
    size_t whole;
    size_t kept;
};

using asker = std::tuple<llama_context *, llama_seq_id, flags_t>;

std::map<asker, known_size> & known_sizes() {
    static thread_local std::map<asker, known_size> sizes;
    return sizes;
}

// The checkpoint that is being made in this thread.
const common_prompt_checkpoint *& being_made() {
    static thread_local const common_prompt_checkpoint * checkpoint = nullptr;
    return checkpoint;
}

bool is_replaced(flags_t flags) {
    return mesh::states().is_on() && (flags & LLAMA_STATE_SEQ_FLAGS_ON_DEVICE) == 0;
}

mesh::captured_state captured(llama_context * context, llama_seq_id id, flags_t flags) {
    return mesh::saved_states::capture(engine().size(context, id, flags), [&](uint8_t * to, size_t size) {
        return engine().save(context, to, size, id, flags);
    });
}

mesh::captured_state take_captured(llama_context * context, llama_seq_id id, flags_t flags) {
    std::optional<asked_state> & last = last_asked();
    if (!last || last->context != context || last->id != id || last->flags != flags) {
        return captured(context, id, flags);
    }
    mesh::captured_state state = std::move(last->state);
    last.reset();
    return state;
}

mesh::state_owner owner_of(llama_seq_id id, flags_t flags) {
    const common_prompt_checkpoint * checkpoint = being_made();
    if ((flags & LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) == 0 || checkpoint == nullptr) {
        return {mesh::state_kind::whole, id, 0, 0};
    }
    const bool is_draft = checkpoint->id_task == -1;  // only requests have a number
    const auto kind = is_draft ? mesh::state_kind::draft : mesh::state_kind::checkpoint;
    return {kind, id, checkpoint->n_tokens, checkpoint->id_task};
}

}  // namespace

size_t mesh::restore_state(
    restore_function restore, llama_context * context, const uint8_t * from, size_t size, llama_seq_id id,
    llama_state_seq_flags flags
) {
    if (!is_replaced(flags) || !saved_states::is_reference(from, size)) {
        return restore(context, from, size, id, flags);
    }
    const auto read = [&](const uint8_t * stream, size_t length) {
        return restore(context, stream, length, id, flags);
    };
    return states().restore(from, size, owner_of(id, flags), read) ? size : 0;
}

extern "C" {

GGML_MESH_API size_t mesh_state_size(llama_context * context, llama_seq_id id, flags_t flags) __asm__(STATE_SIZE);
GGML_MESH_API size_t mesh_state_save(
    llama_context * context, uint8_t * to, size_t size, llama_seq_id id, flags_t flags
) __asm__(STATE_SAVE);
GGML_MESH_API void mesh_checkpoint_save(
    common_prompt_checkpoint * self, llama_context * context, llama_seq_id id, flags_t flags
) __asm__(CHECKPOINT_SAVE);
GGML_MESH_API bool mesh_checkpoint_load(
    common_prompt_checkpoint * self, llama_context * context, llama_seq_id id, flags_t flags
) __asm__(CHECKPOINT_LOAD);
GGML_MESH_API void mesh_memory_copy(
    llama_memory_t memory, llama_seq_id from, llama_seq_id to, llama_pos begin, llama_pos end
) __asm__(MEMORY_COPY);

size_t mesh_state_size(llama_context * context, llama_seq_id id, flags_t flags) {
    if (!is_replaced(flags)) {
        return engine().size(context, id, flags);
    }
    last_asked().reset();  // the cells may be others by now
    known_size & known = known_sizes()[{context, id, flags}];
    const size_t whole = engine().size(context, id, flags);
    if (whole != known.whole || flags != LLAMA_STATE_SEQ_FLAGS_NONE) {
        last_asked() = {context, id, flags, captured(context, id, flags)};
        known = {whole, mesh::saved_states::kept_size(last_asked()->state)};
    }
    return known.kept;
}

size_t mesh_state_save(llama_context * context, uint8_t * to, size_t size, llama_seq_id id, flags_t flags) {
    if (!is_replaced(flags)) {
        return engine().save(context, to, size, id, flags);
    }
    mesh::captured_state state = take_captured(context, id, flags);
    if (mesh::saved_states::kept_size(state) != size) {
        if (size < sizeof(mesh::state_reference)) {
            return 0;
        }
        // Another size than the engine was told, over which it would end the process: nothing is saved.
        state = {};
    }
    mesh::states().save(state, owner_of(id, flags), to);
    return size;
}

void mesh_checkpoint_save(
    common_prompt_checkpoint * self, llama_context * context, llama_seq_id id, flags_t flags
) {
    being_made() = self;
    engine().save_checkpoint(self, context, id, flags);
    being_made() = nullptr;
    if (self->id_task == -1 && mesh::saved_states::is_gone(self->data_tgt.data(), self->data_tgt.size())) {
        mesh::drop_draft(id);
    }
}

bool mesh_checkpoint_load(
    common_prompt_checkpoint * self, llama_context * context, llama_seq_id id, flags_t flags
) {
    if (engine().load_checkpoint(self, context, id, flags)) {
        return true;
    }
    if (!is_replaced(flags)) {
        return false;
    }
    if (mesh::saved_states::is_draft(self->data_tgt.data(), self->data_tgt.size())) {
        // The engine ends the process over it. Every request fails instead, and no token leaves.
        for (const auto & worker : mesh::devices()) {
            worker->fail("a draft could not be taken back");
        }
        return true;
    }
    self->id_task = -1;  // as if it were from a file: the prompt is read again
    return false;
}

void mesh_memory_copy(llama_memory_t memory, llama_seq_id from, llama_seq_id to, llama_pos begin, llama_pos end) {
    engine().copy(memory, from, to, begin, end);
    if (begin < 0 && end < 0) {
        mesh::states().cloned(from, to);
    }
}

int ggml_mesh_keep_states(unsigned int checkpoints) {
    return mesh::engine_has(mesh::feature::saved_states) && mesh::states().keep(checkpoints) ? 0 : 1;
}

}  // extern "C"

#else  // not __linux__

// The engine's functions cannot be replaced here: states stay off where there are workers.
size_t mesh::restore_state(
    restore_function restore, llama_context * context, const uint8_t * from, size_t size, llama_seq_id id,
    llama_state_seq_flags flags
) {
    return restore(context, from, size, id, flags);
}

int ggml_mesh_keep_states(unsigned int) {
    return 1;
}

#endif

void ggml_mesh_reserve_states(const unsigned long long * least, size_t count, unsigned long long most) {
    mesh::states().reserve({least, least + count}, most);
}
