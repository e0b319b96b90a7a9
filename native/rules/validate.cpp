#include "rules/validate.h"

#include "rules/rules.h"

#include "ggml-backend.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

namespace mesh {

namespace {

// An op that a worker computes: which sources it needs and which it may have, as bits, and its rules. None of
// these ops carries a pointer or calls back.
struct op_rules {
    ggml_op op;
    uint32_t needs;
    uint32_t may_have;
    op_check check;
};

void anything(const subject &) {}

constexpr op_rules RULES[] = {
    {GGML_OP_NONE, 0, 0, anything},
    {GGML_OP_RESHAPE, 0b1, 0, check_views},
    {GGML_OP_VIEW, 0b1, 0, check_views},
    {GGML_OP_PERMUTE, 0b1, 0, check_views},
    {GGML_OP_TRANSPOSE, 0b1, 0, check_views},
    {GGML_OP_DUP, 0b1, 0, check_copy},
    {GGML_OP_CONT, 0b1, 0, check_copy},
    {GGML_OP_CPY, 0b11, 0, check_copy},
    {GGML_OP_CONCAT, 0b11, 0, check_concat},
    {GGML_OP_REPEAT, 0b1, 0, check_repeat},
    {GGML_OP_PAD, 0b1, 0, check_pad},
    {GGML_OP_SET, 0b11, 0, check_set},
    {GGML_OP_ACC, 0b11, 0, check_set},
    {GGML_OP_GET_ROWS, 0b11, 0, check_get_rows},
    {GGML_OP_SET_ROWS, 0b111, 0, check_set_rows},
    {GGML_OP_ADD, 0b11, 0, check_binary},
    {GGML_OP_SUB, 0b11, 0, check_binary},
    {GGML_OP_MUL, 0b11, 0, check_binary},
    {GGML_OP_DIV, 0b11, 0, check_binary},
    {GGML_OP_ADD_ID, 0b111, 0, check_add_id},
    {GGML_OP_SQR, 0b1, 0, check_unary},
    {GGML_OP_SQRT, 0b1, 0, check_unary},
    {GGML_OP_LOG, 0b1, 0, check_unary},
    {GGML_OP_SIN, 0b1, 0, check_unary},
    {GGML_OP_COS, 0b1, 0, check_unary},
    {GGML_OP_UNARY, 0b1, 0, check_unary},
    {GGML_OP_GLU, 0b1, 0b10, check_glu},
    {GGML_OP_SCALE, 0b1, 0, check_scale},
    {GGML_OP_CLAMP, 0b1, 0, check_clamp},
    {GGML_OP_LEAKY_RELU, 0b1, 0, check_leaky_relu},
    {GGML_OP_FILL, 0b1, 0, check_fill},
    {GGML_OP_ARANGE, 0, 0, check_arange},
    {GGML_OP_TRI, 0b1, 0, check_tri},
    {GGML_OP_DIAG, 0b1, 0, check_diag},
    {GGML_OP_DIAG_MASK_INF, 0b1, 0, check_diag_mask},
    {GGML_OP_SUM, 0b1, 0, check_sum},
    {GGML_OP_SUM_ROWS, 0b1, 0, check_row_sums},
    {GGML_OP_MEAN, 0b1, 0, check_row_sums},
    {GGML_OP_CUMSUM, 0b1, 0, check_cumsum},
    {GGML_OP_ARGMAX, 0b1, 0, check_argmax},
    {GGML_OP_ARGSORT, 0b1, 0, check_argsort},
    {GGML_OP_TOP_K, 0b1, 0, check_top_k},
    {GGML_OP_NORM, 0b1, 0, check_norm},
    {GGML_OP_RMS_NORM, 0b1, 0, check_norm},
    {GGML_OP_L2_NORM, 0b1, 0, check_norm},
    {GGML_OP_GROUP_NORM, 0b1, 0, check_group_norm},
    {GGML_OP_POOL_2D, 0b1, 0, check_pool_2d},
    {GGML_OP_MUL_MAT, 0b11, 0, check_mul_mat},
    {GGML_OP_MUL_MAT_ID, 0b111, 0, check_mul_mat_id},
    {GGML_OP_SOFT_MAX, 0b1, 0b110, check_soft_max},
    {GGML_OP_ROPE, 0b11, 0b100, check_rope},
    {GGML_OP_ROPE_BACK, 0b11, 0, check_rope},
    {GGML_OP_FLASH_ATTN_EXT, 0b111, 0b11000, check_flash_attn},
    {GGML_OP_LIGHTNING_INDEXER, 0b1111, 0, check_lightning_indexer},
    {GGML_OP_DSV4_HC_COMB, 0b111, 0, check_hyper_comb},
    {GGML_OP_DSV4_HC_PRE, 0b11, 0, check_hyper_pre},
    {GGML_OP_DSV4_HC_POST, 0b111, 0b1000, check_hyper_post},
    {GGML_OP_SSM_CONV, 0b11, 0, check_ssm_conv},
    {GGML_OP_SSM_SCAN, 0b1111111, 0, check_ssm_scan},
    {GGML_OP_RWKV_WKV6, 0b111111, 0, check_rwkv},
    {GGML_OP_RWKV_WKV7, 0b1111111, 0, check_rwkv},
    {GGML_OP_GATED_LINEAR_ATTN, 0b11111, 0, check_rwkv},
    {GGML_OP_GATED_DELTA_NET, 0b111111, 0, check_delta_net},
    {GGML_OP_SOLVE_TRI, 0b11, 0, check_solve_tri},
};

const op_rules * rules_of(uint32_t op) {
    const auto * const found = std::find_if(std::begin(RULES), std::end(RULES), [&](const op_rules & entry) {
        return static_cast<uint32_t>(entry.op) == op;
    });
    return found != std::end(RULES) ? found : nullptr;
}

// Ops that may write over a source which they read element by element, at the same place.
constexpr ggml_op IN_PLACE[] = {
    GGML_OP_ADD,      GGML_OP_ADD_ID,  GGML_OP_SUB,        GGML_OP_MUL,           GGML_OP_DIV,        GGML_OP_SQR,
    GGML_OP_SQRT,     GGML_OP_LOG,     GGML_OP_SIN,        GGML_OP_COS,           GGML_OP_UNARY,      GGML_OP_FILL,
    GGML_OP_SCALE,    GGML_OP_CLAMP,   GGML_OP_ROPE,       GGML_OP_DIAG_MASK_INF, GGML_OP_SOFT_MAX,   GGML_OP_NORM,
    GGML_OP_RMS_NORM, GGML_OP_L2_NORM, GGML_OP_GROUP_NORM, GGML_OP_ROPE_BACK,     GGML_OP_LEAKY_RELU, GGML_OP_SET,
    GGML_OP_ACC,      GGML_OP_DUP,
};

bool may_work_in_place(ggml_op op) {
    return std::find(std::begin(IN_PLACE), std::end(IN_PLACE), op) != std::end(IN_PLACE);
}

// The source that stands for the node's own memory, as ggml builds these ops.
bool is_own_memory(const ggml_tensor & node, size_t source) {
    return (node.op == GGML_OP_CPY && source == 1) || (node.op == GGML_OP_SET_ROWS && source == 2);
}

// A part of it may be all that is read, so it may be as large as weights and caches are.
bool is_read_in_parts(const ggml_tensor & node, size_t source) {
    return (source == 0 &&
            (node.op == GGML_OP_MUL_MAT || node.op == GGML_OP_MUL_MAT_ID || node.op == GGML_OP_GET_ROWS)) ||
           is_own_memory(node, source);
}

std::string op_text(uint32_t op) {
    return op < GGML_OP_COUNT ? ggml_op_name(static_cast<ggml_op>(op)) : std::to_string(op);
}

void check_source(const subject & node, size_t i) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(i);
    node.require(
        is_read_in_parts(dst, i) || ggml_nelements(&src) <= MAX_COMPUTED, "a source has too many elements"
    );
    if ((dst.flags & GGML_TENSOR_FLAG_COMPUTE) != 0) {
        node.require(src.data != nullptr || ggml_is_empty(&src), "a source has no memory");
    }
    // ggml broadcasts by counting, never by strides of 0; without those, work is bounded by memory.
    node.require(has_own_bytes(src), "a source's elements overlap");
    const bool may_be_empty = dst.op == GGML_OP_CONCAT || (dst.op == GGML_OP_SET_ROWS && i != 2);
    node.require(ggml_is_empty(&dst) || may_be_empty || !ggml_is_empty(&src), "a source has no elements");
    if (is_own_memory(dst, i)) {
        node.require(same_place(dst, src), "it writes elsewhere than it says");
    } else if (byte_range(dst).overlaps(byte_range(src))) {
        node.require(may_work_in_place(dst.op) && same_place(dst, src), "it would overwrite what it reads");
    }
}

}  // namespace

void refuse(size_t index, uint32_t op, const std::string & rule) {
    throw std::invalid_argument("tensor " + std::to_string(index) + " (" + op_text(op) + "): " + rule);
}

bool op_is_allowed(uint32_t op) {
    return rules_of(op) != nullptr;
}

uint32_t ops_key(uint32_t lacking) {
    uint32_t key = 2166136261U;  // FNV-1a
    for (uint32_t op = 0; op < GGML_OP_COUNT; ++op) {
        key = (key ^ static_cast<uint32_t>(op != lacking && op_is_allowed(op))) * 16777619U;
    }
    return std::max<uint32_t>((key >> 16) ^ (key & 0xffff), 1);
}

bool node_is_allowed(const ggml_tensor * node) noexcept {
    const op_rules * rules = rules_of(static_cast<uint32_t>(node->op));
    if (rules == nullptr) {
        return false;
    }
    for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
        const bool needed = (rules->needs >> i & 1) != 0;
        if (needed && node->src[i] == nullptr) {
            return false;
        }
    }
    try {
        rules->check(subject(0, node));
        return true;
    } catch (const std::exception &) {
        return false;
    }
}

bool op_only_renames(ggml_op op) {
    return op == GGML_OP_NONE || op == GGML_OP_VIEW || op == GGML_OP_RESHAPE || op == GGML_OP_PERMUTE ||
           op == GGML_OP_TRANSPOSE;
}

// --- one tensor ---

namespace {

constexpr uint32_t KNOWN_FLAGS = GGML_TENSOR_FLAG_INPUT | GGML_TENSOR_FLAG_OUTPUT | GGML_TENSOR_FLAG_PARAM |
                                 GGML_TENSOR_FLAG_LOSS | GGML_TENSOR_FLAG_COMPUTE;

bool type_exists(uint32_t type) {
    return type < GGML_TYPE_COUNT && ggml_type_size(static_cast<ggml_type>(type)) != 0 &&
           ggml_blck_size(static_cast<ggml_type>(type)) > 0;
}

bool is_empty(const wire::tensor & entry) {
    return std::any_of(std::begin(entry.ne), std::end(entry.ne), [](int64_t length) { return length == 0; });
}

class entry_checker {
  public:
    entry_checker(const std::vector<wire::tensor> & table, size_t index)
        : table_(table), index_(index), entry_(table[index]) {}

    void run() const {
        require(type_exists(entry_.type), "its type does not exist");
        require(op_is_allowed(entry_.op), "this op is not allowed");
        check_shape();
        check_strides();
        check_links();
        if (entry_.view_of != 0) {
            check_view(table_[entry_.view_of - 1]);
        } else {
            require(entry_.view_offset == 0 && entry_.offset % ROOT_ALIGNMENT == 0, "it is not aligned");
        }
    }

  private:
    const std::vector<wire::tensor> & table_;
    size_t index_;
    const wire::tensor & entry_;

    void require(bool holds, const char * rule) const {
        if (!holds) {
            refuse(index_, entry_.op, rule);
        }
    }

    void check_shape() const {
        int64_t rows = 1;
        for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
            require(entry_.ne[i] >= 0 && entry_.ne[i] <= MAX_LENGTH, "a dimension is too long");
            // Two lengths fit 62 bits; a third is multiplied only where the first two fit 31.
            rows = i == 0 ? 1 : rows * entry_.ne[i];
            require(rows <= MAX_LENGTH, "it has too many rows");
        }
        require(entry_.ne[0] * rows <= MAX_ELEMENTS, "it has too many elements");
        require(
            entry_.ne[0] % ggml_blck_size(static_cast<ggml_type>(entry_.type)) == 0,
            "its rows are not whole blocks"
        );
    }

    void check_strides() const {
        const auto type = static_cast<ggml_type>(entry_.type);
        const uint64_t size = ggml_type_size(type);
        for (const uint64_t stride : entry_.nb) {
            require(
                stride <= static_cast<uint64_t>(INT64_MAX) && stride % size == 0, "a stride is not whole elements"
            );
        }
        require(ggml_blck_size(type) == 1 || entry_.nb[0] == size, "its blocks do not lie side by side");
        uint64_t bytes = size;
        for (size_t i = 0; i < GGML_MAX_DIMS && !is_empty(entry_); ++i) {
            const auto steps =
                static_cast<uint64_t>(i == 0 ? entry_.ne[0] / ggml_blck_size(type) : entry_.ne[i]) - 1;
            uint64_t span = 0;
            require(
                !__builtin_mul_overflow(steps, entry_.nb[i], &span) &&
                    !__builtin_add_overflow(bytes, span, &bytes) && bytes <= static_cast<uint64_t>(INT64_MAX),
                "its size overflows"
            );
        }
    }

    // What it refers to comes before it. A cast names itself as the place to write to; nothing else may.
    void check_links() const {
        require(entry_.is_node <= 1 && (entry_.flags & ~KNOWN_FLAGS) == 0, "it is marked as nothing that exists");
        require(entry_.view_of <= index_, "it is a view of what comes later");
        uint32_t present = 0;
        for (size_t i = 0; i < wire::TENSOR_SOURCES; ++i) {
            const bool is_cast = entry_.op == GGML_OP_CPY && i == 1 && entry_.sources[i] == index_ + 1;
            require(is_cast || entry_.sources[i] <= index_, "it uses what comes later");
            present |= entry_.sources[i] != 0 ? 1U << i : 0U;
        }
        const op_rules & rules = *rules_of(entry_.op);
        require(entry_.is_node == 1 || entry_.op == GGML_OP_NONE, "it is computed, but no node");
        require((present & rules.needs) == rules.needs, "a source is missing");
        require((present & ~(rules.needs | rules.may_have)) == 0, "it has a source too many");
    }

    void check_view(const wire::tensor & parent) const {
        require(parent.view_of == 0, "it is a view of a view");
        require(entry_.type == parent.type, "it is a view of another type");
        require(entry_.buffer_id == parent.buffer_id, "it is a view into another buffer");
        require(
            entry_.view_offset % ggml_type_size(static_cast<ggml_type>(entry_.type)) == 0, "it is not aligned"
        );
        uint64_t offset = 0;
        require(
            !__builtin_add_overflow(parent.offset, entry_.view_offset, &offset) &&
                (parent.buffer_id == 0 || offset == entry_.offset),
            "it lies elsewhere than its parent says"
        );
        const uint64_t size = extent(parent);
        require(
            is_empty(entry_) || (entry_.view_offset <= size && extent(entry_) <= size - entry_.view_offset),
            "it lies outside of its parent"
        );
    }
};

}  // namespace

uint64_t extent(const wire::tensor & entry) {
    const auto type = static_cast<ggml_type>(entry.type);
    if (is_empty(entry)) {
        return 0;  // a micro-batch without outputs ends in tensors without elements
    }
    uint64_t bytes =
        ggml_type_size(type) + static_cast<uint64_t>(entry.ne[0] / ggml_blck_size(type) - 1) * entry.nb[0];
    for (size_t i = 1; i < GGML_MAX_DIMS; ++i) {
        bytes += static_cast<uint64_t>(entry.ne[i] - 1) * entry.nb[i];
    }
    return bytes;
}

void check_entry(const std::vector<wire::tensor> & table, size_t index) {
    entry_checker(table, index).run();
}

// --- one node ---

namespace {

// Kernels of GPUs read rows of blocks up to a round length, and some leave partial results behind their own: all of
// that has to lie in the session's memory, too.
bool has_room(const ggml_tensor & t) {
    if (t.buffer == nullptr || ggml_is_empty(&t)) {
        return true;
    }
    const size_t need = ggml_backend_buft_get_alloc_size(ggml_backend_buffer_get_type(t.buffer), &t);
    const auto base = reinterpret_cast<uintptr_t>(ggml_backend_buffer_get_base(t.buffer));
    const uintptr_t offset = reinterpret_cast<uintptr_t>(t.data) - base;
    const size_t room = ggml_backend_buffer_get_size(t.buffer);
    return offset <= room && need <= room - offset;
}

void check_room(const subject & node) {
    const ggml_tensor & dst = node.dst();
    if (dst.buffer == nullptr || ggml_backend_buffer_is_host(dst.buffer)) {
        return;  // the CPU's kernels stay within their tensors: the rules see to it
    }
    bool room = has_room(dst);
    for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
        room = room && (!node.has(i) || has_room(node.src(i)));
    }
    node.require(room, "this device needs more memory for it than there is behind it");
}

}  // namespace

void check_node(size_t index, const ggml_tensor * node) {
    const subject checked(index, node);
    if (!op_only_renames(node->op)) {
        const bool in_parts = node->op == GGML_OP_SET_ROWS;
        const bool runs = (node->flags & GGML_TENSOR_FLAG_COMPUTE) != 0 && !ggml_is_empty(node);
        checked.require(node->data != nullptr || !runs, "it is computed into no buffer");
        checked.require(in_parts || ggml_nelements(node) <= MAX_COMPUTED, "it has too many elements");
        checked.require(has_own_bytes(*node), "its elements overlap");
        for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
            if (checked.has(i)) {
                check_source(checked, i);
            }
        }
    }
    rules_of(static_cast<uint32_t>(node->op))->check(checked);
    if (!op_only_renames(node->op)) {
        check_room(checked);
    }
}

}  // namespace mesh
