#pragma once

// The memory that a worker lends: weights, which stay between sessions and are
// shared by them, and what sessions allocate. Both count against one quota; where
// it is used up, weights that nobody holds go, the longest idle ones first, and then saved states.

#include "wire/protocol.h"
#include "worker/state_room.h"
#include "worker/weights.h"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

namespace mesh {

// For sentences.
std::string in_megabytes(uint64_t bytes);

class store;

// Weights that a session uses: they stay for as long as it holds them.
class weight_lease {
  public:
    weight_lease() = default;
    weight_lease(store * owner, std::vector<weight *> && held) : owner_(owner), held_(std::move(held)) {}
    ~weight_lease();

    weight_lease(weight_lease && other) noexcept;
    weight_lease & operator=(weight_lease && other) noexcept;
    weight_lease(const weight_lease &) = delete;
    weight_lease & operator=(const weight_lease &) = delete;

  private:
    store * owner_ = nullptr;
    std::vector<weight *> held_;
};

class store {
  public:
    store(ggml_backend_dev_t device, uint64_t quota) : device_(device), quota_(quota) {}

    store(const store &) = delete;
    store & operator=(const store &) = delete;

    uint64_t quota() const noexcept {
        return quota_;
    }

    // Weights that `chosen` picks by their names lie in main memory, up to `quota` bytes: those of the first `layers` of
    // the layers that are prepared, or all. For models that are added later.
    void use_main_memory(int (*chosen)(const char *), int layers, uint64_t quota);

    // What a new session could have.
    uint64_t left();

    // Room for a session's own buffers. True if there is some, which then has to be given back.
    bool take(uint64_t bytes);
    void give_back(uint64_t bytes);

    // Memory for saved states: at most `most` bytes, half of what is free without dropping weights, or `least` where
    // that is more. It is taken away again when sessions or weights need it. Null where there is none.
    std::shared_ptr<state_room> set_aside(uint64_t least, uint64_t most);
    void end(const std::shared_ptr<state_room> & room);

    // A model on this machine's disk, known by its fingerprint from now on. Where `there` names weights, the
    // others are holes in its files and never read. Throws std::runtime_error.
    void add_model(
        const std::string & fingerprint, const std::vector<std::string> & paths,
        const std::vector<std::string> * there = nullptr
    );

    bool has_model(const std::string & fingerprint);

    // The weights that `entries` name, by their offsets. Throws std::runtime_error where it cannot be.
    weight_lease attach(
        const std::string & fingerprint, const std::vector<wire::attach_entry> & entries,
        std::map<uint64_t, weight *> & by_offset
    );

    // Reads layers `first` to `last` (not included) before anybody asks for them; returns their size. Tells how
    // far it is after each weight. Throws std::runtime_error.
    uint64_t prepare(
        const std::string & fingerprint, int first, int last,
        const std::function<void(uint64_t done, uint64_t total)> & progress
    );

    // Drops a model's weights, those aside that somebody holds. Returns how many bytes went.
    uint64_t unload(const std::string & fingerprint);

    // Bytes of weights that are in memory.
    uint64_t resident();

  private:
    friend class weight_lease;

    ggml_backend_dev_t device_;
    uint64_t quota_;
    std::mutex mutex_;
    uint64_t taken_ = 0;                             // by sessions, saved states aside
    uint64_t resident_ = 0;                          // weights whose size is counted
    int (*in_main_memory_)(const char *) = nullptr;  // picks weights by their names
    int main_memory_layers_ = 0;
    uint64_t main_memory_quota_ = 0;
    uint64_t main_memory_resident_ = 0;
    uint64_t clock_ = 0;
    std::map<std::string, std::unique_ptr<model_weights>> models_;
    std::vector<std::unique_ptr<model_weights>> retired_;
    std::vector<std::shared_ptr<state_room>> rooms_;

    model_weights & find_model(const std::string & fingerprint);
    weight_lease hold(std::vector<weight *> && wanted);
    void release(const std::vector<weight *> & held);

    // All of these with the lock held.
    void place(const model_weights & model, int first, int last);
    bool make_room(uint64_t bytes);
    bool make_main_memory_room(uint64_t bytes);
    uint64_t unused() const;
    uint64_t set_aside_size() const;
    std::vector<weight *> idle_weights(bool in_main_memory = false) const;
    void let_go(const std::vector<weight *> & held);
    void evict(weight * idle);
    void forget(const std::string & fingerprint);
};

}  // namespace mesh
