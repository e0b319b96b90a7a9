#pragma once

// A worker that says what no worker of ours would. It computes nothing.

#include "rules/supports.h"
#include "tests/check.h"
#include "tests/session.h"
#include "wire/link.h"

#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <unistd.h>

namespace session {

// Speaks the protocol, as a GPU would, but for the commands that its `lie` takes over.
class lying_worker {
  public:
    using answer = mesh::wire::answer;
    using command = mesh::wire::command;
    // True if it has answered the command itself, or will not.
    using lie = std::function<bool(lying_worker &, const mesh::frame &)>;

    static constexpr uint64_t MEMORY = 1 << 30;

    explicit lying_worker(lie about) : lie_(std::move(about)) {
        const auto [mine, theirs] = sockets();
        fd_ = mine;
        client_fd_ = theirs;
        link_ = std::make_unique<mesh::link>(mine, "lying_worker");
        thread_ = std::thread([this] { check::thrown([this] { serve(); }); });
    }

    ~lying_worker() {
        link_->shut();
        thread_.join();
    }

    lying_worker(const lying_worker &) = delete;
    lying_worker & operator=(const lying_worker &) = delete;

    int client_fd() const {
        return client_fd_;
    }

    mesh::link & wire() {
        return *link_;
    }

    void say(answer kind, uint32_t ticket, const void * data, size_t size) {
        link_->send(static_cast<uint8_t>(kind), ticket, {{data, size}});
    }

    template <typename T> void say(answer kind, uint32_t ticket, const T & value) {
        say(kind, ticket, &value, sizeof value);
    }

    void say_error(const std::string & text) {
        say(answer::error, 0, text.data(), text.size());
    }

    // Bytes that are no frame.
    void write_raw(const uint8_t * data, size_t size) const {
        CHECK(::write(fd_, data, size) == static_cast<ssize_t>(size));
    }

    // As if it had been honest.
    void answer_truly(const mesh::frame & message) {
        const uint32_t ticket = message.head.ticket;
        switch (static_cast<command>(message.head.kind)) {
        case command::hello:
            return say(answer::hello, ticket, facts_for(message));
        case command::supports:
            return say(answer::supports, ticket, uint32_t{1});
        case command::size:
            return say(answer::size, ticket, true_size(message));
        case command::run:
            return say(answer::done, ticket, mesh::wire::telemetry{});
        case command::reserve:
            return say(answer::reserve, ticket, payload<mesh::wire::reserve>(message).most);
        case command::get: {
            const std::vector<uint8_t> zeros(payload<mesh::wire::span>(message).size);
            return say(answer::data, ticket, zeros.data(), zeros.size());
        }
        default:
            return;
        }
    }

    static mesh::wire::hello_answer facts_for(const mesh::frame & hello) {
        mesh::wire::hello_answer facts{};
        facts.self = payload<mesh::wire::hello>(hello);
        facts.device_type = GGML_BACKEND_DEVICE_TYPE_GPU;
        facts.grant_bytes = facts.total_bytes = MEMORY;
        facts.alignment = 64;
        return facts;
    }

    static uint64_t true_size(const mesh::frame & message) {
        std::vector<mesh::wire::tensor> table(message.payload.size() / sizeof(mesh::wire::tensor));
        std::memcpy(table.data(), message.payload.data(), message.payload.size());
        return mesh::device_size(ggml_backend_get_device(host::cpu()), table);
    }

    template <typename T> static T payload(const mesh::frame & message) {
        T value;
        CHECK(message.payload.size() >= sizeof value);
        std::memcpy(&value, message.payload.data(), sizeof value);
        return value;
    }

  private:
    lie lie_;
    int fd_ = -1;
    int client_fd_ = -1;
    std::unique_ptr<mesh::link> link_;
    std::thread thread_;

    void serve() {
        for (;;) {
            const mesh::frame message = link_->receive_frame();
            if (!lie_(*this, message)) {
                answer_truly(message);
            }
        }
    }
};

}  // namespace session
