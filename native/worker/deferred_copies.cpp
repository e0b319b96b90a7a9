#include "worker/deferred_copies.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace mesh {

namespace {

// More are copied at once: each step compares its writes with all of them. A text has two for each layer.
constexpr size_t MOST_WAITING = 2048;

// Copied around what a step writes: the cells of the next steps, so that most of them find nothing to copy.
constexpr uint64_t GRAIN = 16 << 10;

// Copied before looking whether a command has arrived: some 50 µs, also where each piece is a device's own copy.
constexpr uint32_t PIECE_BYTES = 256 << 10;
constexpr uint32_t FAR_PIECES = 8;

// Copied before others may have the room: a client chooses how many there are.
constexpr uint32_t PIECES_AT_ONCE = 4096;

// In order, and none overlaps or touches the next.
std::vector<byte_range> merged(std::vector<byte_range> && ranges) {
    std::sort(ranges.begin(), ranges.end(), [](const byte_range & a, const byte_range & b) {
        return a.begin < b.begin;
    });
    std::vector<byte_range> result;
    for (const byte_range & each : ranges) {
        if (result.empty() || result.back().end < each.begin) {
            result.push_back(each);
        } else {
            result.back().end = std::max(result.back().end, each.end);
        }
    }
    return result;
}

}  // namespace

uint64_t extent(const wire::copied_range & range, uint32_t stride) {
    if (range.size == 0 || range.count == 0 || (range.count > 1 && stride < range.size)) {
        throw std::invalid_argument("pieces to be copied overlap, or there are none");
    }
    return static_cast<uint64_t>(range.count - 1) * stride + range.size;
}

namespace {

void copy_at_once(const wire::copied_range & range, location from, location to) {
    const bool here = !is_far(from.buffer) && !is_far(to.buffer);
    for (uint32_t i = 0; i < range.count; ++i) {
        if (here) {
            std::memcpy(to.data, from.data, range.size);
        } else {
            byte_tensor source(from, range.size);
            byte_tensor target(to, range.size);
            ggml_backend_tensor_copy(&source.tensor, &target.tensor);
        }
        from.data += range.from_stride;
        to.data += range.to_stride;
    }
}

}  // namespace

bool copy_pieces(
    wire::copied_range range, state_room & room, location other, bool puts_back, const is_over & over
) {
    for (;;) {
        wire::copied_range first = range;
        first.count = std::min(range.count, PIECES_AT_ONCE);
        const bool there = room.use([&](ggml_backend_buffer_t kept) {
            auto * base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(kept));
            if (puts_back) {
                copy_at_once(first, {kept, base + range.from}, other);
            } else {
                copy_at_once(first, other, {kept, base + range.to});
            }
        });
        range.count -= first.count;
        if (!there || range.count == 0 || over()) {
            return there;
        }
        const uint64_t here = static_cast<uint64_t>(first.count) * range.from_stride;
        const uint64_t away = static_cast<uint64_t>(first.count) * range.to_stride;
        range.from += here;
        range.to += away;
        other.data += puts_back ? away : here;
    }
}

byte_range deferred_copies::copy::source() const {
    return {from.data, extent(range, range.from_stride), from.buffer};
}

// One that can be cut anywhere. On other devices each copy takes its time, however small it is.
bool deferred_copies::copy::is_one_piece() const {
    return range.count == 1 && !is_far(from.buffer);
}

// Bytes `first` to `last` of its piece.
deferred_copies::copy deferred_copies::copy::part(uint64_t first, uint64_t last) const {
    copy result = *this;
    result.from.data += first;
    result.range.to += first;
    result.range.size = static_cast<uint32_t>(last - first);
    return result;
}

// The last so many of its pieces.
deferred_copies::copy deferred_copies::copy::last_pieces(uint32_t count) const {
    copy result = *this;
    const uint64_t skipped = range.count - count;
    result.from.data += skipped * range.from_stride;
    result.range.to += skipped * range.to_stride;
    result.range.count = count;
    return result;
}

// Where the room is gone, so is the state: nothing is to be done.
void deferred_copies::copy::perform(const is_over & over) const {
    copy_pieces(range, *room, from, false, over);
}

bool deferred_copies::copy::goes_to(const state_room & where, uint64_t offset, uint64_t size) const {
    return room.get() == &where && range.to < offset + size && offset < range.to + extent(range, range.to_stride);
}

void deferred_copies::add(
    const std::shared_ptr<state_room> & room, const location & from, const wire::copied_range & range
) {
    copy fresh = {room, from, range};
    // The caches of layers mostly lie equally far apart, and so come as one range.
    for (; fresh.range.count > 1 && range.size >= GRAIN; fresh = fresh.last_pieces(fresh.range.count - 1)) {
        copy first = fresh;
        first.range.count = 1;
        wait(std::move(first));
    }
    wait(std::move(fresh));
}

void deferred_copies::wait(copy && fresh) {
    if (waiting_.size() >= MOST_WAITING) {
        fresh.perform(over_);
        return;
    }
    const byte_range source = fresh.source();
    sources_.begin = waiting_.empty() ? source.begin : std::min(sources_.begin, source.begin);
    sources_.end = waiting_.empty() ? source.end : std::max(sources_.end, source.end);
    waiting_.push_back(std::move(fresh));
}

void deferred_copies::before_writing(std::vector<byte_range> && targets) {
    const bool concerned =
        !is_empty() && std::any_of(targets.begin(), targets.end(), [&](const byte_range & each) {
            return each.overlaps(sources_);
        });
    if (!concerned) {
        return;
    }
    const std::vector<byte_range> in_order = merged(std::move(targets));
    std::vector<copy> kept;
    kept.reserve(waiting_.size());
    for (copy & each : waiting_) {
        keep_unwritten(std::move(each), in_order, kept);
    }
    waiting_ = std::move(kept);
}

void deferred_copies::keep_unwritten(
    copy && each, const std::vector<byte_range> & targets, std::vector<copy> & kept
) {
    const byte_range source = each.source();
    const uint64_t size = source.size();
    uint64_t rest = 0;  // all before it has been copied or kept
    auto next = std::partition_point(targets.begin(), targets.end(), [&](const byte_range & target) {
        return target.end <= source.begin;
    });
    for (; next != targets.end() && next->begin < source.end; ++next) {
        if (!each.is_one_piece() || kept.size() >= MOST_WAITING) {
            each.perform(over_);
            return;
        }
        const uint64_t begin = std::max(next->begin, source.begin).address - source.begin.address;
        const uint64_t end = std::min(next->end, source.end).address - source.begin.address;
        const uint64_t first = std::max(rest, begin / GRAIN * GRAIN);
        const uint64_t last = std::min(size, (end + GRAIN - 1) / GRAIN * GRAIN);
        if (first >= last) {
            continue;
        }
        if (rest < first) {
            kept.push_back(each.part(rest, first));
        }
        each.part(first, last).perform(over_);
        rest = last;
    }
    if (rest < size) {
        kept.push_back(rest == 0 ? std::move(each) : each.part(rest, size));
    }
}

template <typename Handle>
void deferred_copies::take_out(const state_room & room, uint64_t offset, uint64_t size, Handle && handle) {
    const auto gone = std::partition(waiting_.begin(), waiting_.end(), [&](const copy & each) {
        return !each.goes_to(room, offset, size);
    });
    std::for_each(gone, waiting_.end(), handle);
    waiting_.erase(gone, waiting_.end());
}

void deferred_copies::before_reading(const state_room & room, uint64_t offset, uint64_t size) {
    take_out(room, offset, size, [this](const copy & each) { each.perform(over_); });
}

void deferred_copies::before_overwriting(const state_room & room, const wire::copied_range & range) {
    const uint64_t size = extent(range, range.to_stride);
    // Between pieces that lie apart may be others' bytes, which stay.
    const bool whole = range.count == 1 || range.to_stride == range.size;
    take_out(room, range.to, size, [&](const copy & each) {
        const uint64_t end = each.range.to + extent(each.range, each.range.to_stride);
        if (!whole || each.range.to < range.to || end > range.to + size) {
            each.perform(over_);
        }
    });
}

void deferred_copies::drop(const state_room & room) {
    take_out(room, 0, room.size(), [](const copy &) {});
}

void deferred_copies::copy_some() {
    copy & last = waiting_.back();
    const uint32_t most = is_far(last.from.buffer) ? FAR_PIECES : PIECES_AT_ONCE;
    const uint32_t rows = std::clamp(PIECE_BYTES / last.range.size, 1U, most);
    if (last.range.count > rows) {
        last.last_pieces(rows).perform(over_);
        last.range.count -= rows;
    } else if (last.is_one_piece() && last.range.size > PIECE_BYTES) {
        last.part(last.range.size - PIECE_BYTES, last.range.size).perform(over_);
        last.range.size -= PIECE_BYTES;
    } else {
        last.perform(over_);
        waiting_.pop_back();
    }
}

}  // namespace mesh
