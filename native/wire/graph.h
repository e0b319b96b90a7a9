#pragma once

// Graphs on the wire: from ggml's pointers to a table of tensors, and back.

#include "ggml-cpp.h"
#include "ggml.h"
#include "rules/indices.h"
#include "wire/protocol.h"
#include "worker/cpu_runs.h"

#include <functional>
#include <string>
#include <vector>

struct ggml_backend_buffer;

namespace mesh {

// Where a tensor's bytes are: a buffer that both sides know by number.
struct placed {
    uint32_t buffer_id = 0;
    uint64_t offset = 0;
};

using place_of = std::function<placed(const ggml_tensor *)>;

// The table of a (sub)graph: canonical, without names, pointers and ids, so that
// the same work gives the same bytes.
std::vector<wire::tensor> encode(const ggml_cgraph * graph, const place_of & place);

wire::graph_key key_of(const std::vector<wire::tensor> & table);

struct key_hash {
    size_t operator()(const wire::graph_key & key) const noexcept {
        return static_cast<size_t>(key.words[0]);
    }
};

struct key_equal {
    bool operator()(const wire::graph_key & a, const wire::graph_key & b) const noexcept {
        return a.words[0] == b.words[0] && a.words[1] == b.words[1];
    }
};

class weight;

// Memory on the worker that a client may use.
struct location {
    ggml_backend_buffer * buffer = nullptr;
    uint8_t * data = nullptr;
    weight * source = nullptr;    // the weight that begins here, if one does
    bool is_weight = false;       // read-only
    bool in_main_memory = false;  // which is not the device's: the CPU computes with it
};

// A tensor that stands for plain bytes: how ggml reads and writes any device's memory.
struct byte_tensor {
    ggml_tensor tensor{};

    byte_tensor(const location & where, uint64_t size);
};

// Finds `size` bytes at `offset` of a buffer. Throws std::invalid_argument where they are not the client's.
using locate = std::function<location(uint32_t buffer_id, uint64_t offset, uint64_t size)>;

// A graph that the worker can compute; owns its tensors, not their data.
struct built_graph {
    ggml_context_ptr context;
    ggml_cgraph * graph = nullptr;
    std::vector<index_check> checks;  // in the order of the nodes that they are for
    std::vector<cpu_run> cpu_runs;    // nodes that the device does not compute

    // Computes it with `compute`, in pieces where row numbers have to be looked at on the way; see run_checks. Throws
    // std::invalid_argument where one is out of bounds, before the node that takes it.
    void run(
        const std::function<void(ggml_cgraph *)> & compute, const std::vector<fresh_bytes> & fresh = {},
        const std::function<void()> & settle = [] {}
    ) const;
};

// Multiply with the weight in the layout that its device likes best, where the node uses it whole.
void prefer_layout(ggml_tensor * node, weight * source);

// Checks every number of `table` (validate.h) and builds the graph. Throws
// std::invalid_argument with the reason where something does not hold.
built_graph decode(const std::vector<wire::tensor> & table, const locate & find);

}  // namespace mesh
