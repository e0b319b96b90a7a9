// Rules of hyper-connections: a few copies of the activation, mixed before and after each layer.

#include "rules/rules.h"

namespace mesh {

namespace {

constexpr int64_t COPIES = 4;  // that the kernel of DSV4_HC_COMB is written for
constexpr int64_t MIXES = (2 + COPIES) * COPIES;
constexpr int32_t MAX_ROUNDS = 1024;  // models have 20; a client must not choose how long one node computes

void require_f32(const subject & node) {
    bool all = is(node.dst(), GGML_TYPE_F32);
    for (size_t i = 0; i < GGML_MAX_SRC; ++i) {
        all = all && (!node.has(i) || is(node.src(i), GGML_TYPE_F32));
    }
    node.require(all, "it is F32 only");
}

}  // namespace

// These kernels follow all strides.
void check_hyper_comb(const subject & node) {
    const ggml_tensor & mixes = node.src(0);
    const ggml_tensor & scale = node.src(1);
    const ggml_tensor & base = node.src(2);
    require_f32(node);
    node.require(has_shape(mixes, MIXES, mixes.ne[1], 1, 1), "it does not mix four copies");
    node.require(scale.ne[0] >= 3 && has_shape(scale, scale.ne[0], 1, 1, 1), "its scale does not fit");
    node.require(has_shape(base, MIXES, 1, 1, 1), "its base does not fit");
    node.require(has_shape(node.dst(), COPIES, COPIES, mixes.ne[1], 1), "its shape is not that of its mixes");
    node.require(node.param(1) >= 1 && node.param(1) <= MAX_ROUNDS, "it has no or too many rounds");
}

void check_hyper_pre(const subject & node) {
    const ggml_tensor & x = node.src(0);
    const ggml_tensor & weights = node.src(1);
    require_f32(node);
    node.require(node.param(1) == 0 || node.param(1) == 1, "its kind does not exist");
    node.require(x.ne[3] == 1, "its source has too many dimensions");
    node.require(
        node.param(1) == 1 ? same_shape(weights, x) : has_shape(weights, x.ne[1], x.ne[2], 1, 1),
        "its weights do not fit"
    );
    node.require(has_shape(node.dst(), x.ne[0], x.ne[2], 1, 1), "its shape is not that of its source");
}

void check_hyper_post(const subject & node) {
    const ggml_tensor & x = node.src(0);
    const ggml_tensor & residual = node.src(1);
    const ggml_tensor & post = node.src(2);
    const int64_t copies = residual.ne[1];
    const int64_t tokens = x.ne[1];
    require_f32(node);
    node.require(has_shape(x, x.ne[0], tokens, 1, 1), "its source has too many dimensions");
    node.require(has_shape(residual, x.ne[0], copies, tokens, 1), "its residual does not fit");
    node.require(has_shape(post, copies, tokens, 1, 1), "its weights do not fit");
    if (node.has(3)) {
        node.require(has_shape(node.src(3), copies, copies, tokens, 1), "its mix does not fit");
    }
    node.require(same_shape(node.dst(), residual), "its shape is not that of its residual");
}

}  // namespace mesh
