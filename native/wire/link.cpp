#include "wire/link.h"

#include "wire/delta.h"
#include "wire/trace.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

namespace mesh {

namespace {

// Commands of one token fit; larger payloads bypass the buffer.
constexpr size_t READ_BUFFER_BYTES = 64 << 10;
constexpr size_t MAX_PARTS = 8;
constexpr size_t MAX_POSTPONED_BYTES = 4 << 10;

#ifdef MSG_NOSIGNAL
constexpr int SEND_FLAGS = MSG_NOSIGNAL;
#else
constexpr int SEND_FLAGS = 0;  // macOS: SO_NOSIGPIPE, set when the link is opened
#endif

// A peer that ended shows as POLLHUP, unasked; where only its sending side did, Linux has to be asked.
#ifdef POLLRDHUP
constexpr short ENDED = POLLRDHUP;
#else
constexpr short ENDED = 0;
#endif

std::string lost() {
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
        return "the other side stands still in the middle of a message";
    }
    return std::string("the link is lost: ") + std::strerror(errno);
}

timeval timeval_of(std::chrono::milliseconds time) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
    timeval value{};
    value.tv_sec = static_cast<decltype(value.tv_sec)>(seconds.count());
    value.tv_usec = static_cast<decltype(value.tv_usec)>(std::chrono::microseconds(time - seconds).count());
    return value;
}

}  // namespace

link::link(int fd, std::string name) : fd_(fd), name_(std::move(name)), buffer_(READ_BUFFER_BYTES) {
#ifdef SO_NOSIGPIPE
    const int on = 1;
    setsockopt(fd_, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
}

link::~link() {
    close(fd_);
}

void link::bound_waits(std::chrono::milliseconds reading, std::chrono::milliseconds writing) noexcept {
    const timeval read_time = timeval_of(reading);
    const timeval write_time = timeval_of(writing);
    setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &read_time, sizeof read_time);
    setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &write_time, sizeof write_time);
}

void link::send(uint8_t kind, uint32_t ticket, std::initializer_list<bytes_view> parts) {
    wire::header head{};
    head.kind = kind;
    head.ticket = ticket;

    std::array<iovec, MAX_PARTS + 2> vectors{};
    size_t count = 0;
    if (!postponed_.empty()) {
        vectors[count++] = {postponed_.data(), postponed_.size()};
    }
    vectors[count++] = {&head, sizeof head};
    for (const bytes_view & part : parts) {
        if (part.size > 0) {
            vectors.at(count++) = {const_cast<void *>(part.data), part.size};
            head.size += part.size;
        }
    }
    trace_frame(name_, true, kind, ticket, sizeof head + head.size);
    write_all(vectors.data(), count);
    postponed_.clear();
}

void link::flush() {
    if (!postponed_.empty()) {
        iovec waiting = {postponed_.data(), postponed_.size()};
        write_all(&waiting, 1);
        postponed_.clear();
    }
}

void link::write_all(iovec * next, size_t count) {
    while (count > 0) {
        msghdr message{};
        message.msg_iov = next;
        message.msg_iovlen = count;
        const ssize_t written = sendmsg(fd_, &message, SEND_FLAGS);
        if (written < 0) {
            if (errno == EINTR) {
                continue;
            }
            throw link_error(lost());
        }
        sent_.fetch_add(static_cast<uint64_t>(written), std::memory_order_relaxed);
        auto left = static_cast<size_t>(written);
        while (count > 0 && left >= next->iov_len) {
            left -= next->iov_len;
            ++next;
            --count;
        }
        if (count > 0) {
            next->iov_base = static_cast<uint8_t *>(next->iov_base) + left;
            next->iov_len -= left;
        }
    }
}

void link::send_later(uint8_t kind, uint32_t ticket, std::initializer_list<bytes_view> parts) {
    wire::header head{};
    head.kind = kind;
    head.ticket = ticket;
    for (const bytes_view & part : parts) {
        head.size += part.size;
    }
    if (postponed_.size() + head.size > MAX_POSTPONED_BYTES) {
        send(kind, ticket, parts);
        return;
    }
    trace_frame(name_, true, kind, ticket, sizeof head + head.size);
    append(postponed_, &head, sizeof head);
    for (const bytes_view & part : parts) {
        append(postponed_, part.data, part.size);
    }
}

wire::header link::receive_header() {
    wire::header head{};
    receive(&head, sizeof head);
    if (head.size > wire::MAX_FRAME_BYTES) {
        throw link_error("a frame of " + std::to_string(head.size) + " bytes is over the limit");
    }
    trace_frame(name_, false, head.kind, head.ticket, sizeof head + head.size);
    return head;
}

void link::receive(void * data, size_t size) {
    auto * target = static_cast<uint8_t *>(data);
    while (size > 0) {
        if (begin_ == end_) {
            if (size >= buffer_.size()) {
                const ssize_t count = read(fd_, target, size);
                if (count < 0 && errno == EINTR) {
                    continue;
                }
                if (count <= 0) {
                    throw link_error(count == 0 ? "the other side closed the link" : lost());
                }
                received_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
                target += count;
                size -= static_cast<size_t>(count);
                continue;
            }
            fill();
        }
        const size_t count = std::min(size, end_ - begin_);
        std::memcpy(target, buffer_.data() + begin_, count);
        begin_ += count;
        target += count;
        size -= count;
    }
}

void link::fill() {
    for (;;) {
        const ssize_t count = read(fd_, buffer_.data(), buffer_.size());
        if (count > 0) {
            received_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
            begin_ = 0;
            end_ = static_cast<size_t>(count);
            return;
        }
        if (count == 0) {
            throw link_error("the other side closed the link");
        }
        if (errno != EINTR) {
            throw link_error(lost());
        }
    }
}

frame link::receive_frame() {
    frame message;
    message.head = receive_header();
    message.payload.resize(message.head.size);
    receive(message.payload.data(), message.payload.size());
    return message;
}

bool link::readable() const noexcept {
    pollfd self = {fd_, POLLIN, 0};
    return begin_ != end_ || poll(&self, 1, 0) > 0;
}

void link::take_arrived() noexcept {
    if (begin_ > 0) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= std::exchange(begin_, 0);
    }
    const ssize_t count = recv(fd_, buffer_.data() + end_, buffer_.size() - end_, MSG_DONTWAIT);
    if (count > 0) {  // else whoever reads on will see why
        received_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
        end_ += static_cast<size_t>(count);
    }
}

bool link::holds_frame() const noexcept {
    wire::header head{};
    if (end_ - begin_ < sizeof head) {
        return false;
    }
    std::memcpy(&head, buffer_.data() + begin_, sizeof head);
    return end_ - begin_ - sizeof head >= head.size;
}

void link::wait_for_more() const noexcept {
    pollfd self = {fd_, POLLIN, 0};
    poll(&self, 1, -1);
}

bool link::ended() const noexcept {
    pollfd self = {fd_, ENDED, 0};
    return poll(&self, 1, 0) > 0;
}

size_t link::wait_readable(
    const std::vector<const link *> & others, std::chrono::milliseconds time, short_waits * waits
) const {
    if (begin_ != end_) {
        return 0;
    }
    std::vector<pollfd> watched = {{fd_, POLLIN, 0}};
    for (const link * other : others) {
        watched.push_back({other->fd_, POLLIN, 0});
    }
    const auto poll_for = [&](int wait) {
        return poll(watched.data(), static_cast<nfds_t>(watched.size()), wait);
    };
    const bool is_over = waits != nullptr && waits->over_soon([&] { return poll_for(0) > 0; });
    const auto end = std::chrono::steady_clock::now() + time;
    while (!is_over) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
        const auto wait = static_cast<int>(std::max<int64_t>(left.count(), 0));
        const int ready = poll_for(wait);
        if (ready > 0) {
            break;
        }
        if (ready == 0) {
            throw link_error("it said nothing for " + std::to_string(time.count() / 1000) + " s");
        }
        if (errno != EINTR) {
            throw link_error(lost());
        }
    }
    const auto ready =
        std::find_if(watched.begin(), watched.end(), [](const pollfd & entry) { return entry.revents != 0; });
    return static_cast<size_t>(ready - watched.begin());
}

void link::end_sending() noexcept {
    shutdown(fd_, SHUT_WR);
}

void link::shut() noexcept {
    // A socket wakes its readers; a pipe would not, so links are always sockets.
    shutdown(fd_, SHUT_RDWR);
}

}  // namespace mesh
