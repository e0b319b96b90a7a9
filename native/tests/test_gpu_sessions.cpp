// What a worker does differently where its device computes by itself: results are copied behind their graph, and whoever
// waits for the next token stays awake.

#include "tests/check.h"
#include "tests/deferring_device.h"
#include "tests/host.h"
#include "tests/rogue_client.h"
#include "tests/session.h"

#include "ggml-mesh.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <unistd.h>
#include <vector>

using namespace session;

namespace {

constexpr uint64_t QUOTA = 64 << 20;

}  // namespace

TEST("gpu sessions: a device that is waited for once computes every example as the CPU does") {
    deferring_device lent;
    worker remote(&lent, QUOTA);
    const relay between(remote.connect(), cut::never, 0);
    const device on(between.client_fd());
    for (const host::example & each : host::examples()) {
        const host::graph here(each, ggml_backend_get_default_buffer_type(host::cpu()));
        host::compute(here.get());
        CHECK(exercise(on, each) == here.result());
        CHECK_EQUAL(on.failure(), "");
    }
    CHECK(lent.copied() > 0);
}

TEST("gpu sessions: tokens go through two workers in quick succession, each with its own numbers") {
    constexpr int TOKENS = 500;
    deferring_device first;
    deferring_device second;
    const linked_workers linked(&first, &second, QUOTA);
    const device & one = *linked.one;
    const device & two = *linked.two;
    const ggml_backend_ptr one_backend(ggml_backend_dev_init(one.handle, nullptr));
    const ggml_backend_ptr two_backend(ggml_backend_dev_init(two.handle, nullptr));
    const host::graph from(host::example_named("sqr"), ggml_backend_dev_buffer_type(one.handle));
    const host::graph to(host::example_named("sqr"), ggml_backend_dev_buffer_type(two.handle));
    ggml_tensor * input = ggml_graph_node(from.get(), 0)->src[0];
    std::vector<float> numbers(static_cast<size_t>(ggml_nelements(input)));
    for (int token = 0; token < TOKENS; ++token) {
        std::fill(numbers.begin(), numbers.end(), static_cast<float>(token % 7));
        ggml_backend_tensor_set(input, numbers.data(), 0, ggml_nbytes(input));
        CHECK(ggml_backend_graph_compute(one_backend.get(), from.get()) == GGML_STATUS_SUCCESS);
        ggml_tensor * handed_on = ggml_graph_node(to.get(), 0)->src[0];
        ggml_backend_tensor_copy_async(
            one_backend.get(), two_backend.get(), ggml_graph_node(from.get(), 0), handed_on
        );
        CHECK(ggml_backend_graph_compute(two_backend.get(), to.get()) == GGML_STATUS_SUCCESS);
        const std::vector<uint8_t> result = to.result();
        std::memcpy(numbers.data(), result.data(), result.size());
        CHECK_EQUAL(numbers.front(), std::pow(static_cast<float>(token % 7), 4.0F));
        CHECK_EQUAL(numbers.back(), numbers.front());
    }
    CHECK_EQUAL(one.failure() + two.failure(), "");
    CHECK(first.copied() > 0 && second.copied() > 0);
}

TEST("gpu sessions: what is copied ahead is checked as any other command") {
    deferring_device lent;
    worker remote(&lent, QUOTA);
    rogue_client other(remote);
    other.greet();
    CHECK(other.alloc(1, 1 << 20));
    const auto squares = [](ggml_context * c) { return ggml_sqr(c, ggml_new_tensor_1d(c, GGML_TYPE_F32, 64)); };
    other.send_graph(host::graph({"squares", squares}, ggml_backend_get_default_buffer_type(host::cpu())).table());
    const mesh::wire::span outside = {1, 0, (1 << 20) - 4, 8};
    other.send_run();
    other.send(mesh::wire::command::get, {{&outside, sizeof outside}});
    CHECK_CONTAINS(other.complaint(), "a range lies outside of its buffer");
}

TEST("gpu sessions: a peer that sends without end holds up nobody") {
    deferring_device lent;
    worker remote(&lent, QUOTA);
    const auto pair = sockets();
    CHECK_EQUAL(ggml_mesh_worker_add_peer(remote.handle(), 0, pair.first), 0);
    std::atomic<bool> over{false};
    std::thread flood([&over, fd = pair.second] {
        struct {
            mesh::wire::header head;
            mesh::wire::deliver to_nobody;
        } frame{};
        frame.head.kind = static_cast<uint8_t>(mesh::wire::command::deliver);
        frame.head.size = sizeof frame.to_nobody;
        frame.to_nobody.session = {{1, 2}};
        const std::vector<decltype(frame)> many(10'000, frame);
        while (!over && write(fd, many.data(), many.size() * sizeof frame) > 0) {
        }
        close(fd);
    });
    {
        rogue_client waiting(remote);
        waiting.greet();
        CHECK(waiting.alloc(1, 64));
        const mesh::wire::recv never = {{1, 0, 0, 32}, 7};
        waiting.send(mesh::wire::command::recv, {{&never, sizeof never}});
        waiting.send(mesh::wire::command::clear, {});
    }
    remote.join();  // its session ends with its link
    over = true;
    flood.join();
}
