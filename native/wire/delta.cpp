#include "wire/delta.h"

#include <cstring>
#include <stdexcept>

namespace mesh {

namespace {

// Changes closer than this are sent as one: a new one costs 8 bytes of its own.
constexpr size_t CHANGE_GAP = 8;

// The first difference at or after `from`, eight bytes at a time where all is alike; `size` if there is none.
size_t next_difference(const uint8_t * before, const uint8_t * now, size_t from, size_t size) {
    while (size - from >= sizeof(uint64_t) && std::memcmp(before + from, now + from, sizeof(uint64_t)) == 0) {
        from += sizeof(uint64_t);
    }
    while (from < size && before[from] == now[from]) {
        ++from;
    }
    return from;
}

}  // namespace

void append(std::vector<uint8_t> & out, const void * data, size_t size) {
    const auto * bytes = static_cast<const uint8_t *>(data);
    out.insert(out.end(), bytes, bytes + size);
}

bool encode_delta(const uint8_t * before, const uint8_t * now, size_t size, std::vector<uint8_t> & out) {
    const size_t limit = out.size() + size;
    for (size_t i = next_difference(before, now, 0, size); i < size;) {
        size_t end = i + 1;
        for (size_t same = 0, j = end; j < size && same < CHANGE_GAP; ++j) {
            same = before[j] == now[j] ? same + 1 : 0;
            end = same == 0 ? j + 1 : end;
        }
        const wire::change change = {static_cast<uint32_t>(i), static_cast<uint32_t>(end - i)};
        if (out.size() + sizeof change + change.size >= limit) {
            return false;
        }
        append(out, &change, sizeof change);
        append(out, now + i, change.size);
        i = next_difference(before, now, end, size);
    }
    return true;
}

void decode_delta(const uint8_t * changes, size_t changes_size, uint8_t * data, size_t size) {
    size_t position = 0;
    while (position < changes_size) {
        wire::change change{};
        if (changes_size - position < sizeof change) {
            throw std::invalid_argument("a change is cut short");
        }
        std::memcpy(&change, changes + position, sizeof change);
        position += sizeof change;
        if (change.size > changes_size - position || change.offset > size || change.size > size - change.offset) {
            throw std::invalid_argument("a change lies outside of what it changes");
        }
        std::memcpy(data + change.offset, changes + position, change.size);
        position += change.size;
    }
}

}  // namespace mesh
