#pragma once

// What llama.cpp's loader asks of a device before it puts a weight there: whether it computes a made-up node with it.

#include "rules/supports.h"

#include "ggml-cpp.h"

#include <vector>

namespace mesh {

// Some made-up nodes have numbers that no model has, and that a worker rightly refuses: ROPE of no dimensions, RWKV_WKV6
// of 123 heads whatever the weight's shape, SSM_SCAN of one head where the weight has a number for each head. What is
// meant is an op with this weight, in a shape that fits it.
class loader_question {
  public:
    explicit loader_question(const ggml_tensor * op);

    // Null where this is a node of a graph.
    const ggml_tensor * op() const {
        return op_;
    }

    const ggml_tensor * weight() const {
        return weight_;
    }

  private:
    ggml_context_ptr context_;
    const ggml_tensor * op_ = nullptr;
    const ggml_tensor * weight_ = nullptr;
};

// What the loader is likely to ask about the layers of a model, each kind once, by the shapes and names of the weights in
// its files. It is only asked ahead: a wrong guess costs some bytes, and what was not guessed a round trip.
std::vector<op_question> likely_loader_questions(const std::vector<gguf_context_ptr> & files);

}  // namespace mesh
