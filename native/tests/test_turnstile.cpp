// The order in which sessions get a worker's device.

#include "check.h"
#include "worker/turnstile.h"

#include <mutex>
#include <thread>
#include <vector>

namespace {

void until_inside(mesh::turnstile & turns, uint64_t count) {
    while (turns.inside() < count) {
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
        until_inside(turns, static_cast<uint64_t>(number) + 1);
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
