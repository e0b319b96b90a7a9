// What one client can cost a worker, and the other clients: memory, threads and time have bounds.

#include "tests/check.h"
#include "tests/model.h"
#include "tests/rogue_client.h"
#include "worker/command_queue.h"

#include <chrono>
#include <cstring>
#include <fstream>
#include <sys/resource.h>
#include <unistd.h>

using namespace session;
using namespace std::chrono_literals;
using mesh::wire::command;

namespace {

constexpr uint64_t QUOTA = 64 << 20;
constexpr size_t SESSIONS = 16;

bool is_over(int fd, std::chrono::milliseconds time) {
    const auto end = std::chrono::steady_clock::now() + time;
    mesh::link link(fd, "worker");
    while (std::chrono::steady_clock::now() < end) {
        if (link.readable()) {
            // What is said is not the point; the end is.
            try {
                link.receive_frame();
            } catch (const std::exception &) {
                return true;
            }
        }
        std::this_thread::sleep_for(5ms);
    }
    return false;
}

std::chrono::microseconds cpu_time() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    return std::chrono::seconds(used.ru_utime.tv_sec) + std::chrono::microseconds(used.ru_utime.tv_usec);
}

#if MESH_PLAIN
// That this process had at once, in bytes.
uint64_t most_memory() {
    rusage used{};
    getrusage(RUSAGE_SELF, &used);
    return static_cast<uint64_t>(used.ru_maxrss) << 10;
}

rlim_t pages_in_use() {
    rlim_t pages = 0;
    std::ifstream("/proc/self/statm") >> pages;
    return pages;
}
#endif

}  // namespace

TEST("limits: a worker takes so many sessions, and another when one has left") {
    worker remote(QUOTA);
    std::vector<std::unique_ptr<rogue_client>> seated;
    for (size_t i = 0; i < SESSIONS; ++i) {
        seated.push_back(std::make_unique<rogue_client>(remote));
        seated.back()->greet();
    }
    CHECK_CONTAINS(rogue_client(remote).complaint(), "it has as many sessions as it takes");
    seated.pop_back();
    const auto end = std::chrono::steady_clock::now() + check::PATIENCE;
    while (!rogue_client(remote).is_welcome()) {
        CHECK(std::chrono::steady_clock::now() < end);
        std::this_thread::sleep_for(5ms);
    }
    for (const auto & each : seated) {
        CHECK(each->alloc(1, 16));  // nobody has noticed
    }
}

TEST("limits: who does not greet is sent away") {
    worker remote(QUOTA);
    const int silent = remote.connect();
    const int hesitant = remote.connect();
    CHECK_EQUAL(write(hesitant, "MESH", 4), 4);
    CHECK(is_over(silent, check::PATIENCE));
    CHECK(is_over(hesitant, check::PATIENCE));
}

TEST("limits: before it has greeted nobody makes a worker take memory") {
    worker remote(QUOTA);
    const int fd = remote.connect();
    mesh::wire::header head{};
    head.kind = static_cast<uint8_t>(command::hello);
    head.size = mesh::wire::MAX_FRAME_BYTES;
    CHECK_EQUAL(write(fd, &head, sizeof head), static_cast<ssize_t>(sizeof head));
    CHECK(is_over(fd, 9s));  // at once, and not when the time for a greeting is over
}

TEST("limits: a peer that reads nothing holds up nobody else") {
    worker remote(QUOTA);
    const auto deaf = sockets();
    const auto pair = sockets();
    CHECK_EQUAL(ggml_mesh_worker_add_peer(remote.handle(), 0, deaf.first), 0);
    CHECK_EQUAL(ggml_mesh_worker_add_peer(remote.handle(), 1, pair.first), 0);
    CHECK_EQUAL(ggml_mesh_worker_add_peer(remote.handle(), 2, pair.second), 0);
    rogue_client stuck(remote);
    stuck.greet();
    stuck.alloc(1, 32 << 20);
    const mesh::wire::push large = {{1, 0, 0, 16 << 20}, 1, 0, 0};
    stuck.send(command::push, {{&large, sizeof large}});
    CHECK(stuck.alloc(2, 64));  // itself neither: a device computes while the network carries
    rogue_client other(remote, {{5, 6}});
    other.greet();
    other.alloc(1, 64);
    const mesh::wire::span where = {1, 0, 0, 64};
    const mesh::wire::push there = {where, 1, 1, 0};
    const mesh::wire::recv back = {where, 1};
    const auto start = std::chrono::steady_clock::now();
    other.send(command::push, {{&there, sizeof there}});
    other.send(command::recv, {{&back, sizeof back}});
    CHECK(other.alloc(2, 64));
    CHECK(std::chrono::steady_clock::now() - start < 25s);  // and not when the deaf one is given up
    close(deaf.second);
    CHECK_CONTAINS(stuck.complaint(), "the link to worker 0 is lost");
}

#if MESH_PLAIN
TEST("limits: what is received and never computed with is not kept without end") {
    constexpr uint64_t PIECE = 16 << 20;
    worker remote(QUOTA);
    const auto pair = sockets();
    CHECK_EQUAL(ggml_mesh_worker_add_peer(remote.handle(), 0, pair.first), 0);
    CHECK_EQUAL(ggml_mesh_worker_add_peer(remote.handle(), 1, pair.second), 0);
    rogue_client greedy(remote);
    greedy.greet();
    greedy.alloc(1, PIECE);
    const mesh::wire::span all = {1, 0, 0, PIECE};
    const uint64_t before = most_memory();
    for (uint64_t number = 0; number < 64; ++number) {
        const mesh::wire::push there = {all, number, 0, 0};
        const mesh::wire::recv back = {all, number};
        greedy.send(command::push, {{&there, sizeof there}});
        greedy.send(command::recv, {{&back, sizeof back}});
    }
    CHECK(greedy.alloc(2, 64));
    CHECK(most_memory() - before < 40 * PIECE);
}
#endif

TEST("limits: weights are not attached without end") {
    const model::temporary_file file;
    model::write(file.path());
    worker remote(QUOTA);
    const char * paths[] = {file.path().c_str()};
    char why[256] = "";
    CHECK_EQUAL(ggml_mesh_worker_add_model(remote.handle(), model::FINGERPRINT, paths, 1, why, sizeof why), 0);
    rogue_client other(remote);
    other.greet();
    mesh::wire::attach request{};
    request.count = 200'000;
    request.buffer_id = 1;
    const std::vector<mesh::wire::attach_entry> entries(request.count);
    other.send(
        command::attach, {{&request, sizeof request}, {entries.data(), entries.size() * sizeof entries[0]}}
    );
    CHECK_CONTAINS(other.complaint(), "weights cannot be attached");
}

TEST("limits: of adapters only those are attached that the worker's node told of") {
    const model::temporary_file file;
    model::write(file.path());
    worker remote(QUOTA);
    const std::string digest(sizeof(mesh::wire::file_name), 'd');  // as long as it may be
    const char * paths[] = {file.path().c_str()};
    char why[256] = "";
    CHECK_EQUAL(ggml_mesh_worker_add_model(remote.handle(), digest.c_str(), paths, 1, why, sizeof why), 0);
    const model::matrix & shape = model::matrices().front();
    const mesh::wire::attach request = {1, 1};
    mesh::wire::attach_entry entry{};
    std::strncpy(entry.name, shape.name, sizeof entry.name - 1);
    entry.size = model::bytes_of(shape).size();
    entry.elements = shape.ne[0] * shape.ne[1] * shape.ne[2];
    entry.type = static_cast<uint32_t>(shape.type);
    const auto attach = [&](rogue_client & other, const std::string & name) {
        other.greet();
        other.send(
            command::attach, {{&request, sizeof request}, {&entry, sizeof entry}, {name.data(), name.size()}}
        );
    };
    rogue_client allowed(remote);
    attach(allowed, digest);
    CHECK(allowed.alloc(2, 64));
    rogue_client unknown(remote);
    attach(unknown, std::string(digest.size(), 'e'));
    CHECK_CONTAINS(unknown.complaint(), "it has no copy of the model eee");
    rogue_client cut_short(remote);
    attach(cut_short, digest.substr(1));
    CHECK_CONTAINS(cut_short.complaint(), "weights cannot be attached");
}

TEST("limits: a few bytes do not stand for endless inputs") {
    worker remote(QUOTA);
    const host::graph built(host::example_named("add"), ggml_backend_get_default_buffer_type(host::cpu()));
    rogue_client other(remote);
    other.greet();
    CHECK(other.alloc(1, 33 << 20));
    other.send_graph(built.table());
    const mesh::wire::graph_key key = {};
    struct {
        mesh::wire::input_head head;
        mesh::wire::run_of_words body;
    } const all = {{1, static_cast<uint32_t>(mesh::wire::input_form::runs), 0, 32 << 20, 8}, {16 << 20, 7, 0}};
    std::vector<uint8_t> payload(
        reinterpret_cast<const uint8_t *>(&key), reinterpret_cast<const uint8_t *>(&key + 1)
    );
    for (int i = 0; i < 1000; ++i) {
        const auto * bytes = reinterpret_cast<const uint8_t *>(&all);
        payload.insert(payload.end(), bytes, bytes + sizeof all);
    }
    other.send(command::run, {{payload.data(), payload.size()}});
    CHECK_CONTAINS(other.complaint(), "the inputs of a RUN are too large");
}

TEST("limits: a computation ends when its client leaves") {
    worker remote(QUOTA, 1);
    // Ten thousand products that take some milliseconds each.
    const auto product = [](ggml_context * c) {
        return ggml_mul_mat(
            c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 512, 512), ggml_new_tensor_2d(c, GGML_TYPE_F32, 512, 512)
        );
    };
    const host::graph built({"product", product}, ggml_backend_get_default_buffer_type(host::cpu()));
    std::vector<mesh::wire::tensor> table = built.table();
    table.insert(table.end(), 10'000, table.back());
    {
        rogue_client leaving(remote);
        leaving.greet();
        CHECK(leaving.alloc(1, 8 << 20));
        leaving.send_graph(table);
        const auto before = cpu_time();
        leaving.send_run();
        while (cpu_time() - before < 100ms) {
            std::this_thread::sleep_for(5ms);  // it has not begun
        }
    }
    const auto start = std::chrono::steady_clock::now();
    remote.join();
    CHECK(std::chrono::steady_clock::now() - start < 20s);
    CHECK_EQUAL(rogue_client(remote).greet(), QUOTA);
}

#if MESH_PLAIN  // sanitizers reserve more addresses than a limit could allow

TEST("limits: no memory to compute with ends a session, not the worker") {
    constexpr uint64_t large = 200 << 20;
    worker remote(large);
    // Half of the second factor as scratch memory.
    const auto wide = [](ggml_context * c) {
        return ggml_mul_mat(
            c, ggml_new_tensor_2d(c, GGML_TYPE_F16, 4096, 1), ggml_new_tensor_2d(c, GGML_TYPE_F32, 4096, 8192)
        );
    };
    const auto memory = ggml_backend_get_default_buffer_type(host::cpu());
    const auto wide_table = host::graph({"wide", wide}, memory).table();
    const auto small_table = host::graph(host::example_named("mul_mat q4_k"), memory).table();
    const auto outcome = [&](const std::vector<mesh::wire::tensor> & table, uint64_t size, rlim_t more) {
        rogue_client other(remote);
        other.greet();
        CHECK(other.alloc(1, size));
        other.send_graph(table);
        CHECK(other.alloc(2, 16));
        rlimit before{};
        getrlimit(RLIMIT_AS, &before);
        const rlimit tight = {pages_in_use() * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + more, before.rlim_max};
        CHECK_EQUAL(setrlimit(RLIMIT_AS, &tight), 0);
        other.send_run();
        const std::string said = other.outcome();
        CHECK_EQUAL(setrlimit(RLIMIT_AS, &before), 0);
        return said;
    };
    for (int i = 0; i < 3; ++i) {
        CHECK_EQUAL(outcome(small_table, 1 << 20, 64 << 20), "done");
        CHECK_EQUAL(outcome(wide_table, 150 << 20, 32 << 20), "the device has no memory to compute a graph");
        remote.join();
    }
    CHECK_EQUAL(outcome(wide_table, 150 << 20, 256 << 20), "done");
}

#endif

TEST("limits: whether a queue has room is known before putting waits") {
    mesh::command_queue queue;
    mesh::frame taken;
    size_t frames = 0;
    for (; queue.has_room(); ++frames) {
        mesh::frame message;
        message.payload.resize(mesh::wire::MAX_FRAME_BYTES);
        CHECK(queue.put(std::move(message)));
    }
    CHECK_EQUAL(frames, mesh::wire::MAX_QUEUE_BYTES / mesh::wire::MAX_FRAME_BYTES);
    CHECK(queue.take(taken));
    CHECK(queue.has_room());
    queue.put(std::move(taken));
    CHECK(!queue.has_room());
    queue.close();
    CHECK(queue.has_room() && !queue.put({}));  // it is over, and nobody waits
}
