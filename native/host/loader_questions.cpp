#include "host/loader_questions.h"

#include "rules/validate.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"
#include "gguf.h"

#include <algorithm>
#include <iterator>
#include <stdexcept>
#include <string>

namespace mesh {

namespace {

constexpr size_t MAX_TENSORS = 64;  // that a question is made from
constexpr int64_t TOKENS = 512;
constexpr int64_t SEQUENCES = 3;
constexpr int64_t MAX_LENGTH = 1 << 20;  // what is longer is not asked about ahead

// The loader gives the weight, which is the only source with a buffer, one without memory.
ggml_tensor * asked_weight(const ggml_tensor * op) {
    for (ggml_tensor * source : op->src) {
        if (source != nullptr && source->buffer != nullptr) {
            return source->buffer->size == 0 && source->buffer->context == nullptr ? source : nullptr;
        }
    }
    return nullptr;
}

ggml_context_ptr context_for_a_question() {
    return ggml_context_ptr(ggml_init({MAX_TENSORS * ggml_tensor_overhead(), nullptr, true}));
}

const ggml_tensor * rope_with(ggml_context * c, ggml_tensor * weight) {
    const int64_t size = 2 * weight->ne[0];
    return ggml_rope_ext(
        c, ggml_new_tensor_3d(c, GGML_TYPE_F32, size, 1, TOKENS), ggml_new_tensor_1d(c, GGML_TYPE_I32, TOKENS),
        weight, static_cast<int>(size), GGML_ROPE_TYPE_NORMAL, 0, 1.0F, 1.0F, 0.0F, 1.0F, 0.0F, 0.0F
    );
}

const ggml_tensor * rwkv_with(ggml_context * c, ggml_tensor * weight) {
    const int64_t size = weight->ne[0];
    const int64_t heads = weight->ne[1];
    const auto rows = [&] { return ggml_new_tensor_3d(c, GGML_TYPE_F32, size, heads, TOKENS); };
    ggml_tensor * state = ggml_new_tensor_2d(c, GGML_TYPE_F32, size * size * heads, 1);
    return ggml_rwkv_wkv6(c, rows(), rows(), rows(), weight, rows(), state);
}

// Of a weight with a number for each head; `inner`: the size of all heads together.
const ggml_tensor * scan_with(ggml_context * c, ggml_tensor * weight, int64_t inner) {
    const int64_t heads = std::max<int64_t>(weight->ne[0], 1);
    const int64_t size = std::max<int64_t>(inner / heads, 1);
    constexpr int64_t state = 128;
    const auto rows = [&] { return ggml_new_tensor_4d(c, GGML_TYPE_F32, state, 1, TOKENS, 1); };
    return ggml_ssm_scan(
        c, ggml_new_tensor_4d(c, GGML_TYPE_F32, state, size, heads, 1),
        ggml_new_tensor_4d(c, GGML_TYPE_F32, size, heads, TOKENS, 1),
        ggml_new_tensor_3d(c, GGML_TYPE_F32, heads, TOKENS, 1), ggml_new_tensor_2d(c, GGML_TYPE_F32, 1, heads),
        rows(), rows(), ggml_new_tensor_1d(c, GGML_TYPE_I32, 1), 1
    );
}

// What the loader means by an op with this weight.
const ggml_tensor * meant_by(ggml_context * c, const ggml_tensor * op, ggml_tensor * weight) {
    switch (op->op) {
    case GGML_OP_ROPE:
        return rope_with(c, weight);
    case GGML_OP_RWKV_WKV6:
        return rwkv_with(c, weight);
    case GGML_OP_SSM_SCAN:
        return weight->ne[0] != 1 && weight->ne[1] == 1 ? scan_with(c, weight, op->src[1]->ne[0]) : op;
    default:
        return op;
    }
}

// Numbers of a model that shapes of weights do not tell; 0 where it has none.
struct model_numbers {
    int64_t used_experts = 0;
    int64_t scan_state = 0;
    int64_t scan_inner = 0;
    int64_t scan_groups = 0;
    int64_t heads = 0;
    int64_t cached_heads = 0;
    float rms_epsilon = 0;
    float epsilon = 0;
};

model_numbers numbers_of(const gguf_context * file) {
    const auto find = [&](const std::string & name, gguf_type type) {
        const int64_t key = gguf_find_key(file, name.c_str());
        return key >= 0 && gguf_get_kv_type(file, key) == type ? key : -1;
    };
    const int64_t named = find("general.architecture", GGUF_TYPE_STRING);
    const std::string architecture = named >= 0 ? gguf_get_val_str(file, named) : "";
    const auto count = [&](const char * name) {
        const int64_t key = find(architecture + name, GGUF_TYPE_UINT32);
        return key >= 0 ? std::min<int64_t>(gguf_get_val_u32(file, key), MAX_LENGTH) : 0;
    };
    const auto fraction = [&](const char * name) {
        const int64_t key = find(architecture + name, GGUF_TYPE_FLOAT32);
        return key >= 0 ? gguf_get_val_f32(file, key) : 0.0F;
    };
    model_numbers numbers;
    numbers.used_experts = count(".expert_used_count");
    numbers.scan_state = count(".ssm.state_size");
    numbers.scan_inner = count(".ssm.inner_size");
    numbers.scan_groups = std::max<int64_t>(count(".ssm.group_count"), 1);
    numbers.heads = count(".attention.head_count");
    numbers.cached_heads = count(".attention.head_count_kv");
    numbers.rms_epsilon = fraction(".attention.layer_norm_rms_epsilon");
    numbers.epsilon = fraction(".attention.layer_norm_epsilon");
    return numbers;
}

// Made-up nodes are larger than the weight, and ggml ends the process where it cannot count what a tensor has.
bool is_countable(const ggml_tensor * weight) {
    return !ggml_is_empty(weight) && ggml_nelements(weight) <= (int64_t{1} << 40) &&
           std::all_of(std::begin(weight->ne), std::end(weight->ne), [](int64_t length) {
               return length <= MAX_LENGTH;
           });
}

bool has(const std::string & name, const char * part) {
    return name.find(part) != std::string::npos;
}

std::vector<ggml_op>
likely_ops(const std::string & name, const ggml_tensor * weight, const model_numbers & model) {
    const bool exact = weight->type == GGML_TYPE_F32;
    const bool matrix = ggml_is_matrix(weight) && weight->ne[1] > 1;
    if (exact && has(name, "rope_f")) {
        return {GGML_OP_ROPE};
    }
    if (exact && has(name, "sinks")) {
        return {GGML_OP_SCALE};
    }
    if (exact && has(name, "ffn.act") && ggml_is_vector(weight)) {
        return {GGML_OP_DIV};
    }
    if (exact && has(name, "time_mix_first") && matrix) {
        return {GGML_OP_RWKV_WKV6};
    }
    if (exact && (has(name, "conv1d") || has(name, "conv.weight")) && matrix) {
        return {GGML_OP_SSM_CONV};
    }
    std::vector<ggml_op> ops = {GGML_OP_MUL_MAT};
    if (exact) {
        ops.insert(ops.end(), {GGML_OP_MUL, GGML_OP_ADD});
    }
    if (exact && has(name, "ssm_a") && ggml_is_matrix(weight) && model.scan_inner >= weight->ne[1]) {
        ops.push_back(GGML_OP_SSM_SCAN);
    }
    if (ggml_is_matrix(weight) && (has(name, "attn_rel_b") || has(name, "_ape") || has(name, "tid2eid"))) {
        ops.push_back(GGML_OP_GET_ROWS);
    }
    if (model.used_experts > 0 && exact && has(name, ".bias") && matrix) {
        ops.push_back(GGML_OP_ADD_ID);
    }
    if (model.used_experts > 0 && (weight->ne[2] > 1 || has(name, "scale")) && ggml_is_3d(weight)) {
        ops.push_back(GGML_OP_MUL_MAT_ID);
    }
    return ops;
}

// As the loader makes it up.
const ggml_tensor * made_up(ggml_context * c, ggml_op op, ggml_tensor * weight, const model_numbers & model) {
    const int64_t * ne = weight->ne;
    const auto rows = [&](int64_t a, int64_t b, int64_t d = 1, int64_t e = 1) {
        return ggml_new_tensor_4d(c, GGML_TYPE_F32, a, b, d, e);
    };
    const auto numbers = [&](int64_t a, int64_t b = 1) { return ggml_new_tensor_2d(c, GGML_TYPE_I32, a, b); };
    const int64_t used = model.used_experts;
    switch (op) {
    case GGML_OP_ROPE:
        return rope_with(c, weight);
    case GGML_OP_RWKV_WKV6:
        return rwkv_with(c, weight);
    case GGML_OP_MUL:
        return ggml_mul(c, rows(ne[0], ne[1], ne[2], ne[3]), weight);
    case GGML_OP_ADD:
        return ggml_add(c, rows(ne[0], ne[1], ne[2], ne[3]), weight);
    case GGML_OP_DIV:
        return ggml_div(c, rows(ne[0], 1), weight);
    case GGML_OP_SCALE:
        return ggml_scale(c, weight, 1.0F);
    case GGML_OP_GET_ROWS:
        return ggml_get_rows(c, weight, numbers(TOKENS));
    case GGML_OP_ADD_ID:
        return ggml_add_id(c, rows(ne[0], used, TOKENS), weight, numbers(used, TOKENS));
    case GGML_OP_MUL_MAT_ID:
        return ggml_mul_mat_id(c, weight, rows(ne[0], used, TOKENS), numbers(used, TOKENS));
    case GGML_OP_SSM_CONV:
        return ggml_ssm_conv(c, rows(ne[0] - 1 + TOKENS, ne[1], SEQUENCES), weight);
    case GGML_OP_SSM_SCAN: {
        const bool mamba2 = ne[0] == 1;
        const int64_t state = mamba2 ? model.scan_state : ne[0];
        const int64_t heads = ne[1];
        const int64_t size = model.scan_inner / heads;
        const auto group = [&] { return rows(state, mamba2 ? model.scan_groups : 1, TOKENS, SEQUENCES); };
        return ggml_ssm_scan(
            c, rows(state, size, heads, SEQUENCES), rows(size, heads, TOKENS, SEQUENCES),
            rows(heads, TOKENS, SEQUENCES), weight, group(), group(), numbers(SEQUENCES), 1
        );
    }
    default:
        return ggml_mul_mat(c, weight, rows(ne[0], TOKENS, ne[2], ne[3]));
    }
}

// llama.cpp asks about norms one by one while it builds a graph, before anybody sees the others of its nodes: those of
// what lies behind such a weight, for one token and for several.
std::vector<const ggml_tensor *>
likely_norms(ggml_context * c, const std::string & name, const ggml_tensor * weight, const model_numbers & model) {
    std::vector<const ggml_tensor *> norms;
    if (!has(name, "norm") || !ggml_is_vector(weight)) {
        return norms;
    }
    for (const int64_t tokens : {1, 2, 4, 32, 512}) {
        for (const int64_t heads : {int64_t{0}, model.heads, model.cached_heads}) {
            ggml_tensor * rows = heads == 0 ? ggml_new_tensor_2d(c, GGML_TYPE_F32, weight->ne[0], tokens)
                                            : ggml_new_tensor_3d(c, GGML_TYPE_F32, weight->ne[0], heads, tokens);
            if (model.rms_epsilon > 0) {
                norms.push_back(ggml_rms_norm(c, rows, model.rms_epsilon));
            }
            if (model.epsilon > 0) {
                norms.push_back(ggml_norm(c, rows, model.epsilon));
            }
        }
    }
    return norms;
}

// Workers send away who asks about tensors that are too large to be any.
bool can_be_asked(const op_question & question) {
    try {
        for (size_t i = 0; i < question.size(); ++i) {
            check_entry(question, i);
        }
        return true;
    } catch (const std::invalid_argument &) {
        return false;
    }
}

}  // namespace

loader_question::loader_question(const ggml_tensor * op) {
    ggml_tensor * weight = asked_weight(op);
    if (weight == nullptr) {
        return;
    }
    context_ = context_for_a_question();
    weight_ = weight;
    op_ = meant_by(context_.get(), op, weight);
}

std::vector<op_question> likely_loader_questions(const std::vector<gguf_context_ptr> & files) {
    std::vector<op_question> questions;
    if (files.empty()) {
        return questions;
    }
    support_cache found;
    const auto add = [&](const ggml_tensor * op) {
        op_question question = question_about(op);
        if (can_be_asked(question) && found.find(question) == nullptr) {
            found.add(question, {});
            questions.push_back(std::move(question));
        }
    };
    const model_numbers model = numbers_of(files.front().get());
    const ggml_context_ptr context = context_for_a_question();
    ggml_context * c = context.get();
    for (const gguf_context_ptr & file : files) {
        for (int64_t i = 0; i < gguf_get_n_tensors(file.get()); ++i) {
            const std::string name = gguf_get_tensor_name(file.get(), i);
            const auto weight_of_this = [&] {
                return ggml_new_tensor(
                    c, gguf_get_tensor_type(file.get(), i), GGML_MAX_DIMS, gguf_get_tensor_ne(file.get(), i)
                );
            };
            ggml_reset(c);
            const ggml_tensor * weight = weight_of_this();
            if (!is_countable(weight)) {
                continue;
            }
            for (const ggml_op op : likely_ops(name, weight, model)) {
                ggml_reset(c);
                ggml_tensor * asked = weight_of_this();
                add(meant_by(c, made_up(c, op, asked, model), asked));
            }
            ggml_reset(c);
            for (const ggml_tensor * norm : likely_norms(c, name, weight_of_this(), model)) {
                add(norm);
            }
        }
    }
    return questions;
}

}  // namespace mesh
