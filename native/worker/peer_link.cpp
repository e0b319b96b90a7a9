#include "worker/peer_link.h"

#include <stdexcept>
#include <sys/socket.h>
#include <sys/time.h>
#include <utility>

namespace mesh {

namespace {

constexpr int PUSH_SECONDS = 30;                  // a peer that takes nothing for so long is gone
constexpr size_t AT_ONCE_BYTES = 64 << 10;        // sockets take these without waiting: one token's activations
constexpr uint64_t MAX_WAITING_BYTES = 32 << 20;  // beyond it sessions wait

}  // namespace

peer_link::peer_link(uint32_t number, int fd, spare_buffers & buffers)
    : wire(fd, "peer " + std::to_string(number)), number_(number), buffers_(buffers) {
    const timeval time = {PUSH_SECONDS, 0};
    setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &time, sizeof time);
    sender_ = std::thread([this] { send_waiting(); });
}

peer_link::~peer_link() {
    {
        const std::lock_guard lock(mutex_);
        over_ = true;
        changed_.notify_all();
    }
    wire.shut();
    sender_.join();
}

void peer_link::push(
    const wire::deliver & address, std::vector<uint8_t> && data, const std::shared_ptr<command_queue> & from
) {
    activations next{address, std::move(data), from};
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return lost_ || waiting_bytes_ <= MAX_WAITING_BYTES; });
    if (!lost_ && next.data.size() <= AT_ONCE_BYTES && waiting_.empty() && !sending_) {
        if (send(next)) {
            return;
        }
        lose();
    }
    if (lost_) {
        throw std::runtime_error(loss());
    }
    waiting_bytes_ += next.data.size();
    waiting_.push_back(std::move(next));
    changed_.notify_all();
}

void peer_link::send_waiting() noexcept {
    std::unique_lock lock(mutex_);
    for (;;) {
        changed_.wait(lock, [&] { return over_ || lost_ || !waiting_.empty(); });
        if (over_ || lost_) {
            return;
        }
        activations next = std::move(waiting_.front());
        waiting_.pop_front();
        sending_ = true;
        lock.unlock();
        const bool sent = send(next);
        lock.lock();
        sending_ = false;
        waiting_bytes_ -= next.data.size();
        if (sent) {
            buffers_.give_back(std::move(next.data));
        } else {
            waiting_.push_front(std::move(next));  // to be told with the others
            lose();
        }
        changed_.notify_all();
    }
}

bool peer_link::send(const activations & next) noexcept {
    try {
        wire.send(
            static_cast<uint8_t>(wire::command::deliver), 0,
            {{&next.address, sizeof next.address}, {next.data.data(), next.data.size()}}
        );
        return true;
    } catch (const link_error &) {
        return false;
    }
}

// Half a frame may be on its way: nothing can follow it. With the lock held.
void peer_link::lose() noexcept {
    lost_ = true;
    wire.shut();
    for (const activations & each : waiting_) {
        if (const std::shared_ptr<command_queue> from = each.from.lock()) {
            from->fail(loss());
        }
    }
    waiting_.clear();
    changed_.notify_all();
}

std::string peer_link::loss() const {
    return "the link to worker " + std::to_string(number_) + " is lost";
}

}  // namespace mesh
