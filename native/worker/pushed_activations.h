#pragma once

// Activations that another worker pushed, waiting for the session that expects them.

#include "wire/protocol.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace mesh {

class pushed_activations {
  public:
    // A session takes part from HELLO to its end; what is pushed to it before or after is dropped.
    void open(const wire::session_id & session);
    void close(const wire::session_id & session);

    // False if the session does not exist or has more waiting than it may.
    bool deliver(const wire::session_id & session, uint64_t number, std::vector<uint8_t> && data);

    // Whether receiving push `number` would not wait.
    bool has_come(const wire::session_id & session, uint64_t number);

    // Waits for push `number`. False when the session ends or the time is over.
    bool receive(
        const wire::session_id & session, uint64_t number, std::chrono::milliseconds time,
        std::vector<uint8_t> & data
    );

  private:
    struct queue {
        std::map<uint64_t, std::vector<uint8_t>> arrived;
        uint64_t bytes = 0;
    };

    struct session_less {
        bool operator()(const wire::session_id & a, const wire::session_id & b) const noexcept {
            return a.words[0] != b.words[0] ? a.words[0] < b.words[0] : a.words[1] < b.words[1];
        }
    };

    std::mutex mutex_;
    std::condition_variable changed_;
    std::map<wire::session_id, queue, session_less> queues_;
};

}  // namespace mesh
