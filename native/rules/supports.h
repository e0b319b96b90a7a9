#pragma once

// Whether a worker's device computes an op, asked once for each kind of it, and what room the result takes.
//
// llama.cpp asks about every node of every graph that it builds. What decides is
// the op, its types, and shapes as far as they do not grow with the context or
// the batch; the answers are kept for those. A worker checks every graph again,
// so that an answer that was too general fails a request and harms nobody.

#include "wire/protocol.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <map>
#include <string>
#include <vector>

namespace mesh {

// The op and its sources as a table, the op last.
std::vector<wire::tensor> question_about(const ggml_tensor * op);

// The worker's side. Throws std::invalid_argument where the table is no question.
bool device_computes(ggml_backend_dev_t device, const std::vector<wire::tensor> & question);

// Bytes that the op's result takes on the device: some keep scratch memory behind it.
uint64_t device_size(ggml_backend_dev_t device, const std::vector<wire::tensor> & question);

// Whether that may be more than the result itself, so that it is worth asking.
bool size_is_uncertain(const ggml_tensor * tensor);

// llama.cpp's loader asks with a made-up node whether a weight can lie on a device. Some of these have numbers that no
// model has, and that a worker rightly refuses: ROPE of no dimensions, RWKV_WKV6 of 123 heads whatever the weight's
// shape, SSM_SCAN of one head where the weight has a number for each head. What is meant is an op with this weight, in a shape that fits it.
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

class support_cache {
  public:
    // Null where nobody has asked yet.
    const bool * find(const std::vector<wire::tensor> & question) const;
    void add(const std::vector<wire::tensor> & question, bool yes);

  private:
    std::map<std::string, bool> known_;
};

// Sizes, for exactly the same question. One that was asked for lately is never asked for again: ggml ends the process
// where a tensor has grown between two looks at it.
class size_cache {
  public:
    // Null where nobody has asked yet.
    const uint64_t * find(const std::vector<wire::tensor> & question);
    void add(const std::vector<wire::tensor> & question, uint64_t bytes);

  private:
    std::map<std::string, uint64_t> recent_;
    std::map<std::string, uint64_t> older_;

    const uint64_t * keep(std::string && question, uint64_t bytes);
};

}  // namespace mesh
