#pragma once

// One link: framed messages over a file descriptor that somebody else opened.

#include "wire/protocol.h"
#include "wire/short_waits.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <sys/uio.h>
#include <utility>
#include <vector>

namespace mesh {

// The other side is gone or does not speak the protocol. Never leaves the library.
struct link_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct bytes_view {
    const void * data;
    size_t size;
};

struct frame {
    wire::header head{};
    std::vector<uint8_t> payload;
};

// Owns a descriptor. Sending and receiving may happen in two threads, one each;
// `shut` may be called from any, and ends both.
class link {
  public:
    // `name` is what a trace calls it.
    link(int fd, std::string name);
    ~link();

    link(const link &) = delete;
    link & operator=(const link &) = delete;

    // Reading and writing throw where nothing moves for so long. Without this they wait for ever.
    void bound_waits(std::chrono::milliseconds reading, std::chrono::milliseconds writing) noexcept;

    void send(uint8_t kind, uint32_t ticket, std::initializer_list<bytes_view> parts);

    // Sends what waits.
    void flush();

    // As `send`, but the frame may wait for the next one: for small commands that mean nothing by themselves.
    void send_later(uint8_t kind, uint32_t ticket, std::initializer_list<bytes_view> parts);

    // The next header; its payload has to be received next, in one piece or several.
    wire::header receive_header();
    void receive(void * data, size_t size);
    frame receive_frame();

    // True if a read would not wait: something has arrived, or the link has ended.
    bool readable() const noexcept;

    // Reads what has arrived, as far as the link's own memory has room for it.
    void take_arrived() noexcept;

    // True if all of a frame has been read like that: receiving it would not wait. Never of one that is larger than the
    // link's own memory.
    bool holds_frame() const noexcept;

    // Waits until something arrives, or the link ends. Another thread may read meanwhile.
    void wait_for_more() const noexcept;

    // True if nothing more will arrive than what has.
    bool ended() const noexcept;

    // Waits until it is readable, or one of `others` is: their number, counted from 1, or 0 for itself. Throws when
    // the time is over.
    // `waits`: where it may stay awake.
    size_t wait_readable(
        const std::vector<const link *> & others, std::chrono::milliseconds time, short_waits * waits = nullptr
    ) const;

    // Lets the other side read all that was sent, and then the end.
    void end_sending() noexcept;

    void shut() noexcept;

    uint64_t sent_bytes() const noexcept {
        return sent_.load(std::memory_order_relaxed);
    }

    uint64_t received_bytes() const noexcept {
        return received_.load(std::memory_order_relaxed);
    }

  private:
    int fd_;
    std::string name_;
    std::vector<uint8_t> postponed_;
    std::vector<uint8_t> buffer_;
    size_t begin_ = 0;
    size_t end_ = 0;
    std::atomic<uint64_t> sent_{0};
    std::atomic<uint64_t> received_{0};

    void fill();
    void write_all(iovec * next, size_t count);
};

}  // namespace mesh
