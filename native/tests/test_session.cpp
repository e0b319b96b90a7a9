// Whole sessions: a real client and a real worker over a socket pair.

#include "ggml-mesh.h"
#include "rules/validate.h"
#include "tests/check.h"
#include "tests/frames.h"
#include "tests/rogue_client.h"
#include "tests/session.h"
#include "worker/worker.h"

#include <chrono>
#include <cstring>
#include <unistd.h>

using namespace session;

namespace {

constexpr uint64_t QUOTA = 8 << 20;

std::vector<uint8_t> computed_here(const host::example & what) {
    const host::graph graph(what, ggml_backend_get_default_buffer_type(host::cpu()));
    host::compute(graph.get());
    return graph.result();
}

}  // namespace

// --- strangers ---

namespace {

std::string complaint_about(worker & to, const std::function<void(rogue_client &)> & deed) {
    rogue_client other(to);
    other.greet();
    other.alloc(1, 4096);
    deed(other);
    return other.complaint();
}

template <typename Request> std::function<void(rogue_client &)> sends(mesh::wire::command kind, Request request) {
    return [=](rogue_client & other) { other.send(kind, {{&request, sizeof request}}); };
}

}  // namespace

// --- clients of ours ---

TEST("session: every example computes the same as here") {
    for (const host::example & each : host::examples()) {
        // A process and a recording for each.
        check::isolated([&] {
            worker remote(QUOTA);
            const relay between(remote.connect(), cut::never, 0, each.name);
            const device on(between.client_fd());
            std::vector<uint8_t> there;
            const std::string said = check::thrown([&] { there = exercise(on, each); });
            CHECK_EQUAL(each.name + said + on.failure(), each.name);
            CHECK(there == computed_here(each));
            return 0;
        });
    }
}

TEST("session: a graph is sent once, and runs again with other inputs") {
    worker remote(QUOTA);
    relay between(remote.connect(), cut::never, 0);
    const device on(between.client_fd());
    const host::graph graph(host::example_named("mul_mat"), ggml_backend_dev_buffer_type(on.handle));
    const ggml_backend_ptr backend(ggml_backend_dev_init(on.handle, nullptr));
    CHECK(ggml_backend_graph_compute(backend.get(), graph.get()) == GGML_STATUS_SUCCESS);
    const std::vector<uint8_t> first = graph.result();
    const size_t seen = between.seen();
    ggml_tensor * input = ggml_graph_node(graph.get(), 0)->src[1];
    const std::vector<float> zeros(static_cast<size_t>(ggml_nelements(input)));
    ggml_backend_tensor_set(input, zeros.data(), 0, ggml_nbytes(input));
    CHECK(ggml_backend_graph_compute(backend.get(), graph.get()) == GGML_STATUS_SUCCESS);
    CHECK(graph.result() != first);
    CHECK_EQUAL(between.seen(), seen + 2);  // RUN and GET
}

TEST("session: quotas are kept, and a refusal ends one session") {
    worker remote(QUOTA);
    for (const uint64_t size : {QUOTA + 1, UINT64_MAX}) {
        rogue_client greedy(remote);
        CHECK_EQUAL(greedy.greet(), QUOTA);
        CHECK(!greedy.alloc(1, size));
    }
    remote.join();
    rogue_client other(remote);
    CHECK_EQUAL(other.greet(), QUOTA);
    CHECK(other.alloc(1, QUOTA));
    other.free(1);
    CHECK(other.alloc(2, QUOTA));
    CHECK(!other.alloc(3, 1));
}

TEST("session: a client that gets no memory says so") {
    worker remote(QUOTA);
    const relay between(remote.connect(), cut::never, 0);
    const device on(between.client_fd());
    CHECK(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(on.handle), QUOTA + 1) == nullptr);
    CHECK_CONTAINS(on.failure(), "no room");
}

namespace {

// A session whose link is cut at its command number `count`; how many there were.
int cut_session(cut when, size_t count, bool & failed) {
    const host::example & what = host::example_named("mixture");
    worker remote(QUOTA);
    const auto start = std::chrono::steady_clock::now();
    size_t seen = 0;
    {
        relay between(remote.connect(), when, count);
        const std::string refused = check::thrown([&] {
            const device on(between.client_fd());
            failed = !check::thrown([&] { exercise(on, what); }).empty();
            CHECK(failed == !on.failure().empty() || !failed);
            CHECK(!failed || !check::thrown([&] { exercise(on, what); }).empty());  // it stays failed
        });
        failed = failed || !refused.empty();
        seen = between.seen();
    }
    remote.join();
    CHECK(std::chrono::steady_clock::now() - start < check::PATIENCE);
    rogue_client next(remote);
    CHECK_EQUAL(next.greet(), QUOTA);  // what the session held is there again
    return static_cast<int>(seen);
}

}  // namespace

TEST("session: the link is cut at every command, the client says so in time, and memory comes back") {
    // Each in a process of its own: a client that lost one worker gives up all.
    const int total = check::isolated([] {
        bool failed = false;
        return cut_session(cut::never, 0, failed);
    });
    constexpr int commands = 5;  // HELLO, ALLOC, GRAPH, RUN, GET; nobody waits for FREE
    CHECK(total >= commands);
    for (const cut when : {cut::before, cut::after}) {
        for (int count = 0; count < commands; ++count) {
            const int failed = check::isolated([&] {
                bool result = false;
                cut_session(when, static_cast<size_t>(count), result);
                return result ? 1 : 0;
            });
            CHECK_EQUAL(failed, 1);
        }
    }
}

TEST("session: two at once share the quota, and one that dies does not disturb the other") {
    worker remote(QUOTA);
    const relay between(remote.connect(), cut::never, 0);
    const device staying(between.client_fd());
    {
        // Not with a client of ours: all devices of a process are one session.
        rogue_client leaving(remote);
        leaving.greet();
        leaving.alloc(1, QUOTA / 2);
    }
    for (int i = 0; i < 3; ++i) {
        CHECK(exercise(staying, host::example_named("mixture")) == computed_here(host::example_named("mixture")));
    }
}

TEST("session: activations go straight from one worker to the next") {
    const linked_workers linked(mesh::cpu_device(), mesh::cpu_device(), QUOTA);
    const device & one = *linked.one;
    const device & two = *linked.two;
    const ggml_backend_ptr one_backend(ggml_backend_dev_init(one.handle, nullptr));
    const ggml_backend_ptr two_backend(ggml_backend_dev_init(two.handle, nullptr));
    const host::graph from(host::example_named("sqr"), ggml_backend_dev_buffer_type(one.handle));
    const host::graph to(host::example_named("sqr"), ggml_backend_dev_buffer_type(two.handle));
    CHECK(ggml_backend_graph_compute(one_backend.get(), from.get()) == GGML_STATUS_SUCCESS);
    ggml_tensor * result = ggml_graph_node(from.get(), 0);
    ggml_tensor * input = ggml_graph_node(to.get(), 0)->src[0];
    ggml_backend_tensor_copy_async(one_backend.get(), two_backend.get(), result, input);
    std::vector<uint8_t> arrived(ggml_nbytes(input));
    ggml_backend_tensor_get(input, arrived.data(), 0, arrived.size());
    CHECK(arrived == from.result());
    CHECK_EQUAL(one.failure() + two.failure(), "");
}

TEST("session: large activations leave behind the session's back, and keep their order") {
    constexpr uint64_t PIECE = 1 << 20;
    worker remote(QUOTA);
    const auto pair = sockets();
    CHECK_EQUAL(ggml_mesh_worker_add_peer(remote.handle(), 0, pair.first), 0);
    CHECK_EQUAL(ggml_mesh_worker_add_peer(remote.handle(), 1, pair.second), 0);
    rogue_client other(remote);
    other.greet();
    other.alloc(1, PIECE);
    other.alloc(2, 4 * PIECE);
    const auto size_of = [](uint64_t number) { return number % 2 == 0 ? PIECE : 64; };
    for (uint64_t number = 0; number < 4; ++number) {
        const mesh::wire::span all = {1, 0, 0, PIECE};
        const mesh::wire::clear filled = {all, static_cast<uint8_t>(number + 1), {}};
        const mesh::wire::push there = {{1, 0, 0, size_of(number)}, number, 0, 0};
        other.send(mesh::wire::command::clear, {{&filled, sizeof filled}});
        other.send(mesh::wire::command::push, {{&there, sizeof there}});
    }
    for (uint64_t number = 0; number < 4; ++number) {
        const mesh::wire::span where = {2, 0, number * PIECE, size_of(number)};
        const mesh::wire::recv back = {where, number};
        other.send(mesh::wire::command::recv, {{&back, sizeof back}});
        CHECK(other.get(where) == std::vector<uint8_t>(where.size, static_cast<uint8_t>(number + 1)));
    }
}

TEST("session: who does not greet, or speaks another version, is sent away") {
    worker remote(QUOTA);
    {
        rogue_client other(remote);
        other.send(mesh::wire::command::alloc, {});
        CHECK_CONTAINS(other.complaint(), "the first command has to be HELLO");
    }
    auto self = rogue_client::hello();
    self.version = 77;
    {
        rogue_client other(remote);
        other.send(mesh::wire::command::hello, {{&self, sizeof self}});
        CHECK_CONTAINS(other.complaint(), "it speaks protocol 77, this worker 1");
    }
    self = rogue_client::hello();
    std::strncpy(self.engine, "1999.1.1", sizeof self.engine - 1);
    {
        rogue_client other(remote);
        other.send(mesh::wire::command::hello, {{&self, sizeof self}});
        CHECK_CONTAINS(other.complaint(), "it runs engine 1999.1.1");
    }
    CHECK_CONTAINS(
        complaint_about(remote, sends(mesh::wire::command::hello, rogue_client::hello())), "HELLO comes once"
    );
}

TEST("session: who leaves without a greeting ends nobody else's mail") {
    worker first(QUOTA);
    const auto pair = sockets();
    CHECK_EQUAL(ggml_mesh_worker_add_peer(first.handle(), 0, pair.first), 0);
    CHECK_EQUAL(ggml_mesh_worker_add_peer(first.handle(), 1, pair.second), 0);
    rogue_client staying(first);  // its id is 0, as that of one who never said
    staying.greet();
    staying.alloc(1, 64);
    { const rogue_client leaving(first); }
    const mesh::wire::span half = {1, 0, 0, 32};
    const mesh::wire::push there = {half, 7, 0, 0};
    const mesh::wire::recv back = {half, 7};
    // Its link is gone for the worker, too, when the worker sees a second one that came later go.
    {
        rogue_client later(first);
        later.send(mesh::wire::command::alloc, {});
        later.complaint();
    }
    staying.send(mesh::wire::command::push, {{&there, sizeof there}});
    staying.send(mesh::wire::command::recv, {{&back, sizeof back}});
    CHECK(staying.alloc(2, 64));
}

TEST("session: a link to another worker that was dropped is closed, and its number is free again") {
    worker first(QUOTA);
    for (int round = 0; round < 3; ++round) {
        const auto pair = sockets();
        CHECK_EQUAL(ggml_mesh_worker_add_peer(first.handle(), 5, pair.first), 0);
        ggml_mesh_worker_drop_peer(first.handle(), 5);
        char nothing = 0;
        CHECK_EQUAL(read(pair.second, &nothing, 1), 0);
        close(pair.second);
    }
    ggml_mesh_worker_drop_peer(first.handle(), 5);
    rogue_client staying(first);
    staying.greet();
    staying.alloc(1, 64);
    const mesh::wire::push there = {{1, 0, 0, 32}, 7, 5, 0};
    staying.send(mesh::wire::command::push, {{&there, sizeof there}});
    CHECK_CONTAINS(staying.complaint(), "the link to worker 5 is lost");
}

TEST("session: commands outside of what the session has are refused") {
    using mesh::wire::command;
    using mesh::wire::span;
    worker remote(QUOTA);
    const span inside = {1, 0, 0, 4096};
    const span outside = {1, 0, 1, 4096};
    const span far = {1, 0, ~0ULL, 2};
    const span foreign = {2, 0, 0, 1};
    for (const span & where : {outside, far}) {
        const char * says = "a range lies outside of its buffer";
        CHECK_CONTAINS(complaint_about(remote, sends(command::get, where)), says);
        CHECK_CONTAINS(complaint_about(remote, sends(command::set, where)), says);
        CHECK_CONTAINS(complaint_about(remote, sends(command::clear, mesh::wire::clear{where, 1, {}})), says);
        CHECK_CONTAINS(complaint_about(remote, sends(command::copy, mesh::wire::copy{where, 1, 0, 0})), says);
        CHECK_CONTAINS(complaint_about(remote, sends(command::push, mesh::wire::push{where, 1, 0, 0})), says);
        CHECK_CONTAINS(complaint_about(remote, sends(command::recv, mesh::wire::recv{where, 1})), says);
    }
    CHECK_CONTAINS(complaint_about(remote, sends(command::copy, mesh::wire::copy{inside, 1, 0, 8})), "outside");
    const span half = {1, 0, 0, 2048};
    CHECK_CONTAINS(complaint_about(remote, sends(command::copy, mesh::wire::copy{half, 1, 0, 2047})), "overlaps");
    CHECK_CONTAINS(complaint_about(remote, sends(command::get, foreign)), "buffer 2 does not exist");
    CHECK_CONTAINS(complaint_about(remote, sends(command::free, uint32_t{2})), "buffer 2 does not exist");
    CHECK_CONTAINS(complaint_about(remote, sends(command::alloc, mesh::wire::alloc{1, 0, 1})), "cannot be made");
    CHECK_CONTAINS(complaint_about(remote, sends(command::alloc, mesh::wire::alloc{0, 0, 1})), "cannot be made");
    CHECK_CONTAINS(complaint_about(remote, sends(command::push, mesh::wire::push{inside, 1, 9, 0})), "is lost");
    CHECK_CONTAINS(complaint_about(remote, sends(command::get, uint32_t{1})), "a command is too short");
    CHECK_CONTAINS(complaint_about(remote, sends(command::set, inside)), "another size than it says");
    CHECK_CONTAINS(complaint_about(remote, sends(command::deliver, inside)), "does not exist");
    CHECK_CONTAINS(
        complaint_about(remote, sends(static_cast<command>(200), inside)), "command 200 does not exist"
    );
    CHECK_CONTAINS(complaint_about(remote, sends(command::run, mesh::wire::graph_key{})), "never sent");
    CHECK_CONTAINS(
        complaint_about(remote, sends(command::graph, mesh::wire::graph_head{})), "does not end with a tensor"
    );
    CHECK_CONTAINS(
        complaint_about(remote, sends(command::graph, mesh::wire::graph_head{{}, {}, 3, 1})), "that is not here"
    );
    CHECK_CONTAINS(complaint_about(remote, sends(command::supports, uint32_t{1})), "does not end with a tensor");
    remote.join();
    CHECK_EQUAL(rogue_client(remote).greet(), QUOTA);
}

TEST("session: a foreign graph is refused with the tensor, the op and the rule") {
    worker remote(QUOTA);
    const host::graph built(host::example_named("rope"), ggml_backend_get_default_buffer_type(host::cpu()));
    auto table = built.table();
    table.back().op_params[1] = 0;
    const mesh::wire::graph_head head = {{}, {}, static_cast<uint32_t>(table.size()), 0};
    const std::string answer = complaint_about(remote, [&](rogue_client & other) {
        other.send(
            mesh::wire::command::graph, {{&head, sizeof head}, {table.data(), table.size() * sizeof table[0]}}
        );
    });
    CHECK_CONTAINS(answer, "tensor " + std::to_string(table.size() - 1) + " (ROPE): it does not rotate pairs");
}

TEST("session: row numbers that changed since the last run are looked at again") {
    worker remote(QUOTA);
    const relay between(remote.connect(), cut::never, 0);
    const device on(between.client_fd());
    const host::graph graph(host::example_named("get_rows"), ggml_backend_dev_buffer_type(on.handle));
    const ggml_backend_ptr backend(ggml_backend_dev_init(on.handle, nullptr));
    CHECK(ggml_backend_graph_compute(backend.get(), graph.get()) == GGML_STATUS_SUCCESS);
    CHECK(!graph.result().empty());
    const int32_t far = 6;
    ggml_backend_tensor_set(ggml_graph_node(graph.get(), 0)->src[1], &far, 0, sizeof far);
    ggml_backend_graph_compute(backend.get(), graph.get());
    CHECK(!check::thrown([&] { graph.result(); }).empty());
    CHECK_CONTAINS(on.failure(), "row 6 is asked for where there are 6");
}
