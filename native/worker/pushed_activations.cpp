#include "worker/pushed_activations.h"

namespace mesh {

namespace {

// What keeping a push costs besides its bytes; pushes of no bytes would cost nothing otherwise, and be kept for ever.
constexpr uint64_t PUSH_OVERHEAD = 256;

}  // namespace

void pushed_activations::open(const wire::session_id & session) {
    const std::lock_guard lock(mutex_);
    queues_[session];
}

void pushed_activations::close(const wire::session_id & session) {
    const std::lock_guard lock(mutex_);
    const auto found = queues_.find(session);
    if (found != queues_.end()) {
        changed_.notify_all();
        queues_.erase(found);
    }
}

bool pushed_activations::deliver(const wire::session_id & session, uint64_t number, std::vector<uint8_t> && data) {
    const std::lock_guard lock(mutex_);
    const auto found = queues_.find(session);
    if (found == queues_.end()) {
        return false;
    }
    queue & to = found->second;
    // A number that comes twice takes the place of the first.
    const auto before = to.arrived.find(number);
    const uint64_t freed = before != to.arrived.end() ? before->second.size() + PUSH_OVERHEAD : 0;
    const uint64_t bytes = to.bytes - freed + data.size() + PUSH_OVERHEAD;
    if (bytes > wire::MAX_QUEUE_BYTES) {
        return false;
    }
    to.bytes = bytes;
    to.arrived[number] = std::move(data);
    changed_.notify_all();
    return true;
}

bool pushed_activations::has_come(const wire::session_id & session, uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = queues_.find(session);
    return found == queues_.end() || found->second.arrived.count(number) != 0;
}

bool pushed_activations::receive(
    const wire::session_id & session, uint64_t number, std::chrono::milliseconds time, std::vector<uint8_t> & data
) {
    std::unique_lock lock(mutex_);
    const auto arrived = [&] {
        const auto found = queues_.find(session);
        return found == queues_.end() || found->second.arrived.count(number) != 0;
    };
    if (!changed_.wait_for(lock, time, arrived)) {
        return false;
    }
    const auto found = queues_.find(session);
    if (found == queues_.end()) {
        return false;
    }
    auto & entries = found->second.arrived;
    data = std::move(entries[number]);
    entries.erase(number);
    found->second.bytes -= data.size() + PUSH_OVERHEAD;
    return true;
}

}  // namespace mesh
