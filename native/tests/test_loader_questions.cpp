// What the loader is likely to ask is made from files that may say anything.

#include "host/loader_questions.h"
#include "tests/check.h"
#include "tests/host.h"

#include "gguf.h"

#include <array>
#include <random>
#include <set>

namespace {

using sizes = std::array<int64_t, GGML_MAX_DIMS>;

struct named_weight {
    std::string name;
    ggml_type type;
    sizes shape;
};

std::vector<gguf_context_ptr> file_with(const std::vector<named_weight> & weights, uint32_t number = 2) {
    std::vector<gguf_context_ptr> files;
    files.emplace_back(gguf_init_empty());
    gguf_context * file = files.back().get();
    gguf_set_val_str(file, "general.architecture", "any");
    for (const char * key :
         {"expert_used_count", "ssm.state_size", "ssm.inner_size", "ssm.group_count", "attention.head_count"}) {
        gguf_set_val_u32(file, (std::string("any.") + key).c_str(), number);
    }
    gguf_set_val_f32(file, "any.attention.layer_norm_rms_epsilon", 1e-5F);
    const ggml_context_ptr context(ggml_init({weights.size() * ggml_tensor_overhead(), nullptr, true}));
    for (const named_weight & each : weights) {
        ggml_tensor * tensor = ggml_new_tensor(context.get(), each.type, GGML_MAX_DIMS, each.shape.data());
        gguf_add_tensor(file, ggml_set_name(tensor, each.name.c_str()));
    }
    return files;
}

std::multiset<std::string> ops_of(const std::vector<mesh::op_question> & questions) {
    std::multiset<std::string> ops;
    for (const mesh::op_question & each : questions) {
        ops.insert(ggml_op_name(static_cast<ggml_op>(each.back().op)));
    }
    return ops;
}

}  // namespace

TEST("loader questions: of many layers, each kind is asked once") {
    std::vector<named_weight> weights;
    for (int layer = 0; layer < 20; ++layer) {
        const std::string prefix = "blk." + std::to_string(layer) + ".";
        weights.push_back({prefix + "attn_q.weight", GGML_TYPE_Q4_0, {2048, 2048, 1, 1}});
        weights.push_back({prefix + "ffn_up.weight", GGML_TYPE_Q4_0, {2048, 8192, 1, 1}});
        weights.push_back({prefix + "ffn_up_exps.weight", GGML_TYPE_Q4_0, {2048, 512, 8, 1}});
    }
    const std::multiset<std::string> expected = {"MUL_MAT", "MUL_MAT", "MUL_MAT_ID"};
    CHECK(ops_of(mesh::likely_loader_questions(file_with(weights))) == expected);
}

TEST("loader questions: no file, or one that says nothing, asks nothing") {
    CHECK(mesh::likely_loader_questions({}).empty());
    std::vector<gguf_context_ptr> files;
    files.emplace_back(gguf_init_empty());
    CHECK(mesh::likely_loader_questions(files).empty());
}

TEST("loader questions: names and shapes of any kind make questions that a worker can answer") {
    const std::vector<std::string> names = {
        "blk.0.attn_q.weight",
        "blk.0.attn_q.bias",
        "blk.0.attn_norm.weight",
        "blk.0.ffn_up_exps.weight",
        "blk.0.ffn_up_exps.bias",
        "blk.0.ffn_up_exps.scale",
        "rope_freqs.weight",
        "blk.0.attn_sinks.weight",
        "blk.0.ffn.act.scales",
        "blk.0.time_mix_first",
        "blk.0.ssm_conv1d.weight",
        "blk.0.shortconv.conv.weight",
        "blk.0.ssm_a",
        "blk.0.attn_rel_b.weight",
        "blk.0.indexer_compressor_ape.weight",
        "blk.0.ffn_gate_tid2eid.weight",
        "anything",
    };
    std::mt19937 random(1);
    const auto one_of = [&](const auto & all) { return all[random() % all.size()]; };
    const std::vector<ggml_type> types = {
        GGML_TYPE_F32, GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_I32};
    const std::vector<int64_t> lengths = {1, 1, 2, 3, 32, 100, 2048, int64_t{1} << 20};
    ggml_backend_dev_t cpu = ggml_backend_get_device(host::cpu());
    for (int round = 0; round < 2000; ++round) {
        const ggml_type type = one_of(types);
        const int64_t block = ggml_blck_size(type);
        sizes shape = {one_of(lengths) * block, one_of(lengths), one_of(lengths), one_of(lengths)};
        if (static_cast<double>(shape[0] * shape[1]) * static_cast<double>(shape[2] * shape[3]) > 1e18) {
            shape[2] = shape[3] = 1;  // no file has weights of more numbers than that
        }
        const auto file = file_with({{one_of(names), type, shape}}, static_cast<uint32_t>(one_of(lengths)));
        for (const mesh::op_question & each : mesh::likely_loader_questions(file)) {
            mesh::device_computes(cpu, each);  // throws where a worker would send us away
        }
    }
}
