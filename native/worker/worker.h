#pragma once

// A ggml device of this machine that is lent to clients at the other end of links.

#include "wire/graph.h"
#include "worker/peer_link.h"
#include "worker/pushed_activations.h"
#include "worker/spare_buffers.h"
#include "worker/store.h"
#include "worker/turnstile.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace mesh {

// A device ready to compute, with so many threads where it has any.
ggml_backend_ptr open_device(ggml_backend_dev_t device, int threads);

ggml_backend_dev_t cpu_device();

// An input of a graph, and where it goes.
struct placed_input {
    location to;
    std::vector<uint8_t> bytes;
};

std::vector<fresh_bytes> fresh_from(const std::vector<placed_input> & inputs);

class worker {
  public:
    worker(ggml_backend_dev_t device, int threads, uint64_t quota)
        : device_(device), threads_(threads), memory_(device, quota) {}

    ~worker();

    worker(const worker &) = delete;
    worker & operator=(const worker &) = delete;

    ggml_backend_dev_t device() const {
        return device_;
    }

    store & memory() {
        return memory_;
    }

    // A session takes a seat before it costs anything else. False if there is none left.
    bool take_seat();
    void leave_seat();

    // Computes one graph at a time, in the order in which sessions ask: those that computed together would share the
    // cores and both be slower, and each would keep scratch memory of its own. Inputs are written first, and checked. Ends early once `is_over` says so.
    // `behind`: what the device is to do behind the graph, before anybody waits for it.
    void compute(
        built_graph & graph, const std::vector<placed_input> & inputs, const std::function<bool()> & is_over,
        const std::function<void(ggml_backend_t)> & behind
    );

    // A link to another worker, in both directions, until one of them closes it.
    void add_peer(uint32_t number, int fd);
    void drop_peer(uint32_t number);
    std::shared_ptr<peer_link> find_peer(uint32_t number);

    // Takes in what peers have sent so far, in the thread that waits for it and would have to be woken.
    void take_pushes();

    // For tests: between runs compute buffers are filled with what no graph may read.
    void poison() {
        poisons_ = true;
    }

    bool poisons() const {
        return poisons_;
    }

    // For tests: this op is unknown here.
    void lack(uint32_t op) {
        lacking_ = op;
    }

    uint32_t lacking() const {
        return lacking_;
    }

    // For tests: how many sessions compute, or wait for their turn.
    uint64_t computing() {
        return computing_.inside();
    }

    pushed_activations & pushed() {
        return pushed_;
    }

    spare_buffers & buffers() {
        return buffers_;
    }

  private:
    ggml_backend_dev_t device_;
    int threads_;
    store memory_;
    std::atomic<bool> poisons_{false};
    std::atomic<uint32_t> lacking_{GGML_OP_COUNT};
    turnstile computing_;
    ggml_backend_ptr backend_;  // made when it is first needed
    ggml_backend_ptr cpu_;      // for weights in main memory
    ggml_backend_buffer_ptr cpu_memory_;
    std::atomic<uint32_t> sessions_{0};
    pushed_activations pushed_;
    spare_buffers buffers_;
    std::mutex peers_mutex_;
    std::map<uint32_t, std::shared_ptr<peer_link>> peers_;
    std::vector<std::pair<std::shared_ptr<peer_link>, std::thread>>
        receivers_;  // one for each peer, until it is dropped

    void write(const std::vector<placed_input> & inputs);
    void compute_piece(const built_graph & graph, ggml_cgraph * piece);
    void compute_nodes(ggml_cgraph * nodes);
    void compute_on_cpu(const cpu_run & run);
    void receive_pushes(peer_link & peer) noexcept;
    void receive_push(link & peer);
};

}  // namespace mesh
