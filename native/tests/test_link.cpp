// Frames over a socket: in any pieces, and with an end anywhere.

#include "tests/check.h"
#include "wire/inputs.h"
#include "wire/link.h"
#include "worker/pushed_activations.h"

#include <array>
#include <chrono>
#include <cstring>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

using namespace std::chrono_literals;

namespace {

std::array<int, 2> sockets() {
    std::array<int, 2> fds{};
    CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) == 0);
    return fds;
}

std::vector<uint8_t> frame_bytes(uint64_t size) {
    mesh::wire::header head{};
    head.kind = 5;
    head.ticket = 7;
    head.size = size;
    std::vector<uint8_t> bytes(sizeof head + size);
    std::memcpy(bytes.data(), &head, sizeof head);
    for (size_t i = sizeof head; i < bytes.size(); ++i) {
        bytes[i] = static_cast<uint8_t>(i);
    }
    return bytes;
}

void write_all(int fd, const uint8_t * data, size_t size) {
    CHECK(write(fd, data, size) == static_cast<ssize_t>(size));
}

bool holds_frame(mesh::link & receiver) {
    receiver.take_arrived();
    return receiver.holds_frame();
}

}  // namespace

TEST("link: whether a frame has arrived whole is known without waiting") {
    const std::vector<uint8_t> bytes = frame_bytes(40);
    const auto fds = sockets();
    mesh::link receiver(fds[0], "test");
    for (size_t frames = 0; frames < 3; ++frames) {
        for (const uint8_t & byte : bytes) {
            CHECK(!holds_frame(receiver));
            write_all(fds[1], &byte, 1);
        }
        CHECK(holds_frame(receiver));
        CHECK_EQUAL(receiver.receive_frame().payload.size(), 40U);
    }
    const std::vector<uint8_t> two = [&] {
        std::vector<uint8_t> both = bytes;
        both.insert(both.end(), bytes.begin(), bytes.end());
        return both;
    }();
    write_all(fds[1], two.data(), two.size() - 1);
    CHECK(holds_frame(receiver));
    receiver.receive_frame();
    CHECK(!holds_frame(receiver));
    write_all(fds[1], &two.back(), 1);
    CHECK(holds_frame(receiver));
    CHECK_EQUAL(receiver.receive_frame().payload.back(), bytes.back());
    // One that is too large is left to who reads it in pieces.
    const std::vector<uint8_t> large = frame_bytes(100'000);
    write_all(fds[1], large.data(), large.size());
    CHECK(!holds_frame(receiver));
    CHECK_EQUAL(receiver.receive_frame().payload.size(), 100'000U);
    close(fds[1]);
    CHECK(!holds_frame(receiver));
    receiver.wait_for_more();
    CHECK_CONTAINS(check::thrown([&] { receiver.receive_header(); }), "the other side closed the link");
}

TEST("link: a frame arrives whole, whatever the pieces") {
    const std::vector<uint8_t> bytes = frame_bytes(40);
    for (size_t piece = 1; piece <= bytes.size(); ++piece) {
        const auto fds = sockets();
        mesh::link receiver(fds[0], "test");
        std::thread sender([&] {
            for (size_t i = 0; i < bytes.size(); i += piece) {
                write_all(fds[1], bytes.data() + i, std::min(piece, bytes.size() - i));
            }
            close(fds[1]);
        });
        const mesh::frame received = receiver.receive_frame();
        sender.join();
        CHECK_EQUAL(received.head.ticket, 7U);
        CHECK(std::equal(received.payload.begin(), received.payload.end(), bytes.begin() + 16));
        CHECK_CONTAINS(check::thrown([&] { receiver.receive_header(); }), "the other side closed the link");
    }
}

TEST("link: an end at every byte is noticed") {
    const std::vector<uint8_t> bytes = frame_bytes(24);
    for (size_t count = 0; count < bytes.size(); ++count) {
        const auto fds = sockets();
        mesh::link receiver(fds[0], "test");
        write_all(fds[1], bytes.data(), count);
        close(fds[1]);
        CHECK_CONTAINS(check::thrown([&] { receiver.receive_frame(); }), "the other side closed the link");
    }
}

TEST("link: a frame over the limit is refused before memory is taken") {
    for (const uint64_t size : {mesh::wire::MAX_FRAME_BYTES + 1, uint64_t{UINT64_MAX}}) {
        const auto fds = sockets();
        mesh::link receiver(fds[0], "test");
        mesh::wire::header head{};
        head.size = size;
        write_all(fds[1], reinterpret_cast<const uint8_t *>(&head), sizeof head);
        CHECK_CONTAINS(check::thrown([&] { receiver.receive_frame(); }), "is over the limit");
        close(fds[1]);
    }
}

TEST("link: large frames bypass the buffer, and several follow each other") {
    const auto fds = sockets();
    mesh::link sender(fds[0], "test");
    mesh::link receiver(fds[1], "test");
    std::vector<uint8_t> large(1 << 20, 0x5a);
    std::thread thread([&] {
        for (uint32_t i = 0; i < 5; ++i) {
            sender.send(9, i, {{large.data(), i % 2 == 0 ? large.size() : 3}, {nullptr, 0}});
        }
    });
    for (uint32_t i = 0; i < 5; ++i) {
        const mesh::frame got = receiver.receive_frame();
        CHECK_EQUAL(got.head.ticket, i);
        CHECK_EQUAL(got.payload.size(), i % 2 == 0 ? large.size() : 3U);
    }
    thread.join();
    CHECK_EQUAL(sender.sent_bytes(), receiver.received_bytes());
}

TEST("link: shut ends a read that waits, and sending to nobody throws") {
    const auto fds = sockets();
    mesh::link one(fds[0], "test");
    mesh::link two(fds[1], "test");
    std::thread thread([&] {
        std::this_thread::sleep_for(20ms);
        one.shut();
    });
    CHECK(!check::thrown([&] { one.receive_header(); }).empty());
    thread.join();
    const std::vector<uint8_t> data(1 << 16);
    CHECK(!check::thrown([&] { two.send(1, 1, {{data.data(), data.size()}}); }).empty());
}

// --- what is pushed ---

TEST("pushed_activations: a push waits for its session, or is waited for") {
    mesh::pushed_activations mail;
    const mesh::wire::session_id id = {{1, 2}};
    std::vector<uint8_t> data;
    CHECK(!mail.deliver(id, 1, {1, 2, 3}));  // nobody is here
    mail.open(id);
    CHECK(mail.deliver(id, 1, {1, 2, 3}));
    CHECK(mail.receive(id, 1, 0ms, data));
    CHECK_EQUAL(data.size(), 3U);
    CHECK(!mail.receive(id, 1, 1ms, data));  // taken
    std::thread sender([&] {
        std::this_thread::sleep_for(10ms);
        mail.deliver(id, 2, {4});
    });
    CHECK(mail.receive(id, 2, 10'000ms, data));
    sender.join();
    CHECK_EQUAL(data.size(), 1U);
}

TEST("pushed_activations: the end of a session wakes who waits") {
    mesh::pushed_activations mail;
    const mesh::wire::session_id id = {{1, 2}};
    std::vector<uint8_t> data;
    mail.open(id);
    std::thread closer([&] {
        std::this_thread::sleep_for(10ms);
        mail.close(id);
    });
    CHECK(!mail.receive(id, 1, 60'000ms, data));
    closer.join();
    CHECK(!mail.deliver(id, 1, {1}));
}

TEST("pushed_activations: a session cannot hoard") {
    mesh::pushed_activations mail;
    const mesh::wire::session_id id = {{1, 2}};
    mail.open(id);
    const size_t piece = mesh::wire::MAX_QUEUE_BYTES / 4 - 1024;
    for (uint64_t i = 0; i < 4; ++i) {
        CHECK(mail.deliver(id, i, std::vector<uint8_t>(piece)));
    }
    CHECK(!mail.deliver(id, 4, std::vector<uint8_t>(piece)));
    std::vector<uint8_t> data;
    CHECK(mail.receive(id, 0, 0ms, data));
    CHECK(mail.deliver(id, 1, std::vector<uint8_t>(1)));  // takes the place of a large one
    CHECK(mail.deliver(id, 5, std::vector<uint8_t>(piece)));
    CHECK(mail.deliver(id, 6, std::vector<uint8_t>(piece)));
}

TEST("pushed_activations: pushes of no bytes are not kept for ever") {
    mesh::pushed_activations mail;
    const mesh::wire::session_id id = {{1, 2}};
    mail.open(id);
    uint64_t kept = 0;
    while (kept < 1 << 21 && mail.deliver(id, kept, {})) {
        ++kept;
    }
    CHECK(kept > 1000 && kept < 1 << 21);
    std::vector<uint8_t> data;
    CHECK(mail.receive(id, 0, 0ms, data));
    CHECK(mail.deliver(id, kept, {}));
    CHECK(!mail.deliver(id, kept + 1, {}));
}

// --- inputs ---

TEST("inputs: small ones are not remembered for ever") {
    for (const uint64_t size : {0U, 1U}) {
        mesh::shadows theirs;
        std::vector<uint8_t> frame(sizeof(mesh::wire::input_head) + size);
        size_t most = 0;
        for (uint64_t i = 0; i < 1 << 19; ++i) {
            const mesh::wire::input_head head = {1, 0, i, size, size};
            std::memcpy(frame.data(), &head, sizeof head);
            size_t position = 0;
            theirs.decode(frame, position);
            most = std::max(most, theirs.count());
        }
        CHECK(most > 1000 && most < 1 << 19);
    }
}

TEST("inputs: both sides agree, and nonsense is refused") {
    mesh::shadows ours;
    mesh::shadows theirs;
    std::vector<uint8_t> data(256, 0);
    for (size_t round = 0; round < 20; ++round) {
        data[round * 7 % data.size()] = static_cast<uint8_t>(round + 1);
        std::vector<uint8_t> bytes;
        ours.encode({1, 64, data}, bytes);
        size_t position = 0;
        const mesh::input got = theirs.decode(bytes, position);
        CHECK_EQUAL(position, bytes.size());
        CHECK(got.data == data && got.buffer_id == 1 && got.offset == 64);
        for (size_t cut = 0; cut < bytes.size(); ++cut) {
            mesh::shadows fresh;
            std::vector<uint8_t> shorter(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(cut));
            size_t start = 0;
            CHECK(!check::thrown([&] { fresh.decode(shorter, start); }).empty());
        }
    }
}
