#pragma once

// C API of libggml-mesh, called from Python through ctypes and from ggml as a backend.
//
// Every function is safe to call from any thread. None throws, and none keeps
// a pointer that it was given.

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_MESH_API __attribute__((visibility("default")))

// Version of the engine that this library was compiled against, as the wheel
// spells it. Loading it into another one is refused by the caller: ggml's
// backend structs change between builds.
GGML_MESH_API const char * ggml_mesh_engine_version(void);

// Ends this process when the other end of `fd` closes, that is, when the node
// that holds it dies. A native thread, since the engine keeps Python's lock
// while it loads a model. Returns 0, or an errno.
GGML_MESH_API int ggml_mesh_guard(int fd);

// Checks the arithmetic of the CPU device or, with the name of a loaded registry of ggml's ("CUDA"), of all its
// devices. Returns 0, or 1 with the reason in `why`; may also die of an instruction that the CPU lacks, or of a
// driver: call it in a process made for that.
GGML_MESH_API int ggml_mesh_selftest(const char * registry, char * why, size_t why_size);

// What a device can do, as models use it.
struct ggml_mesh_speed {
    double read_bytes_per_s;  // of quantised weights, in products with one column: decoding
    double flops_per_s;       // in products with many columns: prompts
    double attention_per_s;   // operations likewise, in a prompt's attention over what came before
    int disturbed;            // 1 where others used the CPU all the while: it can do more than that
};

// Measures the ggml device `device_name` within a second or two, with at most `max_bytes` of weights. Returns 0,
// or 1 with the reason in `why`; may also die of what the device's driver does: call it in a process made for that.
GGML_MESH_API int ggml_mesh_measure(
    const char * device_name, int threads, unsigned long long max_bytes, struct ggml_mesh_speed * speed,
    char * why, size_t why_size
);

// What a model is made of: a weight of a type, the attention of a layer, or one of its small operations.
struct ggml_mesh_shape {
    const char * kind;  // the name of a ggml type, "attention" or "op"
    int64_t width;      // of a weight's rows, of an attention's heads, of what an operation works on
    int64_t rows;       // of a weight; heads that an attention caches; 1
    int64_t experts;    // that a weight is of; 1 where it is no mixture
    int64_t used;       // of these, by each token; heads that an attention has
};

struct ggml_mesh_shape_speed {
    double read_bytes_per_s;  // for one token: of weights, of what is cached, of what an operation works on
    double flops_per_s;       // for many; of small operations: elements
    int disturbed;
};

// Likewise, of one such shape, within a fifth of a second or so.
GGML_MESH_API int ggml_mesh_measure_shape(
    const char * device_name, int threads, unsigned long long max_bytes, const struct ggml_mesh_shape * shape,
    struct ggml_mesh_shape_speed * speed, char * why, size_t why_size
);

// --- client ---

// Greets the workers at the other ends of sockets, which are owned from here on,
// and registers a ggml device of the given name for each. Call it once the model
// is named and before it is loaded. Their indices are those that they have here,
// counted on if there were others before. Returns 0, or 1 with the reason in `why`.
GGML_MESH_API int
ggml_mesh_connect(const int * fds, const char * const * names, size_t count, char * why, size_t why_size);

// Names the model that is going to be loaded: its weights are then asked for by
// name, and sent only if they `may_be_sent` and a worker has no copy of the model.
// Returns 0, or 1 with the reason in `why`.
GGML_MESH_API int ggml_mesh_use_model(
    const char * fingerprint, const char * const * paths, size_t count, int may_be_sent, char * why,
    size_t why_size
);

// Names a LoRA adapter that is going to be loaded with the model; several in the order in which they are. Workers
// have it under its digest. Returns 0, or 1 with the reason in `why`.
GGML_MESH_API int ggml_mesh_use_adapter(const char * digest, const char * path, char * why, size_t why_size);

// Device `from` can push to device `to`, which its worker calls `peer`: activations
// between them then go straight, and not through this machine.
GGML_MESH_API void ggml_mesh_link(int from, int to, unsigned int peer);

// The model is loaded. From here on a result that cannot be read is thrown as
// std::runtime_error, which llama-server turns into a failed request; while it
// loads nobody would catch that.
GGML_MESH_API void ggml_mesh_loaded(void);

// Why the device no longer works; 0 while it does, else the length of the reason.
GGML_MESH_API size_t ggml_mesh_failure(int index, char * why, size_t why_size);

// An op that the device does not compute, although its layers need it: the host computes it in its place.
struct ggml_mesh_declined {
    char op[32];
    char node[64];        // the first one, or the weight that stays on the host for it
    unsigned int layers;  // with such nodes
};

// One after the other, known when the model is loaded. Returns 0, or 1 where there is no such device or no further op.
GGML_MESH_API int ggml_mesh_declined_op(int index, size_t which, struct ggml_mesh_declined * found);

// What a device has done since it was connected; sums, so that whoever reads them twice knows what happened
// in between.
struct ggml_mesh_stage {
    unsigned long long runs;
    unsigned long long compute_ns;
    unsigned long long wait_ns;          // that the worker waited for something to do
    unsigned long long sent_bytes;       // from here to the worker
    unsigned long long received_bytes;   // and back
    unsigned long long worker_in_bytes;  // all that reached the worker, pushes of its peers included
    unsigned long long worker_out_bytes;
    unsigned long long weight_bytes;  // of sent_bytes: weights, for want of the model's file over there
    unsigned int queued;              // commands that waited behind the last run
    unsigned int in_flight;           // runs that are not done
};

// Returns 0, or 1 where there is no such device.
GGML_MESH_API int ggml_mesh_stage_counters(int index, struct ggml_mesh_stage * counters);

// Decides from now on what the engine drafts: at most `model_depth` tokens by its draft model, and `text_depth` by what
// stood in the text before; 0 for none. Call it before the engine loads its model. Returns 0, or 1 where the engine's
// own ways cannot be replaced, and it drafts as it is told.
GGML_MESH_API int ggml_mesh_speculate(int model_depth, int text_depth);

// Puts the caches of a model's layers from `first` on onto a device of the host, whatever the engine's split says. Call it
// before the engine loads its model. Returns 0, or 1 where that cannot be.
GGML_MESH_API int ggml_mesh_keep_layers(int first, const char * device);

// What came of it since the engine started; sums, but for the depth of the last draft.
struct ggml_mesh_speculation {
    unsigned long long steps;
    unsigned long long tokens;  // that these steps gave
    unsigned long long drafted;
    unsigned long long accepted;
    unsigned long long text_drafted;  // of these, by the text itself
    unsigned long long text_accepted;
    double seconds;        // that the steps took
    double plain_seconds;  // and would have taken without drafts
    unsigned int depth;
};

GGML_MESH_API int ggml_mesh_speculation_counters(struct ggml_mesh_speculation * counters);

// Bounds from now on what the engine takes in one step while somebody waits for the next token: as much as it reads of
// prompts in so many seconds, the usual number of tokens or a multiple of it, drafts aside, and never more than it was
// told to; where the usual number takes twice as long, as many as are read in that time, or the fewest. Those are to
// hold a token of each sequence. Call it before the engine loads its model. Returns 0, or 1 where the engine's own ways
// cannot be replaced.
GGML_MESH_API int ggml_mesh_pace(unsigned int usual, unsigned int fewest, double seconds);

// Keeps states that the engine saves on the workers that they are of, at most so many checkpoints for each sequence.
// Call it when the workers are connected and before the engine loads its model. Returns 0, or 1 where that cannot be,
// and the engine must save none: its own functions cannot be replaced, or a worker is of an older version.
GGML_MESH_API int ggml_mesh_keep_states(unsigned int checkpoints);

// The model is loaded: sets memory for that aside on each worker. At least so many bytes, in the order of the workers,
// and otherwise half of what it has left, but at most so many; nothing where there is no room.
GGML_MESH_API void
ggml_mesh_reserve_states(const unsigned long long * least, size_t count, unsigned long long most);

// A function of the engine that this library knows by its symbol (hooks/engine_symbols.h).
struct ggml_mesh_symbol {
    const char * name;     // as the linker has it; empty where functions cannot be replaced at all
    const char * feature;  // that is off where the engine lacks the symbol
    const char * without;  // what happens then
    int replaced;          // 1: our function is called in its place
    int found;             // in the engine that is loaded
};

// One after the other. Returns 0, or 1 where there is no such index.
GGML_MESH_API int ggml_mesh_engine_symbol(size_t index, struct ggml_mesh_symbol * symbol);

// --- both ---

// Appends a line of JSON to `fd` for each frame that is sent or received from now on.
GGML_MESH_API void ggml_mesh_trace(int fd);

// --- worker ---

// Lends the ggml device `device_name`, up to `quota` bytes of its memory to all
// sessions together. Null with the reason in `why` if there is no such device.
GGML_MESH_API void *
ggml_mesh_worker_new(const char * device_name, int threads, unsigned long long quota, char * why, size_t why_size);
GGML_MESH_API void ggml_mesh_worker_free(void * worker);

// Weights that `chosen` picks by their names lie in main memory instead, up to `quota` bytes of it, and the CPU computes
// with them: those of the first so many of the layers that are prepared, all where that is negative. Call it before the
// worker is told of models; `chosen` is called whenever it is, and when layers are prepared.
GGML_MESH_API void ggml_mesh_worker_use_main_memory(
    void * worker, int (*chosen)(const char * name), int layers, unsigned long long quota
);

// Tells the worker of a model on its own disk, all files of it in order. Clients
// that name the same fingerprint get its weights from there. Returns 0, or 1
// with the reason in `why`.
GGML_MESH_API int ggml_mesh_worker_add_model(
    void * worker, const char * fingerprint, const char * const * paths, size_t count, char * why, size_t why_size
);

// The same for files that are not whole: only the weights of these names are there, and only they are ever read.
// Told again when there are more.
GGML_MESH_API int ggml_mesh_worker_add_part(
    void * worker, const char * fingerprint, const char * const * paths, size_t count, const char * const * names,
    size_t name_count, char * why, size_t why_size
);

// Reads layers `first_layer` to `last_layer` (not included) of a model into the device's memory before anybody
// asks for them, and calls `progress` after each weight, in bytes. Returns 0, or 1 with the reason in `why`.
GGML_MESH_API int ggml_mesh_worker_prepare(
    void * worker, const char * fingerprint, int first_layer, int last_layer,
    void (*progress)(unsigned long long done, unsigned long long total), char * why, size_t why_size
);

// Gives back the memory of a model's weights, those aside that a client uses. Returns how many bytes that were.
GGML_MESH_API unsigned long long ggml_mesh_worker_unload(void * worker, const char * fingerprint);

// Bytes of weights that are kept, used or not.
GGML_MESH_API unsigned long long ggml_mesh_worker_resident(void * worker);

// For tests: fills the memory of graphs with what is not a number between runs.
GGML_MESH_API void ggml_mesh_worker_poison(void * worker);

// For tests: the worker does not know the op of this name, as one of an older version. Returns 0, or 1 where nobody does.
GGML_MESH_API int ggml_mesh_worker_lack(void * worker, const char * op);

// A socket to another worker, which is owned from here on. Both sides call each
// other by numbers of their own; the client is told which (ggml_mesh_link).
GGML_MESH_API int ggml_mesh_worker_add_peer(void * worker, unsigned int number, int fd);

// Closes the socket to another worker, if there is one of that number.
GGML_MESH_API void ggml_mesh_worker_drop_peer(void * worker, unsigned int number);

// Serves one client on the socket `fd`, which is owned from here on, until it
// leaves. Blocks; call it from as many threads as there are clients. Returns 0,
// or 1 with what the client did wrong in `why`.
GGML_MESH_API int ggml_mesh_worker_serve(void * worker, int fd, char * why, size_t why_size);

#ifdef __cplusplus
}
#endif
