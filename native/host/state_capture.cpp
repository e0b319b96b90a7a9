#include "host/state_capture.h"

#include "host/device.h"

namespace mesh {

namespace {

state_capture *& current() {
    static thread_local state_capture * open = nullptr;
    return open;
}

}  // namespace

state_capture::state_capture(const void * stream, size_t size)
    : stream_(static_cast<const uint8_t *>(stream)), size_(size) {
    current() = this;
}

state_capture::~state_capture() {
    current() = nullptr;
}

bool state_capture::note(const remote_buffer & memory, uint64_t offset, const void * data, size_t size) noexcept {
    state_capture * open = current();
    if (open == nullptr) {
        return false;
    }
    try {
        open->add(memory, offset, static_cast<const uint8_t *>(data), size);
    } catch (const std::exception &) {
        open->sound_ = false;  // the engine calls this in destructors, where nothing may be thrown
    }
    return true;
}

void state_capture::add(const remote_buffer & memory, uint64_t offset, const uint8_t * data, size_t size) {
    if (size == 0) {
        return;
    }
    const uint64_t before = pieces_.empty() ? 0 : pieces_.back().position + pieces_.back().size;
    const auto position = static_cast<uint64_t>(data - stream_);
    sound_ = sound_ && data >= stream_ && position >= before && position <= size_ && size <= size_ - position;
    pieces_.push_back({memory.owner, memory.id, offset, size, position});
}

}  // namespace mesh
