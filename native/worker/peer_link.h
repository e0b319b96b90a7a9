#pragma once

// A link to another worker.

#include "wire/link.h"
#include "worker/command_queue.h"
#include "worker/spare_buffers.h"

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace mesh {

class peer_link {
  public:
    peer_link(uint32_t number, int fd, spare_buffers & buffers);
    ~peer_link();

    peer_link(const peer_link &) = delete;
    peer_link & operator=(const peer_link &) = delete;

    // Throws where the link is lost. Large activations are left to a thread: a micro-batch of a prompt takes as long as
    // the network needs, and the device may compute the next one meanwhile. The session whose activations are lost
    // that way is told through its commands.
    void
    push(const wire::deliver & address, std::vector<uint8_t> && data, const std::shared_ptr<command_queue> & from);

    link wire;
    std::mutex reading;              // held while a frame is received
    std::atomic<bool> ended{false};  // nothing is received any more

  private:
    struct activations {
        wire::deliver address;
        std::vector<uint8_t> data;
        std::weak_ptr<command_queue> from;
    };

    uint32_t number_;
    spare_buffers & buffers_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<activations> waiting_;
    uint64_t waiting_bytes_ = 0;
    bool sending_ = false;  // in the thread
    bool lost_ = false;
    bool over_ = false;
    std::thread sender_;  // the last member: it uses all the others

    void send_waiting() noexcept;
    bool send(const activations & next) noexcept;
    void lose() noexcept;
    std::string loss() const;
};

}  // namespace mesh
