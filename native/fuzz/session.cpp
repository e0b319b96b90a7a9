// Fuzzes a whole session of a worker: the input is what a client sends.
//
// The first byte of an input holds options: bit 0 greets before its frames are sent, bit 1 computes with two
// threads. The rest are frames, as recordings of sessions hold them (../tests/session.h, MESH_RECORD).

#include "ggml-mesh.h"
#include "tests/frames.h"
#include "tests/model.h"
#include "wire/protocol.h"

#include "ggml.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <iterator>
#include <poll.h>
#include <set>
#include <sys/socket.h>
#include <thread>
#include <unistd.h>

using mesh::wire::command;
using session_bytes::dice;
using session_bytes::frame;

namespace {

constexpr uint64_t QUOTA = 4 << 20;
constexpr uint8_t GREETS = 1;
constexpr uint8_t TWO_THREADS = 2;
constexpr size_t MAX_SENT = 1 << 20;

void * worker_with(int threads) {
    char why[256] = "";
    void * made = ggml_mesh_worker_new("CPU", threads, QUOTA, why, sizeof why);
    // A link to itself: what is pushed to peer 0 comes back as the mail of the same session.
    std::array<int, 2> fds{};
    if (made == nullptr || socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) != 0) {
        std::abort();
    }
    const model::temporary_file file;  // stays mapped
    model::write(file.path());
    const char * paths[] = {file.path().c_str()};
    if (ggml_mesh_worker_add_model(made, model::FINGERPRINT, paths, 1, why, sizeof why) != 0) {
        std::abort();
    }
    ggml_mesh_worker_add_peer(made, 0, fds[0]);
    ggml_mesh_worker_add_peer(made, 1, fds[1]);
    return made;
}

void add(std::vector<uint8_t> & bytes, uint8_t kind, const std::vector<uint8_t> & payload) {
    mesh::wire::header head{};
    head.kind = kind;
    head.size = payload.size();
    const auto * raw = reinterpret_cast<const uint8_t *>(&head);
    bytes.insert(bytes.end(), raw, raw + sizeof head);
    bytes.insert(bytes.end(), payload.begin(), payload.end());
}

std::vector<uint8_t> hello() {
    mesh::wire::hello self{};
    self.session = {{1, 2}};
    self.magic = mesh::wire::MAGIC;
    self.version = mesh::wire::VERSION;
    std::strncpy(self.engine, ggml_mesh_engine_version(), sizeof self.engine - 1);
    self.op_count = GGML_OP_COUNT;
    self.type_count = GGML_TYPE_COUNT;
    self.tensor_size = sizeof(ggml_tensor);
    const auto * raw = reinterpret_cast<const uint8_t *>(&self);
    return {raw, raw + sizeof self};
}

// Which push a PUSH or RECV is about. Nobody waits a minute for one that never comes.
bool number_of(const frame & each, size_t at, uint64_t & number) {
    if (each.payload.size() < at + sizeof number) {
        return false;
    }
    std::memcpy(&number, each.payload.data() + at, sizeof number);
    return true;
}

std::vector<uint8_t> bytes_to_send(uint8_t options, const std::vector<frame> & frames) {
    std::vector<uint8_t> bytes;
    std::set<uint64_t> pushed;
    if ((options & GREETS) != 0) {
        add(bytes, static_cast<uint8_t>(command::hello), hello());
    }
    for (const frame & each : frames) {
        uint64_t number = 0;
        if (each.is(command::push) && number_of(each, offsetof(mesh::wire::push, number), number)) {
            pushed.insert(number);
        }
        const bool waits = each.is(command::recv) && number_of(each, offsetof(mesh::wire::recv, number), number);
        if (waits && pushed.erase(number) == 0) {
            continue;
        }
        add(bytes, each.head.kind, each.payload);
    }
    // A command that does not exist ends the session after all others; closing the link would drop them.
    add(bytes, 0, {});
    return bytes;
}

// Writes, and reads what comes back, until the other side ends.
void converse(int fd, const std::vector<uint8_t> & bytes) {
    std::array<uint8_t, 1 << 16> ignored{};
    size_t sent = 0;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    for (;;) {
        pollfd self = {fd, static_cast<short>(POLLIN | (sent < bytes.size() ? POLLOUT : 0)), 0};
        poll(&self, 1, -1);
        if ((self.revents & POLLOUT) != 0) {
            const ssize_t count = send(fd, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
            if (count < 0 && errno != EAGAIN) {
                sent = bytes.size();
            }
            sent += count > 0 ? static_cast<size_t>(count) : 0;
        }
        if ((self.revents & (POLLIN | POLLHUP | POLLERR)) != 0) {
            const ssize_t count = read(fd, ignored.data(), ignored.size());
            if (count == 0 || (count < 0 && errno != EAGAIN)) {
                return;
            }
        }
    }
}

// --- mutations that know what a frame is ---

void mutate_graph(frame & graph, dice & random) {
    const size_t count = session_bytes::tensor_count(graph);
    if (count == 0) {
        return;
    }
    std::vector<mesh::wire::tensor> table;
    for (size_t i = 0; i < count; ++i) {
        table.push_back(session_bytes::get_tensor(graph, i));
    }
    for (size_t i = 0; i <= random.below(3); ++i) {
        const size_t at = random.below(count);
        mesh::wire::tensor tensor = session_bytes::get_tensor(graph, at);
        session_bytes::change_field(tensor, table, random);
        session_bytes::set_tensor(graph, at, tensor);
    }
}

void mutate_frames(std::vector<frame> & frames, dice & random) {
    const size_t at = random.below(frames.size());
    switch (random.below(6)) {
    case 0:
        frames.erase(frames.begin() + static_cast<std::ptrdiff_t>(at));
        break;
    case 1:
        frames.insert(
            frames.begin() + static_cast<std::ptrdiff_t>(random.below(frames.size())), frame(frames[at])
        );
        break;
    case 2:
        std::swap(frames[at], frames[random.below(frames.size())]);
        break;
    case 3:
        frames[at].head.kind = static_cast<uint8_t>(random.below(static_cast<size_t>(command::copies) + 1));
        break;
    default:
        if (!frames[at].payload.empty()) {
            // One number of 4 bytes, where most numbers lie.
            const size_t word = random.below((frames[at].payload.size() + 3) / 4) * 4;
            auto value = static_cast<uint32_t>(random.below(2) == 0 ? random.below(70) : random.next());
            const size_t size = std::min(sizeof value, frames[at].payload.size() - word);
            std::memcpy(frames[at].payload.data() + word, &value, size);
        }
    }
}

}  // namespace

extern "C" size_t LLVMFuzzerMutate(uint8_t * data, size_t size, size_t max_size);

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t * data, size_t size, size_t max_size, unsigned int seed) {
    dice random(seed);
    if (size < 2 || random.below(10) == 0) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    std::vector<frame> frames = session_bytes::parse(data + 1, size - 1);
    if (frames.empty()) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    std::vector<frame *> graphs;
    for (frame & each : frames) {
        if (each.is(command::graph)) {
            graphs.push_back(&each);
        }
    }
    if (!graphs.empty() && random.below(4) != 0) {
        mutate_graph(*graphs[random.below(graphs.size())], random);
    } else {
        mutate_frames(frames, random);
    }
    const std::vector<uint8_t> bytes = session_bytes::join(frames);
    if (bytes.size() + 1 > max_size) {
        return LLVMFuzzerMutate(data, size, max_size);
    }
    data[0] = random.below(50) == 0 ? static_cast<uint8_t>(random.below(4)) : data[0];
    std::copy(bytes.begin(), bytes.end(), data + 1);
    return bytes.size() + 1;
}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    static void * const alone = worker_with(1);
    static void * const together = worker_with(2);
    if (size < 1 || size > MAX_SENT) {
        return 0;
    }
    const std::vector<uint8_t> bytes = bytes_to_send(data[0], session_bytes::parse(data + 1, size - 1));
    std::array<int, 2> fds{};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, fds.data()) != 0) {
        std::abort();
    }
    std::thread serving([&, fd = fds[1]] {
        char why[256] = "";
        ggml_mesh_worker_serve((data[0] & TWO_THREADS) != 0 ? together : alone, fd, why, sizeof why);
        if (std::getenv("MESH_FUZZ_SAY") != nullptr) {
            std::fprintf(stderr, "%s\n", why);
        }
    });
    converse(fds[0], bytes);
    close(fds[0]);
    serving.join();
    return 0;
}
