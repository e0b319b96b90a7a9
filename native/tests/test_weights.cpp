// Weights by reference: from the worker's own file, in the layouts that its device likes.

#include "ggml-mesh.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/session.h"
#include "worker/store.h"
#include "worker/weights.h"

#include <cmath>
#include <cstring>
#include <unistd.h>

using namespace session;

namespace {

constexpr uint64_t QUOTA = 8 << 20;

// A product or a lookup with one of the model's matrices.
struct use {
    const char * matrix;
    const char * how;
};

constexpr use USES[] = {
    {"q4_0.weight", "mul_mat"},  {"q4_k.weight", "mul_mat"},  {"q8_0.weight", "mul_mat"},
    {"f16.weight", "mul_mat"},   {"f32.weight", "mul_mat"},   {"experts.weight", "mul_mat_id"},
    {"q4_0.weight", "get_rows"}, {"q8_0.weight", "get_rows"},
};

ggml_tensor * apply(ggml_context * context, ggml_tensor * matrix, const std::string & how) {
    if (how == "get_rows") {
        return ggml_get_rows(context, matrix, ggml_new_tensor_1d(context, GGML_TYPE_I32, 5));
    }
    if (how == "mul_mat_id") {
        return ggml_mul_mat_id(
            context, matrix, ggml_new_tensor_3d(context, GGML_TYPE_F32, matrix->ne[0], 1, 3),
            ggml_new_tensor_2d(context, GGML_TYPE_I32, 2, 3)
        );
    }
    return ggml_mul_mat(context, matrix, ggml_new_tensor_2d(context, GGML_TYPE_F32, matrix->ne[0], 9));
}

void fill(ggml_context * context) {
    for (ggml_tensor * t = ggml_get_first_tensor(context); t != nullptr; t = ggml_get_next_tensor(context, t)) {
        std::vector<uint8_t> bytes(ggml_nbytes(t));
        for (size_t i = 0; i < bytes.size() / 4; ++i) {
            const float wave = std::cos(static_cast<float>(i) * 0.21F);
            const int32_t number = static_cast<int32_t>(i % static_cast<size_t>(t->ne[0]));
            std::memcpy(
                bytes.data() + 4 * i, t->type == GGML_TYPE_I32 ? static_cast<const void *>(&number) : &wave, 4
            );
        }
        if (t->op == GGML_OP_NONE) {
            ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
        }
    }
}

std::vector<float> result_on(ggml_backend_t backend, ggml_backend_buffer_type_t memory, const use & what) {
    const ggml_init_params small = {16 * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true};
    const ggml_context_ptr weights(ggml_init(small));
    const ggml_context_ptr rest(ggml_init(small));
    const model::matrix & shape = model::matrix_named(what.matrix);
    ggml_tensor * matrix = model::new_tensor(weights.get(), shape);
    const ggml_backend_buffer_ptr weight_buffer(ggml_backend_alloc_ctx_tensors_from_buft(weights.get(), memory));
    CHECK(weight_buffer != nullptr);
    const std::vector<uint8_t> bytes = model::bytes_of(shape);
    ggml_backend_tensor_set(matrix, bytes.data(), 0, bytes.size());
    ggml_tensor * output = apply(rest.get(), matrix, what.how);
    ggml_cgraph * graph = ggml_new_graph(rest.get());
    ggml_build_forward_expand(graph, output);
    const ggml_backend_buffer_ptr buffer(ggml_backend_alloc_ctx_tensors_from_buft(rest.get(), memory));
    ggml_backend_buffer_set_usage(buffer.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    fill(rest.get());
    CHECK(ggml_backend_graph_compute(backend, graph) == GGML_STATUS_SUCCESS);
    std::vector<float> found(static_cast<size_t>(ggml_nelements(output)));
    ggml_backend_tensor_get(output, found.data(), 0, ggml_nbytes(output));
    return found;
}

void expect_close(const std::vector<float> & found, const std::vector<float> & expected) {
    float largest = 0;
    float error = 0;
    CHECK_EQUAL(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i) {
        largest = std::max(largest, std::fabs(expected[i]));
        error = std::max(error, std::fabs(expected[i] - found[i]));
    }
    CHECK(largest > 0 && error <= 0.02F * largest);  // activations are rounded in other places by other layouts
}

void add_model(const worker & to, const std::string & path) {
    const char * paths[] = {path.c_str()};
    char why[256] = "";
    CHECK_EQUAL(ggml_mesh_worker_add_model(to.handle(), model::FINGERPRINT, paths, 1, why, sizeof why), 0);
}

void multiply_like_others(bool in_main_memory) {
    const model::temporary_file file;
    model::write(file.path());
    for (const use & each : USES) {
        check::isolated([&] {
            worker remote(QUOTA);
            if (in_main_memory) {
                ggml_mesh_worker_use_main_memory(
                    remote.handle(), [](const char *) { return 1; }, -1, QUOTA
                );
            }
            add_model(remote, file.path());
            const std::string name =
                std::string("weights ") + (in_main_memory ? "near " : "") + each.matrix + " " + each.how;
            const relay between(remote.connect(), cut::never, 0, name);
            const char * paths[] = {file.path().c_str()};
            char why[256] = "";
            CHECK_EQUAL(ggml_mesh_use_model(model::FINGERPRINT, paths, 1, 0, why, sizeof why), 0);
            const device on(between.client_fd());
            const ggml_backend_ptr backend(ggml_backend_dev_init(on.handle, nullptr));
            const std::vector<float> there =
                result_on(backend.get(), ggml_backend_dev_buffer_type(on.handle), each);
            const std::vector<float> here =
                result_on(host::cpu(), ggml_backend_get_default_buffer_type(host::cpu()), each);
            expect_close(there, here);
            CHECK_EQUAL(on.failure(), "");
            return 0;
        });
    }
}

}  // namespace

TEST("weights: they are attached, not sent, and multiply like others") {
    multiply_like_others(false);
}

TEST("weights: in main memory, beside those of the device, they multiply like others") {
    multiply_like_others(true);
}

TEST("weights: a file that is cut short, or none, is refused by name") {
    const model::temporary_file file;
    model::write(file.path());
    worker remote(QUOTA);
    const char * missing[] = {"/nowhere/model.gguf"};
    char why[256] = "";
    CHECK_EQUAL(ggml_mesh_worker_add_model(remote.handle(), "x", missing, 1, why, sizeof why), 1);
    CHECK_CONTAINS(std::string(why), "/nowhere/model.gguf");
    CHECK(truncate(file.path().c_str(), 4096) == 0);
    const char * cut_short[] = {file.path().c_str()};
    CHECK_EQUAL(ggml_mesh_worker_add_model(remote.handle(), "x", cut_short, 1, why, sizeof why), 1);
    CHECK_CONTAINS(std::string(why), file.path());
}

namespace {

std::string attach_all(mesh::store & from, const std::string & fingerprint, mesh::weight_lease & lease) {
    std::vector<mesh::wire::attach_entry> entries;
    uint64_t offset = 0;
    const ggml_context_ptr context(ggml_init({64 * ggml_tensor_overhead(), nullptr, true}));
    for (const model::matrix & shape : model::matrices()) {
        const ggml_tensor * tensor = model::new_tensor(context.get(), shape);
        mesh::wire::attach_entry entry{};
        std::snprintf(entry.name, sizeof entry.name, "%s", shape.name);
        entry.offset = offset;
        entry.size = ggml_nbytes(tensor);
        entry.elements = ggml_nelements(tensor);
        entry.type = static_cast<uint32_t>(shape.type);
        offset += entry.size;
        entries.push_back(entry);
    }
    std::map<uint64_t, mesh::weight *> by_offset;
    try {
        lease = from.attach(fingerprint, entries, by_offset);
    } catch (const std::runtime_error & refusal) {
        return refusal.what();
    }
    CHECK_EQUAL(by_offset.size(), entries.size());
    return {};
}

uint64_t model_bytes() {
    uint64_t sum = 0;
    for (const model::matrix & shape : model::matrices()) {
        sum += model::bytes_of(shape).size();
    }
    return sum;
}

}  // namespace

TEST("store: weights stay when nobody holds them, and go when there is no other room") {
    const model::temporary_file file;
    model::write(file.path());
    const uint64_t size = model_bytes();
    mesh::store memory(ggml_backend_get_device(host::cpu()), 2 * size + 1000);
    for (const char * name : {"a", "b", "c"}) {
        memory.add_model(name, {file.path()});
    }
    mesh::weight_lease a;
    CHECK_EQUAL(attach_all(memory, "a", a), "");
    CHECK_EQUAL(memory.resident(), size);
    {
        mesh::weight_lease b;
        CHECK_EQUAL(attach_all(memory, "b", b), "");
        CHECK_EQUAL(memory.left(), 1000U);
        mesh::weight_lease c;
        CHECK_CONTAINS(attach_all(memory, "c", c), "no room for");
        CHECK(!memory.take(1001));
    }
    CHECK_EQUAL(memory.resident(), 2 * size);  // `b` is idle, and still there
    CHECK_EQUAL(memory.left(), size + 1000);
    mesh::weight_lease c;
    CHECK_EQUAL(attach_all(memory, "c", c), "");  // `b` goes, `a` is held
    CHECK_EQUAL(memory.resident(), 2 * size);
    CHECK_EQUAL(memory.unload("a"), 0U);
    a = {};
    CHECK(memory.take(size + 1000));  // `a` goes for a session's own memory
    CHECK_EQUAL(memory.resident(), size);
    memory.give_back(size + 1000);
    c = {};
    CHECK_EQUAL(memory.unload("c"), size);
    CHECK_EQUAL(memory.resident(), 0U);
    CHECK_EQUAL(memory.left(), memory.quota());
    CHECK(!memory.take(UINT64_MAX));
}

TEST("store: the longest idle weights go first") {
    const model::temporary_file file;
    model::write(file.path());
    const uint64_t size = model_bytes();
    mesh::store memory(ggml_backend_get_device(host::cpu()), 2 * size);
    for (const char * name : {"a", "b", "c"}) {
        memory.add_model(name, {file.path()});
    }
    for (const char * name : {"a", "b", "a"}) {
        mesh::weight_lease lease;
        CHECK_EQUAL(attach_all(memory, name, lease), "");
    }
    mesh::weight_lease c;
    CHECK_EQUAL(attach_all(memory, "c", c), "");
    CHECK_EQUAL(memory.unload("a"), size);
    CHECK_EQUAL(memory.unload("b"), 0U);
}

TEST("weights: what is settled ahead multiplies like the rest, and is there again after it was dropped") {
    const model::temporary_file file;
    model::write(file.path());
    mesh::model_weights weights(ggml_backend_get_device(host::cpu()), {file.path()});
    for (mesh::weight * one : weights.all()) {
        one->settle();
        const std::vector<uint8_t> before(
            static_cast<const uint8_t *>(one->plain()->data),
            static_cast<const uint8_t *>(one->plain()->data) + one->size()
        );
        one->drop();
        CHECK(std::memcmp(before.data(), one->plain()->data, one->size()) == 0);
        one->settle();
    }
}
