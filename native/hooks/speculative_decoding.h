#pragma once

#include "llama.h"

#include <cstddef>

namespace mesh {

// How many tokens were drafted for the step that is being made; counted anew from here on.
size_t take_drafted();

// Before that step: a sequence's draft could not be taken back, so that it is not made.
void drop_draft(llama_seq_id id);

}  // namespace mesh
