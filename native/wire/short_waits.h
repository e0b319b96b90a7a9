#pragma once

// Whether a thread that waits for the next token stays awake. Sleeping and being woken takes some 40 microseconds, twice at
// each stage of each token, which is a tenth of the time that a fast GPU needs for one.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>

namespace mesh {

// The waits of one thread: it stays awake while they are short, and sleeps after one that was not.
class short_waits {
  public:
    // From here on it waits; `end`: it did until now.
    void begin() noexcept {
        began_ = clock::now();
    }

    void end() noexcept {
        were_short_ = clock::now() - began_ < AWAKE;
    }

    // Asks once, and again for as long as staying awake pays. False where it is time to sleep.
    template <typename Ready> bool over_soon(Ready && ready) {
        if (ready()) {
            return true;
        }
        if (!were_short_ || awake() >= most_awake()) {
            return false;
        }
        const count_awake here;
        while (clock::now() - began_ < AWAKE) {
            if (ready()) {
                return true;
            }
        }
        return false;
    }

  private:
    using clock = std::chrono::steady_clock;

    // Of longer ones being woken is too small a part.
    static constexpr std::chrono::milliseconds AWAKE{5};

    clock::time_point began_ = clock::now();
    bool were_short_ = false;

    // Threads of this process. Half of the cores are left to others.
    static std::atomic<unsigned> & awake() noexcept {
        static std::atomic<unsigned> threads{0};
        return threads;
    }

    static unsigned most_awake() noexcept {
        static const unsigned most = std::max(1U, std::thread::hardware_concurrency() / 2);
        return most;
    }

    struct count_awake {
        count_awake() noexcept {
            ++awake();
        }
        ~count_awake() {
            --awake();
        }
        count_awake(const count_awake &) = delete;
        count_awake & operator=(const count_awake &) = delete;
    };
};

}  // namespace mesh
