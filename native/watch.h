#pragma once

// Waiting awake for a moment before falling asleep.
//
// To wake a thread takes a tenth of a millisecond where processors sleep deeply,
// several times for each token and stage. Where a GPU computes, its processor
// has nothing better to do; where the processor itself computes, nobody watches.

#include <chrono>
#include <mutex>
#include <thread>

namespace mesh {

using watch_time = std::chrono::microseconds;

constexpr watch_time NO_WATCH{0};
constexpr watch_time GPU_WATCH{5000};  // longer than the other stages of a token take, where that matters

// Returns when `arrived`, which is asked with the lock held, or when the time is over.
template <typename Arrived>
void watch(std::unique_lock<std::mutex> & lock, watch_time time, const Arrived & arrived) {
    if (time == NO_WATCH || arrived()) {
        return;
    }
    const auto end = std::chrono::steady_clock::now() + time;
    do {
        lock.unlock();
        std::this_thread::yield();
        lock.lock();
    } while (!arrived() && std::chrono::steady_clock::now() < end);
}

}  // namespace mesh
