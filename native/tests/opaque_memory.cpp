#include "tests/opaque_memory.h"

#include "tests/check.h"

#include "ggml-backend-impl.h"

#include <algorithm>
#include <cstring>
#include <sys/mman.h>
#include <vector>

namespace opaque_memory {

namespace {

constexpr size_t MOST_BYTES = 1ULL << 36;

// Where tensors are told that they lie; nothing can be read there. The same for all buffers, as on some devices.
void * base() {
    static void * const address =
        mmap(nullptr, MOST_BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(address != MAP_FAILED);
    return address;
}

struct storage {
    std::vector<uint8_t> bytes;

    uint8_t * at(const ggml_tensor * tensor, size_t offset, size_t size) {
        const size_t begin = reinterpret_cast<size_t>(tensor->data) - reinterpret_cast<size_t>(base()) + offset;
        CHECK(begin <= bytes.size() && size <= bytes.size() - begin);
        return bytes.data() + begin;
    }
};

storage & storage_of(ggml_backend_buffer_t buffer) {
    return *static_cast<storage *>(buffer->context);
}

void free_buffer(ggml_backend_buffer_t buffer) {
    delete static_cast<storage *>(buffer->context);
}

void * get_base(ggml_backend_buffer_t) {
    return base();
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size) {
    std::memset(storage_of(buffer).at(tensor, offset, size), value, size);
}

void set_tensor(
    ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size
) {
    std::memcpy(storage_of(buffer).at(tensor, offset, size), data, size);
}

void get_tensor(
    ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size
) {
    device().copied += size;
    device().largest_copy = std::max(device().largest_copy, size);
    std::memcpy(data, storage_of(buffer).at(tensor, offset, size), size);
}

void clear(ggml_backend_buffer_t buffer, uint8_t value) {
    std::fill(storage_of(buffer).bytes.begin(), storage_of(buffer).bytes.end(), value);
}

const char * name(ggml_backend_buffer_type_t) {
    return "far";
}

ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_i calls{};
    calls.free_buffer = free_buffer;
    calls.get_base = get_base;
    calls.memset_tensor = memset_tensor;
    calls.set_tensor = set_tensor;
    calls.get_tensor = get_tensor;
    calls.clear = clear;
    return ggml_backend_buffer_init(type, calls, new storage{std::vector<uint8_t>(size)}, size);
}

size_t alignment(ggml_backend_buffer_type_t) {
    return 128;
}

size_t alloc_size(ggml_backend_buffer_type_t, const ggml_tensor * tensor) {
    return ggml_nbytes(tensor) + (tensor->op == GGML_OP_FLASH_ATTN_EXT ? device().scratch : 0);
}

}  // namespace

facts & device() {
    static facts known;
    return known;
}

ggml_backend_buffer_type_t memory() {
    static ggml_backend_buffer_type type = [] {
        ggml_backend_buffer_type made{};
        made.iface.get_name = name;
        made.iface.alloc_buffer = alloc_buffer;
        made.iface.get_alignment = alignment;
        made.iface.get_alloc_size = alloc_size;
        return made;
    }();
    return &type;
}

}  // namespace opaque_memory
