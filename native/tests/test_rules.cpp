// The rules: every example passes them and computes the same after the round trip over the wire; every rule
// refuses what breaks it.

#include "rules/rules.h"
#include "rules/validate.h"
#include "tests/check.h"
#include "tests/frames.h"
#include "tests/host.h"
#include "tests/opaque_memory.h"
#include "tests/refusals.h"

#include "ggml-cpu.h"

#include <algorithm>
#include <set>

using namespace refusals;

TEST("rules: every op on the list has an example, and no other is allowed") {
    std::set<uint32_t> seen;
    for (const host::example & each : host::examples()) {
        const host::graph built(each, main_memory());
        for (const tensor & entry : built.table()) {
            seen.insert(entry.op);
        }
    }
    for (uint32_t op = 0; op < GGML_OP_COUNT; ++op) {
        if (mesh::op_is_allowed(op) && seen.count(op) == 0) {
            check::fail(
                __FILE__, __LINE__, std::string("no example of ") + ggml_op_name(static_cast<ggml_op>(op))
            );
        }
    }
    for (const ggml_op op : {GGML_OP_CUSTOM, GGML_OP_MAP_CUSTOM1, GGML_OP_MAP_CUSTOM2, GGML_OP_MAP_CUSTOM3}) {
        CHECK(!mesh::op_is_allowed(op));
    }
    CHECK(!mesh::op_is_allowed(GGML_OP_COUNT));
}

// Every op that the engine has is either on the list, or here with the reason why not: a new one is a decision.
TEST("rules: every op of the engine is allowed, or left out on purpose") {
    const std::set<ggml_op> training = {
        GGML_OP_COUNT_EQUAL,    GGML_OP_REPEAT_BACK,        GGML_OP_SILU_BACK,
        GGML_OP_RMS_NORM_BACK,  GGML_OP_OUT_PROD,           GGML_OP_GET_ROWS_BACK,
        GGML_OP_DIAG_MASK_ZERO, GGML_OP_SOFT_MAX_BACK,      GGML_OP_IM2COL_BACK,
        GGML_OP_POOL_2D_BACK,   GGML_OP_FLASH_ATTN_BACK,    GGML_OP_OPT_STEP_ADAMW,
        GGML_OP_OPT_STEP_SGD,   GGML_OP_CROSS_ENTROPY_LOSS, GGML_OP_CROSS_ENTROPY_LOSS_BACK,
    };
    // Of projectors and codecs, which run on the host.
    const std::set<ggml_op> images_and_sound = {
        GGML_OP_ADD1,
        GGML_OP_CONV_TRANSPOSE_1D,
        GGML_OP_IM2COL,
        GGML_OP_IM2COL_3D,
        GGML_OP_COL2IM_1D,
        GGML_OP_CONV_2D,
        GGML_OP_CONV_3D,
        GGML_OP_CONV_2D_DW,
        GGML_OP_CONV_TRANSPOSE_2D,
        GGML_OP_POOL_1D,
        GGML_OP_UPSCALE,
        GGML_OP_PAD_REFLECT_1D,
        GGML_OP_ROLL,
        GGML_OP_TIMESTEP_EMBEDDING,
        GGML_OP_WIN_PART,
        GGML_OP_WIN_UNPART,
        GGML_OP_GET_REL_POS,
        GGML_OP_ADD_REL_POS,
    };
    const std::set<ggml_op> calls_back = {
        GGML_OP_MAP_CUSTOM1, GGML_OP_MAP_CUSTOM2, GGML_OP_MAP_CUSTOM3, GGML_OP_CUSTOM};
    for (uint32_t i = 0; i < GGML_OP_COUNT; ++i) {
        const auto op = static_cast<ggml_op>(i);
        const size_t reasons = training.count(op) + images_and_sound.count(op) + calls_back.count(op);
        if (reasons + (mesh::op_is_allowed(i) ? 1 : 0) != 1) {
            check::fail(__FILE__, __LINE__, std::string(ggml_op_name(op)) + " is neither allowed nor left out");
        }
    }
}

TEST("codec: every example computes the same after the round trip") {
    for (const host::example & each : host::examples()) {
        const host::graph there(each, main_memory());
        const host::graph here(each, main_memory());
        host::compute(here.get());
        try {
            host::run(there.decode(there.table()));
        } catch (const std::exception & error) {
            check::fail(__FILE__, __LINE__, std::string(each.name) + ": " + error.what());
        }
        if (there.result() != here.result()) {
            check::fail(__FILE__, __LINE__, std::string(each.name) + " computes something else");
        }
    }
}

TEST("codec: the same work gives the same bytes") {
    const host::graph one(host::example_named("mixture"), main_memory());
    const host::graph two(host::example_named("mixture"), main_memory());
    const auto a = mesh::key_of(one.table());
    const auto b = mesh::key_of(two.table());
    CHECK(a.words[0] == b.words[0] && a.words[1] == b.words[1]);
    const auto c = mesh::key_of(host::graph(host::example_named("rope"), main_memory()).table());
    CHECK(a.words[0] != c.words[0] && a.words[1] != c.words[1]);
}

TEST("rules: types are what the CPU's kernels say they are") {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = static_cast<ggml_type>(i);
        const auto * traits = ggml_get_type_traits_cpu(type);
        const auto dot = mesh::dot_type(type);
        CHECK(dot == GGML_TYPE_COUNT || (traits->vec_dot != nullptr && traits->vec_dot_type == dot));
        CHECK(!mesh::can_quantise(type) || traits->from_float != nullptr);
        CHECK(
            !mesh::can_dequantise(type) || type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr
        );
    }
}

TEST("rules: a tensor's own numbers") {
    expect({
        {"add", "its type does not exist", [](table & t) { t[0].type = GGML_TYPE_COUNT; }},
        {"add", "its type does not exist", [](table & t) { t[0].type = 4; }},  // a type that was removed
        {"add", "this op is not allowed", [](table & t) { t.back().op = GGML_OP_CUSTOM; }},
        {"add", "this op is not allowed", [](table & t) { t.back().op = 0xffffffff; }},
        {"add", "a dimension is too long", [](table & t) { t[0].ne[1] = -1; }},
        {"add", "a dimension is too long", [](table & t) { t[0].ne[1] = 1LL << 32; }},
        {"add", "it has too many rows", [](table & t) { t[0].ne[1] = t[0].ne[2] = 1LL << 20; }},
        {"add", "it has too many elements", [](table & t) { t[0].ne[0] = t[0].ne[1] = 1LL << 29; }},
        {"mul_mat q4_0", "its rows are not whole blocks",
         [](table & t) { source(t, GGML_OP_MUL_MAT, 0).ne[0] = 33; }},
        {"add", "a stride is not whole elements", [](table & t) { t[0].nb[1] = 33; }},
        {"add", "a stride is not whole elements", [](table & t) { t[0].nb[1] = 1ULL << 63; }},
        {"mul_mat q4_0", "its blocks do not lie side by side",
         [](table & t) { source(t, GGML_OP_MUL_MAT, 0).nb[0] *= 2; }},
        {"add", "its size overflows", [](table & t) { t[0].nb[1] = 1ULL << 62; }},
        {"add", "outside of its buffer", [](table & t) { t[0].nb[1] = 1ULL << 40; }},
        {"add", "outside of its buffer", [](table & t) { t[0].offset = 1ULL << 40; }},
        {"add", "it is marked as nothing that exists", [](table & t) { t[0].flags = 1U << 20; }},
        {"add", "it is marked as nothing that exists", [](table & t) { t[0].is_node = 2; }},
        {"add", "it is not aligned", [](table & t) { t[0].offset += 4; }},
        {"add", "it uses what comes later", [](table & t) { t.back().sources[0] = 100; }},
        {"add", "it uses what comes later",
         [](table & t) { t.back().sources[1] = static_cast<uint32_t>(t.size()); }},
        {"add", "a source is missing", [](table & t) { t.back().sources[1] = 0; }},
        {"add", "it has a source too many", [](table & t) { t.back().sources[2] = 1; }},
        {"add", "it is computed, but no node", [](table & t) { t.back().is_node = 0; }},
        {"mixture", "it is used more often than it says",
         [](table & t) { node_of(t, GGML_OP_ARGSORT).use_count = 0; }},
        {"mixture", "it is used more often than it says",
         [](table & t) { node_of(t, GGML_OP_ARGSORT).use_count = 0xffffffff; }},
    });
}

TEST("rules: views") {
    expect({
        {"views", "it is a view of what comes later",
         [](table & t) { node_of(t, GGML_OP_PERMUTE).view_of = 100; }},
        {"views", "it is a view of another type",
         [](table & t) { node_of(t, GGML_OP_PERMUTE).type = GGML_TYPE_I32; }},
        {"views", "it is a view into another buffer",
         [](table & t) { node_of(t, GGML_OP_PERMUTE).buffer_id = 2; }},
        {"views", "it lies elsewhere than its parent says",
         [](table & t) { node_of(t, GGML_OP_PERMUTE).offset += 4; }},
        {"mixture", "it lies outside of its parent", [](table & t) { node_of(t, GGML_OP_VIEW).ne[1] = 4; }},
        {"mixture", "it is a view of a view",
         [](table & t) {
             tensor copy = node_of(t, GGML_OP_VIEW);
             copy.view_of = static_cast<uint32_t>(&node_of(t, GGML_OP_VIEW) - t.data()) + 1;
             t.push_back(copy);
         }},
        {"mixture", "it is not aligned",
         [](table & t) {
             node_of(t, GGML_OP_VIEW).view_offset += 2;
             node_of(t, GGML_OP_VIEW).offset += 2;
         }},
        {"views", "it is a view of something else than its source",
         [](table & t) { node_of(t, GGML_OP_RESHAPE).sources[0] = node_of(t, GGML_OP_PERMUTE).sources[0]; }},
        {"views", "it begins elsewhere than its source",
         [](table & t) {
             tensor & view = node_of(t, GGML_OP_RESHAPE);
             view.ne[0] /= 2;
             view.view_offset = static_cast<uint64_t>(view.ne[0]) * sizeof(float);
             view.offset += view.view_offset;
         }},
        {"views", "it is a view of nothing", [](table & t) { node_of(t, GGML_OP_RESHAPE).view_of = 0; }},
        {"views", "more or less elements", [](table & t) { node_of(t, GGML_OP_RESHAPE).ne[0] = 4; }},
        set_param("views", "an axis does not exist", GGML_OP_PERMUTE, 0, 4),
        set_param("views", "an axis comes twice", GGML_OP_PERMUTE, 0, 1),
    });
}

TEST("rules: memory of nodes") {
    expect({
        {"add", "its elements overlap", [](table & t) { t.back().nb[1] = 0; }},
        {"add", "a source's elements overlap", [](table & t) { source(t, GGML_OP_ADD, 0).nb[1] = 0; }},
        {"add", "it is computed into no buffer", [](table & t) { t.back().buffer_id = 0; }},
        {"add", "a source has no memory", [](table & t) { source(t, GGML_OP_ADD, 1).buffer_id = 0; }},
        // Not computed, so it needs no memory; there is nothing to compare with its sources'.
        {"add", "its shape is not that of its source",
         [](table & t) {
             t.back().buffer_id = 0;
             t.back().flags = 0;
             t.back().ne[1] = 2;
         }},
        {"add", "a source has no elements", [](table & t) { source(t, GGML_OP_ADD, 1).ne[0] = 0; }},
        {"add", "it would overwrite what it reads",
         [](table & t) { t.back().offset = source(t, GGML_OP_ADD, 0).offset + 32; }},
        {"argsort", "it would overwrite what it reads",
         [](table & t) { t.back().offset = source(t, GGML_OP_ARGSORT, 0).offset; }},
        {"cpy f16", "it writes elsewhere than it says",
         [](table & t) { node_of(t, GGML_OP_CPY).sources[1] = node_of(t, GGML_OP_CPY).sources[0]; }},
        {"set_rows", "it writes elsewhere than it says",
         [](table & t) { node_of(t, GGML_OP_SET_ROWS).sources[2] = node_of(t, GGML_OP_SET_ROWS).sources[0]; }},
    });
}

// Told by numbers alone: nobody has the memory for it.
TEST("rules: scratch memory is not a client's to choose") {
    const char * says = "it needs too much scratch memory";
    constexpr int64_t far_too_long = 1 << 21;
    const auto longer = [=](table & t, ggml_op op, std::initializer_list<size_t> sources) {
        for (const size_t i : sources) {
            source(t, op, i).ne[0] = far_too_long;
        }
        node_of(t, op).ne[0] = far_too_long;
        for (tensor & each : t) {
            const auto type = static_cast<ggml_type>(each.type);
            each.nb[1] = ggml_row_size(type, each.ne[0]);
            each.nb[2] = each.nb[1] * static_cast<uint64_t>(each.ne[1]);
            each.nb[3] = each.nb[2] * static_cast<uint64_t>(each.ne[2]);
        }
    };
    expect_anywhere({
        {"soft_max", says,
         [=](table & t) {
             longer(t, GGML_OP_SOFT_MAX, {0, 1});
         }},
        {"rope partly", says, [=](table & t) { longer(t, GGML_OP_ROPE, {0}); }},
        {"top_k", says, [=](table & t) { longer(t, GGML_OP_TOP_K, {0}); }},
        {"cpy q8_0", says,
         [=](table & t) {
             longer(t, GGML_OP_CPY, {0, 1});
         }},
    });
}

TEST("rules: what another device keeps behind a result lies in the same memory") {
    const auto said = [](const char * name) {
        const host::graph built(host::example_named(name), opaque_memory::memory());
        return check::thrown([&] { built.decode(built.table()); });
    };
    CHECK_EQUAL(said("flash_attn"), "");
    opaque_memory::device().scratch = 1 << 10;
    CHECK_EQUAL(said("flash_attn"), "");
    // Planned by somebody who does not know what lies behind the result.
    const host::graph planned(host::example_named("flash_attn"), opaque_memory::memory());
    opaque_memory::device().scratch = 1 << 20;
    CHECK_CONTAINS(
        check::thrown([&] { planned.decode(planned.table()); }),
        "(FLASH_ATTN_EXT): this device needs more memory for it than there is behind it"
    );
    opaque_memory::device() = {};
}

TEST("rules: what they let through, the CPU supports") {
    session_bytes::dice random(11);
    ggml_backend_dev_t cpu = ggml_backend_get_device(host::cpu());
    size_t asked = 0;
    for (const host::example & each : host::examples()) {
        const host::graph built(each, main_memory());
        for (size_t i = 0; i < 100; ++i) {
            table t = built.table();
            session_bytes::change_field(t[random.below(t.size())], t, random);
            mesh::built_graph graph;
            if (!check::thrown([&] { graph = built.decode(t); }).empty()) {
                continue;
            }
            for (int n = 0; n < ggml_graph_n_nodes(graph.graph); ++n, ++asked) {
                CHECK(ggml_backend_dev_supports_op(cpu, ggml_graph_node(graph.graph, n)));
            }
        }
    }
    CHECK(asked > 1000);
}

TEST("rules: ops that move data") {
    expect({
        {"dup", "more or less elements", [](table & t) { t.back().ne[1] = 2; }},
        {"dup", "only CPY converts",
         [](table & t) {
             source(t, GGML_OP_DUP, 0);
             t.back().type = GGML_TYPE_I32;
         }},
        {"cpy q8_0", "its rows have another length",
         [](table & t) {
             tensor & s = source(t, GGML_OP_CPY, 0);
             s.ne[0] = 96;
             s.ne[1] = 2;
             s.nb[1] = 96 * 4;
         }},
        spread("cpy q8_0", "more or less elements", GGML_OP_CPY, 0),
        {"cast q8_0", "there is no conversion", [](table & t) { node_of(t, GGML_OP_CPY).type = GGML_TYPE_I32; }},
        set_param("concat", "its dimension does not exist", GGML_OP_CONCAT, 0, 4),
        set_param("concat", "its dimension does not exist", GGML_OP_CONCAT, 0, -1),
        set_param("concat", "its shape is not that of its sources", GGML_OP_CONCAT, 0, 1),
        set_type("concat", "its sources have another type", GGML_OP_CONCAT, 1, GGML_TYPE_I32),
        shorten("concat", "its shape is not that of its sources", GGML_OP_CONCAT, 1, 1),
        set_type("repeat", "it has another type", GGML_OP_REPEAT, 0, GGML_TYPE_I32),
        {"repeat", "its shape is no multiple", [](table & t) { source(t, GGML_OP_REPEAT, 0).ne[0] = 3; }},
        spread("repeat", "its rows do not lie side by side", GGML_OP_REPEAT, 0),
        set_param("pad", "its margin is negative", GGML_OP_PAD, 0, -2),
        set_param("pad", "not that of its source with the margin", GGML_OP_PAD, 1, 3),
        set_param("pad", "it may not go round", GGML_OP_PAD, 8, 1),
        set_type("pad", "only F32 is padded", GGML_OP_PAD, 0, GGML_TYPE_I32),
        set_param("set", "a stride or offset is negative", GGML_OP_SET, 0, -32),
        set_param("set", "a stride or offset is negative", GGML_OP_SET, 3, -4),
        set_param("set", "the part lies outside of it", GGML_OP_SET, 3, 100),
        set_param("set", "the part lies outside of it", GGML_OP_SET, 0, INT32_MAX),
        set_type("acc", "this type cannot be set", GGML_OP_ACC, 1, GGML_TYPE_I32),
        spread("acc", "the part's rows", GGML_OP_ACC, 1),
        set_type("get_rows", "its row numbers are not I32", GGML_OP_GET_ROWS, 1, GGML_TYPE_F32),
        shorten("get_rows", "its shape is not that of its rows", GGML_OP_GET_ROWS, 1, 0),
        shorten("get_rows", "its shape is not that of its rows", GGML_OP_GET_ROWS, 0, 0),
        spread("get_rows", "its rows do not lie side by side", GGML_OP_GET_ROWS, 0),
        {"get_rows", "there is no conversion", [](table & t) { t.back().type = GGML_TYPE_I32; }},
        set_type("set_rows", "its row numbers are neither", GGML_OP_SET_ROWS, 1, GGML_TYPE_F64),
        shorten("set_rows", "its row numbers do not fit", GGML_OP_SET_ROWS, 1, 0),
        shorten("set_rows", "its row numbers do not fit", GGML_OP_SET_ROWS, 0, 1),
        {"set_rows q8_0", "there is no conversion",
         [](table & t) {
             tensor & s = source(t, GGML_OP_SET_ROWS, 0);
             s.type = GGML_TYPE_F16;
             s.nb[0] = 2;
         }},
    });
}

TEST("rules: ops on elements and rows") {
    expect({
        set_type("add", "these types do not go together", GGML_OP_ADD, 1, GGML_TYPE_I32),
        {"add", "its second source does not repeat", [](table & t) { source(t, GGML_OP_ADD, 1).ne[0] = 3; }},
        {"add", "its shape is not that of its source", [](table & t) { t.back().ne[1] = 2; }},
        spread("add", "its shape is not that of its source", GGML_OP_ADD, 0),
        shorten("add_id", "its row numbers do not fit", GGML_OP_ADD_ID, 2, 0),
        shorten("add_id", "its rows do not fit", GGML_OP_ADD_ID, 1, 0),
        set_type("add_id", "these types do not go together", GGML_OP_ADD_ID, 2, GGML_TYPE_F32),
        set_param("silu", "its function does not exist", GGML_OP_UNARY, 0, GGML_UNARY_OP_COUNT),
        set_param("silu", "its function does not exist", GGML_OP_UNARY, 0, -1),
        set_type("sqr", "these types do not go together", GGML_OP_SQR, 0, GGML_TYPE_I32),
        set_param("swiglu", "its function does not exist", GGML_OP_GLU, 0, GGML_GLU_OP_COUNT),
        shorten("swiglu", "its rows are not half the source's", GGML_OP_GLU, 0, 0),
        shorten("swiglu split", "its sources do not fit each other", GGML_OP_GLU, 1, 0),
        set_param("swiglu oai", "its limit is negative", GGML_OP_GLU, 3, static_cast<int32_t>(0xbf800000)),
        set_param("swiglu oai", "its limit is negative", GGML_OP_GLU, 3, 0x7fc00000),
        {"swiglu", "its rows do not follow each other",
         [](table & t) {
             // Contiguous to ggml, which ignores the stride of a dimension of length 1.
             for (tensor * each : {&source(t, GGML_OP_GLU, 0), &node_of(t, GGML_OP_GLU)}) {
                 each->ne[2] = each->ne[1];
                 each->nb[2] = each->nb[1];
                 each->ne[1] = 1;
                 each->nb[1] = 1 << 20;
             }
         }},
        {"scale", "its rows do not follow each other",
         [](table & t) {
             for (tensor * each : {&source(t, GGML_OP_SCALE, 0), &node_of(t, GGML_OP_SCALE)}) {
                 each->ne[2] = each->ne[1];
                 each->nb[2] = each->nb[1];
                 each->ne[1] = 1;
                 each->nb[1] = 1 << 20;
             }
         }},
        set_type("clamp", "these types do not go together", GGML_OP_CLAMP, 0, GGML_TYPE_I32),
        {"leaky_relu", "its shape is not", [](table & t) { t.back().ne[1] = 2; }},
        {"fill", "its shape is not", [](table & t) { t.back().ne[1] = 2; }},
        set_param("arange", "more or less elements than steps", GGML_OP_ARANGE, 1, 0x7f800000),
        set_param("arange", "more or less elements than steps", GGML_OP_ARANGE, 2, 0),
        set_param("tri", "its half does not exist", GGML_OP_TRI, 0, 4),
        {"diag", "its source is not one row",
         [](table & t) { std::swap(source(t, GGML_OP_DIAG, 0).ne[1], source(t, GGML_OP_DIAG, 0).ne[2]); }},
        set_param("diag_mask_inf", "its past is longer", GGML_OP_DIAG_MASK_INF, 0, INT32_MAX),
        {"sum", "it is not one number", [](table & t) { t.back().ne[0] = 2; }},
        {"sum_rows", "not one number for each row", [](table & t) { t.back().ne[1] = 2; }},
        {"mean", "not one number for each row", [](table & t) { t.back().ne[1] = 2; }},
        {"cumsum", "its shape is not", [](table & t) { t.back().ne[1] = 2; }},
        {"argmax", "not one number for each row", [](table & t) { t.back().ne[0] = 2; }},
        set_param("argsort", "its order does not exist", GGML_OP_ARGSORT, 0, 7),
        set_type("argsort", "it is I32 from F32 only", GGML_OP_ARGSORT, 0, GGML_TYPE_I32),
        {"top_k", "it has more than its source", [](table & t) { source(t, GGML_OP_TOP_K, 0).ne[0] = 4; }},
        set_param("norm", "its epsilon is negative", GGML_OP_NORM, 0, static_cast<int32_t>(0xbf800000)),
        set_param("rms_norm", "its epsilon is negative", GGML_OP_RMS_NORM, 0, 0x7fc00000),
        spread("l2_norm", "its shape is not", GGML_OP_L2_NORM, 0),
        set_param("group_norm", "no or too many groups", GGML_OP_GROUP_NORM, 0, 0),
        set_param("group_norm", "no or too many groups", GGML_OP_GROUP_NORM, 0, 5),
        set_param("pool_2d", "its kind does not exist", GGML_OP_POOL_2D, 0, 2),
        set_param("pool_2d", "its windows are empty, or overlap", GGML_OP_POOL_2D, 1, 0),
        set_param("pool_2d", "its windows are empty, or overlap", GGML_OP_POOL_2D, 3, 3),
        set_param("pool_2d", "its windows are empty, or overlap", GGML_OP_POOL_2D, 4, 0),
        set_param("pool_2d", "its margin does not fit", GGML_OP_POOL_2D, 5, -1),
        set_param("pool_2d", "its margin does not fit", GGML_OP_POOL_2D, 6, 1),
        set_param("pool_2d", "its shape is not that of its windows", GGML_OP_POOL_2D, 3, 8),
        set_type("pool_2d", "its source is neither", GGML_OP_POOL_2D, 0, GGML_TYPE_I32),
        shorten("pool_2d", "it is not contiguous", GGML_OP_POOL_2D, 0, 0),
    });
}

TEST("rules: products and attention") {
    expect({
        set_type("mul_mat", "this type is not multiplied", GGML_OP_MUL_MAT, 0, GGML_TYPE_I32),
        set_type("mul_mat", "these types do not go together", GGML_OP_MUL_MAT, 1, GGML_TYPE_I32),
        shorten("mul_mat", "its sources do not fit each other", GGML_OP_MUL_MAT, 1, 0),
        shorten("mul_mat", "its shape is not that of a product", GGML_OP_MUL_MAT, 0, 1),
        shorten("mul_mat", "its shape is not that of a product", GGML_OP_MUL_MAT, 1, 1),
        set_param("mul_mat", "its hint does not exist", GGML_OP_MUL_MAT, 1, 2),
        set_param("mul_mat", "not of a power of two", GGML_OP_MUL_MAT, 1, 1),
        {"mul_mat", "it is transposed", [](table & t) { t.back().nb[2] = 0; }},
        shorten("mul_mat_id", "its experts do not fit its input", GGML_OP_MUL_MAT_ID, 2, 1),
        set_type("mul_mat_id", "these types do not go together", GGML_OP_MUL_MAT_ID, 2, GGML_TYPE_F32),
        {"mul_mat_id", "its shape is not that of a product", [](table & t) { t.back().ne[1] = 1; }},
        set_type("soft_max", "its mask is neither", GGML_OP_SOFT_MAX, 1, GGML_TYPE_BF16),
        shorten("soft_max", "its mask does not fit", GGML_OP_SOFT_MAX, 1, 0),
        shorten("soft_max", "its mask does not fit", GGML_OP_SOFT_MAX, 1, 1),
        shorten("soft_max", "its sinks are not one for each head", GGML_OP_SOFT_MAX, 2, 0),
        set_param("rope", "its mode does not exist", GGML_OP_ROPE, 2, 3),
        set_param("rope", "it does not rotate pairs", GGML_OP_ROPE, 1, 0),
        set_param("rope", "it does not rotate pairs", GGML_OP_ROPE, 1, 3),
        set_param("rope", "it rotates beyond its rows", GGML_OP_ROPE, 1, 18),
        set_param("rope partly", "it rotates beyond its rows", GGML_OP_ROPE, 15, 10),
        set_param("rope partly", "it rotates beyond its rows", GGML_OP_ROPE, 15, -2),
        shorten("rope", "it has too few positions", GGML_OP_ROPE, 1, 0),
        shorten("rope sections", "it has too few positions", GGML_OP_ROPE, 1, 0),
        shorten("rope", "it has too few factors", GGML_OP_ROPE, 2, 0),
        set_param("rope sections", "a section is negative", GGML_OP_ROPE, 11, -1),
        set_param("rope sections", "its sections are longer", GGML_OP_ROPE, 11, 100),
        {"rope sections", "it has no sections",
         [](table & t) { std::fill_n(node_of(t, GGML_OP_ROPE).op_params + 11, 4, 0); }},
        set_param("rope vision", "it does not rotate whole rows", GGML_OP_ROPE, 1, 4),
        set_param("rope back", "it does not rotate pairs", GGML_OP_ROPE_BACK, 1, 0),
        {"rope back", "sections are not rotated back",
         [](table & t) {
             node_of(t, GGML_OP_ROPE_BACK).op_params[2] = GGML_ROPE_TYPE_MROPE;
             node_of(t, GGML_OP_ROPE_BACK).op_params[11] = 1;
         }},
        set_type("flash_attn", "its queries are not F32", GGML_OP_FLASH_ATTN_EXT, 0, GGML_TYPE_I32),
        set_type("flash_attn", "its cache has an unknown type", GGML_OP_FLASH_ATTN_EXT, 1, GGML_TYPE_I16),
        shorten("flash_attn", "its queries, keys and values do not fit", GGML_OP_FLASH_ATTN_EXT, 1, 1),
        shorten("flash_attn", "its queries, keys and values do not fit", GGML_OP_FLASH_ATTN_EXT, 0, 0),
        shorten("flash_attn", "its mask does not fit", GGML_OP_FLASH_ATTN_EXT, 3, 0),
        shorten("flash_attn", "its mask does not fit", GGML_OP_FLASH_ATTN_EXT, 3, 1),
        shorten("flash_attn", "its sinks are not one for each head", GGML_OP_FLASH_ATTN_EXT, 4, 0),
        set_param("flash_attn", "its precision does not exist", GGML_OP_FLASH_ATTN_EXT, 3, 1),
        {"flash_attn", "it has no keys or no values",
         [](table & t) {
             for (const size_t i : {0U, 1U, 2U}) {
                 source(t, GGML_OP_FLASH_ATTN_EXT, i).ne[2] = 0;
             }
             t.back().ne[1] = 0;
         }},
        {"flash_attn", "its heads do not fit", [](table & t) { source(t, GGML_OP_FLASH_ATTN_EXT, 0).ne[2] = 3; }},
        {"flash_attn long", "it is not contiguous",
         [](table & t) {
             t.back().nb[1] = 1 << 20;
             t.back().ne[1] = 1;
             t.back().nb[2] = 1 << 20;
             t.back().nb[3] = 1 << 20;
         }},
    });
}

TEST("rules: sparse attention and hyper-connections") {
    expect({
        set_type("lightning_indexer", "it is F32 only", GGML_OP_LIGHTNING_INDEXER, 0, GGML_TYPE_I32),
        set_type(
            "lightning_indexer", "its cache has an unknown type", GGML_OP_LIGHTNING_INDEXER, 1, GGML_TYPE_I16
        ),
        set_type("lightning_indexer", "its mask is not F16", GGML_OP_LIGHTNING_INDEXER, 3, GGML_TYPE_BF16),
        shorten("lightning_indexer", "its keys do not fit its queries", GGML_OP_LIGHTNING_INDEXER, 0, 0),
        shorten("lightning_indexer", "its keys do not fit its queries", GGML_OP_LIGHTNING_INDEXER, 1, 3),
        shorten("lightning_indexer", "its weights do not fit", GGML_OP_LIGHTNING_INDEXER, 2, 0),
        shorten("lightning_indexer", "its weights do not fit", GGML_OP_LIGHTNING_INDEXER, 2, 1),
        shorten("lightning_indexer", "its mask does not fit", GGML_OP_LIGHTNING_INDEXER, 1, 2),
        shorten("lightning_indexer", "its mask does not fit", GGML_OP_LIGHTNING_INDEXER, 3, 1),
        {"lightning_indexer", "its shape is not that of its scores", [](table & t) { t.back().ne[1] = 4; }},
        set_param("hyper_comb", "no or too many rounds", GGML_OP_DSV4_HC_COMB, 1, 0),
        set_param("hyper_comb", "no or too many rounds", GGML_OP_DSV4_HC_COMB, 1, INT32_MAX),
        shorten("hyper_comb", "it does not mix four copies", GGML_OP_DSV4_HC_COMB, 0, 0),
        shorten("hyper_comb", "its scale does not fit", GGML_OP_DSV4_HC_COMB, 1, 0),
        shorten("hyper_comb", "its base does not fit", GGML_OP_DSV4_HC_COMB, 2, 0),
        {"hyper_comb", "its shape is not that of its mixes", [](table & t) { t.back().ne[2] = 4; }},
        set_param("hyper_pre", "its kind does not exist", GGML_OP_DSV4_HC_PRE, 1, 2),
        set_param("hyper_pre", "its weights do not fit", GGML_OP_DSV4_HC_PRE, 1, 1),
        shorten("hyper_pre", "its weights do not fit", GGML_OP_DSV4_HC_PRE, 1, 1),
        shorten("hyper_pre gated", "its weights do not fit", GGML_OP_DSV4_HC_PRE, 1, 0),
        {"hyper_pre", "its shape is not that of its source", [](table & t) { t.back().ne[1] = 4; }},
        shorten("hyper_post", "its residual does not fit", GGML_OP_DSV4_HC_POST, 1, 0),
        shorten("hyper_post", "its weights do not fit", GGML_OP_DSV4_HC_POST, 2, 0),
        shorten("hyper_post", "its mix does not fit", GGML_OP_DSV4_HC_POST, 3, 2),
        {"hyper_post", "its shape is not that of its residual", [](table & t) { t.back().ne[1] = 2; }},
        set_type("hyper_post", "it is F32 only", GGML_OP_DSV4_HC_POST, 3, GGML_TYPE_I32),
    });
}

TEST("rules: nothing lies in the way of what has no elements") {
    // GET_ROWS of no rows, as in a micro-batch without outputs: it may lie in the middle of what it reads.
    const auto none = [](ggml_context * c) {
        return ggml_get_rows(
            c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 8, 6), ggml_new_tensor_1d(c, GGML_TYPE_I32, 0)
        );
    };
    const host::graph built({"none", none}, main_memory());
    table t = built.table();
    t.back().buffer_id = t[0].buffer_id;
    t.back().offset = t[0].offset + 64;
    CHECK_EQUAL(check::thrown([&] { built.decode(t); }), "");
}

TEST("rules: ops with a state") {
    expect({
        shorten("ssm_conv", "its shape is not that of its input", GGML_OP_SSM_CONV, 0, 2),
        shorten("ssm_conv", "its sources do not fit each other", GGML_OP_SSM_CONV, 0, 1),
        {"ssm_conv", "its sources do not fit each other",
         [](table & t) {
             source(t, GGML_OP_SSM_CONV, 0).ne[0] = 2;
             source(t, GGML_OP_SSM_CONV, 0).nb[1] = 8;
         }},
        shorten("ssm_scan mamba2", "its state does not fit", GGML_OP_SSM_SCAN, 1, 1),
        shorten("ssm_scan mamba2", "its steps do not fit", GGML_OP_SSM_SCAN, 2, 0),
        {"ssm_scan mamba2", "its decay does not fit",
         [](table & t) {
             tensor & s = source(t, GGML_OP_SSM_SCAN, 3);
             s.ne[1] = 2;
             s.nb[2] = s.nb[3] = 8;
         }},
        {"ssm_scan mamba", "its states are not multiples of 16",
         [](table & t) {
             for (const size_t i : {0U, 3U, 4U, 5U}) {
                 tensor & s = source(t, GGML_OP_SSM_SCAN, i);
                 s.ne[0] = 8;
                 s.nb[1] = 32;
                 s.nb[2] = s.nb[1] * static_cast<uint64_t>(s.ne[1]);
                 s.nb[3] = s.nb[2] * static_cast<uint64_t>(s.ne[2]);
             }
         }},
        shorten("ssm_scan mamba2", "its groups do not fit", GGML_OP_SSM_SCAN, 4, 1),
        shorten("ssm_scan mamba2", "its numbers of states do not fit", GGML_OP_SSM_SCAN, 6, 0),
        set_param("ssm_scan mamba2", "its size is not that", GGML_OP_SSM_SCAN, 0, 2),
        set_param("ssm_scan mamba2", "it keeps no or too many states", GGML_OP_SSM_SCAN, 0, 0),
        {"ssm_scan mamba2", "its state is not contiguous",
         [](table & t) {
             source(t, GGML_OP_SSM_SCAN, 0).nb[3] = 4;
             source(t, GGML_OP_SSM_SCAN, 0).ne[3] = 1;
         }},
        shorten("rwkv_wkv6", "its sources do not fit each other", GGML_OP_RWKV_WKV6, 1, 2),
        {"rwkv_wkv7", "its state does not fit",
         [](table & t) {
             tensor & s = source(t, GGML_OP_RWKV_WKV7, 6);
             s.ne[0] /= 2;
             s.nb[1] /= 2;
         }},
        {"gated_linear_attn", "its tokens do not fit its sequences",
         [](table & t) {
             tensor & s = source(t, GGML_OP_GATED_LINEAR_ATTN, 4);
             s.ne[1] = 4;
             s.ne[0] /= 2;
             s.nb[1] /= 2;
         }},
        shorten("gated_delta_net", "its state does not fit", GGML_OP_GATED_DELTA_NET, 5, 3),
        shorten("gated_delta_net", "its beta does not fit", GGML_OP_GATED_DELTA_NET, 4, 3),
        set_param("gated_delta_net", "its size is not that", GGML_OP_GATED_DELTA_NET, 0, 3),
        shorten("solve_tri", "it is not contiguous", GGML_OP_SOLVE_TRI, 1, 1),
    });
}
