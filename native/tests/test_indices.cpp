// Row numbers: looked at before each run, or bounded by what computes them.

#include "check.h"
#include "host.h"
#include "refusals.h"

using namespace refusals;

namespace {

// Decodes an example whose numbers were changed, and looks at them.
std::string said_of_numbers(const char * name, ggml_op op, size_t i, int64_t value) {
    const host::graph built(host::example_named(name), main_memory());
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

TEST("indices: computed numbers have to be bounded by what computes them") {
    const char * says = "its row numbers are computed, and may be out of bounds";
    expect({
        // More is sorted than there are experts.
        {"mixture", says, [](table & t) { source(t, GGML_OP_MUL_MAT_ID, 0).ne[2] = 3; }},
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
