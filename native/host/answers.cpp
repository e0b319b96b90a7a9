#include "host/answers.h"

#include "ggml-mesh.h"
#include "rules/indices.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace mesh {

namespace {

// Tensors lie at multiples of it from the beginning of a page; devices say between 4 and 256.
constexpr uint64_t MAX_ALIGNMENT = 4096;

// More than a process can address. Sums of 65,536 such sizes do not overflow.
constexpr uint64_t MAX_MEMORY_BYTES = 1ULL << 47;

// Of one run. A worker may have waited for it for months, and has not sent a petabyte meanwhile.
constexpr uint64_t MAX_RUN_NS = 365ULL * 24 * 3600 * 1'000'000'000;
constexpr uint64_t MAX_RUN_BYTES = 1ULL << 50;

[[noreturn]] void refuse(const std::string & what) {
    throw bad_answer("it sent " + what);
}

template <size_t Size> void make_printable(char (&text)[Size]) {
    const std::string clean = printable(text, strnlen(text, Size - 1));
    std::memset(text, 0, Size);
    std::memcpy(text, clean.data(), clean.size());
}

void check_versions(const wire::hello & theirs) {
    if (theirs.magic != wire::MAGIC || theirs.version != wire::VERSION ||
        std::strcmp(theirs.engine, ggml_mesh_engine_version()) != 0) {
        throw link_error(
            "it runs engine " + std::string(theirs.engine) + ", this machine " + ggml_mesh_engine_version() +
            "; links need the same one"
        );
    }
    if (theirs.op_count != GGML_OP_COUNT || theirs.type_count != GGML_TYPE_COUNT ||
        theirs.tensor_size != sizeof(ggml_tensor)) {
        refuse("the tables of another engine");
    }
}

struct bounded {
    int64_t bound;  // 0 where nobody knows
    bool distinct;  // no number comes twice in a row
};

// What an honest worker's numbers are.
bounded bound_of(const ggml_tensor & numbers) {
    if (numbers.op == GGML_OP_CONT || numbers.op == GGML_OP_DUP || numbers.op == GGML_OP_CPY) {
        const ggml_tensor & source = *numbers.src[0];
        const bool same = source.type == numbers.type && ggml_are_same_shape(&source, &numbers);
        return same ? bound_of(source) : bounded{};
    }
    const ggml_tensor & writer = numbers.view_src != nullptr ? *numbers.view_src : numbers;
    switch (writer.op) {
    case GGML_OP_ARGMAX:
        return {writer.src[0]->ne[0], false};
    case GGML_OP_ARGSORT:
    case GGML_OP_TOP_K:
        return {writer.src[0]->ne[0], is_part_of_rows(numbers, writer)};
    default:
        return {};
    }
}

bool is_integer(const ggml_tensor & tensor) {
    return tensor.type == GGML_TYPE_I32 || tensor.type == GGML_TYPE_I64;
}

}  // namespace

patience & host_patience() {
    static patience times;
    return times;
}

std::string printable(const char * text, size_t size) {
    std::string clean(text, std::min(size, MAX_ERROR_BYTES));
    std::replace_if(
        clean.begin(), clean.end(), [](char sign) { return sign < ' ' || sign > '~'; }, '?'
    );
    return clean;
}

void check_facts(wire::hello_answer & facts) {
    make_printable(facts.name);
    make_printable(facts.description);
    make_printable(facts.self.engine);
    check_versions(facts.self);
    if (facts.alignment == 0 || facts.alignment > MAX_ALIGNMENT ||
        (facts.alignment & (facts.alignment - 1)) != 0) {
        refuse("an alignment of " + std::to_string(facts.alignment));
    }
    if (facts.total_bytes > MAX_MEMORY_BYTES) {
        refuse("a memory of " + std::to_string(facts.total_bytes) + " bytes");
    }
    if (facts.grant_bytes > facts.total_bytes) {
        refuse(
            "a grant of " + std::to_string(facts.grant_bytes) + " of " + std::to_string(facts.total_bytes) +
            " bytes"
        );
    }
    if (facts.device_type > GGML_BACKEND_DEVICE_TYPE_ACCEL) {
        refuse("a device of kind " + std::to_string(facts.device_type));
    }
    if (facts.has_model > 1) {
        refuse(std::to_string(facts.has_model) + " for whether it has the model");
    }
}

void check_cost(const wire::telemetry & cost) {
    if (cost.compute_ns > MAX_RUN_NS || cost.wait_ns > MAX_RUN_NS) {
        refuse("a time of more than a year for one run");
    }
    if (cost.bytes_in > MAX_RUN_BYTES || cost.bytes_out > MAX_RUN_BYTES) {
        refuse("a count of more than a petabyte for one run");
    }
    if (cost.queued > wire::MAX_QUEUE_BYTES / sizeof(wire::header)) {
        refuse("a queue of " + std::to_string(cost.queued) + " commands");
    }
}

void check_size(uint64_t said, uint64_t needed, const wire::hello_answer & facts) {
    if (said < needed || said > std::max(needed, facts.total_bytes)) {
        refuse("a size of " + std::to_string(said) + " bytes for a tensor of " + std::to_string(needed));
    }
}

void check_result(const ggml_tensor & tensor, size_t offset, const void * data, size_t size) {
    if (!is_integer(tensor)) {
        return;
    }
    const auto [bound, distinct] = bound_of(tensor);
    if (bound == 0 || offset != 0 || size != ggml_nbytes(&tensor) || tensor.nb[0] != ggml_type_size(tensor.type)) {
        refuse(std::string("row numbers of ") + ggml_op_name(tensor.op) + ", which cannot be checked");
    }
    const auto * bytes = static_cast<const uint8_t *>(data);
    const std::vector<uint8_t> copy(bytes, bytes + size);
    try {
        run_checks({{&tensor, bound, distinct}}, {{byte_range(tensor), &copy}});
    } catch (const std::invalid_argument & error) {
        refuse(std::string("wrong row numbers: ") + error.what());
    }
}

void fill_harmless(const ggml_tensor & tensor, size_t offset, void * data, size_t size) {
    std::memset(data, 0, size);
    if (tensor.type != GGML_TYPE_I32 || tensor.nb[1] == 0) {
        return;
    }
    for (size_t at = 0; at + sizeof(int32_t) <= size; at += sizeof(int32_t)) {
        const auto number = static_cast<int32_t>((offset + at) % tensor.nb[1] / sizeof(int32_t));
        std::memcpy(static_cast<uint8_t *>(data) + at, &number, sizeof number);
    }
}

}  // namespace mesh
