#include "worker/cpu_runs.h"

#include "rules/validate.h"
#include "wire/graph.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

namespace mesh {

namespace {

constexpr size_t ALIGNMENT = 64;  // of rows, for the CPU's kernels

const ggml_tensor * root_of(const ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src : tensor;
}

class run_builder {
  public:
    run_builder(ggml_cgraph * graph, const main_memory_weights & weights, int first)
        : graph_(graph), weights_(weights), first_(first) {}

    // Whether the node reads nothing but weights in main memory and results of this run.
    bool suffices_for(const ggml_tensor * node) const {
        bool any = false;
        for (const ggml_tensor * source : node->src) {
            if (source == nullptr || source == node || weights_.count(source) != 0) {
                continue;
            }
            if (computed_.count(root_of(source)) == 0) {
                return false;
            }
            any = true;
        }
        return any && can_cross(node);
    }

    void add(ggml_tensor * node) {
        if (!can_cross(node)) {
            throw std::invalid_argument("a node that reads a weight in main memory writes to a part of a tensor");
        }
        nodes_.push_back(node);
        computed_.insert(node);
    }

    cpu_run build(int last) {
        run_.first = first_;
        run_.nodes.assign(nodes_.begin(), nodes_.end());
        run_.last = last;
        const size_t count = nodes_.size() * (GGML_MAX_SRC + 1);
        run_.context.reset(ggml_init(
            {count * ggml_tensor_overhead() + ggml_graph_overhead_custom(nodes_.size(), false), nullptr, true}
        ));
        if (!run_.context) {
            throw std::runtime_error("no memory for a graph");
        }
        run_.graph = ggml_new_graph_custom(run_.context.get(), nodes_.size(), false);
        for (ggml_tensor * node : nodes_) {
            copy_node(node);
        }
        return std::move(run_);
    }

  private:
    ggml_cgraph * graph_;
    const main_memory_weights & weights_;
    int first_;
    std::vector<ggml_tensor *> nodes_;
    std::unordered_set<const ggml_tensor *> computed_;
    cpu_run run_;
    std::unordered_map<const ggml_tensor *, ggml_tensor *> copies_;

    static bool can_cross(const ggml_tensor * node) {
        return node->view_src == nullptr && node->buffer != nullptr && ggml_is_contiguous(node);
    }

    void copy_node(ggml_tensor * node) {
        ggml_tensor * copy = copy_of(node);
        copy->op = node->op;
        copy->flags = node->flags;
        std::memcpy(copy->op_params, node->op_params, sizeof copy->op_params);
        for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
            copy->src[i] = node->src[i] == node ? copy : source_of(node->src[i]);
        }
        const auto first = weights_.find(node->src[0]);
        prefer_layout(copy, first != weights_.end() ? first->second : nullptr);
        ggml_graph_add_node(run_.graph, copy);
        if (is_read_elsewhere(node)) {
            run_.outputs.push_back({node, copy});
        }
    }

    ggml_tensor * source_of(ggml_tensor * source) {
        if (source == nullptr || weights_.count(source) != 0) {
            return source;
        }
        const auto known = copies_.find(source);
        if (known != copies_.end()) {
            return known->second;
        }
        const auto root = copies_.find(root_of(source));
        if (computed_.count(root_of(source)) != 0 && root != copies_.end()) {
            return view_of(source, root->second);
        }
        if (source->buffer == nullptr) {
            throw std::invalid_argument("a node that reads a weight in main memory reads what lies nowhere");
        }
        ggml_tensor * copy = copy_of(source);
        run_.inputs.push_back({source, copy});
        return copy;
    }

    // With the same strides, and memory of its own.
    ggml_tensor * copy_of(const ggml_tensor * tensor) {
        ggml_tensor * copy = ggml_new_tensor(run_.context.get(), tensor->type, GGML_MAX_DIMS, tensor->ne);
        std::copy(std::begin(tensor->nb), std::end(tensor->nb), std::begin(copy->nb));
        run_.offsets.emplace_back(copy, run_.size);
        run_.size += GGML_PAD(ggml_nbytes(tensor), ALIGNMENT);
        if (run_.size > MAX_CPU_RUN_BYTES) {
            throw std::invalid_argument("what it computes in main memory is too large");
        }
        copies_.emplace(tensor, copy);
        return copy;
    }

    ggml_tensor * view_of(const ggml_tensor * tensor, const ggml_tensor * root) {
        ggml_tensor * copy = ggml_new_tensor(run_.context.get(), tensor->type, GGML_MAX_DIMS, tensor->ne);
        std::copy(std::begin(tensor->nb), std::end(tensor->nb), std::begin(copy->nb));
        const auto base = std::find_if(run_.offsets.begin(), run_.offsets.end(), [&](const auto & entry) {
            return entry.first == root;
        });
        run_.offsets.emplace_back(copy, base->second + tensor->view_offs);
        copies_.emplace(tensor, copy);
        return copy;
    }

    // As where devices fuse nodes: a result whose uses are all here need not be written. A view of it is a use elsewhere.
    bool is_read_elsewhere(const ggml_tensor * node) const {
        int32_t uses = 0;
        for (const ggml_tensor * other : nodes_) {
            uses += static_cast<int32_t>(std::count(std::begin(other->src), std::end(other->src), node));
        }
        const size_t slot = ggml_hash_find(&graph_->visited_hash_set, node);
        return node->type != GGML_TYPE_F32 || (node->flags & GGML_TENSOR_FLAG_OUTPUT) != 0 ||
               graph_->use_counts[slot] != uses || uses == 0;
    }
};

}  // namespace

bool cpu_run::has(const ggml_tensor * node) const {
    return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

std::vector<cpu_run>
cpu_runs(ggml_cgraph * graph, const main_memory_weights & weights, const std::unordered_set<size_t> & cuts) {
    std::vector<cpu_run> runs;
    if (weights.empty()) {
        return runs;
    }
    std::unique_ptr<run_builder> open;
    const auto close = [&](int at) {
        if (open) {
            runs.push_back(open->build(at));
            open.reset();
        }
    };
    for (int i = 0; i < graph->n_nodes; ++i) {
        ggml_tensor * node = graph->nodes[i];
        if (cuts.count(static_cast<size_t>(i)) != 0) {
            close(i);
        }
        if (op_only_renames(node->op)) {
            continue;
        }
        const bool reads =
            std::any_of(std::begin(node->src), std::end(node->src), [&](const ggml_tensor * source) {
                return weights.count(source) != 0;
            });
        if (!reads && !(open && open->suffices_for(node))) {
            close(i);
            continue;
        }
        if (!open) {
            open = std::make_unique<run_builder>(graph, weights, i);
        }
        open->add(node);
    }
    close(graph->n_nodes);
    return runs;
}

void compute_run(const cpu_run & run, ggml_backend_t cpu, uint8_t * memory) {
    for (const auto & [tensor, offset] : run.offsets) {
        tensor->data = memory + offset;
    }
    for (const crossing & input : run.inputs) {
        byte_tensor bytes(
            {input.there->buffer, static_cast<uint8_t *>(input.there->data)}, ggml_nbytes(input.there)
        );
        ggml_backend_tensor_get(&bytes.tensor, input.here->data, 0, ggml_nbytes(input.there));
    }
    if (ggml_backend_graph_compute(cpu, run.graph) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("the CPU could not compute a graph");
    }
    for (const crossing & output : run.outputs) {
        ggml_backend_tensor_set(output.there, output.here->data, 0, ggml_nbytes(output.there));
    }
}

}  // namespace mesh
