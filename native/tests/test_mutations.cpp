// One field of a good graph is changed: it is refused, or it computes without touching anything else. Under
// AddressSanitizer a kernel that leaves its memory ends the test, as does one that asserts.

#include "check.h"
#include "frames.h"
#include "host.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

using mesh::wire::tensor;

namespace {

constexpr size_t CHANGES_PER_EXAMPLE = 60;
constexpr size_t CHANGES_PER_RECORDING = 150;

// Buffers of a recorded session, without the session.
class memory {
  public:
    void add(uint32_t id, size_t size) {
        buffers_[id].reset(ggml_backend_alloc_buffer(host::cpu(), size));
        ggml_backend_buffer_clear(buffers_[id].get(), 0);
    }

    mesh::built_graph decode(const std::vector<tensor> & table) const {
        return mesh::decode(table, [this](uint32_t id, uint64_t offset, uint64_t size) {
            const auto found = buffers_.find(id);
            if (found == buffers_.end()) {
                throw std::invalid_argument("it does not exist");
            }
            ggml_backend_buffer_t buffer = found->second.get();
            const size_t room = ggml_backend_buffer_get_size(buffer);
            if (offset > room || size > room - offset) {
                throw std::invalid_argument("it lies outside");
            }
            auto * base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer));
            return mesh::location{buffer, base + offset, nullptr, false};
        });
    }

  private:
    std::map<uint32_t, ggml_backend_buffer_ptr> buffers_;
};

using decode = std::function<mesh::built_graph(const std::vector<tensor> &)>;

// True if it was computed.
bool survive(const decode & with, const std::vector<tensor> & table, int threads = 1) {
    mesh::built_graph graph;
    try {
        graph = with(table);
        mesh::run_checks(graph.checks);
    } catch (const std::invalid_argument &) {
        return false;
    }
    host::compute(graph.graph, threads);
    return true;
}

size_t survive_changes(const decode & with, const std::vector<tensor> & table, size_t changes, uint64_t seed) {
    session_bytes::dice random(seed);
    size_t accepted = 0;
    for (size_t i = 0; i < changes; ++i) {
        std::vector<tensor> changed = table;
        session_bytes::change_field(changed[random.below(changed.size())], table, random);
        accepted += survive(with, changed, i % 10 == 0 ? 2 : 1) ? 1 : 0;
    }
    return accepted;
}

std::vector<session_bytes::frame> recording(const std::filesystem::path & path) {
    std::ifstream file(path, std::ios::binary);
    const std::vector<uint8_t> bytes{std::istreambuf_iterator<char>(file), {}};
    CHECK(bytes.size() > 1);
    return session_bytes::parse(bytes.data() + 1, bytes.size() - 1);
}

memory memory_of(const std::vector<session_bytes::frame> & frames) {
    memory owned;
    for (const session_bytes::frame & each : frames) {
        if (each.is(mesh::wire::command::alloc)) {
            mesh::wire::alloc request{};
            std::memcpy(&request, each.payload.data(), sizeof request);
            owned.add(request.buffer_id, request.size);
        }
    }
    return owned;
}

}  // namespace

TEST("mutations: examples with one field changed are refused or computed, never a crash") {
    size_t accepted = 0;
    size_t seed = 0;
    for (const host::example & each : host::examples()) {
        const host::graph built(each, ggml_backend_get_default_buffer_type(host::cpu()));
        accepted += survive_changes(
            [&](const std::vector<tensor> & table) { return built.decode(table); }, built.table(),
            CHANGES_PER_EXAMPLE, ++seed
        );
    }
    const size_t tried = host::examples().size() * CHANGES_PER_EXAMPLE;
    std::printf("       %zu of %zu computed\n", accepted, tried);
    CHECK(accepted > tried / 50 && accepted < tried / 2);
}

TEST("mutations: recorded graphs with one field changed are refused or computed, never a crash") {
    size_t accepted = 0;
    size_t tried = 0;
    for (const auto & entry : std::filesystem::directory_iterator(MESH_CORPUS)) {
        const std::vector<session_bytes::frame> frames = recording(entry.path());
        const memory owned = memory_of(frames);
        const decode with = [&](const std::vector<tensor> & table) { return owned.decode(table); };
        for (const session_bytes::frame & each : frames) {
            if (!each.is(mesh::wire::command::graph)) {
                continue;
            }
            std::vector<tensor> table;
            for (size_t i = 0; i < session_bytes::tensor_count(each); ++i) {
                table.push_back(session_bytes::get_tensor(each, i));
            }
            // The graph as it was recorded has to pass, or the recordings are older than the protocol.
            if (!survive(with, table)) {
                check::fail(
                    __FILE__, __LINE__, entry.path().filename().string() + " no longer passes: record it anew"
                );
            }
            accepted += survive_changes(with, table, CHANGES_PER_RECORDING, ++tried);
        }
    }
    std::printf("       %zu of %zu computed\n", accepted, tried * CHANGES_PER_RECORDING);
    CHECK(tried > 10 && accepted > 0);
}

TEST("mutations: what says nothing about the result does not change it") {
    for (const host::example & each : host::examples()) {
        const host::graph here(each, ggml_backend_get_default_buffer_type(host::cpu()));
        const host::graph there(each, ggml_backend_get_default_buffer_type(host::cpu()));
        host::compute(here.get());
        auto table = there.table();
        for (tensor & entry : table) {
            entry.use_count += 5;
            entry.flags |= GGML_TENSOR_FLAG_OUTPUT;
            entry.reserved = 77;
        }
        const mesh::built_graph decoded = there.decode(table);
        host::compute(decoded.graph);
        CHECK(there.result() == here.result());
    }
}
