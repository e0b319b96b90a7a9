#pragma once

// Commands that have arrived and wait to be executed.

#include "wire/link.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

namespace mesh {

// Bounded in bytes, so that a client cannot fill our memory. One thread puts, one takes, any may close.
class command_queue {
  public:
    // Waits for room. False when the session is over.
    bool put(frame && message);

    // Whether putting a frame would not wait.
    bool has_room();

    // The next frame; false at the end. Frames that arrived before the end are dropped: nobody waits for them.
    bool take(frame & message);

    // The same within bounded time; throws when it is over.
    bool take_within(std::chrono::milliseconds time, frame & message);

    // The next frame, where one has come: it stays there until it is taken.
    const frame * first();

    // Whether there is something to take, or nothing more to wait for, within this time.
    bool has_come(std::chrono::milliseconds time);

    // Whoever takes the next frame gets this as an exception: something that an earlier one started has failed.
    void fail(const std::string & why);

    uint32_t waiting();
    void close();
    bool is_closed();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<frame> frames_;
    uint64_t bytes_ = 0;
    bool closed_ = false;
    std::string failure_;

    bool can_put() const {
        return closed_ || bytes_ <= wire::MAX_QUEUE_BYTES;
    }

    bool can_take() const {
        return closed_ || !failure_.empty() || !frames_.empty();
    }

    bool take_first(frame & message);
};

}  // namespace mesh
