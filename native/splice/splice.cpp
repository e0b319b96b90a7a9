#include "splice/splice.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <poll.h>
#include <string>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>
#include <vector>

namespace {

// A prefix in front of every array of bytes that goes to or comes from iroh: its length, in network order.
constexpr size_t PREFIX_BYTES = 4;
constexpr size_t MAX_CHUNK_BYTES = 256 << 10;
// iroh clears as much memory as it is asked to read, whatever arrives: small messages get small reads.
constexpr uint32_t MIN_READ_BYTES = 16 << 10;

constexpr int8_t CALL_OK = 0;
constexpr int8_t CALL_ERROR = 1;
constexpr int8_t POLL_READY = 0;

#ifdef MSG_NOSIGNAL
constexpr int SEND_FLAGS = MSG_NOSIGNAL;
#else
constexpr int SEND_FLAGS = 0;  // macOS: SO_NOSIGPIPE, set when the splice starts
#endif

uint32_t read_prefix(const uint8_t * data) {
    return static_cast<uint32_t>(data[0]) << 24U | static_cast<uint32_t>(data[1]) << 16U |
           static_cast<uint32_t>(data[2]) << 8U | static_cast<uint32_t>(data[3]);
}

void write_prefix(uint8_t * data, uint32_t size) {
    for (unsigned i = 0; i < PREFIX_BYTES; ++i) {
        data[i] = static_cast<uint8_t>(size >> (24U - 8U * i));
    }
}

// A buffer of Rust's, freed with the block that holds it.
class owned_buffer {
  public:
    owned_buffer(const mesh_iroh & iroh, mesh_rust_buffer buffer) : iroh_(iroh), buffer_(buffer) {}

    ~owned_buffer() {
        if (buffer_.data != nullptr) {
            mesh_rust_status status{};
            iroh_.buffer_free(buffer_, &status);
        }
    }

    owned_buffer(const owned_buffer &) = delete;
    owned_buffer & operator=(const owned_buffer &) = delete;

    const uint8_t * data() const {
        return buffer_.data;
    }

    uint64_t size() const {
        return buffer_.data == nullptr ? 0 : buffer_.len;
    }

    std::string text() const {
        return size() == 0 ? std::string()
                           : std::string(reinterpret_cast<const char *>(buffer_.data), buffer_.len);
    }

  private:
    const mesh_iroh & iroh_;
    mesh_rust_buffer buffer_;
};

// What a failed call says about itself; frees what it brought along.
std::string message_of(const mesh_iroh & iroh, const mesh_rust_status & status) {
    const owned_buffer error(iroh, status.error);
    if (status.code != CALL_ERROR) {
        const std::string text = error.text();
        return text.empty() ? "the call did not end" : text;
    }
    if (error.size() != sizeof(uint64_t)) {
        return "an error of an unknown form";
    }
    const uint64_t handle =
        static_cast<uint64_t>(read_prefix(error.data())) << 32U | read_prefix(error.data() + PREFIX_BYTES);
    mesh_rust_status asked{};
    const owned_buffer text(iroh, iroh.error_message(handle, &asked));
    const owned_buffer nothing(iroh, asked.error);
    return asked.code == CALL_OK ? text.text() : "an error without a message";
}

// Waits for one future at a time, until it is ready or somebody stops it.
class waiter {
  public:
    using poll_function = void (*)(uint64_t, mesh_rust_continuation, uint64_t);
    using cancel_function = void (*)(uint64_t);

    void wait(uint64_t future, poll_function poll, cancel_function cancel) {
        {
            const std::lock_guard<std::mutex> lock(future_mutex_);
            future_ = future;
            cancel_ = cancel;
            if (stopped_) {
                cancel_(future_);
            }
        }
        while (poll_once(future, poll) != POLL_READY) {
        }
        // From here on nobody else touches the future: its owner may free it.
        const std::lock_guard<std::mutex> lock(future_mutex_);
        cancel_ = nullptr;
    }

    void stop() {
        const std::lock_guard<std::mutex> lock(future_mutex_);
        stopped_ = true;
        if (cancel_ != nullptr) {
            cancel_(future_);
        }
    }

  private:
    std::mutex future_mutex_;
    uint64_t future_ = 0;
    cancel_function cancel_ = nullptr;
    bool stopped_ = false;

    std::mutex mutex_;
    std::condition_variable called_;
    bool answered_ = false;
    int8_t code_ = POLL_READY;

    int8_t poll_once(uint64_t future, poll_function poll) {
        // Nobody else looks at it between two polls: each is answered exactly once.
        answered_ = false;
        poll(future, on_answer, reinterpret_cast<uintptr_t>(this));
        std::unique_lock<std::mutex> lock(mutex_);
        called_.wait(lock, [this] { return answered_; });
        return code_;
    }

    // In a thread of iroh's, in ours within `poll`, or in that of whoever cancels.
    static void on_answer(uint64_t data, int8_t code) {
        // NOLINTNEXTLINE(performance-no-int-to-ptr): iroh hands back a number, as it was given
        auto & self = *reinterpret_cast<waiter *>(static_cast<uintptr_t>(data));
        const std::lock_guard<std::mutex> lock(self.mutex_);
        self.code_ = code;
        self.answered_ = true;
        // With the lock held: once it is free, the waiter may be gone.
        self.called_.notify_one();
    }
};

// Threads of a library do not handle the signals of its process.
class signals_blocked {
  public:
    signals_blocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }

    ~signals_blocked() {
        pthread_sigmask(SIG_SETMASK, &before_, nullptr);
    }

    signals_blocked(const signals_blocked &) = delete;
    signals_blocked & operator=(const signals_blocked &) = delete;

  private:
    sigset_t before_{};
};

// Should the socket not be a blocking one after all.
void wait_for(int fd, short events) {
    pollfd entry{fd, events, 0};
    poll(&entry, 1, -1);
}

bool would_block() {
    return errno == EAGAIN || errno == EWOULDBLOCK;
}

}  // namespace

struct mesh_splice {
    mesh_splice(const mesh_iroh & iroh, int link_fd, uint64_t send_handle, uint64_t recv_handle, int done_fd)
        : iroh_(iroh), link_fd_(link_fd), done_fd_(done_fd), chunk_(PREFIX_BYTES + MAX_CHUNK_BYTES) {
        mesh_rust_status status{};
        send_ = iroh_.send_clone(send_handle, &status);
        recv_ = iroh_.recv_clone(recv_handle, &status);
#ifdef SO_NOSIGPIPE
        const int on = 1;
        setsockopt(link_fd_, SOL_SOCKET, SO_NOSIGPIPE, &on, sizeof on);
#endif
    }

    ~mesh_splice() {
        end_as(MESH_SPLICE_STOPPED, "");
        for (std::thread * thread : {&outwards_, &inwards_}) {
            if (thread->joinable()) {
                thread->join();
            }
        }
        mesh_rust_status status{};
        iroh_.send_free(send_, &status);
        iroh_.recv_free(recv_, &status);
        if (owns_descriptors_) {
            close(link_fd_);
        }
    }

    mesh_splice(const mesh_splice &) = delete;
    mesh_splice & operator=(const mesh_splice &) = delete;

    void start() {
        const signals_blocked block;
        outwards_ = std::thread([this] { run(&mesh_splice::copy_out); });
        inwards_ = std::thread([this] { run(&mesh_splice::copy_in); });
        owns_descriptors_ = true;
    }

    void read(mesh_splice_report & report) {
        const std::lock_guard<std::mutex> lock(mutex_);
        report.sent_bytes = sent_.load(std::memory_order_relaxed);
        report.received_bytes = received_.load(std::memory_order_relaxed);
        report.end = end_;
        std::snprintf(report.reason, sizeof report.reason, "%s", reason_.c_str());
    }

  private:
    const mesh_iroh iroh_;
    const int link_fd_;
    const int done_fd_;
    uint64_t send_ = 0;
    uint64_t recv_ = 0;
    bool owns_descriptors_ = false;

    std::vector<uint8_t> chunk_;  // of the outward thread
    waiter out_waiter_;
    waiter in_waiter_;
    std::thread outwards_;
    std::thread inwards_;
    std::atomic<uint64_t> sent_{0};
    std::atomic<uint64_t> received_{0};

    std::mutex mutex_;
    int running_ = 2;
    mesh_splice_end end_ = MESH_SPLICE_RUNNING;
    std::string reason_;

    // The first end counts; what it makes fail elsewhere does not.
    void end_as(mesh_splice_end end, const std::string & reason) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (end_ != MESH_SPLICE_RUNNING) {
                return;
            }
            end_ = end;
            reason_ = reason;
        }
        if (end != MESH_SPLICE_FINISHED) {
            shutdown(link_fd_, SHUT_RDWR);
            out_waiter_.stop();
            in_waiter_.stop();
        }
    }

    void run(void (mesh_splice::*copy)()) noexcept {
        try {
            (this->*copy)();
        } catch (const std::exception & error) {
            end_as(MESH_SPLICE_LINK_LOST, error.what());
        }
        bool last = false;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            last = --running_ == 0;
        }
        if (last) {
            end_as(MESH_SPLICE_FINISHED, "");
            close(done_fd_);
        }
    }

    void link_lost() {
        end_as(MESH_SPLICE_LINK_LOST, std::strerror(errno));
    }

    // From the socket to the stream, and the end of it, too.
    void copy_out() {
        for (;;) {
            const ssize_t count = recv(link_fd_, chunk_.data() + PREFIX_BYTES, MAX_CHUNK_BYTES, 0);
            if (count < 0 && errno == EINTR) {
                continue;
            }
            if (count < 0 && would_block()) {
                wait_for(link_fd_, POLLIN);
                continue;
            }
            if (count < 0) {
                link_lost();
                return;
            }
            mesh_rust_status status{};
            if (count == 0) {
                if (!stopped()) {
                    out_call(iroh_.send_finish(iroh_.send_clone(send_, &status)));
                }
                return;
            }
            write_prefix(chunk_.data(), static_cast<uint32_t>(count));
            const auto size = static_cast<int32_t>(PREFIX_BYTES + static_cast<size_t>(count));
            const mesh_rust_buffer bytes = iroh_.buffer_from_bytes({size, chunk_.data()}, &status);
            if (!out_call(iroh_.send_write_all(iroh_.send_clone(send_, &status), bytes))) {
                return;
            }
            sent_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
        }
    }

    // A socket that was shut here reads as ended: that end is not the other side's, and not to be passed on.
    bool stopped() {
        const std::lock_guard<std::mutex> lock(mutex_);
        return end_ != MESH_SPLICE_RUNNING;
    }

    bool out_call(uint64_t future) {
        out_waiter_.wait(future, iroh_.void_poll, iroh_.void_cancel);
        mesh_rust_status status{};
        iroh_.void_complete(future, &status);
        iroh_.void_free(future);
        return good(status);
    }

    // From the stream to the socket, and the end of it, too.
    void copy_in() {
        uint32_t limit = MIN_READ_BYTES;
        for (;;) {
            mesh_rust_status status{};
            const uint64_t future = iroh_.recv_read(iroh_.recv_clone(recv_, &status), limit);
            in_waiter_.wait(future, iroh_.buffer_poll, iroh_.buffer_cancel);
            const owned_buffer bytes(iroh_, iroh_.buffer_complete(future, &status));
            iroh_.buffer_future_free(future);
            if (!good(status)) {
                return;
            }
            if (bytes.size() < PREFIX_BYTES || read_prefix(bytes.data()) != bytes.size() - PREFIX_BYTES) {
                end_as(MESH_SPLICE_STREAM_LOST, "a read gave bytes of an unknown form");
                return;
            }
            const size_t size = bytes.size() - PREFIX_BYTES;
            if (size == 0) {
                shutdown(link_fd_, SHUT_WR);
                return;
            }
            if (!write_link(bytes.data() + PREFIX_BYTES, size)) {
                return;
            }
            if (size == limit) {
                limit = std::min<uint32_t>(2 * limit, MAX_CHUNK_BYTES);
            } else if (size < limit / 4) {
                limit = std::max(limit / 2, MIN_READ_BYTES);
            }
        }
    }

    bool write_link(const uint8_t * data, size_t size) {
        while (size > 0) {
            const ssize_t count = send(link_fd_, data, size, SEND_FLAGS);
            if (count < 0 && errno == EINTR) {
                continue;
            }
            if (count < 0 && would_block()) {
                wait_for(link_fd_, POLLOUT);
                continue;
            }
            if (count < 0) {
                link_lost();
                return false;
            }
            received_.fetch_add(static_cast<uint64_t>(count), std::memory_order_relaxed);
            data += count;
            size -= static_cast<size_t>(count);
        }
        return true;
    }

    bool good(const mesh_rust_status & status) {
        if (status.code == CALL_OK) {
            return true;
        }
        end_as(MESH_SPLICE_STREAM_LOST, message_of(iroh_, status));
        return false;
    }
};

extern "C" {

#define MESH_API __attribute__((visibility("default")))

MESH_API mesh_splice *
mesh_splice_start(const mesh_iroh * iroh, int link_fd, uint64_t send_handle, uint64_t recv_handle, int done_fd) {
    if (iroh == nullptr || iroh->size != sizeof(mesh_iroh)) {
        return nullptr;
    }
    try {
        auto splice = std::make_unique<mesh_splice>(*iroh, link_fd, send_handle, recv_handle, done_fd);
        splice->start();
        return splice.release();
    } catch (const std::exception &) {
        return nullptr;
    }
}

MESH_API void mesh_splice_read(mesh_splice * splice, mesh_splice_report * report) {
    splice->read(*report);
}

MESH_API void mesh_splice_free(mesh_splice * splice) {
    delete splice;
}
}
