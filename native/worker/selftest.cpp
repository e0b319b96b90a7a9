// Does this machine compute what it should? Multiplies small matrices of the
// common weight types in every layout that a device offers, and compares with
// the same in plain floats, on the CPU. A compiler's mistake, a missing instruction
// or a driver that does not fit shows here, in a process that may die of it,
// and not in the middle of an answer.

#include "ggml-mesh.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

constexpr int64_t WIDTH = 512;          // a multiple of every block size, K-quants included
constexpr int64_t ROWS = 64;            // of every repacked layout's row group
constexpr int64_t BATCHES[] = {1, 33};  // decode takes other kernels than prefill

constexpr ggml_type TYPES[] = {
    GGML_TYPE_F16,  GGML_TYPE_Q4_0, GGML_TYPE_Q4_1, GGML_TYPE_Q5_0,
    GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_NL,
};

// Of the largest result: activations are quantised to 8 bits on the way.
constexpr float TOLERANCE = 0.02F;

std::vector<float> waves(int64_t count, float step) {
    std::vector<float> values(static_cast<size_t>(count));
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = std::sin(static_cast<float>(i) * step) + 0.5F * std::cos(static_cast<float>(i) * step * 0.37F);
    }
    return values;
}

// What the quantised weights stand for, so that only the multiplication is judged.
std::vector<float> dequantised(ggml_type type, const std::vector<uint8_t> & bytes) {
    std::vector<float> values(static_cast<size_t>(WIDTH * ROWS));
    ggml_get_type_traits(type)->to_float(bytes.data(), values.data(), WIDTH * ROWS);
    return values;
}

std::vector<uint8_t> quantised(ggml_type type, const std::vector<float> & values) {
    std::vector<uint8_t> bytes(ggml_row_size(type, WIDTH) * ROWS);
    ggml_quantize_chunk(type, values.data(), bytes.data(), 0, ROWS, WIDTH, nullptr);
    return bytes;
}

float largest_error(
    const std::vector<float> & weights, const std::vector<float> & input, const std::vector<float> & found
) {
    float error = 0;
    float largest = 0;
    for (size_t column = 0; column < input.size() / WIDTH; ++column) {
        for (size_t row = 0; row < ROWS; ++row) {
            double sum = 0;
            for (size_t i = 0; i < WIDTH; ++i) {
                sum += static_cast<double>(weights[row * WIDTH + i]) * input[column * WIDTH + i];
            }
            const auto expected = static_cast<float>(sum);
            const float actual = found[column * ROWS + row];
            if (!std::isfinite(actual)) {
                return INFINITY;
            }
            error = std::max(error, std::fabs(actual - expected));
            largest = std::max(largest, std::fabs(expected));
        }
    }
    return error / largest;
}

// False where this layout does not take this type.
bool multiply(ggml_backend_t backend, ggml_backend_buffer_type_t layout, ggml_type type, int64_t batch) {
    const ggml_init_params small = {ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true};
    const ggml_context_ptr weight_context(ggml_init(small));
    const ggml_context_ptr graph_context(ggml_init(small));

    ggml_tensor * weight = ggml_new_tensor_2d(weight_context.get(), type, WIDTH, ROWS);
    ggml_tensor * input = ggml_new_tensor_2d(graph_context.get(), GGML_TYPE_F32, WIDTH, batch);
    ggml_tensor * output = ggml_mul_mat(graph_context.get(), weight, input);

    const ggml_backend_buffer_ptr weight_buffer(
        ggml_backend_alloc_ctx_tensors_from_buft(weight_context.get(), layout)
    );
    if (!weight_buffer) {
        throw std::runtime_error("no memory for a small matrix");
    }
    if (!ggml_backend_supports_op(backend, output)) {
        return false;
    }
    const ggml_backend_buffer_ptr graph_buffer(ggml_backend_alloc_ctx_tensors(graph_context.get(), backend));
    if (!graph_buffer) {
        throw std::runtime_error("no memory for a small matrix");
    }

    const std::vector<uint8_t> bytes = quantised(type, waves(WIDTH * ROWS, 0.11F));
    const std::vector<float> values = waves(WIDTH * batch, 0.07F);
    ggml_backend_tensor_set(weight, bytes.data(), 0, bytes.size());
    ggml_backend_tensor_set(input, values.data(), 0, values.size() * sizeof(float));

    ggml_cgraph * graph = ggml_new_graph(graph_context.get());
    ggml_build_forward_expand(graph, output);
    if (ggml_backend_graph_compute(backend, graph) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error(std::string("cannot multiply ") + ggml_type_name(type));
    }
    std::vector<float> found(static_cast<size_t>(ROWS * batch));
    ggml_backend_tensor_get(output, found.data(), 0, found.size() * sizeof(float));

    const float error = largest_error(dequantised(type, bytes), values, found);
    if (!(error <= TOLERANCE)) {
        throw std::runtime_error(
            std::string(ggml_type_name(type)) + " in layout " + ggml_backend_buft_name(layout) + " is off by " +
            std::to_string(error)
        );
    }
    return true;
}

std::vector<ggml_backend_buffer_type_t> layouts_of(ggml_backend_dev_t device) {
    std::vector<ggml_backend_buffer_type_t> layouts = {ggml_backend_dev_buffer_type(device)};
    ggml_backend_reg_t registry = ggml_backend_dev_backend_reg(device);
    auto get_extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(registry, "ggml_backend_dev_get_extra_bufts")
    );
    if (get_extra != nullptr) {
        for (ggml_backend_buffer_type_t * extra = get_extra(device); extra != nullptr && *extra != nullptr;
             ++extra) {
            layouts.push_back(*extra);
        }
    }
    return layouts;
}

void test(ggml_backend_dev_t device) {
    const ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw std::runtime_error("it cannot be used");
    }
    int products = 0;
    for (ggml_backend_buffer_type_t layout : layouts_of(device)) {
        for (ggml_type type : TYPES) {
            for (int64_t batch : BATCHES) {
                products += multiply(backend.get(), layout, type, batch) ? 1 : 0;
            }
        }
    }
    if (products == 0) {
        throw std::runtime_error("it multiplies no matrix of a common type");
    }
}

void test_cpu() {
    ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) {
        throw std::runtime_error("the engine has no CPU device");
    }
    test(device);
}

void test_all(const char * name) {
    ggml_backend_reg_t registry = ggml_backend_reg_by_name(name);
    const size_t count = registry != nullptr ? ggml_backend_reg_dev_count(registry) : 0;
    if (count == 0) {
        throw std::runtime_error("it finds no GPU that it can use");
    }
    for (size_t i = 0; i < count; ++i) {
        ggml_backend_dev_t device = ggml_backend_reg_dev_get(registry, i);
        try {
            test(device);
        } catch (const std::exception & error) {
            throw std::runtime_error(
                std::string(ggml_backend_dev_name(device)) + " (" + ggml_backend_dev_description(device) +
                "): " + error.what()
            );
        }
    }
}

}  // namespace

int ggml_mesh_selftest(const char * registry, char * why, size_t why_size) {
    try {
        if (registry != nullptr) {
            test_all(registry);
        } else {
            test_cpu();
        }
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
    return 0;
}
