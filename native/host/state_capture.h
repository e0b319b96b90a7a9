#pragma once

// What of a state lies on workers, noted while the engine writes or reads that state.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mesh {

class device;
struct remote_buffer;

// Bytes of a worker's cache, and where they would stand in the engine's stream of a state.
struct state_piece {
    device * owner;
    uint32_t buffer_id;
    uint64_t offset;
    uint64_t size;
    uint64_t position;
};

// While one lives, what this thread reads from caches on workers or writes to them is noted, and not done.
class state_capture {
  public:
    // `stream` is the memory that the engine believes the state to be in.
    state_capture(const void * stream, size_t size);
    ~state_capture();

    state_capture(const state_capture &) = delete;
    state_capture & operator=(const state_capture &) = delete;

    // False where nothing is captured in this thread.
    static bool note(const remote_buffer & memory, uint64_t offset, const void * data, size_t size) noexcept;

    // Whether the pieces came in the order of the stream, without overlapping.
    bool is_sound() const noexcept {
        return sound_;
    }

    const std::vector<state_piece> & pieces() const noexcept {
        return pieces_;
    }

  private:
    const uint8_t * stream_;
    size_t size_;
    bool sound_ = true;
    std::vector<state_piece> pieces_;

    void add(const remote_buffer & memory, uint64_t offset, const uint8_t * data, size_t size);
};

}  // namespace mesh
