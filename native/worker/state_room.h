#pragma once

// Memory in which a session keeps saved states, until somebody needs it more.

#include "worker/zero_pages.h"

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace mesh {

class state_room {
  public:
    // Zeros. In main memory they take no room before something is written to them.
    state_room(ggml_backend_dev_t device, uint64_t size) : size_(size) {
        if (ggml_backend_dev_type(device) == GGML_BACKEND_DEVICE_TYPE_CPU) {
            pages_ = std::make_unique<zero_pages>(size);
            pages_->in_large_pages();
            if (pages_->data() != nullptr) {
                buffer_.reset(ggml_backend_dev_buffer_from_host_ptr(device, pages_->data(), size, size));
            }
        } else {
            buffer_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(device), size));
            if (buffer_) {
                ggml_backend_buffer_clear(buffer_.get(), 0);
            }
        }
    }

    state_room(const state_room &) = delete;
    state_room & operator=(const state_room &) = delete;

    uint64_t size() const noexcept {
        return size_;
    }

    bool is_gone() {
        const std::lock_guard lock(mutex_);
        return !buffer_;
    }

    // Calls `work` with the memory, which stays for so long. False where it is gone.
    template <typename Work> bool use(Work && work) {
        const std::lock_guard lock(mutex_);
        if (!buffer_) {
            return false;
        }
        std::forward<Work>(work)(buffer_.get());
        return true;
    }

    void give_up() {
        const std::lock_guard lock(mutex_);
        buffer_.reset();
        pages_.reset();
    }

  private:
    uint64_t size_;
    std::mutex mutex_;
    std::unique_ptr<zero_pages> pages_;  // that the buffer lies in, where it does
    ggml_backend_buffer_ptr buffer_;
};

}  // namespace mesh
