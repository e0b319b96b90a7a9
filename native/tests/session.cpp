#include "tests/session.h"

#include "ggml-mesh.h"
#include "tests/check.h"
#include "worker/worker.h"

#include <array>
#include <cstdlib>
#include <stdexcept>
#include <sys/socket.h>
#include <unistd.h>

namespace session {

namespace {

constexpr size_t WHY_BYTES = 512;

}  // namespace

std::pair<int, int> sockets() {
    std::array<int, 2> fds{};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) == 0);
    return {fds[0], fds[1]};
}

// --- worker ---

worker::worker(uint64_t quota, int threads) {
    char why[WHY_BYTES] = "";
    handle_ = ggml_mesh_worker_new("CPU", threads, quota, why, sizeof why);
    if (handle_ == nullptr) {
        throw std::runtime_error(why);
    }
}

worker::worker(ggml_backend_dev_t device, uint64_t quota) : handle_(new mesh::worker(device, 1, quota)) {}

worker::~worker() {
    join();
    ggml_mesh_worker_free(handle_);
}

int worker::connect() {
    const auto [ours, theirs] = sockets();
    threads_.emplace_back([this, fd = theirs] {
        char why[WHY_BYTES] = "";
        ggml_mesh_worker_serve(handle_, fd, why, sizeof why);
    });
    return ours;
}

void worker::join() {
    for (std::thread & thread : threads_) {
        thread.join();
    }
    threads_.clear();
}

// --- relay ---

relay::relay(int worker_fd, cut when, size_t count, const std::string & name) : when_(when), count_(count) {
    const auto [outer, inner] = sockets();
    client_fd_ = outer;
    client_ = std::make_unique<mesh::link>(inner, "client");
    worker_ = std::make_unique<mesh::link>(worker_fd, "worker");
    const char * folder = std::getenv("MESH_RECORD");
    if (folder != nullptr && !name.empty()) {
        record_ = std::fopen((std::string(folder) + "/" + name).c_str(), "wb");
        CHECK(record_ != nullptr);
        std::fputc(0, record_);  // the fuzzer's options: the recording greets by itself
    }
    up_ = std::thread([this] { pass_commands(); });
    down_ = std::thread([this] { pass_answers(); });
}

relay::~relay() {
    client_->shut();
    worker_->shut();
    up_.join();
    down_.join();
    if (record_ != nullptr) {
        std::fclose(record_);
    }
}

void relay::record(const mesh::frame & message) {
    if (record_ != nullptr) {
        std::fwrite(&message.head, sizeof message.head, 1, record_);
        std::fwrite(message.payload.data(), 1, message.payload.size(), record_);
    }
}

void relay::pass_commands() noexcept {
    try {
        for (;;) {
            const mesh::frame message = client_->receive_frame();
            const bool last = seen_++ == count_ && when_ != cut::never;
            if (last && when_ == cut::after) {
                client_->shut();  // before its answer can arrive
            }
            if (!last || when_ == cut::after) {
                record(message);
                worker_->send(
                    message.head.kind, message.head.ticket, {{message.payload.data(), message.payload.size()}}
                );
            }
            if (last) {
                break;
            }
        }
    } catch (const std::exception &) {
        // One of them has left.
    }
    client_->shut();
    worker_->shut();
}

void relay::pass_answers() noexcept {
    try {
        for (;;) {
            const mesh::frame message = worker_->receive_frame();
            client_->send(
                message.head.kind, message.head.ticket, {{message.payload.data(), message.payload.size()}}
            );
        }
    } catch (const std::exception &) {
        client_->shut();
        worker_->shut();
    }
}

// --- client ---

device::device(int fd) {
    static std::atomic<int> number{0};
    const std::string name = "TEST" + std::to_string(number++);
    char why[WHY_BYTES] = "";
    ggml_mesh_loaded();  // failed reads are thrown
    const char * names[] = {name.c_str()};
    if (ggml_mesh_connect(&fd, names, 1, why, sizeof why) != 0) {
        throw std::runtime_error(why);
    }
    static std::atomic<int> connected{0};
    index = connected++;
    handle = ggml_backend_dev_by_name(name.c_str());
}

std::string device::failure() const {
    char why[WHY_BYTES] = "";
    ggml_mesh_failure(index, why, sizeof why);
    return why;
}

linked_workers::linked_workers(ggml_backend_dev_t first_device, ggml_backend_dev_t second_device, uint64_t quota)
    : first(first_device, quota), second(second_device, quota) {
    const auto pair = sockets();
    CHECK(ggml_mesh_worker_add_peer(first.handle(), 3, pair.first) == 0);
    CHECK(ggml_mesh_worker_add_peer(second.handle(), 4, pair.second) == 0);
    to_first.emplace(first.connect(), cut::never, 0);
    to_second.emplace(second.connect(), cut::never, 0);
    one.emplace(to_first->client_fd());
    two.emplace(to_second->client_fd());
    ggml_mesh_link(one->index, two->index, 3);
}

std::vector<uint8_t> exercise(const device & on, const host::example & what) {
    const host::graph graph(what, ggml_backend_dev_buffer_type(on.handle));
    const ggml_backend_ptr backend(ggml_backend_dev_init(on.handle, nullptr));
    if (ggml_backend_graph_compute(backend.get(), graph.get()) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("compute failed");
    }
    return graph.result();
}

}  // namespace session
