#include "graph.h"
#include "weights.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
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
            add_node(graph_->nodes[i], ggml_node_get_use_count(graph_, i));
        }
        return std::move(table_);
    }

  private:
    const ggml_cgraph *                               graph_;
    const place_of &                                  place_;
    std::vector<wire::tensor>                         table_;
    std::unordered_map<const ggml_tensor *, uint32_t> index_;  // index + 1

    void add_node(const ggml_tensor * node, int32_t use_count) {
        wire::tensor entry = described(node);
        entry.is_node      = 1;
        entry.use_count    = static_cast<uint32_t>(use_count);
        entry.op           = static_cast<uint32_t>(node->op);
        std::memcpy(entry.op_params, node->op_params, sizeof entry.op_params);
        for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
            entry.sources[i] = node->src[i] != nullptr ? reference(node->src[i]) : 0;
        }
        append(node, entry);
    }

    // A tensor that this graph reads and does not compute.
    uint32_t add_leaf(const ggml_tensor * leaf) {
        wire::tensor entry = described(leaf);
        entry.op           = GGML_OP_NONE;
        return append(leaf, entry);
    }

    uint32_t reference(const ggml_tensor * tensor) {
        const auto found = index_.find(tensor);
        return found != index_.end() ? found->second : add_leaf(tensor);
    }

    wire::tensor described(const ggml_tensor * tensor) {
        wire::tensor entry{};
        entry.type  = static_cast<uint32_t>(tensor->type);
        entry.flags = static_cast<uint32_t>(tensor->flags);
        for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
            entry.ne[i] = tensor->ne[i];
            entry.nb[i] = tensor->nb[i];
        }
        if (tensor->view_src != nullptr) {
            entry.view_of     = reference(tensor->view_src);
            entry.view_offset = tensor->view_offs;
        }
        const placed where = place_(tensor);
        entry.buffer_id    = where.buffer_id;
        entry.offset       = where.offset;
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

// Ops that a worker computes. None of them carries a pointer or calls back.
constexpr ggml_op ALLOWED_OPS[] = {
    GGML_OP_NONE,           GGML_OP_DUP,           GGML_OP_ADD,          GGML_OP_ADD_ID,       GGML_OP_ADD1,
    GGML_OP_ACC,            GGML_OP_SUB,           GGML_OP_MUL,          GGML_OP_DIV,          GGML_OP_SQR,
    GGML_OP_SQRT,           GGML_OP_LOG,           GGML_OP_SIN,          GGML_OP_COS,          GGML_OP_SUM,
    GGML_OP_SUM_ROWS,       GGML_OP_CUMSUM,        GGML_OP_MEAN,         GGML_OP_ARGMAX,       GGML_OP_REPEAT,
    GGML_OP_CONCAT,         GGML_OP_NORM,          GGML_OP_RMS_NORM,     GGML_OP_GROUP_NORM,   GGML_OP_L2_NORM,
    GGML_OP_MUL_MAT,        GGML_OP_MUL_MAT_ID,    GGML_OP_SCALE,        GGML_OP_SET,          GGML_OP_CPY,
    GGML_OP_CONT,           GGML_OP_RESHAPE,       GGML_OP_VIEW,         GGML_OP_PERMUTE,      GGML_OP_TRANSPOSE,
    GGML_OP_GET_ROWS,       GGML_OP_SET_ROWS,      GGML_OP_DIAG,         GGML_OP_DIAG_MASK_INF, GGML_OP_SOFT_MAX,
    GGML_OP_ROPE,           GGML_OP_CLAMP,         GGML_OP_PAD,          GGML_OP_ARANGE,       GGML_OP_ARGSORT,
    GGML_OP_TOP_K,          GGML_OP_LEAKY_RELU,    GGML_OP_TRI,          GGML_OP_FILL,         GGML_OP_FLASH_ATTN_EXT,
    GGML_OP_SSM_CONV,       GGML_OP_SSM_SCAN,      GGML_OP_RWKV_WKV6,    GGML_OP_RWKV_WKV7,    GGML_OP_GATED_LINEAR_ATTN,
    GGML_OP_GATED_DELTA_NET, GGML_OP_SOLVE_TRI,    GGML_OP_UNARY,        GGML_OP_GLU,
};

[[noreturn]] void refuse(size_t index, const std::string & what) {
    throw std::invalid_argument("tensor " + std::to_string(index) + ": " + what);
}

// Bytes from the first to the last element, or a refusal where they do not fit 63 bits.
uint64_t extent(size_t index, const wire::tensor & entry) {
    const auto type  = static_cast<ggml_type>(entry.type);
    const auto block = ggml_blck_size(type);
    uint64_t   bytes = ggml_type_size(type);
    if (std::any_of(std::begin(entry.ne), std::end(entry.ne), [](int64_t length) { return length == 0; })) {
        return 0;  // a micro-batch without outputs ends in tensors without elements
    }
    for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
        const int64_t steps = i == 0 ? entry.ne[0] / block - 1 : entry.ne[i] - 1;
        uint64_t      span  = 0;
        if (__builtin_mul_overflow(static_cast<uint64_t>(steps), entry.nb[i], &span) ||
            __builtin_add_overflow(bytes, span, &bytes)) {
            refuse(index, "its size overflows");
        }
    }
    if (bytes > INT64_MAX) {
        refuse(index, "its size overflows");
    }
    return bytes;
}

void check(size_t index, const wire::tensor & entry) {
    if (entry.type >= GGML_TYPE_COUNT || ggml_type_size(static_cast<ggml_type>(entry.type)) == 0 ||
        ggml_blck_size(static_cast<ggml_type>(entry.type)) <= 0) {
        refuse(index, "type " + std::to_string(entry.type) + " does not exist");
    }
    if (entry.op >= GGML_OP_COUNT || !op_is_allowed(entry.op)) {
        refuse(index, "op " + std::to_string(entry.op) + " is not allowed");
    }
    int64_t elements = 1;
    for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
        if (entry.ne[i] < 0 || __builtin_mul_overflow(elements, entry.ne[i], &elements)) {
            refuse(index, "its shape makes no sense");
        }
    }
    if (entry.ne[0] % ggml_blck_size(static_cast<ggml_type>(entry.type)) != 0) {
        refuse(index, "its rows are not whole blocks");
    }
    if (entry.view_of > index) {
        refuse(index, "it is a view of what comes later");
    }
    for (const uint32_t source : entry.sources) {
        if (source > index) {
            refuse(index, "it uses what comes later");
        }
    }
}

void fill(ggml_tensor * tensor, const wire::tensor & entry, const std::vector<ggml_tensor *> & built) {
    for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
        tensor->nb[i] = entry.nb[i];
    }
    tensor->op        = static_cast<ggml_op>(entry.op);
    tensor->flags     = static_cast<int32_t>(entry.flags);
    tensor->view_offs = entry.view_offset;
    tensor->view_src  = entry.view_of != 0 ? built[entry.view_of - 1] : nullptr;
    std::memcpy(tensor->op_params, entry.op_params, sizeof entry.op_params);
    for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
        tensor->src[i] = entry.sources[i] != 0 ? built[entry.sources[i] - 1] : nullptr;
    }
}

bool only_renames(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
           op == GGML_OP_TRANSPOSE;
}

location place(size_t index, ggml_tensor * tensor, const wire::tensor & entry, const locate & find) {
    const location where = find(entry.buffer_id, entry.offset, extent(index, entry));
    if (where.is_weight && entry.is_node != 0 && !only_renames(tensor->op)) {
        refuse(index, "it would overwrite a weight");
    }
    tensor->buffer = where.buffer;
    tensor->data   = where.data;
    return where;
}

// Multiply with the weight in the layout that the device likes best, where the node uses it whole.
void prefer_layout(ggml_tensor * node, weight * source) {
    if (source == nullptr || (node->op != GGML_OP_MUL_MAT && node->op != GGML_OP_MUL_MAT_ID)) {
        return;
    }
    if (node->src[0]->type != source->type() || !source->has_shape(node->src[0]->ne)) {
        return;
    }
    if (ggml_tensor * better = source->best_for(node)) {
        node->src[0] = better;
    }
}

void add_use_count(ggml_cgraph * graph, ggml_tensor * tensor, uint32_t count) {
    const size_t slot       = ggml_hash_find_or_insert(&graph->visited_hash_set, tensor);
    graph->use_counts[slot] = static_cast<int32_t>(count);
}

}  // namespace

bool op_is_allowed(uint32_t op) {
    return std::find(std::begin(ALLOWED_OPS), std::end(ALLOWED_OPS), static_cast<ggml_op>(op)) !=
           std::end(ALLOWED_OPS);
}

std::vector<wire::tensor> encode(const ggml_cgraph * graph, const place_of & place) {
    return encoder(graph, place).run();
}

wire::graph_key key_of(const std::vector<wire::tensor> & table) {
    // Two multiplicative lanes with different odd constants. Not a cryptographic hash: a session that
    // collides with itself, once in 2^64 graphs, hurts only itself, and nobody else uses its keys.
    uint64_t         a     = 0x9e3779b97f4a7c15ULL ^ table.size();
    uint64_t         b     = 0xc2b2ae3d27d4eb4fULL + table.size();
    const auto *     words = reinterpret_cast<const uint64_t *>(table.data());
    const size_t     count = table.size() * sizeof(wire::tensor) / sizeof(uint64_t);
    static_assert(sizeof(wire::tensor) % sizeof(uint64_t) == 0);
    for (size_t i = 0; i < count; ++i) {
        a = (a ^ words[i]) * 0xff51afd7ed558ccdULL;
        a ^= a >> 32;
        b = (b + words[i]) * 0x87c37b91114253d5ULL;
        b ^= b >> 29;
    }
    return {{a, b}};
}

built_graph decode(const std::vector<wire::tensor> & table, const locate & find) {
    if (table.empty() || table.size() > wire::MAX_GRAPH_TENSORS) {
        throw std::invalid_argument("a graph of " + std::to_string(table.size()) + " tensors is over the limit");
    }
    const size_t capacity = 2 * table.size() + 16;  // preferred layouts are tensors of their own

    built_graph result;
    result.context.reset(ggml_init(
        {capacity * ggml_tensor_overhead() + ggml_graph_overhead_custom(capacity, false), nullptr, true}
    ));
    result.graph = ggml_new_graph_custom(result.context.get(), capacity, false);

    std::vector<ggml_tensor *> built;
    std::vector<weight *>      weights;
    for (size_t i = 0; i < table.size(); ++i) {
        const wire::tensor & entry = table[i];
        check(i, entry);
        ggml_tensor * tensor =
            ggml_new_tensor(result.context.get(), static_cast<ggml_type>(entry.type), GGML_MAX_DIMS, entry.ne);
        fill(tensor, entry, built);
        location where;
        if (entry.buffer_id != 0) {
            where = place(i, tensor, entry, find);
        } else if (entry.is_node != 0) {
            refuse(i, "it is computed into no buffer");
        }
        built.push_back(tensor);
        weights.push_back(where.source);
        if (entry.is_node != 0) {
            prefer_layout(tensor, entry.sources[0] != 0 ? weights[entry.sources[0] - 1] : nullptr);
            ggml_graph_add_node(result.graph, tensor);
        }
        add_use_count(result.graph, tensor, entry.use_count);
    }
    return result;
}

}  // namespace mesh
