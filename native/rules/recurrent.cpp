// Rules of ops that carry a state along: their kernels compute addresses from lengths, not from strides.

#include "rules/rules.h"

#include "rules/validate.h"

namespace mesh {

namespace {

void require_f32(const subject & node, size_t sources) {
    bool all = is(node.dst(), GGML_TYPE_F32);
    for (size_t i = 0; i < sources; ++i) {
        all = all && is(node.src(i), GGML_TYPE_F32);
    }
    node.require(all, "it is F32 only");
}

// Lengths have 31 bits: a product of up to four is compared without overflow only if it is cut off early.
class product {
  public:
    product(std::initializer_list<int64_t> factors) {
        for (const int64_t factor : factors) {
            overflow_ = __builtin_mul_overflow(value_, factor, &value_) || overflow_;
        }
    }

    product & operator+=(const product & other) {
        overflow_ = __builtin_add_overflow(value_, other.value_, &value_) || overflow_ || other.overflow_;
        return *this;
    }

    bool operator==(int64_t other) const {
        return !overflow_ && value_ == other;
    }

  private:
    int64_t value_ = 1;
    bool overflow_ = false;
};

}  // namespace

void check_ssm_conv(const subject & node) {
    const ggml_tensor & x = node.src(0);
    const ggml_tensor & kernel = node.src(1);
    require_f32(node, 2);
    node.require(is_packed(kernel) && has_dense_rows(node.dst()), "it is not contiguous");
    node.require(
        has_dense_rows(x) && x.nb[1] == static_cast<size_t>(x.ne[0]) * sizeof(float), "its input is not contiguous"
    );
    node.require(ggml_is_matrix(&kernel) && x.ne[3] == 1, "its sources have too many dimensions");
    const int64_t tokens = x.ne[0] - kernel.ne[0] + 1;
    node.require(tokens >= 0 && x.ne[1] == kernel.ne[1], "its sources do not fit each other");
    node.require(has_shape(node.dst(), x.ne[1], tokens, x.ne[2], 1), "its shape is not that of its input");
}

namespace {

void check_ssm_inputs(const subject & node) {
    const ggml_tensor & state = node.src(0);
    const ggml_tensor & x = node.src(1);
    const ggml_tensor & dt = node.src(2);
    const ggml_tensor & decay = node.src(3);
    const ggml_tensor & b = node.src(4);
    const ggml_tensor & c = node.src(5);
    const int64_t width = x.ne[0];
    const int64_t heads = x.ne[1];
    const int64_t tokens = x.ne[2];
    const int64_t seqs = x.ne[3];
    const auto joined = [](const ggml_tensor & t) {
        return has_dense_rows(t) && t.nb[1] == static_cast<size_t>(t.ne[0]) * sizeof(float);
    };
    node.require(is_packed(state) && has_dense_rows(dt) && is_packed(decay), "its state is not contiguous");
    node.require(joined(x) && joined(b) && joined(c), "its input is not contiguous");
    node.require(state.ne[1] == width && state.ne[2] == heads, "its state does not fit");
    node.require(has_shape(dt, heads, tokens, seqs, 1), "its steps do not fit");
    node.require(has_shape(b, state.ne[0], b.ne[1], tokens, seqs) && same_shape(b, c), "its groups do not fit");
    node.require(b.ne[1] > 0 && heads % b.ne[1] == 0, "its groups do not fit");
    node.require(
        (decay.ne[0] == 1 || decay.ne[0] == state.ne[0]) && has_shape(decay, decay.ne[0], heads, 1, 1),
        "its decay does not fit"
    );
    // Where each state has a decay of its own, vectors have no remainder: up to 16 states go in one step.
    node.require(decay.ne[0] == 1 || state.ne[0] % 16 == 0, "its states are not multiples of 16");
}

}  // namespace

void check_ssm_scan(const subject & node) {
    const ggml_tensor & state = node.src(0);
    const ggml_tensor & x = node.src(1);
    const ggml_tensor & ids = node.src(6);
    const int64_t slots = node.param(0);
    require_f32(node, 6);
    check_ssm_inputs(node);
    node.require(
        is(ids, GGML_TYPE_I32) && has_dense_rows(ids) && has_shape(ids, x.ne[3], 1, 1, 1),
        "its numbers of states do not fit"
    );
    node.require(slots >= 1 && (slots == 1 || node.src(3).ne[0] == 1), "it keeps no or too many states");
    node.require(ggml_is_contiguous(&node.dst()) && has_dense_rows(node.dst()), "it is not contiguous");
    product expected = {ggml_nelements(&x)};
    expected += {slots, state.ne[0], state.ne[1], state.ne[2], x.ne[3]};
    node.require(expected == ggml_nelements(&node.dst()), "its size is not that of its output and states");
}

// One matrix of state per head; all sources but the last (and one vector of WKV6) have a row per head and token.
void check_rwkv(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const size_t last = dst.op == GGML_OP_RWKV_WKV7 ? 6 : dst.op == GGML_OP_RWKV_WKV6 ? 5 : 4;
    const ggml_tensor & state = node.src(last);
    const int64_t size = node.src(0).ne[0];
    const int64_t heads = node.src(0).ne[1];
    const int64_t rows = node.src(0).ne[2];
    const int64_t seqs = state.ne[1];
    require_f32(node, last + 1);
    // Its vectors have no remainder: the longest that there are go through a head of 64 in one step.
    node.require(dst.op != GGML_OP_RWKV_WKV7 || size % 64 == 0, "its heads are not multiples of 64");
    for (size_t i = 0; i < last; ++i) {
        const ggml_tensor & src = node.src(i);
        node.require(ggml_is_contiguous(&src) && has_dense_rows(src), "its input is not contiguous");
        if (dst.op == GGML_OP_RWKV_WKV6 && i == 3) {
            node.require(product({size, heads}) == ggml_nelements(&src), "its sources do not fit each other");
        } else {
            node.require(has_shape(src, size, heads, rows, 1), "its sources do not fit each other");
        }
    }
    node.require(ggml_is_contiguous(&state) && has_dense_rows(state), "its state is not contiguous");
    node.require(seqs >= 1 && rows >= 1 && rows % seqs == 0, "its tokens do not fit its sequences");
    node.require(product({size, size, heads, seqs}) == ggml_nelements(&state), "its state does not fit");
    node.require(ggml_is_contiguous(&dst) && has_dense_rows(dst), "it is not contiguous");
    node.require(
        has_shape(dst, size * heads, rows + size * seqs, 1, 1), "its size is not that of its output and states"
    );
}

void check_delta_net(const subject & node) {
    const ggml_tensor & dst = node.dst();
    const ggml_tensor & v = node.src(2);
    const ggml_tensor & gate = node.src(3);
    const ggml_tensor & state = node.src(5);
    const int64_t size = v.ne[0];
    const int64_t heads = v.ne[1];
    const int64_t slots = node.param(0);
    require_f32(node, 6);
    for (size_t i = 0; i < 2; ++i) {
        const ggml_tensor & each = node.src(i);
        node.require(each.ne[0] == size && each.ne[2] == v.ne[2], "its queries and keys do not fit its values");
        node.require(divides(each.ne[1], heads) && divides(each.ne[3], v.ne[3]), "its heads do not fit");
    }
    node.require(
        has_dense_rows(node.src(0)) && has_dense_rows(node.src(1)) && has_dense_rows(v),
        "its rows do not lie side by side"
    );
    node.require(is_packed(gate) && is_packed(node.src(4)) && is_packed(state), "its state is not contiguous");
    node.require(
        (gate.ne[0] == 1 || gate.ne[0] == size) && has_shape(gate, gate.ne[0], heads, v.ne[2], v.ne[3]),
        "its gate does not fit"
    );
    node.require(has_shape(node.src(4), 1, heads, v.ne[2], v.ne[3]), "its beta does not fit");
    node.require(has_shape(state, size, size, heads, v.ne[3]), "its state does not fit");
    node.require(slots >= 1 && ggml_is_contiguous(&dst) && has_dense_rows(dst), "it is not contiguous");
    product expected = {size, heads, v.ne[2], v.ne[3]};
    expected += {slots, size, size, heads, v.ne[3]};
    node.require(expected == ggml_nelements(&dst), "its size is not that of its output and states");
    // A matrix for each thread: its elements were counted with the state's.
    const auto matrix = static_cast<uint64_t>(size) * static_cast<uint64_t>(size + 1);
    node.require(
        matrix <= MAX_WORK_BYTES / sizeof(float) / MAX_THREADS_ASSUMED, "it needs too much scratch memory"
    );
}

void check_solve_tri(const subject & node) {
    const ggml_tensor & a = node.src(0);
    const ggml_tensor & b = node.src(1);
    require_f32(node, 2);
    node.require(is_packed(a) && is_packed(b) && is_packed(node.dst()), "it is not contiguous");
    node.require(a.ne[0] == a.ne[1] && a.ne[1] == b.ne[1], "its sources do not fit each other");
    node.require(a.ne[2] == b.ne[2] && a.ne[3] == b.ne[3], "its sources do not fit each other");
    node.require(same_shape(node.dst(), b), "its shape is not that of its source");
}

}  // namespace mesh
