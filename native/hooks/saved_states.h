#pragma once

#include "llama.h"

namespace mesh {

using restore_function = size_t (*)(llama_context *, const uint8_t *, size_t, llama_seq_id, llama_state_seq_flags);

// What the engine's own `restore` does, also for states that are kept on workers. 0 where such a state is gone.
size_t restore_state(
    restore_function restore, llama_context * context, const uint8_t * from, size_t size, llama_seq_id id,
    llama_state_seq_flags flags
);

}  // namespace mesh
