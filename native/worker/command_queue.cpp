#include "worker/command_queue.h"

#include <stdexcept>
#include <utility>

namespace mesh {

bool command_queue::has_room() {
    const std::lock_guard lock(mutex_);
    return can_put();
}

bool command_queue::put(frame && message) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return can_put(); });
    if (closed_) {
        return false;
    }
    bytes_ += sizeof(frame) + message.payload.size();
    frames_.push_back(std::move(message));
    changed_.notify_all();
    return true;
}

bool command_queue::take(frame & message) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return can_take(); });
    return take_first(message);
}

bool command_queue::take_within(std::chrono::milliseconds time, frame & message) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, time, [&] { return can_take(); })) {
        throw std::runtime_error("it said nothing for too long");
    }
    return take_first(message);
}

const frame * command_queue::first() {
    const std::lock_guard lock(mutex_);
    return frames_.empty() ? nullptr : &frames_.front();
}

bool command_queue::has_come(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, time, [&] { return can_take(); });
}

bool command_queue::take_first(frame & message) {
    if (closed_) {
        return false;
    }
    if (!failure_.empty()) {
        throw std::runtime_error(failure_);
    }
    message = std::move(frames_.front());
    frames_.pop_front();
    bytes_ -= sizeof(frame) + message.payload.size();
    changed_.notify_all();
    return true;
}

void command_queue::fail(const std::string & why) {
    const std::lock_guard lock(mutex_);
    failure_ = why;
    changed_.notify_all();
}

uint32_t command_queue::waiting() {
    const std::lock_guard lock(mutex_);
    return static_cast<uint32_t>(frames_.size());
}

void command_queue::close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
}

bool command_queue::is_closed() {
    const std::lock_guard lock(mutex_);
    return closed_;
}

}  // namespace mesh
