// Splices between sockets and streams. iroh is played by queues in memory, with futures that are polled, woken from
// other threads and cancelled as uniffi's are.

#include "splice/splice.h"
#include "tests/check.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <poll.h>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

namespace {

constexpr size_t WINDOW_BYTES = 64 << 10;
constexpr int8_t READY = 0;
constexpr int8_t WAKE = 1;

std::atomic<int> live_handles{0};
std::atomic<int> live_buffers{0};
std::atomic<int> live_futures{0};

mesh_rust_buffer new_buffer(const void * data, size_t size) {
    ++live_buffers;
    auto * copy = new uint8_t[size + 1];
    if (size > 0) {
        std::memcpy(copy, data, size);
    }
    return {size + 1, size, copy};
}

void free_buffer(mesh_rust_buffer buffer, mesh_rust_status * /*status*/) {
    --live_buffers;
    delete[] buffer.data;
}

// A future that waits, and where to tell that it is worth another look.
struct waiting {
    mesh_rust_continuation continuation = nullptr;
    uint64_t data = 0;

    void call(int8_t code) {
        if (continuation != nullptr) {
            const mesh_rust_continuation function = continuation;
            continuation = nullptr;
            function(data, code);
        }
    }
};

// One direction of a stream.
struct queue {
    std::mutex mutex;
    std::deque<uint8_t> bytes;
    bool finished = false;
    bool reset = false;
    bool garbled = false;
    waiting * reader = nullptr;
    waiting * writer = nullptr;

    // With the lock held: calls back at once, as uniffi's wakers may.
    void changed() {
        for (waiting * side : {reader, writer}) {
            if (side != nullptr) {
                side->call(WAKE);
            }
        }
    }

    void fail() {
        const std::lock_guard<std::mutex> lock(mutex);
        reset = true;
        changed();
    }
};

enum class doing { WRITE, FINISH, READ };

struct future {
    doing what;
    queue * target;
    std::vector<uint8_t> bytes;
    size_t done = 0;
    uint32_t limit = 0;
    bool ready = false;
    bool failed = false;
    bool cancelled = false;
    waiting wake;

    void advance() {
        failed = target->reset;
        ready = failed;
        if (failed) {
            return;
        }
        if (what == doing::FINISH) {
            target->finished = true;
            ready = true;
        } else if (what == doing::WRITE) {
            for (; done < bytes.size() && target->bytes.size() < WINDOW_BYTES; ++done) {
                target->bytes.push_back(bytes[done]);
            }
            ready = done == bytes.size();
        } else if (!target->bytes.empty() || target->finished) {
            const size_t size = std::min<size_t>(limit, target->bytes.size());
            bytes.assign(target->bytes.begin(), target->bytes.begin() + static_cast<ptrdiff_t>(size));
            target->bytes.erase(target->bytes.begin(), target->bytes.begin() + static_cast<ptrdiff_t>(size));
            ready = true;
        }
    }
};

future & future_of(uint64_t number) {
    return *reinterpret_cast<future *>(static_cast<uintptr_t>(number));
}

queue & queue_of(uint64_t number) {
    return *reinterpret_cast<queue *>(static_cast<uintptr_t>(number));
}

uint64_t number_of(const void * object) {
    return reinterpret_cast<uintptr_t>(object);
}

uint64_t new_future(doing what, uint64_t handle, std::vector<uint8_t> bytes, uint32_t limit) {
    --live_handles;  // a call takes over its handle
    ++live_futures;
    auto made = std::make_unique<future>();
    made->what = what;
    made->target = &queue_of(handle);
    made->bytes = std::move(bytes);
    made->limit = limit;
    return number_of(made.release());
}

uint64_t clone(uint64_t handle, mesh_rust_status * /*status*/) {
    ++live_handles;
    return handle;
}

void release(uint64_t /*handle*/, mesh_rust_status * /*status*/) {
    --live_handles;
}

void poll_future(uint64_t number, mesh_rust_continuation continuation, uint64_t data) {
    future & it = future_of(number);
    const std::lock_guard<std::mutex> lock(it.target->mutex);
    if (!it.cancelled && !it.ready) {
        it.advance();
        if (it.ready) {
            it.target->changed();
        }
    }
    if (it.cancelled || it.ready) {
        continuation(data, READY);
        return;
    }
    it.wake = {continuation, data};
    (it.what == doing::READ ? it.target->reader : it.target->writer) = &it.wake;
    // What a write left behind is news to the reader.
    if (it.what == doing::WRITE && it.target->reader != nullptr) {
        it.target->reader->call(WAKE);
    }
}

void cancel_future(uint64_t number) {
    future & it = future_of(number);
    const std::lock_guard<std::mutex> lock(it.target->mutex);
    it.cancelled = true;
    it.wake.call(READY);
}

void free_future(uint64_t number) {
    future & it = future_of(number);
    {
        const std::lock_guard<std::mutex> lock(it.target->mutex);
        for (waiting ** side : {&it.target->reader, &it.target->writer}) {
            if (*side == &it.wake) {
                *side = nullptr;
            }
        }
    }
    --live_futures;
    delete &it;
}

mesh_rust_buffer complete_future(uint64_t number, mesh_rust_status * status) {
    future & it = future_of(number);
    const std::lock_guard<std::mutex> lock(it.target->mutex);
    if (it.cancelled && !it.ready) {
        status->code = 3;
        return {};
    }
    if (it.failed) {
        const std::array<uint8_t, 8> handle{0, 0, 0, 0, 0, 0, 0, 42};
        status->code = 1;
        status->error = new_buffer(handle.data(), handle.size());
        return {};
    }
    if (it.what != doing::READ) {
        return {};
    }
    const size_t size = it.bytes.size() + (it.target->garbled ? 1 : 0);
    std::vector<uint8_t> prefixed{
        static_cast<uint8_t>(size >> 24U), static_cast<uint8_t>(size >> 16U), static_cast<uint8_t>(size >> 8U),
        static_cast<uint8_t>(size)};
    prefixed.insert(prefixed.end(), it.bytes.begin(), it.bytes.end());
    return new_buffer(prefixed.data(), prefixed.size());
}

const mesh_iroh & fake_iroh() {
    static const mesh_iroh table = [] {
        mesh_iroh iroh{};
        iroh.size = sizeof iroh;
        iroh.buffer_from_bytes = [](mesh_foreign_bytes bytes, mesh_rust_status *) {
            return new_buffer(bytes.data, static_cast<size_t>(bytes.len));
        };
        iroh.buffer_free = free_buffer;
        iroh.send_clone = iroh.recv_clone = clone;
        iroh.send_free = iroh.recv_free = release;
        iroh.send_write_all = [](uint64_t handle, mesh_rust_buffer buffer) {
            std::vector<uint8_t> bytes(buffer.data + 4, buffer.data + buffer.len);
            free_buffer(buffer, nullptr);
            return new_future(doing::WRITE, handle, std::move(bytes), 0);
        };
        iroh.send_finish = [](uint64_t handle) { return new_future(doing::FINISH, handle, {}, 0); };
        iroh.recv_read = [](uint64_t handle, uint32_t limit) {
            return new_future(doing::READ, handle, {}, limit);
        };
        iroh.void_poll = iroh.buffer_poll = poll_future;
        iroh.void_cancel = iroh.buffer_cancel = cancel_future;
        iroh.void_complete = [](uint64_t future, mesh_rust_status * status) { complete_future(future, status); };
        iroh.buffer_complete = complete_future;
        iroh.void_free = iroh.buffer_future_free = free_future;
        iroh.error_message = [](uint64_t handle, mesh_rust_status *) {
            const std::string text = "error " + std::to_string(handle);
            return new_buffer(text.data(), text.size());
        };
        return iroh;
    }();
    return table;
}

// A child's socket, spliced to a stream.
struct spliced {
    int child = -1;
    int done = -1;
    mesh_splice * splice = nullptr;

    spliced(queue & out, queue & in) {
        std::array<int, 2> link{};
        std::array<int, 2> end{};
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, link.data()) == 0);
        CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, end.data()) == 0);
        child = link[0];
        done = end[0];
        splice = mesh_splice_start(&fake_iroh(), link[1], number_of(&out), number_of(&in), end[1]);
        CHECK(splice != nullptr);
    }

    ~spliced() {
        mesh_splice_free(splice);
        close(child);
        close(done);
    }

    spliced(const spliced &) = delete;
    spliced & operator=(const spliced &) = delete;

    mesh_splice_report report() const {
        mesh_splice_report found{};
        mesh_splice_read(splice, &found);
        return found;
    }

    // When it has ended.
    mesh_splice_report last_report() const {
        uint8_t byte = 0;
        CHECK_EQUAL(recv(done, &byte, 1, 0), 0);
        return report();
    }
};

void send_all(int fd, const std::vector<uint8_t> & bytes) {
    for (size_t sent = 0; sent < bytes.size();) {
        const ssize_t count = send(fd, bytes.data() + sent, bytes.size() - sent, 0);
        CHECK(count > 0);
        sent += static_cast<size_t>(count);
    }
}

std::vector<uint8_t> receive_all(int fd) {
    std::vector<uint8_t> bytes;
    std::array<uint8_t, 4096> piece{};
    for (ssize_t count = 0; (count = recv(fd, piece.data(), piece.size(), 0)) > 0;) {
        bytes.insert(bytes.end(), piece.begin(), piece.begin() + count);
    }
    return bytes;
}

std::vector<uint8_t> pattern(size_t size, unsigned seed) {
    std::vector<uint8_t> bytes(size);
    for (size_t i = 0; i < size; ++i) {
        bytes[i] = static_cast<uint8_t>((i * 31 + (i >> 8U) + seed) & 0xffU);
    }
    return bytes;
}

void check_nothing_left() {
    CHECK_EQUAL(live_handles.load(), 0);
    CHECK_EQUAL(live_buffers.load(), 0);
    CHECK_EQUAL(live_futures.load(), 0);
}

}  // namespace

TEST("splice: bytes go both ways at once, and their ends, too") {
    for (const size_t size : {size_t(0), size_t(1), size_t(3000), size_t(1) << 20U}) {
        {
            queue there;
            queue back;
            spliced near(there, back);
            spliced far(back, there);
            const std::vector<uint8_t> up = pattern(size, 1);
            const std::vector<uint8_t> down = pattern(size, 2);
            std::thread near_writer([&] {
                send_all(near.child, up);
                shutdown(near.child, SHUT_WR);
            });
            std::thread far_writer([&] {
                send_all(far.child, down);
                shutdown(far.child, SHUT_WR);
            });
            std::vector<uint8_t> at_far;
            std::thread far_reader([&] { at_far = receive_all(far.child); });
            const std::vector<uint8_t> at_near = receive_all(near.child);
            for (std::thread * thread : {&near_writer, &far_writer, &far_reader}) {
                thread->join();
            }
            CHECK(at_far == up);
            CHECK(at_near == down);
            for (const spliced * side : {&near, &far}) {
                const mesh_splice_report report = side->last_report();
                CHECK_EQUAL(report.end, static_cast<int32_t>(MESH_SPLICE_FINISHED));
                CHECK_EQUAL(report.sent_bytes, size);
                CHECK_EQUAL(report.received_bytes, size);
                CHECK_EQUAL(std::string(report.reason), "");
            }
        }
        check_nothing_left();
    }
}

TEST("splice: a reset ends both directions, with iroh's own words") {
    {
        queue out;
        queue in;
        spliced near(out, in);
        in.fail();
        const mesh_splice_report report = near.last_report();
        CHECK_EQUAL(report.end, static_cast<int32_t>(MESH_SPLICE_STREAM_LOST));
        CHECK_EQUAL(std::string(report.reason), "error 42");
        CHECK(receive_all(near.child).empty());
        CHECK(!out.finished);
    }
    check_nothing_left();
}

TEST("splice: a child that is gone ends both directions") {
    std::signal(SIGPIPE, SIG_IGN);
    {
        queue there;
        queue back;
        spliced near(there, back);
        spliced far(back, there);
        std::thread writer([&] {
            const std::vector<uint8_t> bytes = pattern(1 << 16, 3);
            while (send(far.child, bytes.data(), bytes.size(), 0) > 0) {
            }
        });
        uint8_t byte = 0;
        CHECK_EQUAL(recv(near.child, &byte, 1, 0), 1);
        shutdown(near.child, SHUT_RDWR);
        CHECK_EQUAL(near.last_report().end, static_cast<int32_t>(MESH_SPLICE_LINK_LOST));
        back.fail();
        CHECK_EQUAL(far.last_report().end, static_cast<int32_t>(MESH_SPLICE_STREAM_LOST));
        writer.join();
    }
    check_nothing_left();
}

TEST("splice: freed while both directions wait, and while both are full") {
    for (int i = 0; i < 50; ++i) {
        {
            queue there;
            queue back;
            spliced near(there, back);
            spliced far(back, there);
        }
        check_nothing_left();
    }
    {
        queue there;
        queue back;
        spliced near(there, back);
        const std::vector<uint8_t> bytes = pattern(1 << 16, 4);
        while (send(near.child, bytes.data(), bytes.size(), MSG_DONTWAIT) > 0) {
        }
        const std::lock_guard<std::mutex> lock(back.mutex);
        back.bytes.assign(4 << 20U, 5);
        back.changed();
    }
    check_nothing_left();
}

TEST("splice: bytes of another form than agreed are refused") {
    {
        queue out;
        queue in;
        in.garbled = true;
        in.bytes.assign(10, 1);
        spliced near(out, in);
        const mesh_splice_report report = near.last_report();
        CHECK_EQUAL(report.end, static_cast<int32_t>(MESH_SPLICE_STREAM_LOST));
        CHECK_CONTAINS(report.reason, "unknown form");
        CHECK_EQUAL(report.received_bytes, 0U);
    }
    check_nothing_left();
    mesh_iroh older = fake_iroh();
    older.size -= 8;
    CHECK(mesh_splice_start(&older, -1, 0, 0, -1) == nullptr);
}
