#include "rules/supports.h"

#include "rules/validate.h"
#include "wire/delta.h"

#include "ggml-backend-impl.h"
#include "ggml-cpp.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace mesh {

namespace {

// Lengths that models have are kept; longer ones are those of contexts, batches and vocabularies, of which only
// the divisibility matters.
constexpr int64_t EXACT_LENGTH = 1024;
constexpr size_t MAX_KNOWN_SIZES = 4096;

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
std::string kind_of(const op_question & question) {
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

std::string exactly(const op_question & question) {
    const auto * bytes = reinterpret_cast<const char *>(question.data());
    return {bytes, bytes + question.size() * sizeof question[0]};
}

}  // namespace

op_question question_about(const ggml_tensor * op) {
    op_question table;
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

namespace {

// The tensors of a question, the op last.
class asked_op {
  public:
    explicit asked_op(const op_question & question) {
        if (question.empty() || question.size() > wire::MAX_QUESTION_TENSORS) {
            throw std::invalid_argument("a question about " + std::to_string(question.size()) + " tensors");
        }
        context_.reset(ggml_init({question.size() * ggml_tensor_overhead(), nullptr, true}));
        for (size_t i = 0; i < question.size(); ++i) {
            check_entry(question, i);
            add(question[i]);
        }
    }

    const ggml_tensor * get() const {
        return built_.back();
    }

  private:
    ggml_context_ptr context_;
    std::vector<ggml_tensor *> built_;

    void add(const wire::tensor & entry) {
        ggml_tensor * tensor =
            ggml_new_tensor(context_.get(), static_cast<ggml_type>(entry.type), GGML_MAX_DIMS, entry.ne);
        built_.push_back(tensor);
        std::memcpy(tensor->nb, entry.nb, sizeof entry.nb);
        std::memcpy(tensor->op_params, entry.op_params, sizeof entry.op_params);
        tensor->op = static_cast<ggml_op>(entry.op);
        tensor->flags = static_cast<int32_t>(entry.flags);
        for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
            // A cast names itself, which is the last one by now.
            tensor->src[i] = entry.sources[i] != 0 ? built_[entry.sources[i] - 1] : nullptr;
        }
    }
};

// What has no elements is never computed, and devices do not expect to be asked about it.
bool computes(ggml_backend_dev_t device, const ggml_tensor * op) {
    return node_is_allowed(op) && (ggml_is_empty(op) || ggml_backend_dev_supports_op(device, op));
}

}  // namespace

bool device_computes(ggml_backend_dev_t device, const op_question & question) {
    return computes(device, asked_op(question).get());
}

uint64_t device_size(ggml_backend_dev_t device, const op_question & question) {
    const asked_op asked(question);
    // Devices know the sizes of ops that they compute, and may end the process over others.
    return asked.get()->op == GGML_OP_NONE || computes(device, asked.get())
               ? ggml_backend_buft_get_alloc_size(ggml_backend_dev_buffer_type(device), asked.get())
               : ggml_nbytes(asked.get());
}

bool size_is_uncertain(const ggml_tensor * tensor) {
    constexpr int64_t padded_row = 512;  // quantised rows are padded to that by some devices
    switch (tensor->op) {
    case GGML_OP_FLASH_ATTN_EXT:
    case GGML_OP_MUL_MAT_ID:
    case GGML_OP_ARGSORT:
    case GGML_OP_TOP_K:
    case GGML_OP_CUMSUM:
        return true;
    default:
        return ggml_is_quantized(tensor->type) && tensor->ne[0] % padded_row != 0 && tensor->view_src == nullptr;
    }
}

const std::optional<bool> * support_cache::find(const op_question & question) const {
    const auto found = known_.find(kind_of(question));
    return found != known_.end() ? &found->second : nullptr;
}

void support_cache::add(const op_question & question, std::optional<bool> yes) {
    known_[kind_of(question)] = yes;
}

const uint64_t * size_cache::find(const op_question & question) {
    std::string exact = exactly(question);
    const auto found = recent_.find(exact);
    if (found != recent_.end()) {
        return &found->second;
    }
    const auto before = older_.find(exact);
    return before != older_.end() ? keep(std::move(exact), before->second) : nullptr;
}

void size_cache::add(const op_question & question, uint64_t bytes) {
    keep(exactly(question), bytes);
}

const uint64_t * size_cache::keep(std::string && question, uint64_t bytes) {
    if (recent_.size() == MAX_KNOWN_SIZES) {
        older_ = std::move(recent_);
        recent_.clear();
    }
    return &(recent_[std::move(question)] = bytes);
}

}  // namespace mesh
