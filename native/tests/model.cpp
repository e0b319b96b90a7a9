#include "tests/model.h"

#include "ggml-cpp.h"
#include "gguf.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <unistd.h>

namespace model {

const std::vector<matrix> & matrices() {
    static const std::vector<matrix> all = {
        {"q4_0.weight", GGML_TYPE_Q4_0, {256, 64, 1}}, {"q4_k.weight", GGML_TYPE_Q4_K, {256, 64, 1}},
        {"q8_0.weight", GGML_TYPE_Q8_0, {256, 64, 1}}, {"f16.weight", GGML_TYPE_F16, {64, 32, 1}},
        {"f32.weight", GGML_TYPE_F32, {32, 16, 1}},    {"experts.weight", GGML_TYPE_Q4_0, {64, 16, 4}},
    };
    return all;
}

const matrix & matrix_named(const std::string & name) {
    const auto found =
        std::find_if(matrices().begin(), matrices().end(), [&](const matrix & each) { return each.name == name; });
    if (found == matrices().end()) {
        throw std::runtime_error("there is no " + name);
    }
    return *found;
}

ggml_tensor * new_tensor(ggml_context * context, const matrix & shape) {
    ggml_tensor * tensor = ggml_new_tensor_3d(context, shape.type, shape.ne[0], shape.ne[1], shape.ne[2]);
    ggml_set_name(tensor, shape.name);
    return tensor;
}

std::vector<uint8_t> bytes_of(const matrix & shape) {
    const int64_t rows = shape.ne[1] * shape.ne[2];
    std::vector<float> values(static_cast<size_t>(shape.ne[0] * rows));
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = std::sin(static_cast<float>(i) * 0.13F);
    }
    std::vector<uint8_t> bytes(ggml_row_size(shape.type, shape.ne[0]) * static_cast<size_t>(rows));
    ggml_quantize_chunk(shape.type, values.data(), bytes.data(), 0, rows, shape.ne[0], nullptr);
    return bytes;
}

void write(const std::string & path) {
    const ggml_context_ptr context(ggml_init({matrices().size() * ggml_tensor_overhead(), nullptr, true}));
    gguf_context * file = gguf_init_empty();
    std::vector<std::vector<uint8_t>> kept;
    for (const matrix & each : matrices()) {
        kept.push_back(bytes_of(each));
        gguf_add_tensor(file, new_tensor(context.get(), each));
        gguf_set_tensor_data(file, each.name, kept.back().data());
    }
    const bool written = gguf_write_to_file(file, path.c_str(), false);
    gguf_free(file);
    if (!written) {
        throw std::runtime_error("cannot write " + path);
    }
}

temporary_file::temporary_file() : path_("/tmp/mesh-test-XXXXXX") {
    const int fd = mkstemp(path_.data());
    if (fd < 0) {
        throw std::runtime_error("no temporary file");
    }
    close(fd);
}

temporary_file::~temporary_file() {
    unlink(path_.c_str());
}

}  // namespace model
