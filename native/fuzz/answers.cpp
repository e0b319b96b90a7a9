// A client over a worker that answers whatever the fuzzer thinks of.
//
// The first byte chooses a graph. Then each command that is answered takes the next bytes: options, a place, a length
// and a payload, which stands alone or is laid over the true one. Behind the end all answers are true.
//
// What must not happen: a crash, a finding of a sanitizer, a hang.

#include "ggml-mesh.h"
#include "host/device.h"
#include "tests/lying_worker.h"

#include <cstdio>
#include <cstdlib>

namespace check {

void fail(const char * file, int line, const std::string & what) {
    throw failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

std::string thrown(const std::function<void()> & work) {
    try {
        work();
    } catch (const std::exception & error) {
        return error.what();
    }
    return {};
}

}  // namespace check

namespace {

using session::lying_worker;

// Options: an answer has all of these bits, or it is not meant.
constexpr uint8_t OTHER_KIND = 0x03;
constexpr uint8_t OTHER_TICKET = 0x0c;
constexpr uint8_t LAID_OVER = 0x10;
constexpr uint8_t TRUE = 0x20;
constexpr uint8_t END = 0xf0;

bool has(uint8_t options, uint8_t meant) {
    return (options & meant) == meant;
}

// Takes answers from the input, one after the other.
class script {
  public:
    script(const uint8_t * data, size_t size) : data_(data), size_(size) {}

    bool answer(lying_worker & self, const mesh::frame & to) {
        const auto kind = kind_of(to);
        if (kind == 0) {
            return true;
        }
        const uint8_t options = next();
        if (has(options, END)) {
            self.wire().shut();
            return true;
        }
        if (has(options, TRUE)) {
            return false;
        }
        std::vector<uint8_t> payload = has(options, LAID_OVER) ? truth(to) : std::vector<uint8_t>();
        const size_t place = next() * 2U;
        const size_t length = next() * 4U;
        payload.resize(has(options, LAID_OVER) ? payload.size() : length);
        for (size_t i = place; i < payload.size() && i < place + 8; ++i) {
            payload[i] = next();
        }
        self.say(
            static_cast<lying_worker::answer>(has(options, OTHER_KIND) ? next() : kind),
            to.head.ticket + (has(options, OTHER_TICKET) ? 1 : 0), payload.data(), payload.size()
        );
        return true;
    }

  private:
    const uint8_t * data_;
    size_t size_;
    size_t at_ = 0;

    uint8_t next() {
        return at_ < size_ ? data_[at_++] : TRUE;
    }

    static uint8_t kind_of(const mesh::frame & command) {
        switch (static_cast<lying_worker::command>(command.head.kind)) {
        case lying_worker::command::hello:
        case lying_worker::command::supports:
        case lying_worker::command::size:
        case lying_worker::command::reserve:
        case lying_worker::command::run:
        case lying_worker::command::get:
            return command.head.kind | 0x80;
        default:
            return 0;
        }
    }

    static std::vector<uint8_t> truth(const mesh::frame & command) {
        switch (static_cast<lying_worker::command>(command.head.kind)) {
        case lying_worker::command::hello: {
            const auto facts = lying_worker::facts_for(command);
            const auto * bytes = reinterpret_cast<const uint8_t *>(&facts);
            return {bytes, bytes + sizeof facts};
        }
        case lying_worker::command::supports:
            return {1, 0, 0, 0};
        case lying_worker::command::size: {
            const uint64_t size = lying_worker::true_size(command);
            const auto * bytes = reinterpret_cast<const uint8_t *>(&size);
            return {bytes, bytes + sizeof size};
        }
        case lying_worker::command::reserve: {
            const uint64_t size = lying_worker::payload<mesh::wire::reserve>(command).most;
            const auto * bytes = reinterpret_cast<const uint8_t *>(&size);
            return {bytes, bytes + sizeof size};
        }
        case lying_worker::command::run:
            return std::vector<uint8_t>(sizeof(mesh::wire::telemetry));
        default:
            return std::vector<uint8_t>(lying_worker::payload<mesh::wire::span>(command).size);
        }
    }
};

// What llama.cpp does with a device: asks, allocates, computes, reads.
void use(ggml_backend_dev_t device, const host::example & what) {
    const host::graph graph(what, ggml_backend_dev_buffer_type(device));
    const ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    for (int i = 0; i < ggml_graph_n_nodes(graph.get()); ++i) {
        ggml_backend_dev_supports_op(device, ggml_graph_node(graph.get(), i));
    }
    for (int i = 0; i < 2; ++i) {
        if (ggml_backend_graph_compute(backend.get(), graph.get()) == GGML_STATUS_SUCCESS) {
            graph.result();
        }
    }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    ggml_mesh_loaded();
    mesh::host_patience() = {std::chrono::seconds(2), std::chrono::seconds(2), std::chrono::seconds(2)};
    return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t size) {
    static const std::vector<const char *> names = {"mixture", "flash_attn", "argsort", "get_rows q4_k"};
    if (size < 1 || size > 4096) {
        return 0;
    }
    script answers(data + 1, size - 1);
    lying_worker worker([&](lying_worker & self, const mesh::frame & to) { return answers.answer(self, to); });
    char why[512] = "";
    const char * name = "FUZZED";
    const int fd = worker.client_fd();
    if (ggml_mesh_connect(&fd, &name, 1, why, sizeof why) == 0) {
        ggml_backend_dev_t device = &mesh::devices().back()->handle;
        mesh::devices().back()->reserve(0, 1 << 20);
        check::thrown([&] { use(device, host::example_named(names[data[0] % names.size()])); });
        ggml_mesh_failure(static_cast<int>(mesh::devices().size()) - 1, why, sizeof why);
        // ggml keeps its handle for good; nobody looks at it any more.
        mesh::devices().pop_back();
    }
    if (std::getenv("MESH_FUZZ_SAY") != nullptr) {
        std::fprintf(stderr, "%s\n", why);
    }
    return 0;
}
