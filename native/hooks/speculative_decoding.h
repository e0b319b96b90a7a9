#pragma once

#include <cstddef>

namespace mesh {

// How many tokens were drafted for the step that is being made; counted anew from here on.
size_t take_drafted();

}  // namespace mesh
