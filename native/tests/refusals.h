#pragma once

// Tables of good graphs, spoilt, and what is said of them.

#include "tests/host.h"

#include <functional>
#include <string>
#include <vector>

namespace refusals {

using mesh::wire::tensor;
using table = std::vector<tensor>;

ggml_backend_buffer_type_t main_memory();

// The last node with this op, and one of its sources.
tensor & node_of(table & t, ggml_op op);
tensor & source(table & t, ggml_op op, size_t i);

struct refusal {
    const char * of;  // an example
    const char * says;
    std::function<void(table &)> change;
};

void expect(const std::vector<refusal> & refusals);

// The same for graphs that are larger than their memory, which is not asked for: each tensor gets an address of its own.
void expect_anywhere(const std::vector<refusal> & refusals);

refusal set_param(const char * of, const char * says, ggml_op op, size_t i, int32_t value);
refusal set_type(const char * of, const char * says, ggml_op op, size_t i, ggml_type type);

// A source half as long, and thereby still inside of its memory.
refusal shorten(const char * of, const char * says, ggml_op op, size_t i, size_t dimension);

// A source whose elements do not lie side by side.
refusal spread(const char * of, const char * says, ggml_op op, size_t i);

}  // namespace refusals
