// What no rule can look at: the bytes in a client's tensors. Whatever they are, kernels stay inside of their memory.

#include "rules/rules.h"
#include "tests/check.h"
#include "tests/frames.h"
#include "tests/host.h"
#include "tests/refusals.h"

#include <cstring>
#include <limits>

using refusals::main_memory;

namespace {

constexpr int64_t WIDTH = 256;  // a whole block of every type

std::vector<host::example> uses_of(ggml_type type) {
    const auto matrix = [type](ggml_context * c) { return ggml_new_tensor_2d(c, type, WIDTH, 16); };
    const auto floats = [](ggml_context * c, int64_t rows) {
        return ggml_new_tensor_2d(c, GGML_TYPE_F32, WIDTH, rows);
    };
    return {
        {"get_rows",
         [=](ggml_context * c) { return ggml_get_rows(c, matrix(c), ggml_new_tensor_1d(c, GGML_TYPE_I32, 4)); }},
        {"mul_mat", [=](ggml_context * c) { return ggml_mul_mat(c, matrix(c), floats(c, 1)); }},
        {"mul_mat tiled", [=](ggml_context * c) { return ggml_mul_mat(c, matrix(c), floats(c, 20)); }},
        {"cast", [=](ggml_context * c) { return ggml_cast(c, matrix(c), GGML_TYPE_F32); }},
        {"flash_attn",
         [=](ggml_context * c) {
             return ggml_flash_attn_ext(c, floats(c, 3), matrix(c), matrix(c), nullptr, 1.0F, 0.0F, 0.0F);
         }},
    };
}

// Random bytes, or all bits set, in everything that holds no row numbers.
void spoil(const host::graph & graph, session_bytes::dice & random, bool all_bits) {
    for (int n = 0; n < ggml_graph_n_nodes(graph.get()); ++n) {
        for (ggml_tensor * source : ggml_graph_node(graph.get(), n)->src) {
            if (source == nullptr || source->op != GGML_OP_NONE || source->type == GGML_TYPE_I32) {
                continue;
            }
            std::vector<uint8_t> bytes(ggml_nbytes(source));
            for (uint8_t & byte : bytes) {
                byte = all_bits ? 0xff : static_cast<uint8_t>(random.next() >> 24);
            }
            ggml_backend_tensor_set(source, bytes.data(), 0, bytes.size());
        }
    }
}

}  // namespace

TEST("values: blocks of any bytes, in every type") {
    session_bytes::dice random(3);
    size_t computed = 0;
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = static_cast<ggml_type>(i);
        if (!mesh::can_dequantise(type)) {
            continue;
        }
        for (const host::example & each : uses_of(type)) {
            const host::graph built(each, main_memory());
            mesh::built_graph decoded;
            if (!check::thrown([&] { decoded = built.decode(built.table()); }).empty()) {
                continue;  // a cast to its own type
            }
            for (int round = 0; round < 4; ++round, ++computed) {
                spoil(built, random, round == 0);
                host::compute(decoded.graph, 1);
            }
        }
    }
    CHECK(computed > 400);
}

TEST("values: numbers that are none are sorted, and their places stay within bounds") {
    constexpr int64_t length = 300;
    session_bytes::dice random(5);
    for (const bool all : {true, false}) {
        const auto sort = [=](ggml_context * c) {
            ggml_tensor * values = ggml_new_tensor_2d(c, GGML_TYPE_F32, length, 64);
            return all ? ggml_argsort(c, values, GGML_SORT_ORDER_DESC) : ggml_top_k(c, values, 40);
        };
        const host::graph built({"sort", sort}, main_memory());
        for (int round = 0; round < 8; ++round) {
            std::vector<float> values(static_cast<size_t>(length) * 64);
            for (float & value : values) {
                value = random.below(3) == 0 ? std::numeric_limits<float>::quiet_NaN()
                                             : static_cast<float>(random.below(50));
            }
            ggml_tensor * source = ggml_graph_node(built.get(), 0)->src[0];
            ggml_backend_tensor_set(source, values.data(), 0, ggml_nbytes(source));
            host::compute(built.get(), 1);
            const std::vector<uint8_t> result = built.result();
            for (size_t i = 0; i < result.size(); i += sizeof(int32_t)) {
                int32_t place = 0;
                std::memcpy(&place, result.data() + i, sizeof place);
                CHECK(place >= 0 && place < length);
            }
        }
    }
}
