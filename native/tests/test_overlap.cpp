// Prefill over several stages: the host sends everything ahead, and stages compute at the same time.
//
// The stages are stand-ins that speak the protocol and compute nothing. Their clock is a number: what a run takes,
// and when it may begin, follows from the order of commands alone.

#include "ggml-mesh.h"
#include "tests/check.h"
#include "tests/host.h"
#include "tests/session.h"
#include "wire/link.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <sys/socket.h>
#include <thread>

using mesh::wire::command;

namespace {

constexpr uint64_t STAGE = 100;  // ticks that one run takes

// When pushes arrive, on the common clock; and a gate that no run passes before it is open.
class timetable {
  public:
    void open() {
        const std::lock_guard lock(mutex_);
        open_ = true;
        changed_.notify_all();
    }

    void wait_open() {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return open_; });
    }

    void set_arrival(uint64_t push, uint64_t tick) {
        const std::lock_guard lock(mutex_);
        arrivals_[push] = tick;
        changed_.notify_all();
    }

    uint64_t arrival(uint64_t push) {
        std::unique_lock lock(mutex_);
        CHECK(changed_.wait_for(lock, check::PATIENCE, [&] { return arrivals_.count(push) != 0; }));
        return arrivals_[push];
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool open_ = false;
    std::map<uint64_t, uint64_t> arrivals_;
};

class stand_in {
  public:
    stand_in(timetable & times, int buffer_bytes) : times_(times) {
        const auto [mine, theirs] = session::sockets();
        for (const int fd : {mine, theirs}) {
            setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &buffer_bytes, sizeof buffer_bytes);
        }
        client_fd_ = theirs;
        link_ = std::make_unique<mesh::link>(mine, "stage");
        reader_ = std::thread([this] { read(); });
        thread_ = std::thread([this] { check::thrown([this] { serve(); }); });
    }

    ~stand_in() {
        times_.open();
        link_->shut();
        reader_.join();
        thread_.join();
    }

    stand_in(const stand_in &) = delete;
    stand_in & operator=(const stand_in &) = delete;

    int client_fd() const {
        return client_fd_;
    }

    size_t runs_received() const {
        return received_;
    }

    uint64_t finished() const {
        return tick_;
    }

  private:
    timetable & times_;
    int client_fd_ = -1;
    std::unique_ptr<mesh::link> link_;
    std::thread reader_;
    std::thread thread_;
    std::atomic<size_t> received_{0};
    std::atomic<uint64_t> tick_{0};
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<mesh::frame> frames_;
    bool ended_ = false;

    void read() {
        check::thrown([this] {
            for (;;) {
                mesh::frame message = link_->receive_frame();
                received_ += message.head.kind == static_cast<uint8_t>(command::run) ? 1 : 0;
                const std::lock_guard lock(mutex_);
                frames_.push_back(std::move(message));
                changed_.notify_all();
            }
        });
        const std::lock_guard lock(mutex_);
        ended_ = true;
        changed_.notify_all();
    }

    template <typename T> static T payload(const mesh::frame & message) {
        T value;
        std::memcpy(&value, message.payload.data(), sizeof value);
        return value;
    }

    void serve() {
        for (;;) {
            mesh::frame message;
            {
                std::unique_lock lock(mutex_);
                changed_.wait(lock, [&] { return ended_ || !frames_.empty(); });
                if (frames_.empty()) {
                    return;
                }
                message = std::move(frames_.front());
                frames_.pop_front();
            }
            execute(message);
        }
    }

    void execute(const mesh::frame & message) {
        switch (static_cast<command>(message.head.kind)) {
        case command::hello: {
            mesh::wire::hello_answer facts{};
            facts.self = payload<mesh::wire::hello>(message);
            facts.grant_bytes = facts.total_bytes = 1 << 30;
            facts.alignment = 64;
            link_->send(
                static_cast<uint8_t>(mesh::wire::answer::hello), message.head.ticket, {{&facts, sizeof facts}}
            );
            break;
        }
        case command::recv:
            tick_ = std::max(tick_.load(), times_.arrival(payload<mesh::wire::recv>(message).number));
            break;
        case command::run: {
            times_.wait_open();
            tick_ += STAGE;
            const mesh::wire::telemetry cost{};
            link_->send(
                static_cast<uint8_t>(mesh::wire::answer::done), message.head.ticket, {{&cost, sizeof cost}}
            );
            break;
        }
        case command::push:
            times_.set_arrival(payload<mesh::wire::push>(message).number, tick_);
            break;
        case command::get: {
            const std::vector<uint8_t> zeros(payload<mesh::wire::span>(message).size);
            link_->send(
                static_cast<uint8_t>(mesh::wire::answer::data), message.head.ticket, {{zeros.data(), zeros.size()}}
            );
            break;
        }
        default:
            break;
        }
    }
};

constexpr size_t STAGES = 3;

// Three stages, one after the other, and a host that sends micro-batches through them.
class pipeline {
  public:
    explicit pipeline(int buffer_bytes) {
        for (size_t i = 0; i < STAGES; ++i) {
            stages_.push_back(std::make_unique<stand_in>(times_, buffer_bytes));
            devices_.emplace_back(stages_.back()->client_fd());
            backends_.emplace_back(ggml_backend_dev_init(devices_.back().handle, nullptr));
            graphs_.push_back(std::make_unique<host::graph>(
                host::example_named("add"), ggml_backend_dev_buffer_type(devices_.back().handle)
            ));
        }
        for (size_t i = 0; i + 1 < STAGES; ++i) {
            ggml_mesh_link(devices_[i].index, devices_[i + 1].index, 1);
        }
    }

    void send_micro_batch() {
        for (size_t i = 0; i < STAGES; ++i) {
            ggml_tensor * output = ggml_graph_node(graphs_[i]->get(), -1);
            CHECK(ggml_backend_graph_compute_async(backends_[i].get(), graphs_[i]->get()) == GGML_STATUS_SUCCESS);
            if (i + 1 < STAGES) {
                ggml_tensor * input = ggml_graph_node(graphs_[i + 1]->get(), -1)->src[0];
                ggml_backend_tensor_copy_async(backends_[i].get(), backends_[i + 1].get(), output, input);
            }
        }
    }

    // Waits for the last stage, and tells when it was done.
    uint64_t finish() {
        CHECK(!graphs_.back()->result().empty());
        return stages_.back()->finished();
    }

    stand_in & stage(size_t index) {
        return *stages_[index];
    }

    void open() {
        times_.open();
    }

  private:
    timetable times_;
    std::vector<std::unique_ptr<stand_in>> stages_;
    std::vector<session::device> devices_;
    std::vector<ggml_backend_ptr> backends_;
    std::vector<std::unique_ptr<host::graph>> graphs_;
};

void wait_for_runs(const stand_in & stage, size_t count) {
    const auto end = std::chrono::steady_clock::now() + check::PATIENCE;
    while (stage.runs_received() < count && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK_EQUAL(stage.runs_received(), count);
}

}  // namespace

TEST("overlap: sixteen micro-batches take three stages and fifteen more, and nobody waits before the end") {
    constexpr size_t batches = 16;
    pipeline line(1 << 20);
    for (size_t i = 0; i < batches; ++i) {
        line.send_micro_batch();
    }
    // Everything has been sent, although nothing has been computed.
    for (size_t i = 0; i < STAGES; ++i) {
        wait_for_runs(line.stage(i), batches);
        CHECK_EQUAL(line.stage(i).finished(), 0U);
    }
    line.open();
    CHECK_EQUAL(line.finish(), (STAGES + batches - 1) * STAGE);
}

TEST("overlap: a host sends so many runs ahead and no more") {
    constexpr size_t batches = mesh::wire::MAX_RUNS_IN_FLIGHT + 8;
    pipeline line(1 << 20);
    std::thread host([&] {
        for (size_t i = 0; i < batches; ++i) {
            line.send_micro_batch();
        }
    });
    wait_for_runs(line.stage(0), mesh::wire::MAX_RUNS_IN_FLIGHT);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    CHECK_EQUAL(line.stage(0).runs_received(), size_t{mesh::wire::MAX_RUNS_IN_FLIGHT});
    line.open();
    host.join();
    CHECK_EQUAL(line.finish(), (STAGES + batches - 1) * STAGE);
}

TEST("overlap: links that hold next to nothing slow it down, and never for good") {
    constexpr size_t batches = 3 * mesh::wire::MAX_RUNS_IN_FLIGHT;
    pipeline line(1);  // the kernel's smallest buffer
    line.open();
    for (size_t i = 0; i < batches; ++i) {
        line.send_micro_batch();
    }
    CHECK_EQUAL(line.finish(), (STAGES + batches - 1) * STAGE);
}
