#pragma once

// Inputs of a graph on the wire: most of them hardly change from token to token.
//
// Both sides keep a shadow of each input as it was last sent, by its place. The
// memory itself cannot serve as one: the allocator reuses it between runs.

#include "wire/protocol.h"

#include <cstddef>
#include <cstdint>
#include <map>
#include <tuple>
#include <vector>

namespace mesh {

struct input {
    uint32_t buffer_id = 0;
    uint64_t offset = 0;
    std::vector<uint8_t> data;
};

// Larger ones are not remembered: they are prompts' activations, which are never like the ones before, and masks.
constexpr size_t MAX_SHADOWED_BYTES = 256 << 10;

class shadows {
  public:
    // True if `encode` would only make it longer: large, and not of long runs.
    static bool is_better_raw(const std::vector<uint8_t> & data);

    // Appends `value` to `out` in the shortest form, and remembers it.
    void encode(const input & value, std::vector<uint8_t> & out);

    // Reads one input at `position`, which moves behind it, and remembers it. Throws std::invalid_argument.
    input decode(const std::vector<uint8_t> & in, size_t & position);

    // Both sides forget at the same commands, so they always agree.
    void clear();

    // How many are remembered.
    size_t count() const {
        return known_.size();
    }

  private:
    using place = std::tuple<uint32_t, uint64_t, uint64_t>;  // buffer, offset, size

    std::map<place, std::vector<uint8_t>> known_;
    uint64_t bytes_ = 0;

    void remember(const input & value);
};

}  // namespace mesh
