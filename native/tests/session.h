#pragma once

// A client and a worker in one process, with something between them that can cut the link.

#include "tests/host.h"
#include "wire/link.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <thread>

namespace session {

std::pair<int, int> sockets();

// A worker on this machine's CPU, or on a device of a test, with as many sessions as are asked for.
class worker {
  public:
    explicit worker(uint64_t quota, int threads = 2);
    worker(ggml_backend_dev_t device, uint64_t quota);
    ~worker();

    // The client's end of a new session.
    int connect();

    // Waits until all sessions are over.
    void join();

    void * handle() const {
        return handle_;
    }

  private:
    void * handle_ = nullptr;
    std::vector<std::thread> threads_;
};

enum class cut { never, before, after };

// Passes frames on, until it has seen `count` of the client's: that one is lost, or its answer is. Where the
// environment names a folder (MESH_RECORD), what the client sent is written there under `name`, as the fuzzer
// reads it (../fuzz/session.cpp).
class relay {
  public:
    relay(int worker_fd, cut when, size_t count, const std::string & name = {});
    ~relay();

    int client_fd() const {
        return client_fd_;
    }

    size_t seen() const {
        return seen_;
    }

  private:
    cut when_;
    size_t count_;
    std::atomic<size_t> seen_{0};
    int client_fd_ = -1;
    std::unique_ptr<mesh::link> client_;
    std::unique_ptr<mesh::link> worker_;
    std::FILE * record_ = nullptr;
    std::thread up_;
    std::thread down_;

    void pass_commands() noexcept;
    void pass_answers() noexcept;
    void record(const mesh::frame & message);
};

// A device for the other end of `fd`; its name, which no other has had. Throws with the reason.
struct device {
    int index = -1;
    ggml_backend_dev_t handle = nullptr;

    explicit device(int fd);

    std::string failure() const;
};

// Two workers with a link between them, and their client's device for each: activations go straight from the first to
// the second.
struct linked_workers {
    worker first;
    worker second;
    std::optional<relay> to_first;
    std::optional<relay> to_second;
    std::optional<device> one;
    std::optional<device> two;

    linked_workers(ggml_backend_dev_t first_device, ggml_backend_dev_t second_device, uint64_t quota);
};

// Allocates, sets, computes and reads an example on a device. Throws where any of it fails.
std::vector<uint8_t> exercise(const device & on, const host::example & what);

}  // namespace session
