#pragma once

// Memory of a device that this process cannot look into, as that of a GPU: reading it by its address ends the test.
// All buffers have the same addresses, as with Vulkan.

#include "ggml-backend.h"

#include <cstddef>

namespace opaque_memory {

// What the device says of itself.
struct facts {
    size_t scratch = 0;  // bytes behind the result of FLASH_ATTN_EXT that its kernel writes to
    size_t copied = 0;   // bytes that were read back
    size_t largest_copy = 0;
};

facts & device();

ggml_backend_buffer_type_t memory();

}  // namespace opaque_memory
