#pragma once

// Inside of validate.cpp: what the rules of single ops are written with.

#include "ggml-backend.h"
#include "ggml.h"

#include <cstddef>
#include <cstdint>

namespace mesh {

// A node whose sources are known to be there.
class subject {
  public:
    subject(size_t index, const ggml_tensor * node) : index_(index), node_(node) {}

    const ggml_tensor & dst() const {
        return *node_;
    }

    const ggml_tensor & src(size_t i) const {
        return *node_->src[i];
    }

    bool has(size_t i) const {
        return node_->src[i] != nullptr;
    }

    int32_t param(size_t i) const {
        return node_->op_params[i];
    }

    float number(size_t i) const;

    // Refuses the node where the rule does not hold.
    void require(bool holds, const char * rule) const;

  private:
    size_t index_;
    const ggml_tensor * node_;
};

using op_check = void (*)(const subject &);

// --- what is said of one tensor ---

inline bool is(const ggml_tensor & t, ggml_type type) {
    return t.type == type;
}

inline bool is_float(const ggml_tensor & t) {
    return t.type == GGML_TYPE_F32 || t.type == GGML_TYPE_F16 || t.type == GGML_TYPE_BF16;
}

// Elements of a row lie side by side. Stricter than ggml's contiguous_rows, which lets rows of one element go.
inline bool has_dense_rows(const ggml_tensor & t) {
    return t.nb[0] == ggml_type_size(t.type);
}

// Row i of all rows lies at i * nb[1]. ggml's contiguity does not say so: it ignores the strides of
// dimensions of length 1, and kernels do not.
bool has_even_rows(const ggml_tensor & t);

// Every stride as a new tensor of this shape has it, also those of dimensions of length 1.
bool is_packed(const ggml_tensor & t);

// No two elements share a byte.
bool has_own_bytes(const ggml_tensor & t);

inline bool has_shape(const ggml_tensor & t, int64_t ne0, int64_t ne1, int64_t ne2, int64_t ne3) {
    return t.ne[0] == ne0 && t.ne[1] == ne1 && t.ne[2] == ne2 && t.ne[3] == ne3;
}

inline bool same_shape(const ggml_tensor & a, const ggml_tensor & b) {
    return ggml_are_same_shape(&a, &b);
}

// Whatever their shapes.
bool begin_together(const ggml_tensor & a, const ggml_tensor & b);

// The same bytes in the same order.
bool same_place(const ggml_tensor & a, const ggml_tensor & b);

// Memory that this process cannot read by its address.
bool is_far(ggml_backend_buffer_t buffer);

// Where a byte lies. Some devices give all their buffers the same addresses: these count within a buffer.
struct byte_place {
    uintptr_t memory = 0;  // the device's buffer; 0 for memory of this process
    uintptr_t address = 0;

    bool operator<(const byte_place & other) const {
        return memory != other.memory ? memory < other.memory : address < other.address;
    }
    bool operator<=(const byte_place & other) const {
        return !(other < *this);
    }
};

// The bytes that a tensor lies on, as numbers: a node that is not computed may have no memory, and pointers must not
// be computed from none. Such a tensor overlaps nothing.
struct byte_range {
    byte_place begin;
    byte_place end;

    byte_range() = default;
    byte_range(const void * from, uint64_t size, ggml_backend_buffer_t buffer);
    explicit byte_range(const ggml_tensor & t);

    // Of a range in one buffer.
    uint64_t size() const {
        return end.address - begin.address;
    }

    // An empty range overlaps nothing, wherever it lies.
    bool overlaps(const byte_range & other) const {
        return begin < end && other.begin < other.end && begin < other.end && other.begin < end;
    }

    bool contains(const byte_range & other) const {
        return begin <= other.begin && other.end <= end;
    }
};

// `whole` is a multiple of `part`, which may be 0 only where `whole` is.
inline bool divides(int64_t part, int64_t whole) {
    return part == 0 ? whole == 0 : whole % part == 0;
}

// The type that the CPU's dot products of `type` want on the other side; GGML_TYPE_COUNT where there are none.
ggml_type dot_type(ggml_type type);

// Whether rows of floats can be written in this type, and read from it.
bool can_quantise(ggml_type type);
bool can_dequantise(ggml_type type);

// Scratch memory is asked for in one piece, and a client must not choose its size. Sums and products of what is passed
// here stay below 2^63: lengths have 31 bits, elements that are computed as well.
void require_work(const subject & node, uint64_t bytes);

// `elements` of 4 bytes for each thread.
void require_work_per_thread(const subject & node, int64_t elements);

// --- the rules, by family ---

void check_views(const subject & node);  // RESHAPE, VIEW, PERMUTE, TRANSPOSE
void check_copy(const subject & node);   // CPY, DUP, CONT
void check_concat(const subject & node);
void check_repeat(const subject & node);
void check_pad(const subject & node);
void check_set(const subject & node);  // SET, ACC
void check_get_rows(const subject & node);
void check_set_rows(const subject & node);

void check_binary(const subject & node);  // ADD, SUB, MUL, DIV
void check_add_id(const subject & node);
void check_unary(const subject & node);  // UNARY and SQR, SQRT, LOG, SIN, COS
void check_glu(const subject & node);
void check_scale(const subject & node);
void check_clamp(const subject & node);
void check_leaky_relu(const subject & node);
void check_fill(const subject & node);
void check_arange(const subject & node);
void check_tri(const subject & node);
void check_diag(const subject & node);
void check_diag_mask(const subject & node);

void check_sum(const subject & node);
void check_row_sums(const subject & node);  // SUM_ROWS, MEAN
void check_cumsum(const subject & node);
void check_argmax(const subject & node);
void check_argsort(const subject & node);
void check_top_k(const subject & node);
void check_norm(const subject & node);  // NORM, RMS_NORM, L2_NORM
void check_group_norm(const subject & node);
void check_pool_2d(const subject & node);

void check_mul_mat(const subject & node);
void check_mul_mat_id(const subject & node);
void check_soft_max(const subject & node);
void check_rope(const subject & node);  // ROPE, ROPE_BACK
void check_flash_attn(const subject & node);
void check_lightning_indexer(const subject & node);

void check_hyper_comb(const subject & node);  // DSV4_HC_COMB
void check_hyper_pre(const subject & node);   // DSV4_HC_PRE
void check_hyper_post(const subject & node);  // DSV4_HC_POST

void check_ssm_conv(const subject & node);
void check_ssm_scan(const subject & node);
void check_rwkv(const subject & node);  // RWKV_WKV6, RWKV_WKV7, GATED_LINEAR_ATTN
void check_delta_net(const subject & node);
void check_solve_tri(const subject & node);

}  // namespace mesh
