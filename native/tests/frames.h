#pragma once

// A recorded session: the frames that a client sent, and the graphs inside of them.

#include "wire/protocol.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace session_bytes {

struct frame {
    mesh::wire::header head{};
    std::vector<uint8_t> payload;

    bool is(mesh::wire::command kind) const {
        return head.kind == static_cast<uint8_t>(kind);
    }
};

// The frames in `bytes`. One that is cut short ends with the bytes.
std::vector<frame> parse(const uint8_t * bytes, size_t size);

std::vector<uint8_t> join(const std::vector<frame> & frames);

// How many tensors a GRAPH holds, and one of them.
size_t tensor_count(const frame & graph);
mesh::wire::tensor get_tensor(const frame & graph, size_t index);
void set_tensor(frame & graph, size_t index, const mesh::wire::tensor & tensor);

// A source of numbers that is the same on every machine.
class dice {
  public:
    explicit dice(uint64_t seed) : state_(seed * 2 + 1) {}

    uint64_t next() {
        state_ ^= state_ << 13;
        state_ ^= state_ >> 7;
        state_ ^= state_ << 17;
        return state_ * 0x2545f4914f6cdd1dULL;
    }

    size_t below(size_t limit) {
        return limit == 0 ? 0 : static_cast<size_t>((next() >> 16) % limit);
    }

  private:
    uint64_t state_;
};

// Changes one field of one tensor, to a value that is likely to matter. Says which.
std::string
change_field(mesh::wire::tensor & tensor, const std::vector<mesh::wire::tensor> & others, dice & random);

}  // namespace session_bytes
