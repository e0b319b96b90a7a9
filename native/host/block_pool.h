#pragma once

// Which parts of a memory are in use: blocks of any size, each where the first gap is large enough.

#include <cstdint>
#include <map>
#include <optional>

namespace mesh {

class block_pool {
  public:
    explicit block_pool(uint64_t size) : size_(size) {}

    // Where the block begins; none where there is no gap of that size.
    std::optional<uint64_t> take(uint64_t size) {
        uint64_t begin = 0;
        for (const auto & [start, end] : blocks_) {
            if (start - begin >= size) {
                break;
            }
            begin = end;
        }
        if (size == 0 || begin > size_ || size_ - begin < size) {
            return std::nullopt;
        }
        blocks_.emplace(begin, begin + size);
        return begin;
    }

    void give_back(uint64_t begin) {
        blocks_.erase(begin);
    }

  private:
    uint64_t size_;
    std::map<uint64_t, uint64_t> blocks_;  // begin and end
};

}  // namespace mesh
