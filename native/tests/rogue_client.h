#pragma once

// One who speaks the protocol, and says what no client of ours would.

#include "ggml-mesh.h"
#include "tests/check.h"
#include "tests/session.h"
#include "wire/link.h"

#include <cstring>

namespace session {

// What the worker says to bytes that no client of ours would send.
class rogue_client {
  public:
    explicit rogue_client(worker & to, mesh::wire::session_id id = {}) : link_(to.connect(), "worker"), id_(id) {}

    void send(mesh::wire::command kind, std::initializer_list<mesh::bytes_view> parts) {
        link_.send(static_cast<uint8_t>(kind), ++ticket_, parts);
    }

    // What the worker grants.
    uint64_t greet() {
        mesh::wire::hello self = hello();
        self.session = id_;
        send(mesh::wire::command::hello, {{&self, sizeof self}});
        const mesh::frame answer = link_.receive_frame();
        mesh::wire::hello_answer facts{};
        CHECK(
            answer.head.kind == static_cast<uint8_t>(mesh::wire::answer::hello) &&
            answer.payload.size() == sizeof facts
        );
        std::memcpy(&facts, answer.payload.data(), sizeof facts);
        return facts.grant_bytes;
    }

    bool is_welcome() {
        const mesh::wire::hello self = hello();
        bool welcome = false;
        check::thrown([&] {
            send(mesh::wire::command::hello, {{&self, sizeof self}});
            welcome = link_.receive_frame().head.kind == static_cast<uint8_t>(mesh::wire::answer::hello);
        });
        return welcome;
    }

    bool alloc(uint32_t id, uint64_t size) {
        const mesh::wire::alloc request = {id, 0, size};
        send(mesh::wire::command::alloc, {{&request, sizeof request}});
        // Nothing is said to it, so something is asked that needs it.
        const mesh::wire::span nothing = {id, 0, 0, 0};
        send(mesh::wire::command::get, {{&nothing, sizeof nothing}});
        return link_.receive_frame().head.kind == static_cast<uint8_t>(mesh::wire::answer::data);
    }

    // What the worker sets aside.
    uint64_t reserve(uint32_t id, uint64_t least, uint64_t most) {
        const mesh::wire::reserve request = {id, 0, least, most};
        send(mesh::wire::command::reserve, {{&request, sizeof request}});
        const mesh::frame answer = link_.receive_frame();
        uint64_t granted = 0;
        CHECK(answer.head.kind == static_cast<uint8_t>(mesh::wire::answer::reserve));
        CHECK(answer.payload.size() == sizeof granted);
        std::memcpy(&granted, answer.payload.data(), sizeof granted);
        return granted;
    }

    std::vector<uint8_t> get(const mesh::wire::span & where) {
        send(mesh::wire::command::get, {{&where, sizeof where}});
        return link_.receive_frame().payload;
    }

    void free(uint32_t id) {
        send(mesh::wire::command::free, {{&id, sizeof id}});
    }

    std::string complaint() {
        for (;;) {
            const mesh::frame answer = link_.receive_frame();
            if (answer.head.kind == static_cast<uint8_t>(mesh::wire::answer::error)) {
                return {answer.payload.begin(), answer.payload.end()};
            }
        }
    }

    void send_graph(const std::vector<mesh::wire::tensor> & table) {
        const mesh::wire::graph_head head = {{}, {}, static_cast<uint32_t>(table.size()), 0};
        send(mesh::wire::command::graph, {{&head, sizeof head}, {table.data(), table.size() * sizeof table[0]}});
    }

    // Of that graph.
    void send_run() {
        const mesh::wire::graph_key key = {};
        send(mesh::wire::command::run, {{&key, sizeof key}});
    }

    // Of a RUN.
    std::string outcome() {
        const mesh::frame answer = link_.receive_frame();
        const bool done = answer.head.kind == static_cast<uint8_t>(mesh::wire::answer::done);
        return done ? "done" : std::string(answer.payload.begin(), answer.payload.end());
    }

    static mesh::wire::hello hello() {
        mesh::wire::hello self{};
        self.magic = mesh::wire::MAGIC;
        self.version = mesh::wire::VERSION;
        std::strncpy(self.engine, ggml_mesh_engine_version(), sizeof self.engine - 1);
        self.op_count = GGML_OP_COUNT;
        self.type_count = GGML_TYPE_COUNT;
        self.tensor_size = sizeof(ggml_tensor);
        return self;
    }

  private:
    mesh::link link_;
    mesh::wire::session_id id_;
    uint32_t ticket_ = 0;
};

}  // namespace session
