// Rules of ops that work element by element or row by row.

#include "rules/rules.h"

#include <cmath>

namespace mesh {

namespace {

void require_same(const subject & node) {
    node.require(same_shape(node.dst(), node.src(0)), "its shape is not that of its source");
}

void require_dense(const subject & node) {
    node.require(has_dense_rows(node.dst()) && has_dense_rows(node.src(0)), "its rows do not lie side by side");
}

void require_f32(const subject & node) {
    node.require(is(node.dst(), GGML_TYPE_F32) && is(node.src(0), GGML_TYPE_F32), "it is F32 only");
}

}  // namespace

void check_binary(const subject & node) {
    const ggml_type dst = node.dst().type;
    const ggml_type a = node.src(0).type;
    const ggml_type b = node.src(1).type;
    node.require(is_float(node.dst()) && is_float(node.src(0)), "these types do not go together");
    node.require(
        (a == b && dst == a) || (b == GGML_TYPE_F32 && (dst == a || dst == GGML_TYPE_F32)),
        "these types do not go together"
    );
    require_same(node);
    require_dense(node);
    node.require(ggml_can_repeat(&node.src(1), &node.src(0)), "its second source does not repeat to its first");
}

void check_add_id(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & rows = node.src(1);
    const ggml_tensor & ids = node.src(2);
    require_f32(node);
    node.require(is(rows, GGML_TYPE_F32) && is(ids, GGML_TYPE_I32), "these types do not go together");
    require_same(node);
    require_dense(node);
    node.require(has_dense_rows(rows) && rows.ne[0] == dst.ne[0], "its rows do not fit");
    node.require(rows.ne[2] == 1 && rows.ne[3] == 1, "its rows do not fit");
    node.require(has_shape(ids, dst.ne[1], dst.ne[2], 1, 1), "its row numbers do not fit");
}

void check_unary(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    if (dst.op == GGML_OP_UNARY) {
        node.require(node.param(0) >= 0 && node.param(0) < GGML_UNARY_OP_COUNT, "its function does not exist");
    }
    node.require(is_float(dst) && dst.type == src.type, "these types do not go together");
    require_same(node);
    require_dense(node);
    if (dst.op == GGML_OP_UNARY && node.param(0) == GGML_UNARY_OP_XIELU) {
        node.require(
            ggml_is_contiguous_1(&dst) && ggml_is_contiguous_1(&src), "its rows do not follow each other"
        );
    }
}

void check_glu(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    node.require(node.param(0) >= 0 && node.param(0) < GGML_GLU_OP_COUNT, "its function does not exist");
    node.require(is_float(dst) && dst.type == src.type, "these types do not go together");
    const bool limited = node.param(0) == GGML_GLU_OP_SWIGLU_OAI || node.param(0) == GGML_GLU_OP_SWIGLU_CLAMP;
    if (limited) {
        node.require(is(dst, GGML_TYPE_F32), "it is F32 only");
        node.require(node.number(3) >= 0, "its limit is negative");
    }
    node.require(has_even_rows(dst) && has_even_rows(src), "its rows do not follow each other");
    node.require(ggml_nrows(&dst) == ggml_nrows(&src), "it has more or less rows than its source");
    if (node.has(1)) {
        const ggml_tensor & gate = node.src(1);
        node.require(gate.type == src.type && same_shape(gate, src), "its sources do not fit each other");
        node.require(has_even_rows(gate), "its rows do not follow each other");
        node.require(dst.ne[0] == src.ne[0], "its rows have another length than the source's");
    } else {
        node.require(src.ne[0] % 2 == 0 && dst.ne[0] == src.ne[0] / 2, "its rows are not half the source's");
    }
}

void check_scale(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    node.require(is(dst, GGML_TYPE_F32) || is(dst, GGML_TYPE_BF16), "it is F32 or BF16 only");
    node.require(dst.type == src.type, "these types do not go together");
    require_same(node);
    node.require(ggml_is_contiguous(&dst) && ggml_is_contiguous(&src), "it is not contiguous");
    node.require(
        has_even_rows(dst) && has_even_rows(src) && dst.nb[1] == src.nb[1], "its rows do not follow each other"
    );
}

void check_clamp(const subject & node) {
    node.require(is(node.dst(), GGML_TYPE_F32) || is(node.dst(), GGML_TYPE_F16), "it is F32 or F16 only");
    node.require(node.dst().type == node.src(0).type, "these types do not go together");
    require_same(node);
    require_dense(node);
}

void check_leaky_relu(const subject & node) {
    node.require(is(node.dst(), GGML_TYPE_F32) || is(node.dst(), GGML_TYPE_F16), "it is F32 or F16 only");
    node.require(node.dst().type == node.src(0).type, "these types do not go together");
    require_same(node);
    node.require(has_even_rows(node.dst()) && has_even_rows(node.src(0)), "its rows do not follow each other");
}

void check_fill(const subject & node) {
    node.require(is(node.dst(), GGML_TYPE_F32) || is(node.dst(), GGML_TYPE_F16), "it is F32 or F16 only");
    node.require(node.dst().type == node.src(0).type, "these types do not go together");
    require_same(node);
    node.require(has_dense_rows(node.dst()), "its rows do not lie side by side");
}

void check_arange(const subject & node) {
    const float steps = std::ceil((node.number(1) - node.number(0)) / node.number(2));
    node.require(is(node.dst(), GGML_TYPE_F32), "it is F32 only");
    node.require(ggml_is_contiguous(&node.dst()) && has_dense_rows(node.dst()), "it is not contiguous");
    // Compared as the kernel does, after the same rounding; NaN fails the first comparison.
    node.require(
        steps >= 0 && steps < 0x1p31F && static_cast<int64_t>(steps) == ggml_nelements(&node.dst()),
        "it has more or less elements than steps"
    );
}

void check_tri(const subject & node) {
    require_f32(node);
    require_same(node);
    node.require(
        node.param(0) >= GGML_TRI_TYPE_UPPER_DIAG && node.param(0) <= GGML_TRI_TYPE_LOWER,
        "its half does not exist"
    );
    node.require(ggml_is_contiguous(&node.src(0)) && has_dense_rows(node.src(0)), "its source is not contiguous");
    node.require(has_dense_rows(node.dst()), "its rows do not lie side by side");
}

void check_diag(const subject & node) {
    const ggml_tensor & src = node.src(0);
    require_f32(node);
    require_dense(node);
    node.require(src.ne[1] == 1, "its source is not one row");
    node.require(has_shape(node.dst(), src.ne[0], src.ne[0], src.ne[2], src.ne[3]), "its shape is not square");
}

void check_diag_mask(const subject & node) {
    require_f32(node);
    require_same(node);
    node.require(is_packed(node.dst()) && is_packed(node.src(0)), "it is not contiguous");
    node.require(node.param(0) >= 0 && node.param(0) <= node.dst().ne[0], "its past is longer than its rows");
}

// --- along rows ---

void check_sum(const subject & node) {
    node.require(is_float(node.src(0)) && node.dst().type == node.src(0).type, "these types do not go together");
    node.require(ggml_is_scalar(&node.dst()), "it is not one number");
    node.require(has_dense_rows(node.src(0)), "its rows do not lie side by side");
}

void check_row_sums(const subject & node) {
    const ggml_tensor & src = node.src(0);
    require_f32(node);
    require_dense(node);
    node.require(has_shape(node.dst(), 1, src.ne[1], src.ne[2], src.ne[3]), "it is not one number for each row");
}

void check_cumsum(const subject & node) {
    require_f32(node);
    require_same(node);
    require_dense(node);
}

void check_argmax(const subject & node) {
    const ggml_tensor & src = node.src(0);
    node.require(is(node.dst(), GGML_TYPE_I32) && is(src, GGML_TYPE_F32), "it is I32 from F32 only");
    require_dense(node);
    node.require(
        ggml_is_matrix(&src) && has_shape(node.dst(), src.ne[1], 1, 1, 1), "it is not one number for each row"
    );
}

void check_argsort(const subject & node) {
    node.require(is(node.dst(), GGML_TYPE_I32) && is(node.src(0), GGML_TYPE_F32), "it is I32 from F32 only");
    require_same(node);
    node.require(has_even_rows(node.dst()) && has_even_rows(node.src(0)), "its rows do not follow each other");
    node.require(
        node.param(0) == GGML_SORT_ORDER_ASC || node.param(0) == GGML_SORT_ORDER_DESC, "its order does not exist"
    );
}

void check_top_k(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    node.require(is(dst, GGML_TYPE_I32) && is(src, GGML_TYPE_F32), "it is I32 from F32 only");
    node.require(has_even_rows(dst) && has_even_rows(src), "its rows do not follow each other");
    node.require(
        dst.ne[0] <= src.ne[0] && has_shape(dst, dst.ne[0], src.ne[1], src.ne[2], src.ne[3]),
        "it has more than its source"
    );
    require_work_per_thread(node, src.ne[0]);
}

void check_norm(const subject & node) {
    require_f32(node);
    require_same(node);
    require_dense(node);
    node.require(node.number(0) >= 0, "its epsilon is negative");
}

void check_group_norm(const subject & node) {
    require_f32(node);
    require_same(node);
    require_dense(node);
    // The kernel adds both in 32 bits.
    node.require(
        node.param(0) >= 1 && node.param(0) <= node.src(0).ne[2] && node.src(0).ne[2] <= INT32_MAX / 2,
        "it has no or too many groups"
    );
}

// Largest or mean value of windows that do not overlap; none of its numbers may leave 32 bits in the kernel.
void check_pool_2d(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & src = node.src(0);
    node.require(is(dst, GGML_TYPE_F32), "it is F32 only");
    node.require(is(src, GGML_TYPE_F32) || is(src, GGML_TYPE_F16), "its source is neither F32 nor F16");
    // The kernel counts planes by bytes, and writes one after the other.
    node.require(is_packed(dst) && is_packed(src), "it is not contiguous");
    node.require(
        node.param(0) == GGML_OP_POOL_MAX || node.param(0) == GGML_OP_POOL_AVG, "its kind does not exist"
    );
    for (size_t i = 0; i < 2; ++i) {
        const int64_t window = node.param(1 + i);
        const int64_t step = node.param(3 + i);
        const int64_t margin = node.param(5 + i);
        node.require(window >= 1 && step >= window, "its windows are empty, or overlap");
        node.require(margin >= 0 && margin < window, "its margin does not fit its windows");
        const int64_t room = src.ne[i] + 2 * margin - window;
        node.require(room >= 0 && dst.ne[i] == room / step + 1, "its shape is not that of its windows");
    }
    const int64_t cells = static_cast<int64_t>(node.param(1)) * node.param(2);
    node.require(cells <= INT32_MAX, "its windows are too large");
    node.require(dst.ne[2] == src.ne[2] && dst.ne[3] == src.ne[3], "its shape is not that of its windows");
}

}  // namespace mesh
