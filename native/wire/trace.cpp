#include "wire/trace.h"

#include "ggml-mesh.h"
#include "wire/protocol.h"

#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <unistd.h>

namespace mesh {

namespace {

std::atomic<int> & trace_fd() {
    static std::atomic<int> fd{-1};
    return fd;
}

const char * name_of(uint8_t kind) {
    static const char * const commands[] = {"?",    "HELLO",   "ALLOC",    "FREE", "CLEAR",   "SET",
                                            "GET",  "COPY",    "GRAPH",    "RUN",  "ATTACH",  "PUSH",
                                            "RECV", "DELIVER", "SUPPORTS", "SIZE", "RESERVE", "COPIES"};
    if (kind < sizeof commands / sizeof commands[0]) {
        return commands[kind];
    }
    switch (static_cast<wire::answer>(kind)) {
    case wire::answer::hello:
        return "hello";
    case wire::answer::data:
        return "data";
    case wire::answer::done:
        return "done";
    case wire::answer::supports:
        return "supports";
    case wire::answer::size:
        return "size";
    case wire::answer::reserve:
        return "reserve";
    case wire::answer::error:
        return "error";
    }
    return "?";
}

}  // namespace

void start_trace(int fd) {
    trace_fd() = fd;
}

void trace_frame(const std::string & link, bool sent, uint8_t kind, uint32_t ticket, uint64_t size) noexcept {
    const int fd = trace_fd().load(std::memory_order_relaxed);
    if (fd < 0) {
        return;
    }
    // Wall time, so that the traces of two machines can be laid side by side.
    const auto now =
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch());
    char line[256];
    const int length = std::snprintf(
        line, sizeof line,
        "{\"ns\":%" PRId64 ",\"link\":\"%.64s\",\"sent\":%s,\"frame\":\"%s\",\"ticket\":%" PRIu32
        ",\"bytes\":%" PRIu64 "}\n",
        static_cast<int64_t>(now.count()), link.c_str(), sent ? "true" : "false", name_of(kind), ticket, size
    );
    if (length > 0 && write(fd, line, static_cast<size_t>(length)) < 0) {
        trace_fd() = -1;  // a full disk must not stop a link
    }
}

}  // namespace mesh

void ggml_mesh_trace(int fd) {
    mesh::start_trace(fd);
}
