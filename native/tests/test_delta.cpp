// Graphs and inputs as differences.

#include "ggml-mesh.h"
#include "rules/supports.h"
#include "rules/validate.h"
#include "tests/check.h"
#include "tests/frames.h"
#include "tests/host.h"
#include "tests/session.h"
#include "wire/delta.h"
#include "wire/graph.h"

#include <cstring>

TEST("delta: any two blocks of one size give the second back") {
    session_bytes::dice random(7);
    for (int round = 0; round < 2000; ++round) {
        std::vector<uint8_t> before(random.below(300));
        for (uint8_t & byte : before) {
            byte = static_cast<uint8_t>(random.below(3));
        }
        std::vector<uint8_t> now = before;
        for (size_t i = random.below(20); i > 0 && !now.empty(); --i) {
            now[random.below(now.size())] = static_cast<uint8_t>(random.next());
        }
        std::vector<uint8_t> changes;
        if (mesh::encode_delta(before.data(), now.data(), now.size(), changes)) {
            CHECK(changes.empty() || changes.size() < now.size());
            mesh::decode_delta(changes.data(), changes.size(), before.data(), before.size());
            CHECK(before == now);
        } else {
            CHECK(before != now || now.empty());
        }
    }
}

TEST("delta: what does not fit is refused") {
    uint8_t data[16] = {};
    const mesh::wire::change beyond = {12, 5};
    std::vector<uint8_t> bytes;
    mesh::append(bytes, &beyond, sizeof beyond);
    bytes.resize(bytes.size() + 5);
    CHECK_CONTAINS(
        check::thrown([&] { mesh::decode_delta(bytes.data(), bytes.size(), data, sizeof data); }), "outside"
    );
    CHECK_CONTAINS(check::thrown([&] { mesh::decode_delta(bytes.data(), 3, data, sizeof data); }), "cut short");
}

TEST("delta: a graph that resembles one before travels as what differs") {
    session::worker remote(64 << 20);
    const session::relay between(remote.connect(), session::cut::never, 0);
    const session::device on(between.client_fd());
    const ggml_backend_ptr backend(ggml_backend_dev_init(on.handle, nullptr));
    ggml_mesh_stage before{};
    ggml_mesh_stage after{};
    uint64_t whole = 0;
    std::vector<std::unique_ptr<host::graph>> graphs;
    for (int round = 0; round < 3; ++round) {
        // The same op in other memory, as when a cache grows.
        graphs.push_back(
            std::make_unique<host::graph>(host::example_named("rope"), ggml_backend_dev_buffer_type(on.handle))
        );
        ggml_mesh_stage_counters(on.index, &before);
        CHECK(ggml_backend_graph_compute(backend.get(), graphs.back()->get()) == GGML_STATUS_SUCCESS);
        CHECK(graphs.back()->result() == graphs.front()->result());
        ggml_mesh_stage_counters(on.index, &after);
        const uint64_t sent = after.sent_bytes - before.sent_bytes;
        CHECK(round == 0 || sent + 2 * sizeof(mesh::wire::tensor) < whole);
        whole = round == 0 ? sent : whole;
    }
    CHECK_EQUAL(on.failure(), "");
    CHECK_EQUAL(after.runs, 3U);
    CHECK_EQUAL(after.weight_bytes, 0U);
    CHECK(after.compute_ns > 0 && after.in_flight == 0);
}

TEST("supports: a device answers for every example as if it were asked directly") {
    ggml_backend_dev_t cpu = ggml_backend_get_device(host::cpu());
    for (const host::example & each : host::examples()) {
        const host::graph graph(each, ggml_backend_get_default_buffer_type(host::cpu()));
        for (int i = 0; i < ggml_graph_n_nodes(graph.get()); ++i) {
            const ggml_tensor * node = ggml_graph_node(graph.get(), i);
            if (mesh::op_only_renames(node->op)) {
                continue;  // never asked for
            }
            const mesh::op_question question = mesh::question_about(node);
            CHECK_EQUAL(
                each.name + std::to_string(mesh::device_computes(cpu, question)),
                each.name + std::to_string(ggml_backend_dev_supports_op(cpu, node))
            );
            mesh::support_cache cache;
            CHECK(cache.find(question) == nullptr);
            cache.add(question, true);
            CHECK(cache.find(question) != nullptr && cache.find(question)->value_or(false));
        }
    }
}
