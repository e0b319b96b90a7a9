#include "host/saved_states.h"

#include "worker/zero_pages.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <set>

namespace mesh {

namespace {

constexpr uint64_t MAGIC = 0x455441545348534dULL;  // "MSHSTATE": no state of the engine's begins with it
constexpr int64_t MIN_STEP = 8192;  // tokens between checkpoints, where there are many: the engine's own figure
constexpr uint64_t MAX_PIECE = 1U << 31;
constexpr size_t SERIES = 16;  // that rows may belong to: one for each range of cells

const state_reference & nobody() {
    static const state_reference reference = [] {
        std::random_device random;
        const auto word = [&] { return static_cast<uint64_t>(random()) << 32 | random(); };
        return state_reference{MAGIC, {word(), word()}, 0, state_kind::whole, 0};
    }();
    return reference;
}

state_reference read_reference(const uint8_t * data) {
    state_reference reference;
    std::memcpy(&reference, data, sizeof reference);
    return reference;
}

bool is_ours(const state_reference & reference) {
    return reference.magic == MAGIC &&
           std::memcmp(reference.process, nobody().process, sizeof reference.process) == 0;
}

// Copies from one buffer to another, as few ranges as they need: rows that lie equally far apart are one.
class copy_list {
  public:
    void add(uint64_t from, uint64_t to, uint64_t size) {
        for (; size > MAX_PIECE; from += MAX_PIECE, to += MAX_PIECE, size -= MAX_PIECE) {
            ranges_.push_back({from, to, static_cast<uint32_t>(MAX_PIECE), 1, 0, 0});
        }
        const size_t first = ranges_.size() > SERIES ? ranges_.size() - SERIES : 0;
        for (size_t i = ranges_.size(); i > first; --i) {
            if (continues(ranges_[i - 1], from, to, size)) {
                return;
            }
        }
        ranges_.push_back({from, to, static_cast<uint32_t>(size), 1, 0, 0});
    }

    const std::vector<wire::copied_range> & ranges() const {
        return ranges_;
    }

  private:
    std::vector<wire::copied_range> ranges_;

    // True if these bytes are the next of a range, which they then belong to.
    static bool continues(wire::copied_range & range, uint64_t from, uint64_t to, uint64_t size) {
        if (range.count == 1 && from == range.from + range.size && to == range.to + range.size &&
            size <= MAX_PIECE - range.size) {
            range.size += static_cast<uint32_t>(size);
            return true;
        }
        if (size != range.size || from < range.from || to < range.to) {
            return false;
        }
        if (range.count == 1) {
            const uint64_t from_stride = from - range.from;
            const uint64_t to_stride = to - range.to;
            if (std::min(from_stride, to_stride) < size || std::max(from_stride, to_stride) > UINT32_MAX) {
                return false;
            }
            range.from_stride = static_cast<uint32_t>(from_stride);
            range.to_stride = static_cast<uint32_t>(to_stride);
        } else if (
            from != range.from + static_cast<uint64_t>(range.count) * range.from_stride ||
            to != range.to + static_cast<uint64_t>(range.count) * range.to_stride
        ) {
            return false;
        }
        ++range.count;
        return true;
    }
};

using copy_lists = std::map<std::pair<device *, uint32_t>, copy_list>;  // by the buffer of the cache

// The gaps between `ranges` of a stream of `size`: calls `on_gap(begin, end)` for each.
template <typename Ranges, typename OnGap> void for_gaps(const Ranges & ranges, uint64_t size, OnGap && on_gap) {
    uint64_t done = 0;
    for (const auto & range : ranges) {
        if (range.position > done) {
            on_gap(done, range.position);
        }
        done = range.position + range.size;
    }
    if (size > done) {
        on_gap(done, size);
    }
}

}  // namespace

saved_states & states() {
    static saved_states all;
    return all;
}

bool saved_states::keep(size_t checkpoints) {
    const std::lock_guard lock(mutex_);
    const auto can = [](const auto & worker) { return worker->keeps_states(); };
    on_ = std::all_of(devices().begin(), devices().end(), can);
    checkpoints_ = checkpoints;
    return on_;
}

bool saved_states::is_on() const {
    const std::lock_guard lock(mutex_);
    return on_;
}

void saved_states::reserve(const std::vector<uint64_t> & least, uint64_t most) {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; on_ && i < devices().size(); ++i) {
        device * worker = devices()[i].get();
        const wire::span granted = worker->reserve(i < least.size() ? least[i] : 0, most);
        rooms_.insert_or_assign(worker, room{granted.buffer_id, block_pool(granted.size)});
    }
}

// --- saving ---

captured_state saved_states::capture(size_t size, const stream_writer & write) {
    captured_state state;
    state.size = size;
    const zero_pages stream(size);
    auto * begin = static_cast<uint8_t *>(stream.data());
    if (begin == nullptr) {
        return state;
    }
    const state_capture noted(begin, size);
    if (write(begin, size) != size || !noted.is_sound()) {
        return state;
    }
    state.usable = true;
    state.pieces = noted.pieces();
    for_gaps(state.pieces, size, [&](uint64_t from, uint64_t to) {
        state.rest.insert(state.rest.end(), begin + from, begin + to);
    });
    return state;
}

size_t saved_states::kept_size(const captured_state & state) {
    return state.usable && state.pieces.empty() ? state.rest.size() : sizeof(state_reference) + state.rest.size();
}

void saved_states::save(const captured_state & state, const state_owner & whose, uint8_t * to) {
    if (state.usable && state.pieces.empty()) {
        std::copy(state.rest.begin(), state.rest.end(), to);
        return;
    }
    state_reference reference = nobody();
    reference.kind = whose.kind;
    const std::lock_guard lock(mutex_);
    notice_losses();
    follow_engine(whose);
    snapshot fresh;
    fresh.whose = whose;
    fresh.size = state.size;
    fresh.rest = state.rest.size();
    fresh.used = ++clock_;
    std::map<device *, uint64_t> sizes;
    for (const state_piece & piece : state.pieces) {
        uint64_t & offset = sizes[piece.owner];
        kept_range * last = fresh.ranges.empty() ? nullptr : &fresh.ranges.back();
        if (last != nullptr && last->owner == piece.owner && last->buffer_id == piece.buffer_id &&
            last->position + last->size == piece.position) {
            last->size += piece.size;
        } else {
            fresh.ranges.push_back({piece.owner, piece.buffer_id, piece.position, piece.size, offset});
        }
        offset += piece.size;
    }
    fresh.blocks = sizes;
    if (state.usable && place(fresh)) {
        copy_lists copies;
        std::map<device *, uint64_t> next = fresh.blocks;
        for (const state_piece & piece : state.pieces) {
            copies[{piece.owner, piece.buffer_id}].add(piece.offset, next[piece.owner], piece.size);
            next[piece.owner] += piece.size;
        }
        for (const auto & [where, list] : copies) {
            where.first->copies(where.second, rooms_.at(where.first).buffer_id, list.ranges());
        }
        reference.id = ++last_id_;
        if (whose.kind == state_kind::checkpoint) {
            of_sequence_[whose.sequence].push_back(reference.id);
        } else if (whose.kind == state_kind::draft) {
            drafts_[whose.sequence] = reference.id;
        } else {
            fresh.checkpoints = of_sequence_[whose.sequence];
        }
        snapshots_.emplace(reference.id, std::move(fresh));
    }
    std::memcpy(to, &reference, sizeof reference);
    std::copy(state.rest.begin(), state.rest.end(), to + sizeof reference);
}

// The engine drops checkpoints before it makes another one: we do so, too, by its rules.
void saved_states::follow_engine(const state_owner & whose) {
    if (whose.kind == state_kind::draft) {
        drafts_.erase(whose.sequence);
    }
    if (whose.kind == state_kind::checkpoint) {
        std::vector<uint64_t> & held = of_sequence_[whose.sequence];
        const auto drop_where = [&](const auto & is_dropped) {
            held.erase(std::remove_if(held.begin(), held.end(), is_dropped), held.end());
        };
        drop_where([&](uint64_t id) {
            const auto found = snapshots_.find(id);
            return found == snapshots_.end() || found->second.whose.tokens >= whose.tokens;
        });
        int64_t last = -1;
        size_t left = held.size();
        drop_where([&](uint64_t id) {
            const state_owner & other = snapshots_.at(id).whose;
            if (left + 1 >= checkpoints_ && other.task != whose.task && last >= 0 &&
                other.tokens <= last + MIN_STEP) {
                --left;
                return true;
            }
            last = other.tokens;
            return false;
        });
        if (held.size() >= checkpoints_) {
            const size_t most = std::max<size_t>(checkpoints_, 1) - 1;
            held.erase(held.begin(), held.end() - static_cast<std::ptrdiff_t>(most));
        }
    }
    drop_unreferenced();
}

void saved_states::drop_unreferenced() {
    std::set<uint64_t> referenced;
    for (const auto & [sequence, ids] : of_sequence_) {
        referenced.insert(ids.begin(), ids.end());
    }
    for (const auto & [sequence, id] : drafts_) {
        referenced.insert(id);
    }
    for (const auto & [id, each] : snapshots_) {
        referenced.insert(each.checkpoints.begin(), each.checkpoints.end());
    }
    std::vector<uint64_t> left_over;
    for (const auto & [id, each] : snapshots_) {
        if (each.whose.kind != state_kind::whole && referenced.count(id) == 0) {
            left_over.push_back(id);
        }
    }
    for (const uint64_t id : left_over) {
        drop(id);
    }
}

void saved_states::drop(uint64_t id) {
    const auto found = snapshots_.find(id);
    for (const auto & [worker, begin] : found->second.blocks) {
        rooms_.at(worker).blocks.give_back(begin);
    }
    snapshots_.erase(found);
}

// --- room ---

// On entry `blocks` has the sizes, on return where they begin.
bool saved_states::place(snapshot & fresh) {
    while (!take_blocks(fresh)) {
        if (!evict_for(fresh.whose.kind)) {
            return false;
        }
    }
    return true;
}

bool saved_states::take_blocks(snapshot & fresh) {
    std::map<device *, uint64_t> taken;
    for (const auto & [worker, size] : fresh.blocks) {
        const auto found = rooms_.find(worker);
        const std::optional<uint64_t> begin =
            found != rooms_.end() ? found->second.blocks.take(size) : std::nullopt;
        if (!begin) {
            for (const auto & [other, start] : taken) {
                rooms_.at(other).blocks.give_back(start);
            }
            return false;
        }
        taken[worker] = *begin;
    }
    fresh.blocks = std::move(taken);
    return true;
}

// Texts that nobody is at go first, the longest unused one before the others; then checkpoints, but not for such a text.
bool saved_states::evict_for(state_kind kind) {
    std::optional<uint64_t> victim;
    const auto rank = [&](const snapshot & each) {
        return std::make_pair(each.whose.kind != state_kind::whole, each.used);
    };
    for (const auto & [id, each] : snapshots_) {
        const bool may_go = each.whose.kind == state_kind::whole ||
                            (each.whose.kind == state_kind::checkpoint && kind != state_kind::whole);
        if (may_go && (!victim || rank(each) < rank(snapshots_.at(*victim)))) {
            victim = id;
        }
    }
    if (!victim) {
        return false;
    }
    drop(*victim);
    drop_unreferenced();
    return true;
}

// A worker needed its memory for something else: all that has a part there is gone.
void saved_states::notice_losses() {
    for (auto each = rooms_.begin(); each != rooms_.end();) {
        device * worker = each->first;
        if (!worker->lost_states()) {
            ++each;
            continue;
        }
        std::vector<uint64_t> gone;
        for (const auto & [id, kept] : snapshots_) {
            if (kept.blocks.count(worker) != 0) {
                gone.push_back(id);
            }
        }
        for (const uint64_t id : gone) {
            drop(id);
        }
        each = rooms_.erase(each);
    }
}

void saved_states::forget(const device * owner, uint32_t buffer_id) {
    const std::lock_guard lock(mutex_);
    std::vector<uint64_t> gone;
    for (const auto & [id, each] : snapshots_) {
        if (std::any_of(each.ranges.begin(), each.ranges.end(), [&](const kept_range & range) {
                return range.owner == owner && range.buffer_id == buffer_id;
            })) {
            gone.push_back(id);
        }
    }
    for (const uint64_t id : gone) {
        drop(id);
    }
}

// --- putting back ---

bool saved_states::is_reference(const uint8_t * data, size_t size) {
    return size >= sizeof(state_reference) && read_reference(data).magic == MAGIC;
}

bool saved_states::is_gone(const uint8_t * data, size_t size) {
    return is_reference(data, size) && read_reference(data).id == 0;
}

bool saved_states::is_draft(const uint8_t * data, size_t size) {
    return is_reference(data, size) && is_ours(read_reference(data)) &&
           read_reference(data).kind == state_kind::draft;
}

bool saved_states::restore(
    const uint8_t * data, size_t size, const state_owner & whose, const stream_reader & read
) {
    const state_reference reference = read_reference(data);
    const std::lock_guard lock(mutex_);
    notice_losses();
    const auto found = snapshots_.find(reference.id);
    if (!is_ours(reference) || found == snapshots_.end() || size != sizeof reference + found->second.rest) {
        return false;
    }
    snapshot & from = found->second;
    const zero_pages stream(from.size);
    auto * begin = static_cast<uint8_t *>(stream.data());
    if (begin == nullptr) {
        return false;
    }
    const uint8_t * rest = data + sizeof reference;
    for_gaps(from.ranges, from.size, [&](uint64_t start, uint64_t end) {
        std::memcpy(begin + start, rest, end - start);
        rest += end - start;
    });
    const state_capture noted(begin, from.size);
    if (read(begin, from.size) != from.size || !noted.is_sound() || !put_back(from, noted.pieces())) {
        return false;
    }
    from.used = ++clock_;
    if (from.whose.kind == state_kind::whole) {
        // The engine keeps it no longer: the sequence is that text again, with its checkpoints.
        of_sequence_[whose.sequence] = from.checkpoints;
        drop(reference.id);
        drop_unreferenced();
    }
    return true;
}

// The engine may cut the same stream in other pieces, for other cells.
bool saved_states::put_back(const snapshot & from, const std::vector<state_piece> & to) {
    copy_lists copies;
    auto range = from.ranges.begin();
    uint64_t done = 0;  // of that range
    for (state_piece piece : to) {
        while (piece.size > 0) {
            if (range == from.ranges.end() || range->owner != piece.owner || range->buffer_id != piece.buffer_id ||
                range->position + done != piece.position) {
                return false;
            }
            const uint64_t count = std::min(piece.size, range->size - done);
            const uint64_t kept = from.blocks.at(piece.owner) + range->offset + done;
            copies[{piece.owner, piece.buffer_id}].add(kept, piece.offset, count);
            piece.offset += count;
            piece.position += count;
            piece.size -= count;
            done += count;
            if (done == range->size) {
                ++range;
                done = 0;
            }
        }
    }
    if (range != from.ranges.end()) {
        return false;
    }
    for (const auto & [where, list] : copies) {
        where.first->copies(rooms_.at(where.first).buffer_id, where.second, list.ranges());
    }
    return true;
}

void saved_states::cloned(int32_t from, int32_t to) {
    const std::lock_guard lock(mutex_);
    if (on_ && from != to) {
        of_sequence_[to] = of_sequence_[from];
        drop_unreferenced();
    }
}

}  // namespace mesh
