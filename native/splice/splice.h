#pragma once

// Copies between a socket and a stream of iroh's, both ways, in two threads that need nobody's interpreter.
//
// iroh is reached through the C interface that its language bindings use (uniffi, contract version 30). Whoever
// loads this library resolves the functions and vouches for their version; nothing here links to iroh.

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// Bytes that Rust allocated, and that only Rust frees.
struct mesh_rust_buffer {
    uint64_t capacity;
    uint64_t len;
    uint8_t * data;
};

// How a call ended: 0 well, 1 with an error object, 2 in a panic, 3 cancelled.
struct mesh_rust_status {
    int8_t code;
    struct mesh_rust_buffer error;
};

struct mesh_foreign_bytes {
    int32_t len;
    const uint8_t * data;
};

// Called once for each poll, in any thread: `code` is 0 when the future can be completed, 1 when it wants to be
// polled again.
typedef void (*mesh_rust_continuation)(uint64_t data, int8_t code);

// Every call of a method takes over the handle that it is given: pass a clone.
struct mesh_iroh {
    uint64_t size;  // of this struct, as its maker knows it

    struct mesh_rust_buffer (*buffer_from_bytes
    )(struct mesh_foreign_bytes bytes, struct mesh_rust_status * status);
    void (*buffer_free)(struct mesh_rust_buffer buffer, struct mesh_rust_status * status);

    uint64_t (*send_clone)(uint64_t handle, struct mesh_rust_status * status);
    void (*send_free)(uint64_t handle, struct mesh_rust_status * status);
    uint64_t (*send_write_all)(uint64_t handle, struct mesh_rust_buffer buffer);
    uint64_t (*send_finish)(uint64_t handle);

    uint64_t (*recv_clone)(uint64_t handle, struct mesh_rust_status * status);
    void (*recv_free)(uint64_t handle, struct mesh_rust_status * status);
    uint64_t (*recv_read)(uint64_t handle, uint32_t limit);

    void (*void_poll)(uint64_t future, mesh_rust_continuation continuation, uint64_t data);
    void (*void_cancel)(uint64_t future);
    void (*void_complete)(uint64_t future, struct mesh_rust_status * status);
    void (*void_free)(uint64_t future);

    void (*buffer_poll)(uint64_t future, mesh_rust_continuation continuation, uint64_t data);
    void (*buffer_cancel)(uint64_t future);
    struct mesh_rust_buffer (*buffer_complete)(uint64_t future, struct mesh_rust_status * status);
    void (*buffer_future_free)(uint64_t future);

    // Takes over the error's handle.
    struct mesh_rust_buffer (*error_message)(uint64_t handle, struct mesh_rust_status * status);
};

enum mesh_splice_end {
    MESH_SPLICE_RUNNING = 0,
    MESH_SPLICE_FINISHED = 1,     // both sides said that they had no more to send
    MESH_SPLICE_LINK_LOST = 2,    // the socket broke
    MESH_SPLICE_STREAM_LOST = 3,  // the stream was reset, or its connection is gone
    MESH_SPLICE_STOPPED = 4,
};

struct mesh_splice_report {
    uint64_t sent_bytes;  // from the socket, taken by the stream
    uint64_t received_bytes;
    int32_t end;
    char reason[252];  // empty for an end without a fault
};

struct mesh_splice;

// Starts to copy. Owns `link_fd`, a blocking stream socket, and `done_fd` from here on, and closes the latter when
// it has ended; the handles stay the caller's. NULL if it could not start: then nothing was taken over.
struct mesh_splice * mesh_splice_start(
    const struct mesh_iroh * iroh, int link_fd, uint64_t send_handle, uint64_t recv_handle, int done_fd
);

// What went through so far, and how it ended if it has. From any thread.
void mesh_splice_read(struct mesh_splice * splice, struct mesh_splice_report * report);

// Ends it if it runs, waits for its threads, and frees it. The socket is shut both ways, unless it had finished.
void mesh_splice_free(struct mesh_splice * splice);

#ifdef __cplusplus
}
#endif
