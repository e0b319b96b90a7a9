#pragma once

// States of sequences that the engine saves and puts back: what of them lies on workers stays there.
//
// The engine writes a state to memory of its own, tensor by tensor, and reads it back, perhaps to other cells. Here it
// is let do so with an empty stretch of addresses (state_capture.h). What it would have read from a worker is copied
// over there, into memory that was set aside when the model was loaded, and what the engine keeps is a reference: which
// snapshot it is, and the rest of the state, which lies on this machine.
//
// The engine does not tell when it drops a state. So we follow what it does with those of each sequence; where there is
// no room, what was not used for longest goes. A snapshot that is gone is a state that cannot be put back, and the
// prompt is read again.

#include "host/block_pool.h"
#include "host/device.h"
#include "host/state_capture.h"

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <vector>

namespace mesh {

// Why a state is saved.
enum class state_kind : uint32_t {
    whole,       // all of a sequence, for when another one has taken its place; put back once
    checkpoint,  // what cannot be rolled back of it, at several lengths of its text
    draft,       // the same, before a step that may have to be taken back
};

struct state_owner {
    state_kind kind = state_kind::whole;
    int32_t sequence = 0;
    int64_t tokens = 0;  // of the text at that time
    int task = 0;        // in which the engine saves it
};

// A state as the engine has written it: what lies on workers, and all the rest in its order.
struct captured_state {
    std::vector<state_piece> pieces;
    std::vector<uint8_t> rest;
    uint64_t size = 0;  // of the whole
    bool usable = false;
};

// Where a saved state begins: what the engine keeps starts with it where something lies on workers.
struct state_reference {
    uint64_t magic;
    uint64_t process[2];  // random: a reference means nothing to another one
    uint64_t id;          // 0: nothing was saved
    state_kind kind;
    uint32_t reserved;
};

class saved_states {
  public:
    // Gets a stretch of addresses, and says how much it wrote or read.
    using stream_writer = std::function<size_t(uint8_t * to, size_t size)>;
    using stream_reader = std::function<size_t(const uint8_t * from, size_t size)>;

    // From now on, at most so many checkpoints for each sequence. False where a worker cannot.
    bool keep(size_t checkpoints);
    bool is_on() const;

    // Sets memory aside on each worker.
    void reserve(const std::vector<uint64_t> & least, uint64_t most);

    // What `write` writes, `size` bytes in all.
    static captured_state capture(size_t size, const stream_writer & write);

    // Bytes that the engine has to keep of it.
    static size_t kept_size(const captured_state & state);

    // Has the workers copy their part, and writes what the engine is to keep.
    void save(const captured_state & state, const state_owner & whose, uint8_t * to);

    static bool is_reference(const uint8_t * data, size_t size);

    // What was to be saved was not: there was no room.
    static bool is_gone(const uint8_t * data, size_t size);

    // One of this process, saved before a step that may have to be taken back. The engine cannot go on without it.
    static bool is_draft(const uint8_t * data, size_t size);

    // Puts a state back; false where it is gone. What the engine has read by then is no state of the sequence.
    bool restore(const uint8_t * data, size_t size, const state_owner & whose, const stream_reader & read);

    // A sequence goes on from where another one is, with its checkpoints.
    void cloned(int32_t from, int32_t to);

    // Memory that states were of is given back.
    void forget(const device * owner, uint32_t buffer_id);

  private:
    struct kept_range {
        device * owner;
        uint32_t buffer_id;
        uint64_t position;  // in the stream
        uint64_t size;
        uint64_t offset;  // in the owner's room
    };

    struct snapshot {
        state_owner whose;
        uint64_t size = 0;
        size_t rest = 0;
        uint64_t used = 0;               // when, as numbers that grow
        std::vector<kept_range> ranges;  // by position
        std::map<device *, uint64_t> blocks;
        std::vector<uint64_t> checkpoints;  // of the same sequence, that the engine keeps with it
    };

    struct room {
        uint32_t buffer_id;
        block_pool blocks;
    };

    mutable std::mutex mutex_;
    bool on_ = false;
    size_t checkpoints_ = 0;
    uint64_t last_id_ = 0;
    uint64_t clock_ = 0;
    std::map<device *, room> rooms_;
    std::map<uint64_t, snapshot> snapshots_;
    std::map<int32_t, std::vector<uint64_t>> of_sequence_;  // checkpoints that the engine has, in their order
    std::map<int32_t, uint64_t> drafts_;

    bool place(snapshot & fresh);
    bool take_blocks(snapshot & fresh);
    bool evict_for(state_kind kind);
    void drop(uint64_t id);
    void drop_unreferenced();
    void follow_engine(const state_owner & whose);
    void notice_losses();
    bool put_back(const snapshot & from, const std::vector<state_piece> & to);
};

// The one of this process.
saved_states & states();

}  // namespace mesh
