// The order in which sessions get a worker's device.

#include "tests/check.h"
#include "tests/host.h"
#include "tests/rogue_client.h"
#include "tests/session.h"
#include "worker/turnstile.h"
#include "worker/worker.h"

#include "ggml-backend-impl.h"

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

void wait_until(const std::function<bool()> & condition) {
    const auto end = std::chrono::steady_clock::now() + check::PATIENCE;
    while (!condition()) {
        CHECK(std::chrono::steady_clock::now() < end);
        std::this_thread::yield();
    }
}

}  // namespace

TEST("who waits for a device gets it in the order of coming, also before who has just had it") {
    mesh::turnstile turns;
    std::vector<int> order;
    std::vector<std::thread> others;
    turns.lock();
    for (int number = 1; number <= 3; ++number) {
        others.emplace_back([&turns, &order, number] {
            const std::lock_guard lock(turns);
            order.push_back(number);
        });
        wait_until([&] { return turns.inside() > static_cast<uint64_t>(number); });
    }
    turns.unlock();
    turns.lock();
    order.push_back(0);
    turns.unlock();
    for (std::thread & other : others) {
        other.join();
    }
    CHECK_EQUAL(order.size(), 4U);
    for (int at = 0; at < 4; ++at) {
        CHECK_EQUAL(order[static_cast<size_t>(at)], (at + 1) % 4);
    }
}

// --- two sessions ---

namespace {

constexpr uint64_t QUOTA = 16 << 20;
constexpr int64_t WIDTH = 64;
constexpr size_t ALL = SIZE_MAX;

// A device that computes nothing, and keeps each graph until the test lets it go.
class holding_device : public ggml_backend_device {
  public:
    holding_device() : ggml_backend_device(*mesh::cpu_device()) {
        iface.init_backend = open;
    }

    // Of all graphs that ever come, the first so many.
    void let_go(size_t graphs) {
        const std::lock_guard lock(mutex_);
        let_go_ = graphs;
        changed_.notify_all();
    }

    // What came, once so many have: p for a run of a prompt, t for one of a token.
    std::string order(size_t graphs) {
        std::unique_lock lock(mutex_);
        CHECK(changed_.wait_for(lock, check::PATIENCE, [&] { return order_.size() >= graphs; }));
        return order_;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::string order_;
    size_t let_go_ = 0;

    static ggml_backend_t open(ggml_backend_dev_t device, const char * params) {
        ggml_backend_t made = ggml_backend_dev_init(mesh::cpu_device(), params);
        made->device = device;
        made->iface.graph_compute = compute;
        return made;
    }

    static ggml_status compute(ggml_backend_t backend, ggml_cgraph * graph) {
        const bool is_token = ggml_graph_node(graph, -1)->ne[1] == 1;
        static_cast<holding_device *>(backend->device)->hold(is_token ? 't' : 'p');
        return GGML_STATUS_SUCCESS;
    }

    void hold(char graph) {
        std::unique_lock lock(mutex_);
        order_ += graph;
        const size_t number = order_.size();
        changed_.notify_all();
        changed_.wait(lock, [&] { return number <= let_go_; });
    }
};

struct holding_worker {
    holding_device device;
    session::worker remote{&device, QUOTA};

    // A session does not end while its graph is held, and the worker waits for its sessions.
    ~holding_worker() {
        device.let_go(ALL);
    }

    uint64_t sessions_computing() const {
        return static_cast<mesh::worker *>(remote.handle())->computing();
    }
};

// A client whose graph is of so many tokens.
struct client : session::rogue_client {
    client(holding_worker & to, int64_t tokens) : rogue_client(to.remote) {
        const auto squares = [=](ggml_context * c) {
            return ggml_sqr(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, WIDTH, tokens));
        };
        greet();
        CHECK(alloc(1, QUOTA / 4));
        send_graph(host::graph({"squares", squares}, ggml_backend_get_default_buffer_type(host::cpu())).table());
    }

    // Returns once the worker has read all that was sent before: no socket holds so much.
    void send_much() {
        const mesh::wire::span all = {1, 0, 0, QUOTA / 4};
        const std::vector<uint8_t> zeros(all.size);
        send(mesh::wire::command::set, {{&all, sizeof all}, {zeros.data(), zeros.size()}});
    }
};

}  // namespace

TEST("a token of one session waits for one run of another, however many runs of a prompt are queued there") {
    constexpr size_t RUNS = 16;
    constexpr size_t TOKENS = RUNS - 1;
    holding_worker lent;
    client prompt(lent, 512);
    client token(lent, 1);
    for (size_t i = 0; i < RUNS; ++i) {
        prompt.send_run();
    }
    prompt.send_much();
    std::string order = "p";
    for (size_t i = 0; i < TOKENS; ++i) {
        // A run of the prompt is under way, the others are behind it, and now a token comes.
        CHECK_EQUAL(lent.device.order(order.size()), order);
        token.send_run();
        wait_until([&] { return lent.sessions_computing() == 2; });
        lent.device.let_go(order.size());
        order += 't';
        CHECK_EQUAL(lent.device.order(order.size()), order);
        lent.device.let_go(order.size());
        CHECK_EQUAL(token.outcome(), "done");
        order += 'p';
    }
    lent.device.let_go(ALL);
    for (size_t i = 0; i < RUNS; ++i) {
        CHECK_EQUAL(prompt.outcome(), "done");
    }
    CHECK_EQUAL(lent.device.order(order.size()), order);
}
