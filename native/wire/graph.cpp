#include "wire/graph.h"
#include "rules/validate.h"
#include "worker/weights.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <unordered_map>

namespace mesh {

static_assert(GGML_MAX_SRC == wire::TENSOR_SOURCES);
static_assert(GGML_MAX_DIMS == 4);
static_assert(GGML_MAX_OP_PARAMS == wire::TENSOR_OP_PARAMS * sizeof(int32_t));

namespace {

// --- client: from pointers to numbers ---

class encoder {
  public:
    encoder(const ggml_cgraph * graph, const place_of & place) : graph_(graph), place_(place) {
        table_.reserve(static_cast<size_t>(graph->n_nodes) * 2);
        index_.reserve(static_cast<size_t>(graph->n_nodes) * 2);
    }

    std::vector<wire::tensor> run() {
        for (int i = 0; i < graph_->n_nodes; ++i) {
            if (!is_idle(graph_->nodes[i])) {
                add_node(graph_->nodes[i], ggml_node_get_use_count(graph_, i));
            }
        }
        return std::move(table_);
    }

  private:
    const ggml_cgraph * graph_;
    const place_of & place_;
    std::vector<wire::tensor> table_;
    std::unordered_map<const ggml_tensor *, uint32_t> index_;  // index + 1

    // The scheduler gives a device nodes that compute nothing: views of another device's memory, copies of no
    // elements. What has no place here is left out.
    bool is_idle(const ggml_tensor * node) const {
        return (ggml_op_is_empty(node->op) || ggml_is_empty(node)) && place_(node).buffer_id == 0;
    }

    void add_node(const ggml_tensor * node, int32_t use_count) {
        wire::tensor entry = described(node, parent_of(node));
        entry.is_node = 1;
        entry.use_count = static_cast<uint32_t>(use_count);
        entry.op = static_cast<uint32_t>(node->op);
        std::memcpy(entry.op_params, node->op_params, sizeof entry.op_params);
        for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
            entry.sources[i] = node->src[i] != nullptr && node->src[i] != node ? reference(node->src[i]) : 0;
        }
        for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
            if (node->src[i] == node) {  // a cast; its number is known only now
                entry.sources[i] = static_cast<uint32_t>(table_.size()) + 1;
            }
        }
        append(node, entry);
    }

    // A source: computed before, or only read by this graph.
    uint32_t reference(const ggml_tensor * tensor) {
        const auto found = index_.find(tensor);
        return found != index_.end() ? found->second : append(tensor, described(tensor, parent_of(tensor)));
    }

    // What it is a view of, which is never a view itself.
    uint32_t parent_of(const ggml_tensor * tensor) {
        const ggml_tensor * parent = tensor->view_src;
        if (parent == nullptr) {
            return 0;
        }
        const auto found = index_.find(parent);
        return found != index_.end() ? found->second : append(parent, described(parent, 0));
    }

    wire::tensor described(const ggml_tensor * tensor, uint32_t parent) const {
        wire::tensor entry{};
        entry.type = static_cast<uint32_t>(tensor->type);
        entry.flags = static_cast<uint32_t>(tensor->flags);
        for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
            entry.ne[i] = tensor->ne[i];
            entry.nb[i] = tensor->nb[i];
        }
        entry.op = GGML_OP_NONE;
        entry.view_of = parent;
        entry.view_offset = parent != 0 ? tensor->view_offs : 0;
        const placed where = place_(tensor);
        entry.buffer_id = where.buffer_id;
        entry.offset = where.offset;
        return entry;
    }

    uint32_t append(const ggml_tensor * tensor, const wire::tensor & entry) {
        table_.push_back(entry);
        const auto number = static_cast<uint32_t>(table_.size());
        index_.emplace(tensor, number);
        return number;
    }
};

// --- worker: from numbers to pointers, nothing taken on trust ---

void fill(ggml_tensor * tensor, const wire::tensor & entry, const std::vector<ggml_tensor *> & built) {
    for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
        tensor->nb[i] = entry.nb[i];
    }
    tensor->op = static_cast<ggml_op>(entry.op);
    tensor->flags = static_cast<int32_t>(entry.flags);
    tensor->view_offs = entry.view_offset;
    tensor->view_src = entry.view_of != 0 ? built[entry.view_of - 1] : nullptr;
    std::memcpy(tensor->op_params, entry.op_params, sizeof entry.op_params);
    for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
        if (entry.sources[i] != 0) {
            // A cast names itself as the place to write to.
            tensor->src[i] = entry.sources[i] <= built.size() ? built[entry.sources[i] - 1] : tensor;
        }
    }
}

location place(size_t index, ggml_tensor * tensor, const wire::tensor & entry, const locate & find) {
    const location where = find(entry.buffer_id, entry.offset, extent(entry));
    if (where.is_weight && entry.is_node != 0 && !op_only_renames(tensor->op)) {
        refuse(index, tensor->op, "it would overwrite a weight");
    }
    tensor->buffer = where.buffer;
    tensor->data = where.data;
    return where;
}

}  // namespace

void prefer_layout(ggml_tensor * node, weight * source) {
    if (source == nullptr || (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID)) {
        return;
    }
    // Some special kernels reserve too little room for a product of stacks, and abort for want of it.
    if (node->op == GGML_OP_MUL_MAT && node->src[0]->ne[2] != 1) {
        return;
    }
    // Special kernels know three dimensions, which devices do not tell when asked.
    if (node->src[0]->type != source->type() || !source->has_shape(node->src[0]->ne) || node->src[1]->ne[3] != 1) {
        return;
    }
    if (ggml_tensor * better = source->best_for(node)) {
        node->src[0] = better;
    }
}

namespace {

class decoder {
  public:
    decoder(const std::vector<wire::tensor> & table, const locate & find) : table_(table), find_(find) {
        const size_t count = table.size();
        result_.context.reset(
            ggml_init({count * ggml_tensor_overhead() + ggml_graph_overhead_custom(count, false), nullptr, true})
        );
        if (!result_.context) {
            throw std::runtime_error("no memory for a graph");
        }
        result_.graph = ggml_new_graph_custom(result_.context.get(), count, false);
        static std::atomic<uint64_t> last_uid{0};
        result_.graph->uid = ++last_uid;  // so that a device knows it again without comparing all of it
        built_.reserve(count);
        weights_.reserve(count);
    }

    built_graph run() {
        for (size_t i = 0; i < table_.size(); ++i) {
            check_entry(table_, i);
            add(i, table_[i]);
        }
        check_use_counts();
        result_.checks = index_checks(nodes_);
        std::unordered_set<size_t> cuts;
        for (const index_check & each : result_.checks) {
            cuts.insert(each.before);
        }
        result_.cpu_runs = cpu_runs(result_.graph, in_main_memory_, cuts);
        return std::move(result_);
    }

  private:
    const std::vector<wire::tensor> & table_;
    const locate & find_;
    built_graph result_;
    std::vector<ggml_tensor *> built_;
    std::vector<weight *> weights_;
    main_memory_weights in_main_memory_;
    std::vector<placed_node> nodes_;

    void add(size_t index, const wire::tensor & entry) {
        ggml_tensor * tensor =
            ggml_new_tensor(result_.context.get(), static_cast<ggml_type>(entry.type), GGML_MAX_DIMS, entry.ne);
        fill(tensor, entry, built_);
        location where;
        if (entry.buffer_id != 0) {
            where = place(index, tensor, entry, find_);
        }
        built_.push_back(tensor);
        // The layouts of one in main memory are the CPU's.
        weights_.push_back(where.in_main_memory ? nullptr : where.source);
        if (where.in_main_memory) {
            in_main_memory_.emplace(tensor, where.source);
        }
        if (entry.is_node != 0) {
            add_node(index, tensor, entry);
        }
        const size_t slot = ggml_hash_find_or_insert(&result_.graph->visited_hash_set, tensor);
        result_.graph->use_counts[slot] = static_cast<int32_t>(entry.use_count);
    }

    void add_node(size_t index, ggml_tensor * tensor, const wire::tensor & entry) {
        check_node(index, tensor);
        nodes_.push_back({index, tensor});
        prefer_layout(tensor, entry.sources[0] != 0 ? weights_[entry.sources[0] - 1] : nullptr);
        ggml_graph_add_node(result_.graph, tensor);
    }

    // Devices fuse nodes whose results are used once, and then do not write them: a count that is too low
    // would leave old bytes where another node reads.
    void check_use_counts() const {
        std::vector<uint32_t> uses(table_.size());
        for (const wire::tensor & entry : table_) {
            for (const uint32_t source : entry.sources) {
                if (source != 0) {
                    ++uses[source - 1];
                }
            }
        }
        for (const auto & [index, node] : nodes_) {
            const uint32_t said = table_[index].use_count;
            if (said < uses[index] || said > INT32_MAX) {
                refuse(index, node->op, "it is used more often than it says");
            }
        }
    }
};

}  // namespace

byte_tensor::byte_tensor(const location & where, uint64_t size) {
    tensor.type = GGML_TYPE_I8;
    tensor.buffer = where.buffer;
    tensor.data = where.data;
    tensor.ne[0] = static_cast<int64_t>(size);
    tensor.ne[1] = tensor.ne[2] = tensor.ne[3] = 1;
    tensor.nb[0] = 1;
    tensor.nb[1] = tensor.nb[2] = tensor.nb[3] = size;
}

std::vector<wire::tensor> encode(const ggml_cgraph * graph, const place_of & place) {
    return encoder(graph, place).run();
}

wire::graph_key key_of(const std::vector<wire::tensor> & table) {
    // Two multiplicative lanes with different odd constants. Not a cryptographic hash: a session that
    // collides with itself, once in 2^64 graphs, hurts only itself, and nobody else uses its keys.
    uint64_t a = 0x9e3779b97f4a7c15ULL ^ table.size();
    uint64_t b = 0xc2b2ae3d27d4eb4fULL + table.size();
    const auto * words = reinterpret_cast<const uint64_t *>(table.data());
    const size_t count = table.size() * sizeof(wire::tensor) / sizeof(uint64_t);
    static_assert(sizeof(wire::tensor) % sizeof(uint64_t) == 0);
    for (size_t i = 0; i < count; ++i) {
        a = (a ^ words[i]) * 0xff51afd7ed558ccdULL;
        a ^= a >> 32;
        b = (b + words[i]) * 0x87c37b91114253d5ULL;
        b ^= b >> 29;
    }
    return {{a, b}};
}

void built_graph::run(
    const std::function<void(ggml_cgraph *)> & compute, const std::vector<fresh_bytes> & fresh,
    const std::function<void()> & settle
) const {
    size_t done = 0;
    auto next = checks.begin();
    const auto look = [&] {
        const auto first = next;
        next = std::find_if(first, checks.end(), [&](const index_check & each) { return each.before != done; });
        // What nodes have written is not what was sent.
        run_checks({first, next}, done == 0 ? fresh : std::vector<fresh_bytes>{}, settle);
    };
    look();
    while (next != checks.end()) {
        ggml_cgraph piece = ggml_graph_view(graph, static_cast<int>(done), static_cast<int>(next->before));
        compute(&piece);
        done = next->before;
        look();
    }
    if (done == 0) {
        compute(graph);
    } else {
        ggml_cgraph rest = ggml_graph_view(graph, static_cast<int>(done), graph->n_nodes);
        compute(&rest);
    }
}

built_graph decode(const std::vector<wire::tensor> & table, const locate & find) {
    if (table.empty() || table.size() > wire::MAX_GRAPH_TENSORS) {
        throw std::invalid_argument("a graph of " + std::to_string(table.size()) + " tensors is over the limit");
    }
    return decoder(table, find).run();
}

}  // namespace mesh
