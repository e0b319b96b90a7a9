#pragma once

// Small graphs, built with ggml's own functions, on memory of this process or of a device at the other end of a link.

#include "wire/graph.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace host {

// One small graph for each op, or for a way in which models use it.
struct example {
    const char * name;
    std::function<ggml_tensor *(ggml_context *)> build;
};

const std::vector<example> & examples();
const example & example_named(const std::string & name);

// An example with memory, and with numbers in its inputs: integers count along their rows, the rest are waves.
class graph {
  public:
    graph(const example & from, ggml_backend_buffer_type_t memory);

    ggml_cgraph * get() const {
        return graph_;
    }

    // Bytes of the result.
    std::vector<uint8_t> result() const;

    std::vector<mesh::wire::tensor> table() const;
    mesh::built_graph decode(const std::vector<mesh::wire::tensor> & table) const;

  private:
    ggml_context_ptr context_;
    ggml_cgraph * graph_ = nullptr;
    ggml_tensor * output_ = nullptr;
    ggml_backend_buffer_ptr buffer_;

    void fill();
};

ggml_backend_t cpu();

// With one thread it takes microseconds, with two it finds what goes wrong between them.
void compute(ggml_cgraph * graph, int threads = 2);

// The same with a look at row numbers, as a worker does it. Throws std::invalid_argument.
void run(const mesh::built_graph & graph, int threads = 2);

}  // namespace host
