#include "mailbox.h"

namespace mesh {

void mailbox::open(const wire::session_id & session) {
    const std::lock_guard lock(mutex_);
    boxes_[session];
}

void mailbox::close(const wire::session_id & session) {
    const std::lock_guard lock(mutex_);
    const auto found = boxes_.find(session);
    if (found != boxes_.end()) {
        changed_.notify_all();
        boxes_.erase(found);
    }
}

bool mailbox::deliver(const wire::session_id & session, uint64_t number, std::vector<uint8_t> && data) {
    const std::lock_guard lock(mutex_);
    const auto found = boxes_.find(session);
    if (found == boxes_.end() || found->second.bytes + data.size() > wire::MAX_QUEUE_BYTES) {
        return false;
    }
    std::vector<uint8_t> & slot = found->second.arrived[number];
    found->second.bytes += data.size() - slot.size();  // a number that comes twice takes the place of the first
    slot = std::move(data);
    changed_.notify_all();
    return true;
}

bool mailbox::receive(
    const wire::session_id & session, uint64_t number, std::chrono::milliseconds time, std::vector<uint8_t> & data
) {
    std::unique_lock lock(mutex_);
    const auto arrived = [&] {
        const auto found = boxes_.find(session);
        return found == boxes_.end() || found->second.arrived.count(number) != 0;
    };
    if (!changed_.wait_for(lock, time, arrived)) {
        return false;
    }
    const auto found = boxes_.find(session);
    if (found == boxes_.end()) {
        return false;
    }
    auto & entries = found->second.arrived;
    data = std::move(entries[number]);
    entries.erase(number);
    found->second.bytes -= data.size();
    return true;
}

}  // namespace mesh
