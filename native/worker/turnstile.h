#pragma once

// A lock that lets those who wait in by the order in which they came. A mutex would mostly go to whoever has just
// released it: a session with a prompt's runs ahead would keep the tokens of all others waiting.

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace mesh {

class turnstile {
  public:
    void lock() {
        std::unique_lock lock(mutex_);
        const uint64_t number = next_++;
        changed_.wait(lock, [&] { return number == serving_; });
    }

    void unlock() {
        {
            const std::lock_guard lock(mutex_);
            ++serving_;
        }
        changed_.notify_all();
    }

    // How many have come that have not left.
    uint64_t inside() {
        const std::lock_guard lock(mutex_);
        return next_ - serving_;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    uint64_t next_ = 0;
    uint64_t serving_ = 0;
};

}  // namespace mesh
