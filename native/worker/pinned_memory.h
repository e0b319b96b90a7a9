#pragma once

// Main memory that a device reads and writes by itself, without copies of its driver's in between.

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstddef>
#include <cstdint>

namespace mesh {

class pinned_memory {
  public:
    explicit pinned_memory(ggml_backend_dev_t device) : device_(device) {}

    // Null where the device has no such memory, or this is too much of it. What was there before may be lost.
    uint8_t * take(size_t size) {
        ggml_backend_buffer_type_t kind = ggml_backend_dev_host_buffer_type(device_);
        if (!buffer_ && kind != nullptr) {
            buffer_.reset(ggml_backend_buft_alloc_buffer(kind, SIZE));
        }
        return buffer_ && size <= SIZE ? static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer_.get()))
                                       : nullptr;
    }

  private:
    static constexpr size_t SIZE = 4 << 20;  // the logits of several tokens

    ggml_backend_dev_t device_;
    ggml_backend_buffer_ptr buffer_;  // made when it is first needed
};

}  // namespace mesh
