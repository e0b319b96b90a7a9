// What all rules share, and those of ops that move data.

#include "rules/rules.h"

#include "rules/validate.h"

#include <algorithm>
#include <array>
#include <cstring>

namespace mesh {

float subject::number(size_t i) const {
    float value = 0;
    std::memcpy(&value, &node_->op_params[i], sizeof value);
    return value;
}

void subject::require(bool holds, const char * rule) const {
    if (!holds) {
        refuse(index_, node_->op, rule);
    }
}

void require_work(const subject & node, uint64_t bytes) {
    node.require(bytes <= MAX_WORK_BYTES, "it needs too much scratch memory");
}

void require_work_per_thread(const subject & node, int64_t elements) {
    require_work(node, static_cast<uint64_t>(elements) * sizeof(float) * MAX_THREADS_ASSUMED);
}

bool has_even_rows(const ggml_tensor & t) {
    if (!has_dense_rows(t)) {
        return false;
    }
    const auto even = [&](int dimension, int64_t rows) {
        size_t expected = 0;
        return t.ne[dimension] <= 1 || (!__builtin_mul_overflow(t.nb[1], static_cast<size_t>(rows), &expected) &&
                                        t.nb[dimension] == expected);
    };
    return even(2, t.ne[1]) && even(3, t.ne[1] * t.ne[2]);
}

bool is_packed(const ggml_tensor & t) {
    size_t expected = ggml_row_size(t.type, t.ne[0]);
    if (!has_dense_rows(t)) {
        return false;
    }
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        if (t.nb[i] != expected) {
            return false;
        }
        expected *= static_cast<size_t>(t.ne[i]);
    }
    return true;
}

bool has_own_bytes(const ggml_tensor & t) {
    if (ggml_is_empty(&t)) {
        return true;
    }
    struct dimension {
        size_t stride;
        int64_t steps;
    };
    std::array<dimension, GGML_MAX_DIMS> order{};
    for (size_t i = 0; i < order.size(); ++i) {
        order[i] = {t.nb[i], (i == 0 ? t.ne[0] / ggml_blck_size(t.type) : t.ne[i]) - 1};
    }
    std::sort(order.begin(), order.end(), [](const dimension & a, const dimension & b) {
        return a.stride < b.stride;
    });
    size_t occupied = ggml_type_size(t.type);
    for (const dimension & each : order) {
        if (each.steps > 0) {
            if (each.stride < occupied) {
                return false;
            }
            occupied += static_cast<size_t>(each.steps) * each.stride;
        }
    }
    return true;
}

namespace {

// A view gets one of its own only when it is allocated.
ggml_backend_buffer_t buffer_of(const ggml_tensor & t) {
    return t.view_src != nullptr ? t.view_src->buffer : t.buffer;
}

uintptr_t memory_of(ggml_backend_buffer_t buffer) {
    return is_far(buffer) ? reinterpret_cast<uintptr_t>(buffer) : 0;
}

}  // namespace

bool begin_together(const ggml_tensor & a, const ggml_tensor & b) {
    return a.data == b.data && (a.data == nullptr || memory_of(buffer_of(a)) == memory_of(buffer_of(b)));
}

bool same_place(const ggml_tensor & a, const ggml_tensor & b) {
    return begin_together(a, b) && a.type == b.type && same_shape(a, b) &&
           std::equal(a.nb, a.nb + GGML_MAX_DIMS, b.nb);
}

bool is_far(ggml_backend_buffer_t buffer) {
    return buffer != nullptr && !ggml_backend_buffer_is_host(buffer);
}

byte_range::byte_range(const void * from, uint64_t size, ggml_backend_buffer_t buffer) {
    begin.memory = end.memory = memory_of(buffer);
    begin.address = reinterpret_cast<uintptr_t>(from);
    end.address = begin.address + size;
}

byte_range::byte_range(const ggml_tensor & t) {
    if (t.data != nullptr) {
        *this = byte_range(t.data, ggml_nbytes(&t), buffer_of(t));
    }
}

ggml_type dot_type(ggml_type type) {
    switch (type) {
    case GGML_TYPE_F32:
    case GGML_TYPE_F16:
    case GGML_TYPE_BF16:
        return type;
    case GGML_TYPE_Q4_1:
    case GGML_TYPE_Q5_1:
        return GGML_TYPE_Q8_1;
    case GGML_TYPE_Q1_0:
    case GGML_TYPE_Q2_0:
    case GGML_TYPE_Q4_0:
    case GGML_TYPE_Q5_0:
    case GGML_TYPE_Q8_0:
    case GGML_TYPE_MXFP4:
    case GGML_TYPE_NVFP4:
    case GGML_TYPE_IQ4_NL:
        return GGML_TYPE_Q8_0;
    case GGML_TYPE_Q2_K:
    case GGML_TYPE_Q3_K:
    case GGML_TYPE_Q4_K:
    case GGML_TYPE_Q5_K:
    case GGML_TYPE_Q6_K:
    case GGML_TYPE_IQ2_XXS:
    case GGML_TYPE_IQ2_XS:
    case GGML_TYPE_IQ2_S:
    case GGML_TYPE_IQ3_XXS:
    case GGML_TYPE_IQ3_S:
    case GGML_TYPE_IQ1_S:
    case GGML_TYPE_IQ1_M:
    case GGML_TYPE_IQ4_XS:
    case GGML_TYPE_TQ1_0:
    case GGML_TYPE_TQ2_0:
        return GGML_TYPE_Q8_K;
    default:
        return GGML_TYPE_COUNT;
    }
}

bool can_quantise(ggml_type type) {
    switch (type) {
    case GGML_TYPE_IQ2_XXS:
    case GGML_TYPE_IQ2_XS:
    case GGML_TYPE_IQ2_S:
    case GGML_TYPE_IQ3_XXS:
    case GGML_TYPE_IQ3_S:
    case GGML_TYPE_IQ1_S:
    case GGML_TYPE_IQ1_M:
        return false;  // they need tables that are made for quantising whole models
    default:
        return dot_type(type) != GGML_TYPE_COUNT;
    }
}

bool can_dequantise(ggml_type type) {
    return dot_type(type) != GGML_TYPE_COUNT;
}

// --- views ---

void check_views(const subject & node) {
    const ggml_tensor & dst = node.dst();
    node.require(dst.view_src != nullptr, "it is a view of nothing");
    node.require(dst.type == node.src(0).type, "it has another type than its source");
    // Devices that compute several nodes as one take a view for the memory of what it is a view of.
    const ggml_tensor * root = node.src(0).view_src != nullptr ? node.src(0).view_src : &node.src(0);
    node.require(dst.view_src == root, "it is a view of something else than its source");
    if (dst.op == GGML_OP_VIEW) {
        return;  // its place was checked against its parent's
    }
    node.require(begin_together(dst, node.src(0)), "it begins elsewhere than its source");
    node.require(
        ggml_nelements(&dst) == ggml_nelements(&node.src(0)), "it has more or less elements than its source"
    );
    if (dst.op == GGML_OP_PERMUTE) {
        uint32_t seen = 0;
        for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
            node.require(node.param(i) >= 0 && node.param(i) < GGML_MAX_DIMS, "an axis does not exist");
            seen |= 1U << static_cast<uint32_t>(node.param(i));
        }
        node.require(seen == 0b1111, "an axis comes twice");
    }
}

// --- copies ---

namespace {

void check_same_type_copy(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    if (ggml_blck_size(dst.type) == 1) {
        return;  // every pair of strides is copied element by element
    }
    const bool whole = ggml_is_contiguous(&dst) && ggml_is_contiguous(&src);
    node.require(whole || same_shape(dst, src), "blocks can only be copied whole or row by row");
}

void check_quantising_copy(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    node.require(is_float(src) && can_quantise(dst.type), "there is no conversion between these types");
    node.require(ggml_is_contiguous(&dst) && has_dense_rows(src), "it has to be contiguous to be quantised");
    // The kernel's scratch memory holds a row of the result, and the kernel fills it with a row of the source.
    node.require(src.ne[0] == dst.ne[0], "its rows have another length than the source's");
}

void check_dequantising_copy(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    node.require(can_dequantise(src.type) && is(dst, GGML_TYPE_F32), "there is no conversion between these types");
    node.require(
        has_dense_rows(dst) && (dst.ne[0] % ggml_blck_size(src.type) == 0 || ggml_is_contiguous(&dst)),
        "its rows do not hold whole blocks"
    );
}

}  // namespace

void check_copy(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    node.require(ggml_nelements(&dst) == ggml_nelements(&src), "it has more or less elements than its source");
    if (dst.type == src.type) {
        check_same_type_copy(node);
        return;
    }
    // Only CPY has scratch memory for conversions: a row of the result for each thread. From and to F32 it needs none.
    node.require(dst.op == GGML_OP_CPY, "only CPY converts");
    if (ggml_is_quantized(dst.type) || !(is(src, GGML_TYPE_F32) || is(dst, GGML_TYPE_F32)) ||
        is(src, GGML_TYPE_I32) || is(dst, GGML_TYPE_I32)) {
        require_work_per_thread(node, dst.ne[0]);
    }
    if (ggml_is_quantized(dst.type)) {
        check_quantising_copy(node);
    } else if (ggml_is_quantized(src.type)) {
        check_dequantising_copy(node);
    } else {
        const bool floats = is_float(dst) && is_float(src);
        const bool counts = (is(dst, GGML_TYPE_F32) && is(src, GGML_TYPE_I32)) ||
                            (is(dst, GGML_TYPE_I32) && is(src, GGML_TYPE_F32));
        node.require(floats || counts, "there is no conversion between these types");
    }
}

void check_concat(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const int32_t dim = node.param(0);
    node.require(dim >= 0 && dim < GGML_MAX_DIMS, "its dimension does not exist");
    node.require(dst.type == node.src(0).type && dst.type == node.src(1).type, "its sources have another type");
    for (int i = 0; i < GGML_MAX_DIMS; ++i) {
        const int64_t a = node.src(0).ne[i];
        const int64_t b = node.src(1).ne[i];
        node.require(
            i == dim ? dst.ne[i] == a + b : dst.ne[i] == a && a == b, "its shape is not that of its sources"
        );
    }
    const bool single = ggml_blck_size(dst.type) == 1 && ggml_type_size(dst.type) <= sizeof(float);
    node.require(
        single || (has_dense_rows(dst) && has_dense_rows(node.src(0)) && has_dense_rows(node.src(1))),
        "elements of this type have to lie side by side"
    );
}

void check_repeat(const subject & node) {
    const ggml_tensor & dst = node.dst();
    node.require(
        is(dst, GGML_TYPE_F32) || is(dst, GGML_TYPE_I32) || is(dst, GGML_TYPE_F16) || is(dst, GGML_TYPE_BF16) ||
            is(dst, GGML_TYPE_I16),
        "this type is not repeated"
    );
    node.require(dst.type == node.src(0).type, "it has another type than its source");
    node.require(ggml_can_repeat(&node.src(0), &dst), "its shape is no multiple of its source's");
    node.require(has_dense_rows(dst) && has_dense_rows(node.src(0)), "its rows do not lie side by side");
}

void check_pad(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    node.require(is(dst, GGML_TYPE_F32) && is(src, GGML_TYPE_F32), "only F32 is padded");
    node.require(ggml_is_contiguous(&dst), "it is not contiguous");
    node.require(node.param(8) == 0, "it may not go round");
    for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
        const int64_t before = node.param(2 * i);
        const int64_t after = node.param(2 * i + 1);
        node.require(before >= 0 && after >= 0, "its margin is negative");
        node.require(
            dst.ne[i] == src.ne[i] + before + after, "its shape is not that of its source with the margin"
        );
    }
}

// The second source is written into a copy of the first, at strides and an offset of its own.
void check_set(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    const ggml_tensor & part = node.src(1);
    const bool typed = is(dst, GGML_TYPE_F32) || (dst.op == GGML_OP_SET && is(dst, GGML_TYPE_I32));
    node.require(typed && src.type == dst.type && part.type == dst.type, "this type cannot be set");
    node.require(same_shape(dst, src), "its shape is not that of its source");
    node.require(ggml_is_contiguous(&dst) && ggml_is_contiguous(&src), "it is not contiguous");
    node.require(has_dense_rows(part), "the part's rows do not lie side by side");
    if (ggml_is_empty(&part)) {
        return;
    }
    int64_t end = node.param(3) + part.ne[0] * static_cast<int64_t>(sizeof(float));
    bool ok = node.param(3) >= 0;
    for (size_t i = 0; i < 3; ++i) {
        // Lengths have 31 bits and so have these strides: three products and their sum fit 64.
        ok = ok && node.param(i) >= 0;
        end += (part.ne[i + 1] - 1) * node.param(i);
    }
    node.require(ok, "a stride or offset is negative");
    node.require(end <= static_cast<int64_t>(ggml_nbytes(&dst)), "the part lies outside of it");
}

// --- rows by number; the numbers themselves are checked before each run ---

void check_get_rows(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & rows = node.src(0);
    const ggml_tensor & ids = node.src(1);
    node.require(is(ids, GGML_TYPE_I32), "its row numbers are not I32");
    node.require(
        is(rows, GGML_TYPE_I32) ? is(dst, GGML_TYPE_I32) : can_dequantise(rows.type) && is(dst, GGML_TYPE_F32),
        "there is no conversion between these types"
    );
    node.require(has_dense_rows(rows) && has_dense_rows(dst), "its rows do not lie side by side");
    node.require(
        rows.ne[2] == ids.ne[1] && rows.ne[3] == ids.ne[2] && ids.ne[3] == 1, "its row numbers do not fit"
    );
    node.require(has_shape(dst, rows.ne[0], ids.ne[0], ids.ne[1], ids.ne[2]), "its shape is not that of its rows");
}

void check_set_rows(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    const ggml_tensor & ids = node.src(1);
    node.require(is(ids, GGML_TYPE_I64) || is(ids, GGML_TYPE_I32), "its row numbers are neither I64 nor I32");
    // From F16 the kernel converts in scratch memory that is sized for one thread.
    node.require(
        (is(src, GGML_TYPE_F32) && can_quantise(dst.type)) || (is(src, GGML_TYPE_F16) && is(dst, GGML_TYPE_F16)),
        "there is no conversion between these types"
    );
    node.require(has_dense_rows(dst) && has_dense_rows(src), "its rows do not lie side by side");
    node.require(
        dst.ne[0] == src.ne[0] && dst.ne[2] == src.ne[2] && dst.ne[3] == src.ne[3],
        "its rows do not fit the source's"
    );
    node.require(
        ids.ne[0] == src.ne[1] && divides(ids.ne[1], src.ne[2]) && divides(ids.ne[2], src.ne[3]) && ids.ne[3] == 1,
        "its row numbers do not fit"
    );
}

}  // namespace mesh
