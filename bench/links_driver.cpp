// Both ends of what the links bench measures, as a native child would drive them: messages and masses of bytes over
// a socket, and the same over a stream of iroh's without any socket. Built by the bench, together with splice.cpp,
// whose way to wait for iroh it uses.

#include "../native/splice/splice.cpp"

#include <chrono>

namespace {

using clock_type = std::chrono::steady_clock;

// As much as arrives between two reads, when they are fast: iroh clears what it is asked for.
constexpr size_t READ_BYTES = 64 << 10;

// What is sent to and fro: a socket or a stream. False when it ended.
struct socket_way {
    int fd;

    bool write(std::vector<uint8_t> & prefixed) {
        const uint8_t * data = prefixed.data() + PREFIX_BYTES;
        size_t left = prefixed.size() - PREFIX_BYTES;
        while (left > 0) {
            const ssize_t count = send(fd, data, left, SEND_FLAGS);
            if (count <= 0) {
                return false;
            }
            data += count;
            left -= static_cast<size_t>(count);
        }
        return true;
    }

    size_t read(std::vector<uint8_t> & buffer, size_t limit) {
        const ssize_t count = recv(fd, buffer.data(), std::min(limit, buffer.size()), 0);
        return count <= 0 ? 0 : static_cast<size_t>(count);
    }
};

struct stream_way {
    const mesh_iroh & iroh;
    uint64_t send_handle;
    uint64_t recv_handle;
    waiter out;
    waiter in;

    bool write(std::vector<uint8_t> & prefixed) {
        mesh_rust_status status{};
        write_prefix(prefixed.data(), static_cast<uint32_t>(prefixed.size() - PREFIX_BYTES));
        const mesh_rust_buffer bytes =
            iroh.buffer_from_bytes({static_cast<int32_t>(prefixed.size()), prefixed.data()}, &status);
        const uint64_t future = iroh.send_write_all(iroh.send_clone(send_handle, &status), bytes);
        out.wait(future, iroh.void_poll, iroh.void_cancel);
        iroh.void_complete(future, &status);
        iroh.void_free(future);
        return status.code == CALL_OK;
    }

    size_t read(std::vector<uint8_t> & buffer, size_t limit) {
        mesh_rust_status status{};
        const auto wanted = static_cast<uint32_t>(std::min(limit, buffer.size()));
        const uint64_t future = iroh.recv_read(iroh.recv_clone(recv_handle, &status), wanted);
        in.wait(future, iroh.buffer_poll, iroh.buffer_cancel);
        const owned_buffer bytes(iroh, iroh.buffer_complete(future, &status));
        iroh.buffer_future_free(future);
        if (status.code != CALL_OK || bytes.size() <= PREFIX_BYTES) {
            return 0;
        }
        std::memcpy(buffer.data(), bytes.data() + PREFIX_BYTES, bytes.size() - PREFIX_BYTES);
        return bytes.size() - PREFIX_BYTES;
    }
};

template <typename Way> bool read_exactly(Way & way, std::vector<uint8_t> & buffer, uint64_t size) {
    while (size > 0) {
        const size_t count = way.read(buffer, size);
        if (count == 0) {
            return false;
        }
        size -= count;
    }
    return true;
}

// `rounds` messages of `size` bytes, each answered by one of the same size; seconds for each.
template <typename Way> int ping(Way & way, uint64_t size, uint64_t rounds, double * seconds) {
    std::vector<uint8_t> message(PREFIX_BYTES + size, 7);
    std::vector<uint8_t> buffer(size);
    for (uint64_t i = 0; i < rounds; ++i) {
        const auto start = clock_type::now();
        if (!way.write(message) || !read_exactly(way, buffer, size)) {
            return 1;
        }
        seconds[i] = std::chrono::duration<double>(clock_type::now() - start).count();
    }
    return 0;
}

template <typename Way> int echo(Way & way, uint64_t size, uint64_t rounds) {
    std::vector<uint8_t> message(PREFIX_BYTES + size, 8);
    std::vector<uint8_t> buffer(size);
    for (uint64_t i = 0; i < rounds; ++i) {
        if (!read_exactly(way, buffer, size) || !way.write(message)) {
            return 1;
        }
    }
    return 0;
}

// `rounds` chunks of `size` bytes one way, and one byte back when all have arrived; seconds in all.
template <typename Way> int push(Way & way, uint64_t size, uint64_t rounds, double * seconds) {
    std::vector<uint8_t> message(PREFIX_BYTES + size, 9);
    std::vector<uint8_t> buffer(1);
    const auto start = clock_type::now();
    for (uint64_t i = 0; i < rounds; ++i) {
        if (!way.write(message)) {
            return 1;
        }
    }
    const bool arrived = read_exactly(way, buffer, 1);
    *seconds = std::chrono::duration<double>(clock_type::now() - start).count();
    return arrived ? 0 : 1;
}

template <typename Way> int pull(Way & way, uint64_t size, uint64_t rounds) {
    std::vector<uint8_t> buffer(READ_BYTES);
    std::vector<uint8_t> answer(PREFIX_BYTES + 1, 1);
    return read_exactly(way, buffer, size * rounds) && way.write(answer) ? 0 : 1;
}

template <typename Way> int drive(Way & way, int what, uint64_t size, uint64_t rounds, double * seconds) {
    switch (what) {
    case 0:
        return ping(way, size, rounds, seconds);
    case 1:
        return echo(way, size, rounds);
    case 2:
        return push(way, size, rounds, seconds);
    default:
        return pull(way, size, rounds);
    }
}

}  // namespace

extern "C" {

MESH_API int drive_socket(int fd, int what, uint64_t size, uint64_t rounds, double * seconds) {
    socket_way way{fd};
    return drive(way, what, size, rounds, seconds);
}

MESH_API int drive_stream(
    const mesh_iroh * iroh, uint64_t send_handle, uint64_t recv_handle, int what, uint64_t size, uint64_t rounds,
    double * seconds
) {
    stream_way way{*iroh, send_handle, recv_handle, {}, {}};
    return drive(way, what, size, rounds, seconds);
}
}
