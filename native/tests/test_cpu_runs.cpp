// Weights in main memory beside a device whose memory nothing else can look into.

#include "rules/validate.h"
#include "tests/check.h"
#include "tests/host.h"
#include "tests/opaque_memory.h"
#include "worker/cpu_runs.h"

#include "ggml-impl.h"

#include <cmath>
#include <stdexcept>
#include <vector>

using namespace mesh;

namespace {

constexpr int64_t WIDTH = 8;
constexpr int64_t TOKENS = 3;

// Two products with a weight and what is between them, on the CPU; what is before and after, on the device.
struct example {
    ggml_context_ptr weights{ggml_init({16 * ggml_tensor_overhead(), nullptr, true})};
    ggml_context_ptr rest{ggml_init({32 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})};
    ggml_tensor * weight = ggml_new_tensor_2d(weights.get(), GGML_TYPE_F32, WIDTH, WIDTH);
    ggml_tensor * x = ggml_new_tensor_2d(rest.get(), GGML_TYPE_F32, WIDTH, TOKENS);
    ggml_tensor * before = ggml_tanh(rest.get(), x);
    ggml_tensor * product = ggml_mul_mat(rest.get(), weight, before);
    ggml_tensor * square = ggml_sqr(rest.get(), product);
    ggml_tensor * again = ggml_mul_mat(rest.get(), weight, ggml_reshape_2d(rest.get(), square, WIDTH, TOKENS));
    ggml_tensor * after = ggml_add(rest.get(), again, before);
    ggml_cgraph * graph = ggml_new_graph(rest.get());
    ggml_backend_buffer_ptr weight_buffer;
    ggml_backend_buffer_ptr buffer;

    explicit example(ggml_backend_buffer_type_t memory) {
        ggml_build_forward_expand(graph, after);
        weight_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(
            weights.get(), ggml_backend_get_default_buffer_type(host::cpu())
        ));
        buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(rest.get(), memory));
        CHECK(weight_buffer != nullptr && buffer != nullptr);
        set(weight, 0.3F);
        set(x, 0.7F);
    }

    static void set(ggml_tensor * tensor, float step) {
        std::vector<float> values(static_cast<size_t>(ggml_nelements(tensor)));
        for (size_t i = 0; i < values.size(); ++i) {
            values[i] = std::sin(step * static_cast<float>(i));
        }
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
    }

    std::vector<cpu_run> runs(const std::unordered_set<size_t> & cuts = {}) {
        return cpu_runs(graph, {{weight, nullptr}}, cuts);
    }

    int place_of(const ggml_tensor * node) const {
        for (int i = 0; i < graph->n_nodes; ++i) {
            if (graph->nodes[i] == node) {
                return i;
            }
        }
        return -1;
    }
};

std::vector<float> values_of(const ggml_tensor * tensor) {
    std::vector<float> found(static_cast<size_t>(ggml_nelements(tensor)));
    ggml_backend_tensor_get(tensor, found.data(), 0, ggml_nbytes(tensor));
    return found;
}

}  // namespace

TEST("cpu runs: what lies between products with weights in main memory is theirs, and little crosses") {
    example on_cpu(ggml_backend_get_default_buffer_type(host::cpu()));
    CHECK(ggml_backend_graph_compute(host::cpu(), on_cpu.graph) == GGML_STATUS_SUCCESS);
    example far(opaque_memory::memory());
    const std::vector<float> before = values_of(on_cpu.before);
    ggml_backend_tensor_set(far.before, before.data(), 0, ggml_nbytes(far.before));

    const std::vector<cpu_run> runs = far.runs();

    CHECK_EQUAL(runs.size(), 1U);
    CHECK_EQUAL(runs[0].nodes.size(), 3U);
    CHECK(runs[0].has(far.square) && !runs[0].has(far.after) && !runs[0].has(far.before));
    CHECK_EQUAL(runs[0].first, far.place_of(far.product));
    CHECK_EQUAL(runs[0].last, far.place_of(far.after));
    CHECK_EQUAL(runs[0].inputs.size(), 1U);
    // A reshaped result counts as used elsewhere.
    CHECK_EQUAL(runs[0].outputs.size(), 2U);
    std::vector<uint8_t> memory(runs[0].size + 64);
    compute_run(runs[0], host::cpu(), memory.data() + 64 - reinterpret_cast<size_t>(memory.data()) % 64);
    CHECK(values_of(far.again) == values_of(on_cpu.again));
}

TEST("cpu runs: one ends where row numbers have to be looked at") {
    example far(opaque_memory::memory());
    const auto cut = static_cast<size_t>(far.place_of(far.again));
    const std::vector<cpu_run> runs = far.runs({cut});
    CHECK_EQUAL(runs.size(), 2U);
    CHECK_EQUAL(runs[0].last, static_cast<int>(cut));
    CHECK_EQUAL(runs[1].first, static_cast<int>(cut));
    CHECK_EQUAL(runs[1].inputs.size(), 1U);
    CHECK(far.runs().size() == 1 && cpu_runs(far.graph, {}, {}).empty());
}

TEST("cpu runs: what would write to a part of a tensor, or takes too much memory, is refused") {
    example far(opaque_memory::memory());
    far.product->view_src = far.x;
    CHECK_EQUAL(
        check::thrown([&] { far.runs(); }),
        "a node that reads a weight in main memory writes to a part of a tensor"
    );
    far.product->view_src = nullptr;
    far.product->ne[1] = static_cast<int64_t>(MAX_CPU_RUN_BYTES / WIDTH / sizeof(float)) + 1;
    far.product->nb[2] = far.product->nb[3] = static_cast<size_t>(far.product->ne[1]) * far.product->nb[1];
    CHECK_EQUAL(check::thrown([&] { far.runs(); }), "what it computes in main memory is too large");
}
