#pragma once

// Memory for activations on their way, used again: fresh pages of a micro-batch take longer than its copy.

#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

namespace mesh {

class spare_buffers {
  public:
    // With any content.
    std::vector<uint8_t> take(size_t size) {
        std::vector<uint8_t> found;
        if (size >= WORTH_KEEPING) {
            const std::lock_guard lock(mutex_);
            if (!kept_.empty()) {
                found = std::move(kept_.back());
                kept_.pop_back();
            }
        }
        found.resize(size);
        return found;
    }

    void give_back(std::vector<uint8_t> && used) {
        if (used.size() < WORTH_KEEPING || used.capacity() > TOO_LARGE) {
            return;
        }
        const std::lock_guard lock(mutex_);
        if (kept_.size() < MOST) {
            kept_.push_back(std::move(used));
        }
    }

  private:
    static constexpr size_t WORTH_KEEPING = 64 << 10;
    static constexpr size_t TOO_LARGE = 32 << 20;
    static constexpr size_t MOST = 4;  // one that arrives, one that is used, and two that leave

    std::mutex mutex_;
    std::vector<std::vector<uint8_t>> kept_;
};

}  // namespace mesh
