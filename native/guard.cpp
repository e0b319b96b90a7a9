// A child must not outlive its node: the node holds the write end of a pipe,
// and the kernel closes that end however the node dies.

#include "ggml-mesh.h"

#include <cerrno>
#include <fcntl.h>
#include <system_error>
#include <thread>
#include <unistd.h>

namespace {

// Exit status of a child whose node is gone; nobody is left to read it but a tracer.
constexpr int ORPHANED = 75;

void wait_for_end_of_file(int fd) {
    char ignored[64];
    for (;;) {
        const ssize_t count = read(fd, ignored, sizeof ignored);
        if (count == 0) {
            // No destructors: other threads are in the middle of their work, and the kernel frees everything.
            _exit(ORPHANED);
        }
        if (count < 0 && errno != EINTR) {
            return;
        }
    }
}

}  // namespace

int ggml_mesh_guard(int fd) {
    if (fcntl(fd, F_GETFD) < 0) {
        return errno;
    }
    try {
        std::thread(wait_for_end_of_file, fd).detach();
    } catch (const std::system_error & error) {
        return error.code().value();
    }
    return 0;
}
