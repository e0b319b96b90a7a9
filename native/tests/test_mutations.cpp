// One field of a good graph is changed: it is refused, or it computes without touching anything else. Under
// AddressSanitizer a kernel that leaves its memory ends the test, as does one that asserts.

#include "rules/validate.h"
#include "tests/check.h"
#include "tests/frames.h"
#include "tests/host.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

using mesh::wire::tensor;

namespace {

// A few seconds by default; MESH_ROUNDS=100 makes a long run of it.
size_t rounds() {
    const char * text = std::getenv("MESH_ROUNDS");
    return text != nullptr ? std::strtoul(text, nullptr, 10) : 1;
}

// Now and then two, for what goes wrong between them. Not under ThreadSanitizer: rows that are written twice
// race, as numbers that come twice demand, and spoil nothing but themselves.
int threads_for(size_t round) {
    return MESH_UNDER_TSAN == 0 && round % 10 == 0 ? 2 : 1;
}

size_t changes_per_example() {
    return 60 * rounds();
}

size_t changes_per_recording() {
    return 100 * rounds();
}

size_t sizes_per_example() {
    return 60 * rounds();
}

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
    try {
        host::run(with(table), threads);
        return true;
    } catch (const std::invalid_argument &) {
        return false;
    }
}

size_t survive_changes(const decode & with, const std::vector<tensor> & table, size_t changes, uint64_t seed) {
    session_bytes::dice random(seed);
    size_t accepted = 0;
    for (size_t i = 0; i < changes; ++i) {
        std::vector<tensor> changed = table;
        session_bytes::change_field(changed[random.below(changed.size())], table, random);
        accepted += survive(with, changed, threads_for(i)) ? 1 : 0;
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
            changes_per_example(), ++seed
        );
    }
    const size_t tried = host::examples().size() * changes_per_example();
    std::printf("       %zu of %zu computed\n", accepted, tried);
    CHECK(accepted > tried / 50 && accepted < tried / 2);
}

TEST("mutations: recorded graphs with one field changed are refused or computed, never a crash") {
    size_t accepted = 0;
    size_t tried = 0;
    for (const auto & entry : std::filesystem::directory_iterator(MESH_CORPUS)) {
        const std::vector<session_bytes::frame> frames = recording(entry.path());
        for (const session_bytes::frame & each : frames) {
            if (!each.is(mesh::wire::command::graph)) {
                continue;
            }
            const memory owned = memory_of(frames);
            const decode with = [&](const std::vector<tensor> & table) { return owned.decode(table); };
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
            accepted += survive_changes(with, table, changes_per_recording(), ++tried);
        }
    }
    std::printf("       %zu of %zu computed\n", accepted, tried * changes_per_recording());
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

// --- other sizes ---

namespace {

constexpr int64_t SIZES[] = {1,  2,  3,  5,  7,  8,  9,  15,  16,  17,  24,  31,  32,
                             33, 48, 63, 64, 65, 72, 96, 100, 127, 128, 130, 256, 512};

constexpr int64_t MAX_ELEMENTS = 1 << 18;

void pack(tensor & t) {
    const auto type = static_cast<ggml_type>(t.type);
    t.nb[0] = ggml_type_size(type);
    t.nb[1] = ggml_row_size(type, t.ne[0]);
    t.nb[2] = t.nb[1] * static_cast<uint64_t>(t.ne[1]);
    t.nb[3] = t.nb[2] * static_cast<uint64_t>(t.ne[2]);
}

// The strides that ggml would give a view of this kind.
void follow(tensor & view, const tensor & parent, const tensor & source) {
    if (view.op == GGML_OP_PERMUTE || view.op == GGML_OP_TRANSPOSE) {
        const int32_t swapped[] = {1, 0, 2, 3};
        for (size_t i = 0; i < 4; ++i) {
            const int32_t axis = view.op == GGML_OP_PERMUTE ? view.op_params[i] : swapped[i];
            view.ne[axis] = source.ne[i];
            view.nb[axis] = source.nb[i];
        }
    } else if (view.op == GGML_OP_VIEW) {
        std::copy(std::begin(parent.nb), std::end(parent.nb), std::begin(view.nb));
    } else {
        pack(view);
    }
    view.buffer_id = parent.buffer_id;
    view.offset = view.view_offset;
}

// Every length `from` becomes `to`; each tensor gets memory of its own, so that it cannot overflow unnoticed.
bool resize(std::vector<tensor> & table, int64_t from, int64_t to) {
    for (size_t i = 0; i < table.size(); ++i) {
        tensor & t = table[i];
        std::replace(std::begin(t.ne), std::end(t.ne), from, to);
        if (t.ne[0] % ggml_blck_size(static_cast<ggml_type>(t.type)) != 0 ||
            t.ne[0] * t.ne[1] * t.ne[2] * t.ne[3] > MAX_ELEMENTS) {
            return false;
        }
        if (t.view_of != 0) {
            follow(t, table[t.view_of - 1], t.sources[0] != 0 ? table[t.sources[0] - 1] : t);
        } else {
            pack(t);
            t.buffer_id = static_cast<uint32_t>(i) + 1;
            t.offset = 0;
        }
    }
    return true;
}

memory memory_for(const std::vector<tensor> & table) {
    memory owned;
    for (const tensor & t : table) {
        if (t.view_of == 0) {
            owned.add(t.buffer_id, mesh::extent(t));
        }
    }
    return owned;
}

// Row numbers count along their rows, so that those of experts differ.
void count_rows(const mesh::built_graph & graph) {
    for (const mesh::index_check & check : graph.checks) {
        const ggml_tensor & t = *check.tensor;
        for (int64_t i = 0; check.before == 0 && ggml_is_contiguous(&t) && i < ggml_nelements(&t); ++i) {
            const int64_t number = i % t.ne[0];
            std::memcpy(
                static_cast<uint8_t *>(t.data) + static_cast<size_t>(i) * t.nb[0], &number, ggml_type_size(t.type)
            );
        }
    }
}

}  // namespace

TEST("mutations: examples in other sizes are refused or computed, each tensor within its own memory") {
    size_t accepted = 0;
    size_t tried = 0;
    session_bytes::dice random(7);
    for (const host::example & each : host::examples()) {
        const auto table = host::graph(each, ggml_backend_get_default_buffer_type(host::cpu())).table();
        for (size_t i = 0; i < sizes_per_example(); ++i) {
            std::vector<tensor> changed = table;
            const tensor & any = table[random.below(table.size())];
            if (!resize(changed, any.ne[random.below(4)], SIZES[random.below(std::size(SIZES))])) {
                continue;
            }
            const memory owned = memory_for(changed);
            ++tried;
            accepted += survive(
                            [&](const std::vector<tensor> & t) {
                                mesh::built_graph graph = owned.decode(t);
                                count_rows(graph);
                                return graph;
                            },
                            changed, threads_for(i)
                        )
                            ? 1
                            : 0;
        }
    }
    std::printf("       %zu of %zu computed\n", accepted, tried);
    CHECK(accepted > tried / 10);
}
