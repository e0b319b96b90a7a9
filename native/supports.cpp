#include "supports.h"

#include "changes.h"
#include "validate.h"

#include "ggml-cpp.h"
#include "ggml-impl.h"

#include <cstring>
#include <stdexcept>

namespace mesh {

namespace {

// Lengths that models have are kept; longer ones are those of contexts, batches and vocabularies, of which only
// the divisibility matters.
constexpr int64_t EXACT_LENGTH = 1024;

int64_t kind_of_length(int64_t length) {
    for (const int64_t step : {256, 32, 4}) {
        if (length % step == 0) {
            return step;
        }
    }
    return length == 1 ? 1 : 3;
}

wire::tensor described(const ggml_tensor * tensor) {
    wire::tensor entry{};
    entry.type = static_cast<uint32_t>(tensor->type);
    entry.flags = static_cast<uint32_t>(tensor->flags);
    for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
        entry.ne[i] = tensor->ne[i];
        entry.nb[i] = tensor->nb[i];
    }
    return entry;
}

// What the answer is remembered for.
std::string kind_of(const std::vector<wire::tensor> & question) {
    std::vector<uint8_t> kind;
    const auto put = [&](const auto & value) { append(kind, &value, sizeof value); };
    const wire::tensor & op = question.back();
    put(op.op);
    put(op.op_params);
    put(op.sources);
    for (const wire::tensor & entry : question) {
        put(entry.type);
        // Attention depends on how many heads share a key, which are counted in the third dimension.
        const bool heads = op.op == GGML_OP_FLASH_ATTN_EXT;
        put(entry.ne[0] <= EXACT_LENGTH ? entry.ne[0] : kind_of_length(entry.ne[0]));
        put(kind_of_length(entry.ne[1]));
        put(heads ? entry.ne[2] : kind_of_length(entry.ne[2]));
        put(kind_of_length(entry.ne[3]));
        const uint64_t row = ggml_row_size(static_cast<ggml_type>(entry.type), entry.ne[0]);
        put(entry.nb[0] == ggml_type_size(static_cast<ggml_type>(entry.type)));
        put(entry.nb[1] == row);
        put(entry.nb[1] % 16 == 0);
        put(entry.nb[2] == entry.nb[1] * static_cast<uint64_t>(entry.ne[1]));
        put(entry.nb[3] == entry.nb[2] * static_cast<uint64_t>(entry.ne[2]));
        put(entry.nb[1] <= entry.nb[2] && entry.nb[2] <= entry.nb[3]);
    }
    return {kind.begin(), kind.end()};
}

}  // namespace

std::vector<wire::tensor> question_about(const ggml_tensor * op) {
    std::vector<wire::tensor> table;
    wire::tensor asked = described(op);
    asked.op = static_cast<uint32_t>(op->op);
    asked.is_node = 1;
    std::memcpy(asked.op_params, op->op_params, sizeof asked.op_params);
    for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
        if (op->src[i] != nullptr && op->src[i] != op) {
            table.push_back(described(op->src[i]));
            asked.sources[i] = static_cast<uint32_t>(table.size());
        }
    }
    for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
        if (op->src[i] == op) {  // a cast names itself as the place to write to
            asked.sources[i] = static_cast<uint32_t>(table.size()) + 1;
        }
    }
    table.push_back(asked);
    return table;
}

bool device_computes(ggml_backend_dev_t device, const std::vector<wire::tensor> & question) {
    if (question.empty() || question.size() > wire::MAX_QUESTION_TENSORS) {
        throw std::invalid_argument("a question about " + std::to_string(question.size()) + " tensors");
    }
    const ggml_context_ptr context(ggml_init({question.size() * ggml_tensor_overhead(), nullptr, true}));
    std::vector<ggml_tensor *> built;
    for (size_t i = 0; i < question.size(); ++i) {
        const wire::tensor & entry = question[i];
        check_entry(question, i);
        ggml_tensor * tensor =
            ggml_new_tensor(context.get(), static_cast<ggml_type>(entry.type), GGML_MAX_DIMS, entry.ne);
        std::memcpy(tensor->nb, entry.nb, sizeof entry.nb);
        std::memcpy(tensor->op_params, entry.op_params, sizeof entry.op_params);
        tensor->op = static_cast<ggml_op>(entry.op);
        tensor->flags = static_cast<int32_t>(entry.flags);
        for (size_t k = 0; k < GGML_MAX_SRC; ++k) {
            const uint32_t source = entry.sources[k];
            tensor->src[k] = source == 0 ? nullptr : source == i + 1 ? tensor : built[source - 1];
        }
        built.push_back(tensor);
    }
    return node_is_allowed(built.back()) && ggml_backend_dev_supports_op(device, built.back());
}

const bool * support_cache::find(const std::vector<wire::tensor> & question) const {
    const auto found = known_.find(kind_of(question));
    return found != known_.end() ? &found->second : nullptr;
}

void support_cache::add(const std::vector<wire::tensor> & question, bool yes) {
    known_[kind_of(question)] = yes;
}

}  // namespace mesh
