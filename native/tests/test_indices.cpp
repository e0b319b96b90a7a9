// Row numbers: looked at before each run, or bounded by what computes them.

#include "tests/check.h"
#include "tests/host.h"
#include "tests/opaque_memory.h"
#include "tests/refusals.h"

#include <tuple>

using namespace refusals;

namespace {

// Decodes an example whose numbers were changed, and looks at them.
std::string said_of_numbers(
    const char * name, ggml_op op, size_t i, int64_t value, ggml_backend_buffer_type_t memory = main_memory()
) {
    const host::graph built(host::example_named(name), memory);
    const mesh::built_graph decoded = built.decode(built.table());
    for (int n = 0; n < ggml_graph_n_nodes(decoded.graph); ++n) {
        const ggml_tensor * node = ggml_graph_node(decoded.graph, n);
        if (node->op == op) {
            ggml_backend_tensor_set(node->src[i], &value, 0, ggml_type_size(node->src[i]->type));
        }
    }
    return check::thrown([&] { mesh::run_checks(decoded.checks); });
}

}  // namespace

TEST("indices: numbers out of bounds are found before each run") {
    CHECK_EQUAL(said_of_numbers("get_rows", GGML_OP_GET_ROWS, 1, 5), "");
    CHECK_CONTAINS(said_of_numbers("get_rows", GGML_OP_GET_ROWS, 1, 6), "row 6 is asked for where there are 6");
    CHECK_CONTAINS(said_of_numbers("get_rows", GGML_OP_GET_ROWS, 1, -1), "row -1");
    CHECK_CONTAINS(said_of_numbers("set_rows", GGML_OP_SET_ROWS, 1, 6), "row 6");
    CHECK_CONTAINS(said_of_numbers("set_rows", GGML_OP_SET_ROWS, 1, INT64_MIN), "row -");
    CHECK_CONTAINS(said_of_numbers("add_id", GGML_OP_ADD_ID, 2, 4), "row 4");
    CHECK_CONTAINS(said_of_numbers("mul_mat_id", GGML_OP_MUL_MAT_ID, 2, 4), "row 4");
    CHECK_CONTAINS(said_of_numbers("mul_mat_id", GGML_OP_MUL_MAT_ID, 2, 1), "one expert is asked for twice");
    CHECK_CONTAINS(said_of_numbers("ssm_scan mamba2", GGML_OP_SSM_SCAN, 6, 3), "row 3");
}

TEST("indices: numbers in another device's memory are looked at, too") {
    opaque_memory::device() = {};
    for (const auto & [name, op, i] :
         {std::tuple{"get_rows", GGML_OP_GET_ROWS, 1}, std::tuple{"set_rows", GGML_OP_SET_ROWS, 1},
          std::tuple{"ssm_scan mamba2", GGML_OP_SSM_SCAN, 6}}) {
        const auto source = static_cast<size_t>(i);
        CHECK_EQUAL(said_of_numbers(name, op, source, 0, opaque_memory::memory()), "");
        CHECK_CONTAINS(said_of_numbers(name, op, source, 6, opaque_memory::memory()), "row 6 is asked for");
        CHECK_CONTAINS(said_of_numbers(name, op, source, -1, opaque_memory::memory()), "row -1 is asked for");
    }
    CHECK_CONTAINS(
        said_of_numbers("mul_mat_id", GGML_OP_MUL_MAT_ID, 2, 1, opaque_memory::memory()), "asked for twice"
    );
}

TEST("indices: what the graph computes itself is not read back") {
    opaque_memory::device() = {};
    CHECK_EQUAL(said_of_numbers("mixture", GGML_OP_SOFT_MAX, 0, 0, opaque_memory::memory()), "");
    CHECK_EQUAL(opaque_memory::device().copied, 0U);
}

TEST("indices: numbers that lie far apart do not bring along what lies between them") {
    opaque_memory::device() = {};
    const auto sparse = [](ggml_context * c) {
        ggml_tensor * all = ggml_new_tensor_2d(c, GGML_TYPE_I32, 1 << 18, 4);
        ggml_tensor * some = ggml_view_2d(c, all, 3, 4, all->nb[1], 0);
        return ggml_get_rows(c, ggml_new_tensor_3d(c, GGML_TYPE_F32, 8, 6, 4), some);
    };
    const host::graph built({"sparse", sparse}, opaque_memory::memory());
    mesh::run_checks(built.decode(built.table()).checks);
    CHECK_EQUAL(opaque_memory::device().copied, 3 * 4 * sizeof(int32_t));
    const auto dense = [](ggml_context * c) {
        ggml_tensor * rows = ggml_new_tensor_2d(c, GGML_TYPE_F32, 2, 1 << 18);
        return ggml_get_rows(c, rows, ggml_new_tensor_1d(c, GGML_TYPE_I32, 1 << 18));
    };
    const host::graph long_row({"dense", dense}, opaque_memory::memory());
    opaque_memory::device() = {};
    mesh::run_checks(long_row.decode(long_row.table()).checks);
    CHECK_EQUAL(opaque_memory::device().copied, sizeof(int32_t) << 18);
    CHECK(opaque_memory::device().largest_copy <= 1 << 16);  // and not all at once
}

TEST("indices: more numbers than there are experts are refused before they are remembered") {
    const auto many = [](ggml_context * c) {
        return ggml_mul_mat_id(
            c, ggml_new_tensor_3d(c, GGML_TYPE_F32, 4, 2, 3), ggml_new_tensor_3d(c, GGML_TYPE_F32, 4, 1, 1),
            ggml_new_tensor_2d(c, GGML_TYPE_I32, 64, 1)
        );
    };
    const host::graph built({"many", many}, main_memory());
    const mesh::built_graph decoded = built.decode(built.table());
    CHECK_CONTAINS(check::thrown([&] { mesh::run_checks(decoded.checks); }), "asked for twice");
}

TEST("indices: all users of what a GPU sorts take the same of it") {
    const auto two_views = [](ggml_context * c) {
        ggml_tensor * sorted = ggml_argsort(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 6, 3), GGML_SORT_ORDER_DESC);
        ggml_tensor * rows = ggml_new_tensor_3d(c, GGML_TYPE_F32, 8, 6, 3);
        ggml_tensor * first = ggml_get_rows(c, rows, ggml_view_2d(c, sorted, 2, 3, sorted->nb[1], 0));
        ggml_tensor * others = ggml_get_rows(c, rows, ggml_view_2d(c, sorted, 2, 3, sorted->nb[1], 8));
        return ggml_add(c, first, others);
    };
    const host::graph here({"two views", two_views}, main_memory());
    CHECK_EQUAL(check::thrown([&] { here.decode(here.table()); }), "");  // the CPU writes all of it
    const host::graph there({"two views", two_views}, opaque_memory::memory());
    CHECK_CONTAINS(check::thrown([&] { there.decode(there.table()); }), "may be out of bounds");
}

TEST("indices: computed numbers have to be bounded by what computes them") {
    const char * says = "its row numbers are computed, and may be out of bounds";
    expect({
        // More is sorted than there are experts.
        {"mixture", says, [](table & t) { source(t, GGML_OP_MUL_MAT_ID, 0).ne[2] = 3; }},
        {"mixture", "its row numbers do not lie side by side",
         [](table & t) { node_of(t, GGML_OP_VIEW).nb[0] = 8; }},
        // What sorts is not computed.
        {"mixture", says, [](table & t) { node_of(t, GGML_OP_ARGSORT).flags = 0; }},
        // One expert twice: rows of the view straddle those that were sorted.
        {"mixture", says, [](table & t) { node_of(t, GGML_OP_VIEW).nb[1] = 12; }},
        // Something else is written over them before they are used.
        {"mixture", says,
         [](table & t) {
             const tensor sorted = node_of(t, GGML_OP_ARGSORT);
             tensor filled = sorted;
             filled.op = GGML_OP_FILL;
             filled.type = GGML_TYPE_F32;
             const auto at = static_cast<size_t>(&node_of(t, GGML_OP_MUL_MAT_ID) - t.data());
             filled.use_count = 9;
             tensor place = filled;
             place.op = GGML_OP_NONE;
             place.is_node = 0;
             std::fill(std::begin(place.sources), std::end(place.sources), 0);
             table longer(t.begin(), t.begin() + static_cast<std::ptrdiff_t>(at));
             longer.push_back(place);
             std::fill(std::begin(filled.sources), std::end(filled.sources), 0);
             filled.sources[0] = static_cast<uint32_t>(longer.size());
             std::fill(std::begin(filled.op_params), std::end(filled.op_params), 0x7f7f7f7f);
             longer.push_back(filled);
             for (size_t i = at; i < t.size(); ++i) {
                 tensor moved = t[i];
                 for (uint32_t & number : moved.sources) {
                     number += number > at ? 2 : 0;
                 }
                 moved.view_of += moved.view_of > at ? 2 : 0;
                 longer.push_back(moved);
             }
             t = longer;
         }},
    });
}

namespace {

// Says what is wrong with row numbers that are sorted, changed and then used.
std::string said_of_copies(const std::function<ggml_tensor *(ggml_context *, ggml_tensor *)> & change) {
    const auto build = [&](ggml_context * c) {
        ggml_tensor * best = ggml_top_k(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 6, 3), 2);
        return ggml_get_rows(c, ggml_new_tensor_3d(c, GGML_TYPE_F32, 8, 6, 3), change(c, best));
    };
    const host::graph built({"copies", build}, main_memory());
    return check::thrown([&] { built.decode(built.table()); });
}

}  // namespace

TEST("indices: copies of what was sorted are as good") {
    CHECK_EQUAL(said_of_copies([](ggml_context *, ggml_tensor * best) { return best; }), "");
    CHECK_EQUAL(said_of_copies([](ggml_context * c, ggml_tensor * best) { return ggml_cont(c, best); }), "");
    CHECK_EQUAL(
        said_of_copies([](ggml_context * c, ggml_tensor * best) { return ggml_dup(c, ggml_cont(c, best)); }), ""
    );
    const auto converted = [](ggml_context * c, ggml_tensor * best) {
        return ggml_cast(c, ggml_cast(c, best, GGML_TYPE_F32), GGML_TYPE_I32);
    };
    CHECK_CONTAINS(said_of_copies(converted), "may be out of bounds");
    const auto of_others = [](ggml_context * c, ggml_tensor *) {
        return ggml_cont(c, ggml_new_tensor_2d(c, GGML_TYPE_I32, 2, 3));
    };
    CHECK_CONTAINS(said_of_copies(of_others), "may be out of bounds");
}

TEST("indices: experts from a copy may come twice") {
    const auto build = [](ggml_context * c) {
        ggml_tensor * best = ggml_top_k(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 4, 2), 3);
        ggml_tensor * others =
            ggml_reshape_2d(c, ggml_cont(c, best), 2, 3);  // rows that go over two of the sorted
        return ggml_mul_mat_id(
            c, ggml_new_tensor_3d(c, GGML_TYPE_F32, 16, 8, 4), ggml_new_tensor_3d(c, GGML_TYPE_F32, 16, 1, 3),
            others
        );
    };
    const host::graph built({"experts", build}, main_memory());
    CHECK_CONTAINS(check::thrown([&] { built.decode(built.table()); }), "may be out of bounds");
}
