// Rules of matrix products, attention and what surrounds it.

#include "rules/rules.h"

#include "rules/validate.h"

namespace mesh {

namespace {

// What both kinds of matrix products demand of the matrix on the right.
void check_factors(const subject & node) {
    const ggml_tensor & a = node.src(0);
    const ggml_tensor & b = node.src(1);
    const ggml_type dot = dot_type(a.type);
    node.require(dot != GGML_TYPE_COUNT && is(node.dst(), GGML_TYPE_F32), "this type is not multiplied");
    node.require(a.ne[0] == b.ne[0] && b.ne[0] % ggml_blck_size(dot) == 0, "its sources do not fit each other");
    node.require(
        has_dense_rows(a) && has_dense_rows(b) && has_dense_rows(node.dst()), "its rows do not lie side by side"
    );
    // Repacking kernels read four rows as one piece.
    node.require(b.ne[1] <= 1 || b.nb[1] >= ggml_row_size(b.type, b.ne[0]), "its rows overlap");
    const ggml_tensor & dst = node.dst();
    const bool in_order = dst.nb[0] <= dst.nb[1] && dst.nb[1] <= dst.nb[2] && dst.nb[2] <= dst.nb[3];
    // Products of no columns, of which prompts are full, have strides of no meaning.
    node.require(ggml_is_empty(&dst) || in_order, "it is transposed");
}

// Conversion of the right side, for a type that takes no more than 4 bytes for an element and 1/8 above it.
uint64_t converted_bytes(const ggml_tensor & b) {
    return static_cast<uint64_t>(ggml_nelements(&b)) * sizeof(float) * 9 / 8;
}

constexpr uint64_t TILE_BYTES = 1 << 20;  // per thread, of the tiled kernels

}  // namespace

void check_mul_mat(const subject & node) {
    const ggml_tensor & a = node.src(0);
    const ggml_tensor & b = node.src(1);
    const ggml_tensor & dst = node.dst();
    const bool widened = is(a, GGML_TYPE_F32) && is_float(b);
    node.require(
        is(b, GGML_TYPE_F32) || widened || (is_float(b) && b.type == a.type), "these types do not go together"
    );
    check_factors(node);
    node.require(divides(a.ne[2], b.ne[2]) && divides(a.ne[3], b.ne[3]), "its sources do not fit each other");
    node.require(has_shape(dst, a.ne[1], b.ne[1], b.ne[2], b.ne[3]), "its shape is not that of a product");
    const int32_t hint = node.param(1);
    node.require(hint == GGML_HINT_NONE || hint == GGML_HINT_SRC0_IS_HADAMARD, "its hint does not exist");
    if (hint == GGML_HINT_SRC0_IS_HADAMARD) {
        const int64_t n = b.ne[0];
        node.require(is(a, GGML_TYPE_F32) && !is(b, GGML_TYPE_BF16), "this type is not transformed");
        node.require(a.ne[1] == n && (n & (n - 1)) == 0, "its transform is not of a power of two");
    }
    require_work(node, converted_bytes(b) + TILE_BYTES * MAX_THREADS_ASSUMED);
}

void check_mul_mat_id(const subject & node) {
    const ggml_tensor & a = node.src(0);
    const ggml_tensor & b = node.src(1);
    const ggml_tensor & ids = node.src(2);
    node.require(is(b, GGML_TYPE_F32) && is(ids, GGML_TYPE_I32), "these types do not go together");
    check_factors(node);
    node.require(
        a.ne[3] == 1 && b.ne[3] == 1 && ids.ne[2] == 1 && ids.ne[3] == 1, "its sources have too many dimensions"
    );
    node.require(ids.ne[1] == b.ne[2] && divides(b.ne[1], ids.ne[0]), "its experts do not fit its input");
    node.require(has_shape(node.dst(), a.ne[1], ids.ne[0], b.ne[2], 1), "its shape is not that of a product");
    const auto experts = static_cast<uint64_t>(a.ne[2]);
    const uint64_t chosen = static_cast<uint64_t>(ids.ne[0] * ids.ne[1]) + static_cast<uint64_t>(b.ne[2]);
    node.require(experts <= MAX_WORK_BYTES && chosen <= MAX_WORK_BYTES, "it needs too much scratch memory");
    require_work(
        node, converted_bytes(b) + experts * (chosen * sizeof(int64_t) + 128) + TILE_BYTES * MAX_THREADS_ASSUMED
    );
}

void check_soft_max(const subject & node) {
    const ggml_tensor & dst = node.dst();
    node.require(is(dst, GGML_TYPE_F32) && is(node.src(0), GGML_TYPE_F32), "it is F32 only");
    node.require(same_shape(dst, node.src(0)), "its shape is not that of its source");
    node.require(ggml_is_contiguous(&dst), "it is not contiguous");
    node.require(has_dense_rows(dst) && has_dense_rows(node.src(0)), "its rows do not lie side by side");
    if (node.has(1)) {
        const ggml_tensor & mask = node.src(1);
        node.require(is(mask, GGML_TYPE_F16) || is(mask, GGML_TYPE_F32), "its mask is neither F16 nor F32");
        node.require(has_dense_rows(mask), "its mask's rows do not lie side by side");
        node.require(
            mask.ne[0] == dst.ne[0] && mask.ne[1] >= dst.ne[1] && divides(mask.ne[2], dst.ne[2]) &&
                divides(mask.ne[3], dst.ne[3]),
            "its mask does not fit"
        );
    }
    if (node.has(2)) {
        const ggml_tensor & sinks = node.src(2);
        node.require(is(sinks, GGML_TYPE_F32) && has_dense_rows(sinks), "its sinks are not F32");
        node.require(has_shape(sinks, dst.ne[2], 1, 1, 1), "its sinks are not one for each head");
    }
    require_work_per_thread(node, dst.ne[0]);
}

namespace {

void check_sections(const subject & node) {
    int64_t total = 0;
    for (size_t i = 11; i < 15; ++i) {
        node.require(node.param(i) >= 0, "a section is negative");
        total += node.param(i);
    }
    node.require(node.param(11) > 0 || node.param(12) > 0 || node.param(13) > 0, "it has no sections");
    node.require(total <= node.dst().ne[0], "its sections are longer than its rows");
}

void check_rope_mode(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const int32_t mode = node.param(2);
    node.require(
        mode == GGML_ROPE_TYPE_NORMAL || mode == GGML_ROPE_TYPE_NEOX || mode == GGML_ROPE_TYPE_MROPE ||
            mode == GGML_ROPE_TYPE_IMROPE || mode == GGML_ROPE_TYPE_VISION,
        "its mode does not exist"
    );
    const bool sections = (mode & GGML_ROPE_TYPE_MROPE) != 0;
    if (sections) {
        node.require(dst.op == GGML_OP_ROPE, "sections are not rotated back");
        check_sections(node);
    }
    if (mode == GGML_ROPE_TYPE_VISION) {
        node.require(node.param(1) == dst.ne[0] / 2 && node.param(15) == 0, "it does not rotate whole rows");
    }
    const ggml_tensor & positions = node.src(1);
    node.require(
        is(positions, GGML_TYPE_I32) && has_dense_rows(positions) && ggml_is_vector(&positions) &&
            positions.ne[0] >= dst.ne[2] * (sections ? 4 : 1),
        "it has too few positions"
    );
}

}  // namespace

void check_rope(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const int64_t dims = node.param(1);
    const int64_t offset = node.param(15);
    node.require(is(dst, GGML_TYPE_F32) || is(dst, GGML_TYPE_F16), "it is F32 or F16 only");
    node.require(dst.type == node.src(0).type, "these types do not go together");
    node.require(same_shape(dst, node.src(0)), "its shape is not that of its source");
    node.require(has_dense_rows(dst) && has_dense_rows(node.src(0)), "its rows do not lie side by side");
    // With no dimensions at all the kernel would step back as far as forward, for ever.
    node.require(dst.ne[0] % 2 == 0 && dims % 2 == 0 && dims >= 2, "it does not rotate pairs");
    node.require(offset >= 0 && offset % 2 == 0 && offset + dims <= dst.ne[0], "it rotates beyond its rows");
    check_rope_mode(node);
    if (node.has(2)) {
        const ggml_tensor & factors = node.src(2);
        node.require(is(factors, GGML_TYPE_F32) && has_dense_rows(factors), "its factors are not F32");
        // The kernel reads one for each pair of the row, also for those that it does not rotate.
        node.require(factors.ne[0] >= dst.ne[0] / 2, "it has too few factors");
    }
    require_work_per_thread(node, dst.ne[0]);
}

namespace {

void check_heads(const subject & node) {
    const ggml_tensor & q = node.src(0);
    const ggml_tensor & k = node.src(1);
    const ggml_tensor & v = node.src(2);
    node.require(is(q, GGML_TYPE_F32), "its queries are not F32");
    node.require(dot_type(k.type) != GGML_TYPE_COUNT && can_dequantise(v.type), "its cache has an unknown type");
    node.require(has_dense_rows(q) && has_dense_rows(k) && has_dense_rows(v), "its rows do not lie side by side");
    node.require(q.ne[0] == k.ne[0] && k.ne[1] == v.ne[1], "its queries, keys and values do not fit");
    node.require(k.ne[0] % ggml_blck_size(dot_type(k.type)) == 0, "its keys are not whole blocks");
    // Devices divide by them when they are asked, whatever they would compute.
    node.require(!ggml_is_empty(&k) && !ggml_is_empty(&v), "it has no keys or no values");
    node.require(
        divides(k.ne[2], q.ne[2]) && divides(v.ne[2], q.ne[2]) && divides(k.ne[3], q.ne[3]) &&
            divides(v.ne[3], q.ne[3]),
        "its heads do not fit"
    );
}

}  // namespace

void check_flash_attn(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & q = node.src(0);
    const ggml_tensor & k = node.src(1);
    const ggml_tensor & v = node.src(2);
    check_heads(node);
    node.require(is(dst, GGML_TYPE_F32) && is_packed(dst), "it is not contiguous");
    node.require(has_shape(dst, v.ne[0], q.ne[2], q.ne[1], q.ne[3]), "its shape is not that of its queries");
    node.require(
        node.param(3) == GGML_PREC_DEFAULT || node.param(3) == GGML_PREC_F32, "its precision does not exist"
    );
    if (node.has(3)) {
        const ggml_tensor & mask = node.src(3);
        node.require(is(mask, GGML_TYPE_F16) && has_dense_rows(mask), "its mask is not F16");
        node.require(
            mask.ne[0] >= k.ne[1] && mask.ne[1] >= q.ne[1] && divides(mask.ne[2], q.ne[2]) &&
                divides(mask.ne[3], q.ne[3]),
            "its mask does not fit"
        );
    }
    if (node.has(4)) {
        const ggml_tensor & sinks = node.src(4);
        node.require(is(sinks, GGML_TYPE_F32) && has_dense_rows(sinks), "its sinks are not F32");
        node.require(has_shape(sinks, q.ne[2], 1, 1, 1), "its sinks are not one for each head");
    }
    // Tiles of 64 queries and keys in float; or one partial result per head and thread.
    constexpr uint64_t TILE = 64;
    const auto row = static_cast<uint64_t>(k.ne[0] + v.ne[0]);
    const auto all = static_cast<uint64_t>(q.ne[2]) * static_cast<uint64_t>(v.ne[0] + 2);
    node.require(row <= MAX_WORK_BYTES && all <= MAX_WORK_BYTES, "it needs too much scratch memory");
    require_work(node, sizeof(float) * MAX_THREADS_ASSUMED * (2 * TILE * (row + TILE) + all));
}

// Scores of all keys for each token, added up over the heads of a small attention.
void check_lightning_indexer(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & q = node.src(0);
    const ggml_tensor & k = node.src(1);
    const ggml_tensor & weights = node.src(2);
    const ggml_tensor & mask = node.src(3);
    node.require(is(dst, GGML_TYPE_F32) && is(q, GGML_TYPE_F32) && is(weights, GGML_TYPE_F32), "it is F32 only");
    node.require(can_dequantise(k.type), "its cache has an unknown type");
    node.require(is(mask, GGML_TYPE_F16), "its mask is not F16");
    node.require(
        has_dense_rows(dst) && has_dense_rows(q) && has_dense_rows(k) && has_dense_rows(weights) &&
            has_dense_rows(mask),
        "its rows do not lie side by side"
    );
    node.require(has_shape(k, q.ne[0], 1, k.ne[2], q.ne[3]), "its keys do not fit its queries");
    node.require(has_shape(weights, q.ne[1], q.ne[2], 1, q.ne[3]), "its weights do not fit its queries");
    node.require(
        has_shape(mask, k.ne[2], q.ne[2], 1, mask.ne[3]) && divides(mask.ne[3], q.ne[3]), "its mask does not fit"
    );
    node.require(has_shape(dst, k.ne[2], q.ne[2], 1, q.ne[3]), "its shape is not that of its scores");
    require_work_per_thread(node, q.ne[0]);
}

}  // namespace mesh
