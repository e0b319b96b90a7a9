#pragma once

// The link protocol of ggml-mesh, version 1.
//
// A link is an ordered byte stream between a client (the host's engine) and a
// worker (another machine's device). Each side sends frames: a header of 16
// bytes, then `size` bytes of payload. Everything is little-endian, nothing is
// a pointer, and everything that arrives is checked before it is used.
//
// Commands are executed in the order in which they were sent. Only HELLO, SUPPORTS,
// SIZE, RESERVE and GET are answered; RUN is followed by a DONE when it has been
// computed, which nobody has to wait for. After an ERROR the session is over:
// every later command is skipped, and the link closes.
//
//   command  payload                                       answer
//   HELLO    hello, op and type table hashes               HELLO: hello_answer, name, description
//   SUPPORTS a graph of one node (tensors)                 SUPPORTS: 1 if the device computes it, else 0
//   SIZE     a graph of one node (tensors)                 SIZE: bytes that its result takes on the device
//   ALLOC    alloc
//   ATTACH   attach, attach_entry × count, [file_name]     (weights of the model that HELLO named, or of a LoRA adapter)
//   FREE     buffer_id
//   CLEAR    clear
//   SET      span, bytes
//   GET      span                                          DATA: bytes
//   COPY     copy                                          (within one worker)
//   RESERVE  reserve                                       RESERVE: bytes of the new buffer, 0 where there is no room
//   COPIES   copies, copied_range …                        (from another buffer to such memory, or back)
//   GRAPH    graph_head, tensors or changes (see graph.h)
//   RUN      graph_key, inputs (input_head, body) …        DONE: telemetry
//   PUSH     push                                          (to another worker, over their own link)
//   RECV     recv                                          (waits for such a push)
//
// Between workers a link carries DELIVER frames only: deliver, bytes.
//
// RESERVE and COPIES are for saved states; a worker that knows them says so in its HELLO (FEATURE_STATES).
//
// A ticket in the header pairs answers with their commands.

#include <cstddef>
#include <cstdint>

namespace mesh::wire {

constexpr uint32_t MAGIC = 0x4853454d;  // "MESH"
constexpr uint32_t VERSION = 1;

// Limits on what one frame or session may ask for; beyond them it is refused.
constexpr uint64_t MAX_FRAME_BYTES = 64ULL << 20;  // a micro-batch of activations is 16 MB at 8192 × 512
constexpr uint32_t MAX_GRAPH_TENSORS = 1U << 16;   // the largest graphs known have some 10,000
constexpr uint32_t MAX_CACHED_GRAPHS = 64;  // per session; decode needs one, speculation and slots some more
constexpr uint32_t MAX_CACHED_TENSORS = 1U << 20;   // in all these graphs; some 450 bytes each
constexpr uint32_t MAX_BUFFERS = 256;               // per session; llama.cpp makes about five
constexpr uint64_t MAX_QUEUE_BYTES = 256ULL << 20;  // commands that have arrived and wait for the device
constexpr uint64_t MAX_SHADOW_BYTES = 64ULL << 20;  // inputs that both sides remember, per session
constexpr uint32_t RECV_TIMEOUT_MS = 600'000;  // for a push: as long as the client waits for the stage before it
constexpr uint32_t MAX_QUESTION_TENSORS = 2 * 11;  // an op, its sources, and what they are views of
constexpr uint32_t MAX_RUNS_IN_FLIGHT = 32;        // micro-batches that a client sends ahead

enum class command : uint8_t {
    hello = 1,
    alloc = 2,
    free = 3,
    clear = 4,
    set = 5,
    get = 6,
    copy = 7,
    graph = 8,
    run = 9,
    attach = 10,
    push = 11,
    recv = 12,
    deliver = 13,
    supports = 14,
    size = 15,
    reserve = 16,
    copies = 17,
};

enum class answer : uint8_t {
    hello = 0x81,
    data = 0x86,
    done = 0x89,
    supports = 0x8e,
    size = 0x8f,
    reserve = 0x90,
    error = 0xff,
};

struct header {
    uint8_t kind;
    uint8_t reserved[3];
    uint32_t ticket;
    uint64_t size;
};

static_assert(sizeof(header) == 16);

// Chosen at random by the client, the same for all workers of a session: pushes are addressed to it.
struct session_id {
    uint64_t words[2];
};

struct hello {
    session_id session;
    char model[64];  // fingerprint of the model whose layers it is about, zero-padded
    uint32_t magic;
    uint32_t version;
    char engine[32];      // version of the engine, zero-padded
    uint32_t op_count;    // GGML_OP_COUNT, GGML_TYPE_COUNT and the size of a tensor: the same numbers
    uint32_t type_count;  // with another meaning would compute nonsense, so different tables are refused
    uint32_t tensor_size;
    uint32_t features;  // 0 from a client. A worker of an older version sends back what it got
};

static_assert(sizeof(hello) == 136);

constexpr uint32_t FEATURE_STATES = 1;    // it knows RESERVE and COPIES
constexpr uint32_t FEATURE_ADAPTERS = 2;  // it knows an ATTACH that names a file
constexpr uint32_t FEATURE_OPS = 16;  // from this bit on: ops_key() of the ops that it knows; 0 in older versions

struct hello_answer {
    hello self;
    uint32_t device_type;  // enum ggml_backend_dev_type
    uint32_t has_model;    // 1 if the worker has the model's files
    uint64_t grant_bytes;  // what this session may allocate
    uint64_t total_bytes;
    uint64_t alignment;
    char name[64];
    char description[128];
};

static_assert(sizeof(hello_answer) == 136 + 8 + 24 + 192);

struct alloc {
    uint32_t buffer_id;  // chosen by the client
    uint32_t usage;      // enum ggml_backend_buffer_usage
    uint64_t size;
};

static_assert(sizeof(alloc) == 16);

// Weights by reference: the worker takes them from its own copy of the model and
// presents them at the addresses that the client chose. No byte of them travels.
struct attach {
    uint32_t buffer_id;
    uint32_t count;
};

static_assert(sizeof(attach) == 8);

struct attach_entry {
    char name[64];
    uint64_t offset;
    uint64_t size;
    int64_t elements;
    uint32_t type;
    uint32_t reserved;
};

static_assert(sizeof(attach_entry) == 96);

// Behind the entries: they are weights of this file, a LoRA adapter, and not of the model.
struct file_name {
    char digest[64];  // as the worker's node told it, zero-padded
};

static_assert(sizeof(file_name) == 64);

struct span {
    uint32_t buffer_id;
    uint32_t reserved;
    uint64_t offset;
    uint64_t size;
};

static_assert(sizeof(span) == 24);

struct clear {
    span where;
    uint8_t value;
    uint8_t reserved[7];
};

static_assert(sizeof(clear) == 32);

struct copy {
    span from;
    uint32_t to_buffer_id;
    uint32_t reserved;
    uint64_t to_offset;
};

static_assert(sizeof(copy) == 40);

// Memory for saved states: at most `most` bytes, half of what is free, or `least` where that is more. Only COPIES
// reach it, and the worker may take it away: what is copied to it then is lost, and what is asked back from it is an error.
struct reserve {
    uint32_t buffer_id;  // chosen by the client
    uint32_t reserved;
    uint64_t least;
    uint64_t most;
};

static_assert(sizeof(reserve) == 24);

struct copies {
    uint32_t from_buffer_id;
    uint32_t to_buffer_id;
};

static_assert(sizeof(copies) == 8);

// `count` times `size` bytes, so far apart on either side.
struct copied_range {
    uint64_t from;
    uint64_t to;
    uint32_t size;
    uint32_t count;
    uint32_t from_stride;
    uint32_t to_stride;
};

static_assert(sizeof(copied_range) == 32);

struct push {
    span from;
    uint64_t number;  // of this push in its session
    uint32_t peer;    // which worker, by the number that both sides were told
    uint32_t reserved;
};

static_assert(sizeof(push) == 40);

struct recv {
    span to;
    uint64_t number;
};

static_assert(sizeof(recv) == 32);

struct deliver {
    session_id session;
    uint64_t number;
};

static_assert(sizeof(deliver) == 24);

struct graph_key {
    uint64_t words[2];
};

static_assert(sizeof(graph_key) == 16);

// A graph comes whole, or as what differs from the table of one that the worker keeps.
struct graph_head {
    graph_key key;
    graph_key base;
    uint32_t count;     // tensors
    uint32_t has_base;  // 1: changes follow, else the tensors
};

static_assert(sizeof(graph_head) == 40);

constexpr uint32_t TENSOR_SOURCES = 10;
constexpr uint32_t TENSOR_OP_PARAMS = 16;

// A tensor of a graph. Sources come before the tensors that use them.
struct tensor {
    uint32_t type;
    uint32_t op;
    uint32_t flags;
    uint32_t use_count;
    int64_t ne[4];
    uint64_t nb[4];
    int32_t op_params[TENSOR_OP_PARAMS];
    uint32_t sources[TENSOR_SOURCES];  // index + 1 in the same graph; 0 is none
    uint32_t view_of;                  // index + 1
    uint32_t is_node;                  // 1 if it is computed in this graph, in the order of the table
    uint64_t view_offset;
    uint32_t buffer_id;
    uint32_t reserved;
    uint64_t offset;  // of its data in that buffer
};

static_assert(sizeof(tensor) == 16 + 32 + 32 + 64 + 40 + 8 + 8 + 8 + 8);

// An input of a RUN, written before it is computed.
enum class input_form : uint32_t {
    raw = 0,
    changes = 1,  // change and bytes, repeated: what differs from the same input as it was sent last
    runs = 2,     // run_of_words, repeated: the whole input
};

struct input_head {
    uint32_t buffer_id;
    uint32_t form;
    uint64_t offset;
    uint64_t size;
    uint64_t body;  // bytes that follow
};

static_assert(sizeof(input_head) == 32);

struct change {
    uint32_t offset;
    uint32_t size;
};

static_assert(sizeof(change) == 8);

struct run_of_words {
    uint32_t count;
    uint16_t word;
    uint16_t reserved;
};

static_assert(sizeof(run_of_words) == 8);

// What one RUN cost, in nanoseconds.
struct telemetry {
    uint64_t compute_ns;
    uint64_t wait_ns;   // between the end of the run before and the arrival of this one
    uint64_t bytes_in;  // since the run before, from client and peers
    uint64_t bytes_out;
    uint32_t queued;       // commands that were waiting behind it
    uint32_t states_gone;  // 1 where the memory for saved states was needed for something else
};

static_assert(sizeof(telemetry) == 40);

}  // namespace mesh::wire
