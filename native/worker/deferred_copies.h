#pragma once

// Copies to saved states that wait until a session has nothing else to do, as copy-on-write: a step does not wait for
// copies of memory that it leaves alone. Who is about to write to what has not been copied yet says so before.

#include "rules/rules.h"
#include "wire/graph.h"
#include "wire/protocol.h"
#include "worker/state_room.h"

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace mesh {

// Bytes from the first of a range's pieces to the end of the last, so many apart.
uint64_t extent(const wire::copied_range & range, uint32_t stride);

using is_over = std::function<bool()>;

// Copies a range's pieces to a room or back, the first of which lies at `other` outside of it. Ends early once
// `over`. False where the room is gone.
bool copy_pieces(
    wire::copied_range range, state_room & room, location other, bool puts_back, const is_over & over
);

// Of one session, and used by one thread. Nothing more is copied once the session is over.
class deferred_copies {
  public:
    explicit deferred_copies(is_over over) : over_(std::move(over)) {}

    bool is_empty() const {
        return waiting_.empty();
    }

    // All memory that is still to be read lies in here.
    const byte_range & sources() const {
        return sources_;
    }

    // `range` is to be copied from here to where it says in `room`.
    void add(const std::shared_ptr<state_room> & room, const location & from, const wire::copied_range & range);

    // Copies at least what lies in `targets`, which come in any order.
    void before_writing(std::vector<byte_range> && targets);

    // Copies what goes to these bytes of a room. What goes nowhere else need not be where they are all written anew.
    void before_reading(const state_room & room, uint64_t offset, uint64_t size);
    void before_overwriting(const state_room & room, const wire::copied_range & range);

    // Copies for some microseconds. Only where something waits.
    void copy_some();

    // A room is no longer needed.
    void drop(const state_room & room);

  private:
    struct copy {
        std::shared_ptr<state_room> room;
        location from;
        wire::copied_range range;

        byte_range source() const;
        bool is_one_piece() const;
        copy part(uint64_t first, uint64_t last) const;
        copy last_pieces(uint32_t count) const;
        void perform(const is_over & over) const;
        bool goes_to(const state_room & where, uint64_t offset, uint64_t size) const;
    };

    is_over over_;
    std::vector<copy> waiting_;
    byte_range sources_;

    void wait(copy && fresh);
    template <typename Handle>
    void take_out(const state_room & room, uint64_t offset, uint64_t size, Handle && handle);
    void keep_unwritten(copy && each, const std::vector<byte_range> & targets, std::vector<copy> & kept);
};

}  // namespace mesh
