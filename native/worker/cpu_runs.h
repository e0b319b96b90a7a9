#pragma once

// Nodes that read weights in main memory are computed by the CPU, beside a device that has the rest of the graph.
//
// Consecutive ones are a run: what it reads of the device's results is copied to main memory, and what
// others read of its own is copied back. A node that needs nothing but a run's results belongs to it, too: of
// a mixture's layer all from the first product with its experts to the last crosses only once.

#include "ggml-cpp.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

namespace mesh {

class weight;

// What one run copies and computes: a client may not ask for more.
constexpr uint64_t MAX_CPU_RUN_BYTES = 2ULL << 30;

// A tensor of the device's, and the one in main memory that stands for it.
struct crossing {
    ggml_tensor * there;
    ggml_tensor * here;
};

struct cpu_run {
    int first = 0;  // nodes of the graph; the last one is not included
    int last = 0;
    ggml_context_ptr context;
    ggml_cgraph * graph = nullptr;
    std::vector<const ggml_tensor *> nodes;  // of the device's graph that it computes
    std::vector<crossing> inputs;
    std::vector<crossing> outputs;
    std::vector<std::pair<ggml_tensor *, size_t>> offsets;  // of all tensors in main memory
    size_t size = 0;

    bool has(const ggml_tensor * node) const;
};

// Tensors of a graph that lie in main memory, and the weights that begin there, if any do.
using main_memory_weights = std::unordered_map<const ggml_tensor *, weight *>;

// The runs of a graph, in its order. `weights` lie in main memory; no run goes on over a node in `cuts`. Throws
// std::invalid_argument where a node cannot be computed there.
std::vector<cpu_run>
cpu_runs(ggml_cgraph * graph, const main_memory_weights & weights, const std::unordered_set<size_t> & cuts);

// Computes one on the CPU, with `memory` of at least its size.
void compute_run(const cpu_run & run, ggml_backend_t cpu, uint8_t * memory);

}  // namespace mesh
