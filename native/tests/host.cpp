#include "tests/host.h"

#include "rules/rules.h"
#include "tests/check.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace host {

namespace {

constexpr size_t MAX_TENSORS = 64;
constexpr uint32_t BUFFER = 1;

// Something for every type: small floats, small integers, and bytes for blocks.
std::vector<uint8_t> values_for(const ggml_tensor * t) {
    std::vector<uint8_t> bytes(ggml_nbytes(t));
    const auto count = static_cast<size_t>(ggml_nelements(t));
    const auto row = static_cast<size_t>(std::max<int64_t>(t->ne[0], 1));
    for (size_t i = 0; i < count; ++i) {
        const float wave = 0.5F * std::sin(static_cast<float>(i) * 0.7F) + 0.1F;
        const int64_t number = static_cast<int64_t>(i % row);
        if (t->type == GGML_TYPE_F32) {
            std::memcpy(bytes.data() + i * sizeof wave, &wave, sizeof wave);
        } else if (t->type == GGML_TYPE_F16) {
            const ggml_fp16_t half = ggml_fp32_to_fp16(wave);
            std::memcpy(bytes.data() + i * sizeof half, &half, sizeof half);
        } else if (t->type == GGML_TYPE_I32 || t->type == GGML_TYPE_I64) {
            const size_t size = ggml_type_size(t->type);
            std::memcpy(bytes.data() + i * size, &number, size);
        }
    }
    // Types whose tables take seconds to make are left at zero.
    if (ggml_is_quantized(t->type) && mesh::can_quantise(t->type)) {
        std::vector<float> floats(count, 0.25F);
        ggml_quantize_chunk(
            t->type, floats.data(), bytes.data(), 0, ggml_nrows(t), t->ne[0], std::vector<float>(row, 1.0F).data()
        );
    }
    return bytes;
}

}  // namespace

ggml_backend_t cpu() {
    static const ggml_backend_ptr backend(ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr));
    return backend.get();
}

void compute(ggml_cgraph * graph, int threads) {
    ggml_backend_cpu_set_n_threads(cpu(), threads);
    CHECK(ggml_backend_graph_compute(cpu(), graph) == GGML_STATUS_SUCCESS);
}

void run(const mesh::built_graph & graph, int threads) {
    graph.run([=](ggml_cgraph * piece) { compute(piece, threads); });
}

const example & example_named(const std::string & name) {
    const auto found = std::find_if(examples().begin(), examples().end(), [&](const example & each) {
        return each.name == name;
    });
    CHECK(found != examples().end());
    return *found;
}

graph::graph(const example & from, ggml_backend_buffer_type_t memory)
    : context_(ggml_init(
          {MAX_TENSORS * ggml_tensor_overhead() + ggml_graph_overhead_custom(MAX_TENSORS, false), nullptr, true}
      )) {
    output_ = from.build(context_.get());
    graph_ = ggml_new_graph_custom(context_.get(), MAX_TENSORS, false);
    ggml_build_forward_expand(graph_, output_);
    buffer_.reset(ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), memory));
    if (!buffer_) {
        throw std::runtime_error("no memory");
    }
    ggml_backend_buffer_set_usage(buffer_.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    fill();
}

void graph::fill() {
    for (ggml_tensor * t = ggml_get_first_tensor(context_.get()); t != nullptr;
         t = ggml_get_next_tensor(context_.get(), t)) {
        if (t->op == GGML_OP_NONE && t->view_src == nullptr) {
            const std::vector<uint8_t> bytes = values_for(t);
            ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
        }
    }
}

std::vector<uint8_t> graph::result() const {
    std::vector<uint8_t> bytes(ggml_nbytes(output_));
    ggml_backend_tensor_get(output_, bytes.data(), 0, bytes.size());
    return bytes;
}

std::vector<mesh::wire::tensor> graph::table() const {
    const auto * base = static_cast<const uint8_t *>(ggml_backend_buffer_get_base(buffer_.get()));
    return mesh::encode(graph_, [&](const ggml_tensor * t) {
        return mesh::placed{BUFFER, static_cast<uint64_t>(static_cast<const uint8_t *>(t->data) - base)};
    });
}

mesh::built_graph graph::decode(const std::vector<mesh::wire::tensor> & table) const {
    ggml_backend_buffer_t buffer = buffer_.get();
    return mesh::decode(table, [buffer](uint32_t id, uint64_t offset, uint64_t size) {
        const size_t room = ggml_backend_buffer_get_size(buffer);
        if (id != BUFFER || offset > room || size > room - offset) {
            throw std::invalid_argument("a range lies outside of its buffer");
        }
        auto * base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer));
        return mesh::location{buffer, base + offset, nullptr, false};
    });
}

}  // namespace host
