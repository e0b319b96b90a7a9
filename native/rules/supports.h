#pragma once

// Whether a worker's device computes an op, asked once for each kind of it, and what room the result takes.
//
// llama.cpp asks about every node of every graph that it builds. What decides is
// the op, its types, and shapes as far as they do not grow with the context or
// the batch; the answers are kept for those. A worker checks every graph again,
// so that an answer that was too general fails a request and harms nobody.

#include "wire/protocol.h"

#include "ggml-backend.h"

#include <map>
#include <optional>
#include <string>
#include <vector>

namespace mesh {

// An op and its sources as a table, the op last.
using op_question = std::vector<wire::tensor>;

op_question question_about(const ggml_tensor * op);

// The worker's side. Throws std::invalid_argument where the table is no question.
bool device_computes(ggml_backend_dev_t device, const op_question & question);

// Bytes that the op's result takes on the device: some keep scratch memory behind it.
uint64_t device_size(ggml_backend_dev_t device, const op_question & question);

// Whether that may be more than the result itself, so that it is worth asking.
bool size_is_uncertain(const ggml_tensor * tensor);

class support_cache {
  public:
    // Null where nobody has asked yet, empty while there is no answer.
    const std::optional<bool> * find(const op_question & question) const;
    void add(const op_question & question, std::optional<bool> yes);

  private:
    std::map<std::string, std::optional<bool>> known_;
};

// Sizes, for exactly the same question. One that was asked for lately is never asked for again: ggml ends the process
// where a tensor has grown between two looks at it.
class size_cache {
  public:
    // Null where nobody has asked yet.
    const uint64_t * find(const op_question & question);
    void add(const op_question & question, uint64_t bytes);

  private:
    std::map<std::string, uint64_t> recent_;
    std::map<std::string, uint64_t> older_;

    const uint64_t * keep(std::string && question, uint64_t bytes);
};

}  // namespace mesh
