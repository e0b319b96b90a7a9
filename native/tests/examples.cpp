#include "tests/host.h"

#include <array>

// At least one for each op on the list, in the shapes that models use.

namespace host {

namespace {

using context = ggml_context *;

ggml_tensor * floats(context c, int64_t a, int64_t b = 1, int64_t d = 1, int64_t e = 1) {
    return ggml_new_tensor_4d(c, GGML_TYPE_F32, a, b, d, e);
}

ggml_tensor * halves(context c, int64_t a, int64_t b = 1, int64_t d = 1) {
    return ggml_new_tensor_3d(c, GGML_TYPE_F16, a, b, d);
}

ggml_tensor * numbers(context c, int64_t a, int64_t b = 1, int64_t d = 1) {
    return ggml_new_tensor_3d(c, GGML_TYPE_I32, a, b, d);
}

ggml_tensor * blocks(context c, ggml_type type, int64_t a, int64_t b = 1, int64_t d = 1) {
    return ggml_new_tensor_3d(c, type, a, b, d);
}

ggml_tensor * rope(context c, int mode, ggml_tensor * factors, int n_positions) {
    int sections[4] = {4, 2, 2, 0};
    return ggml_rope_multi(
        c, floats(c, 16, 3, 5), numbers(c, n_positions), factors, mode == GGML_ROPE_TYPE_VISION ? 8 : 16, sections,
        mode, 4096, 10000.0F, 1.0F, 0.0F, 1.0F, 32.0F, 1.0F
    );
}

ggml_tensor * flash(context c, ggml_type k_type, ggml_type v_type, int64_t tokens, int64_t cells, bool sinks) {
    ggml_tensor * q = floats(c, 32, tokens, 4);
    ggml_tensor * k = blocks(c, k_type, 32, cells, 2);
    ggml_tensor * v = blocks(c, v_type, 32, cells, 2);
    ggml_tensor * mask = halves(c, cells, tokens);
    ggml_tensor * out = ggml_flash_attn_ext(c, q, k, v, mask, 0.25F, 0.0F, 0.0F);
    if (sinks) {
        ggml_flash_attn_ext_add_sinks(out, floats(c, 4));
    }
    return out;
}

ggml_tensor * indexer(context c, ggml_type type) {
    return ggml_lightning_indexer(
        c, floats(c, 32, 3, 5, 2), ggml_new_tensor_4d(c, type, 32, 1, 16, 2), floats(c, 3, 5, 1, 2),
        halves(c, 16, 5)
    );
}

// A mask that lets each token see the cells with the best scores, as sparse attention does it.
ggml_tensor * sparse_mask(context c) {
    constexpr int64_t cells = 16;
    constexpr int64_t tokens = 5;
    ggml_tensor * best = ggml_cont(c, ggml_top_k(c, floats(c, cells, tokens), 4));
    ggml_tensor * none = ggml_fill(c, halves(c, cells, tokens), -1.0F);
    ggml_tensor * rows = ggml_reshape_3d(c, none, 1, cells, tokens);
    ggml_tensor * zeros = ggml_fill(c, floats(c, 1, 4, tokens), 0.0F);
    return ggml_cont(c, ggml_set_rows(c, rows, zeros, best));
}

// Rows by numbers that are computed in floats, which nothing bounds: they are looked at on the way.
ggml_tensor * counted_rows(context c) {
    ggml_tensor * best = ggml_top_k(c, floats(c, 6, 3), 2);
    ggml_tensor * halved = ggml_scale(c, ggml_cast(c, best, GGML_TYPE_F32), 0.5F);
    return ggml_get_rows(c, floats(c, 8, 6, 3), ggml_cast(c, halved, GGML_TYPE_I32));
}

// Experts chosen by what a router says, as all mixtures do it.
ggml_tensor * mixture(context c, ggml_type type) {
    constexpr int64_t width = 256;
    constexpr int64_t experts = 4;
    constexpr int64_t tokens = 3;
    ggml_tensor * probabilities = ggml_soft_max(c, floats(c, experts, tokens));
    ggml_tensor * sorted = ggml_argsort(c, probabilities, GGML_SORT_ORDER_DESC);
    ggml_tensor * chosen = ggml_view_2d(c, sorted, 2, tokens, sorted->nb[1], 0);
    ggml_tensor * out =
        ggml_mul_mat_id(c, blocks(c, type, width, 8, experts), floats(c, width, 1, tokens), chosen);
    ggml_tensor * biased = ggml_add_id(c, out, floats(c, 8, experts), chosen);
    ggml_tensor * weights = ggml_get_rows(c, ggml_reshape_3d(c, probabilities, 1, experts, tokens), chosen);
    return ggml_mul(c, biased, weights);
}

ggml_tensor * scan(context c, bool mamba2) {
    const int64_t state = 16;
    const int64_t width = mamba2 ? 8 : 1;
    return ggml_ssm_scan(
        c, floats(c, state, width, 4, 3), floats(c, width, 4, 5, 2), floats(c, 4, 5, 2),
        floats(c, mamba2 ? 1 : state, 4), floats(c, state, 2, 5, 2), floats(c, state, 2, 5, 2), numbers(c, 2), 1
    );
}

std::vector<example> movers() {
    return {
        {"views",
         [](context c) {
             ggml_tensor * t = ggml_cont(c, ggml_permute(c, floats(c, 8, 3, 5), 0, 2, 1, 3));
             return ggml_cont(c, ggml_transpose(c, ggml_reshape_2d(c, t, 24, 5)));
         }},
        {"dup", [](context c) { return ggml_dup(c, ggml_permute(c, floats(c, 8, 3, 5), 1, 0, 2, 3)); }},
        {"cpy f16", [](context c) { return ggml_cpy(c, floats(c, 8, 3), halves(c, 4, 6)); }},
        {"cpy q8_0", [](context c) { return ggml_cpy(c, floats(c, 64, 3), blocks(c, GGML_TYPE_Q8_0, 64, 3)); }},
        {"cast q8_0", [](context c) { return ggml_cast(c, blocks(c, GGML_TYPE_Q8_0, 64, 3), GGML_TYPE_F32); }},
        {"cast f16",
         [](context c) { return ggml_add(c, ggml_cast(c, floats(c, 8, 3), GGML_TYPE_F16), halves(c, 8)); }},
        {"concat", [](context c) { return ggml_concat(c, floats(c, 3, 4, 2), floats(c, 5, 4, 2), 0); }},
        {"concat q8_0",
         [](context c) {
             return ggml_concat(c, blocks(c, GGML_TYPE_Q8_0, 32, 2), blocks(c, GGML_TYPE_Q8_0, 32, 3), 1);
         }},
        {"repeat", [](context c) { return ggml_repeat(c, floats(c, 4, 1), floats(c, 8, 3)); }},
        {"pad", [](context c) { return ggml_pad(c, floats(c, 4, 3), 2, 1, 0, 0); }},
        {"set", [](context c) { return ggml_set_2d(c, floats(c, 8, 4), floats(c, 4, 2), 8 * 4, 16); }},
        {"set in place",
         [](context c) { return ggml_set_2d_inplace(c, floats(c, 8, 4), floats(c, 4, 2), 8 * 4, 16); }},
        {"acc",
         [](context c) {
             ggml_tensor * t = floats(c, 8, 4);
             return ggml_acc(c, t, floats(c, 4, 2), t->nb[1], t->nb[2], t->nb[3], 16);
         }},
        {"get_rows", [](context c) { return ggml_get_rows(c, floats(c, 8, 6), numbers(c, 4)); }},
        {"get_rows q4_k",
         [](context c) { return ggml_get_rows(c, blocks(c, GGML_TYPE_Q4_K, 256, 6), numbers(c, 4)); }},
        {"set_rows",
         [](context c) {
             return ggml_set_rows(c, halves(c, 8, 6), floats(c, 8, 4), ggml_new_tensor_1d(c, GGML_TYPE_I64, 4));
         }},
        {"set_rows q8_0",
         [](context c) {
             ggml_tensor * cache = blocks(c, GGML_TYPE_Q8_0, 32, 6);
             ggml_tensor * ids = ggml_new_tensor_1d(c, GGML_TYPE_I64, 4);
             return ggml_set_rows(
                 c, ggml_view_2d(c, cache, 32, 5, cache->nb[1], cache->nb[1]), floats(c, 32, 4), ids
             );
         }},
    };
}

std::vector<example> elements() {
    return {
        {"add", [](context c) { return ggml_add(c, floats(c, 8, 3, 2), floats(c, 8)); }},
        {"sub", [](context c) { return ggml_sub(c, floats(c, 8, 3), floats(c, 8, 3)); }},
        {"mul in place", [](context c) { return ggml_mul_inplace(c, floats(c, 8, 3), floats(c, 8)); }},
        {"div", [](context c) { return ggml_div(c, halves(c, 8, 3), floats(c, 1, 3)); }},
        {"add_id",
         [](context c) { return ggml_add_id(c, floats(c, 8, 2, 3), floats(c, 8, 4), numbers(c, 2, 3)); }},
        {"sqr", [](context c) { return ggml_sqr(c, floats(c, 8, 3)); }},
        {"sqrt", [](context c) { return ggml_sqrt(c, floats(c, 8, 3)); }},
        {"log", [](context c) { return ggml_log(c, floats(c, 8, 3)); }},
        {"sin", [](context c) { return ggml_sin(c, floats(c, 8, 3)); }},
        {"cos", [](context c) { return ggml_cos(c, floats(c, 8, 3)); }},
        {"silu", [](context c) { return ggml_silu(c, floats(c, 40, 3)); }},
        {"gelu f16", [](context c) { return ggml_gelu(c, halves(c, 40, 3)); }},
        {"swiglu", [](context c) { return ggml_swiglu(c, floats(c, 80, 3)); }},
        {"swiglu split", [](context c) { return ggml_swiglu_split(c, floats(c, 40, 3), floats(c, 40, 3)); }},
        {"swiglu oai",
         [](context c) { return ggml_swiglu_oai(c, floats(c, 40, 3), floats(c, 40, 3), 1.7F, 7.0F); }},
        {"scale", [](context c) { return ggml_scale_bias(c, floats(c, 8, 3), 2.0F, 0.5F); }},
        {"clamp", [](context c) { return ggml_clamp(c, floats(c, 8, 3), -0.2F, 0.2F); }},
        {"leaky_relu", [](context c) { return ggml_leaky_relu(c, floats(c, 8, 3), 0.1F, false); }},
        {"fill", [](context c) { return ggml_fill(c, floats(c, 8, 3), 3.0F); }},
        {"arange", [](context c) { return ggml_arange(c, 0.0F, 10.0F, 1.0F); }},
        {"tri", [](context c) { return ggml_tri(c, floats(c, 8, 8, 2), GGML_TRI_TYPE_LOWER); }},
        {"diag", [](context c) { return ggml_diag(c, floats(c, 8, 1, 2)); }},
        {"diag_mask_inf", [](context c) { return ggml_diag_mask_inf(c, floats(c, 8, 8), 2); }},
        {"sum", [](context c) { return ggml_sum(c, floats(c, 8, 3)); }},
        {"sum_rows", [](context c) { return ggml_sum_rows(c, floats(c, 8, 3)); }},
        {"mean", [](context c) { return ggml_mean(c, floats(c, 8, 3)); }},
        {"cumsum", [](context c) { return ggml_cumsum(c, floats(c, 8, 3)); }},
        {"argmax", [](context c) { return ggml_argmax(c, floats(c, 8, 3)); }},
        {"argsort", [](context c) { return ggml_argsort(c, floats(c, 40, 3), GGML_SORT_ORDER_ASC); }},
        {"top_k", [](context c) { return ggml_top_k(c, floats(c, 40, 3), 5); }},
        {"norm", [](context c) { return ggml_norm(c, floats(c, 8, 3), 1e-5F); }},
        {"rms_norm",
         [](context c) { return ggml_mul(c, ggml_rms_norm(c, floats(c, 8, 3), 1e-5F), floats(c, 8)); }},
        {"l2_norm", [](context c) { return ggml_l2_norm(c, floats(c, 8, 3), 1e-5F); }},
        {"group_norm", [](context c) { return ggml_group_norm(c, floats(c, 8, 3, 4), 2, 1e-5F); }},
        {"pool_2d",
         [](context c) { return ggml_pool_2d(c, floats(c, 16, 3, 2), GGML_OP_POOL_MAX, 4, 1, 4, 1, 0, 0); }},
        {"pool_2d mean f16",
         [](context c) { return ggml_pool_2d(c, halves(c, 9, 6, 2), GGML_OP_POOL_AVG, 3, 2, 4, 2, 1, 1); }},
    };
}

std::vector<example> attention() {
    return {
        {"mul_mat", [](context c) { return ggml_mul_mat(c, floats(c, 32, 5), floats(c, 32, 3)); }},
        {"mul_mat f16", [](context c) { return ggml_mul_mat(c, halves(c, 32, 5, 2), floats(c, 32, 3, 4)); }},
        {"mul_mat q4_0",
         [](context c) { return ggml_mul_mat(c, blocks(c, GGML_TYPE_Q4_0, 64, 16), floats(c, 64, 9)); }},
        {"mul_mat q4_k",
         [](context c) { return ggml_mul_mat(c, blocks(c, GGML_TYPE_Q4_K, 256, 16), floats(c, 256, 9)); }},
        {"mul_mat hadamard",
         [](context c) {
             ggml_tensor * out = ggml_mul_mat(c, floats(c, 32, 32), floats(c, 32, 3));
             ggml_mul_mat_set_hint(out, GGML_HINT_SRC0_IS_HADAMARD);
             return out;
         }},
        {"mul_mat_id",
         [](context c) { return ggml_mul_mat_id(c, floats(c, 16, 8, 4), floats(c, 16, 2, 3), numbers(c, 2, 3)); }},
        {"mixture", [](context c) { return mixture(c, GGML_TYPE_F32); }},
        {"mixture q4_k", [](context c) { return mixture(c, GGML_TYPE_Q4_K); }},
        {"soft_max",
         [](context c) {
             ggml_tensor * out = ggml_soft_max_ext(c, floats(c, 16, 4, 2), halves(c, 16, 4), 0.5F, 0.0F);
             ggml_soft_max_add_sinks(out, floats(c, 2));
             return out;
         }},
        {"rope", [](context c) { return rope(c, GGML_ROPE_TYPE_NEOX, floats(c, 8), 5); }},
        {"rope sections", [](context c) { return rope(c, GGML_ROPE_TYPE_MROPE, nullptr, 20); }},
        {"rope vision", [](context c) { return rope(c, GGML_ROPE_TYPE_VISION, nullptr, 20); }},
        {"rope partly",
         [](context c) { return ggml_rope(c, floats(c, 16, 3, 5), numbers(c, 5), 8, GGML_ROPE_TYPE_NORMAL); }},
        {"rope back",
         [](context c) {
             return ggml_rope_ext_back(
                 c, floats(c, 16, 3, 5), numbers(c, 5), nullptr, 8, GGML_ROPE_TYPE_NEOX, 4096, 10000.0F, 1.0F,
                 0.0F, 1.0F, 32.0F, 1.0F
             );
         }},
        {"flash_attn", [](context c) { return flash(c, GGML_TYPE_F16, GGML_TYPE_F16, 3, 16, true); }},
        {"flash_attn long", [](context c) { return flash(c, GGML_TYPE_F16, GGML_TYPE_F16, 1, 520, false); }},
        {"flash_attn tiled", [](context c) { return flash(c, GGML_TYPE_F16, GGML_TYPE_F16, 70, 80, false); }},
        {"flash_attn q8_0", [](context c) { return flash(c, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0, 3, 16, false); }},
        {"lightning_indexer", [](context c) { return indexer(c, GGML_TYPE_F16); }},
        {"lightning_indexer f32", [](context c) { return indexer(c, GGML_TYPE_F32); }},
        {"lightning_indexer q8_0", [](context c) { return indexer(c, GGML_TYPE_Q8_0); }},
        {"sparse mask", sparse_mask},
        {"counted rows", counted_rows},
        {"hyper_comb",
         [](context c) { return ggml_dsv4_hc_comb(c, floats(c, 24, 5), floats(c, 3), floats(c, 24), 1e-6F, 2); }},
        {"hyper_pre", [](context c) { return ggml_dsv4_hc_pre(c, floats(c, 8, 4, 5), floats(c, 4, 5)); }},
        {"hyper_pre gated",
         [](context c) { return ggml_dsv4_hc_pre_gated(c, floats(c, 8, 4, 5), floats(c, 8, 4, 5), 0.5F); }},
        {"hyper_post",
         [](context c) {
             return ggml_dsv4_hc_post(c, floats(c, 8, 5), floats(c, 8, 4, 5), floats(c, 4, 5), floats(c, 4, 4, 5));
         }},
        {"hyper_post alone",
         [](context c) {
             return ggml_dsv4_hc_post(c, floats(c, 8, 5), floats(c, 8, 4, 5), floats(c, 4, 5), nullptr);
         }},
    };
}

std::vector<example> recurrent() {
    return {
        {"ssm_conv", [](context c) { return ggml_ssm_conv(c, floats(c, 8, 6, 2), floats(c, 4, 6)); }},
        {"ssm_scan mamba", [](context c) { return scan(c, false); }},
        {"ssm_scan mamba2", [](context c) { return scan(c, true); }},
        {"rwkv_wkv6",
         [](context c) {
             const auto rows = [&] { return floats(c, 16, 2, 6); };
             return ggml_rwkv_wkv6(c, rows(), rows(), rows(), floats(c, 16, 2), rows(), floats(c, 16 * 16 * 2, 3));
         }},
        {"rwkv_wkv7",
         [](context c) {
             const auto rows = [&] { return floats(c, 64, 2, 6); };
             return ggml_rwkv_wkv7(c, rows(), rows(), rows(), rows(), rows(), rows(), floats(c, 64 * 64 * 2, 3));
         }},
        {"gated_linear_attn",
         [](context c) {
             const auto rows = [&] { return floats(c, 16, 2, 6); };
             return ggml_gated_linear_attn(c, rows(), rows(), rows(), rows(), floats(c, 16 * 16 * 2, 3), 0.5F);
         }},
        {"gated_delta_net",
         [](context c) {
             const auto rows = [&] { return floats(c, 16, 2, 6, 3); };
             return ggml_gated_delta_net(
                 c, rows(), rows(), rows(), floats(c, 1, 2, 6, 3), floats(c, 1, 2, 6, 3), floats(c, 16, 16, 2, 3),
                 2
             );
         }},
        {"solve_tri",
         [](context c) { return ggml_solve_tri(c, floats(c, 6, 6, 2), floats(c, 3, 6, 2), true, true, false); }},
    };
}

}  // namespace

const std::vector<example> & examples() {
    static const std::vector<example> all = [] {
        std::vector<example> list;
        for (const auto & family : {movers(), elements(), attention(), recurrent()}) {
            list.insert(list.end(), family.begin(), family.end());
        }
        return list;
    }();
    return all;
}

}  // namespace host
