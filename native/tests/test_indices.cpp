// Row numbers: looked at before each run, or bounded by what computes them.

#include "tests/check.h"
#include "tests/host.h"
#include "tests/opaque_memory.h"
#include "tests/refusals.h"

#include <algorithm>
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

// How often numbers are looked at while a graph computes.
size_t looks(const mesh::built_graph & graph) {
    return static_cast<size_t>(std::count_if(
        graph.checks.begin(), graph.checks.end(), [](const mesh::index_check & each) { return each.before != 0; }
    ));
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
    CHECK_EQUAL(looks(here.decode(here.table())), 0U);  // the CPU writes all of it
    const host::graph there({"two views", two_views}, opaque_memory::memory());
    CHECK_EQUAL(looks(there.decode(there.table())), 1U);
}

namespace {

// A mixture that is spoilt: how often its numbers are looked at, and what is said of them in the end.
std::pair<size_t, std::string> spoilt_mixture(const std::function<void(table &)> & spoil) {
    const host::graph built(host::example_named("mixture"), main_memory());
    table t = built.table();
    spoil(t);
    const mesh::built_graph decoded = built.decode(t);
    return {looks(decoded), check::thrown([&] { host::run(decoded); })};
}

}  // namespace

TEST("indices: computed numbers are bounded by what computes them, or looked at") {
    CHECK_EQUAL(spoilt_mixture([](table &) {}).first, 0U);
    // More is sorted than there are experts.
    CHECK(spoilt_mixture([](table & t) { source(t, GGML_OP_MUL_MAT_ID, 0).ne[2] = 3; }).first > 0);
    // What sorts is not computed.
    CHECK(spoilt_mixture([](table & t) { node_of(t, GGML_OP_ARGSORT).flags = 0; }).first > 0);
    // One expert twice: rows of the view straddle those that were sorted.
    CHECK(spoilt_mixture([](table & t) { node_of(t, GGML_OP_VIEW).nb[1] = 12; }).first > 0);
    // Something else is written over them before they are used.
    const auto overwritten = [](table & t) {
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
    };
    CHECK_CONTAINS(spoilt_mixture(overwritten).second, "row 2139062143 is asked for");
    expect({
        {"mixture", "its row numbers do not lie side by side",
         [](table & t) { node_of(t, GGML_OP_VIEW).nb[0] = 8; }},
    });
}

namespace {

using changed_ids = std::function<ggml_tensor *(ggml_context *, ggml_tensor *)>;

// Row numbers that are sorted, changed and then used.
host::example with_ids(const changed_ids & change) {
    return {"ids", [=](ggml_context * c) {
                ggml_tensor * best = ggml_top_k(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 6, 3), 2);
                return ggml_get_rows(c, ggml_new_tensor_3d(c, GGML_TYPE_F32, 8, 6, 3), change(c, best));
            }};
}

size_t looks_at(const changed_ids & change) {
    const host::graph built(with_ids(change), main_memory());
    return looks(built.decode(built.table()));
}

// In floats, as sparse attention counts cells of blocks.
ggml_tensor * counted(ggml_context * c, ggml_tensor * best, float factor) {
    return ggml_cast(c, ggml_scale(c, ggml_cast(c, best, GGML_TYPE_F32), factor), GGML_TYPE_I32);
}

}  // namespace

TEST("indices: copies of what was sorted are as good") {
    CHECK_EQUAL(looks_at([](ggml_context *, ggml_tensor * best) { return best; }), 0U);
    CHECK_EQUAL(looks_at([](ggml_context * c, ggml_tensor * best) { return ggml_cont(c, best); }), 0U);
    CHECK_EQUAL(
        looks_at([](ggml_context * c, ggml_tensor * best) { return ggml_dup(c, ggml_cont(c, best)); }), 0U
    );
    CHECK_EQUAL(looks_at([](ggml_context * c, ggml_tensor * best) { return counted(c, best, 1.0F); }), 1U);
    const auto of_others = [](ggml_context * c, ggml_tensor *) {
        return ggml_cont(c, ggml_new_tensor_2d(c, GGML_TYPE_I32, 2, 3));
    };
    CHECK_EQUAL(looks_at(of_others), 1U);
}

TEST("indices: experts from a copy may come twice") {
    const auto build = [](ggml_context * c) {
        ggml_tensor * best = ggml_top_k(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 4, 2), 3);
        // Rows that go over two of the sorted.
        ggml_tensor * others = ggml_reshape_2d(c, ggml_cont(c, best), 2, 3);
        return ggml_mul_mat_id(
            c, ggml_new_tensor_3d(c, GGML_TYPE_F32, 16, 8, 4), ggml_new_tensor_3d(c, GGML_TYPE_F32, 16, 1, 3),
            others
        );
    };
    const host::graph built({"experts", build}, main_memory());
    CHECK_EQUAL(looks(built.decode(built.table())), 1U);
}

TEST("indices: a graph in pieces computes the same, and stops before a number that is out of bounds") {
    const auto within = with_ids([](ggml_context * c, ggml_tensor * best) { return counted(c, best, 1.0F); });
    const host::graph here(within, main_memory());
    const host::graph there(within, main_memory());
    host::compute(here.get());
    host::run(there.decode(there.table()));
    CHECK(here.result() == there.result());
    const auto beyond = with_ids([](ggml_context * c, ggml_tensor * best) { return counted(c, best, 100.0F); });
    const host::graph wrong(beyond, main_memory());
    CHECK_CONTAINS(
        check::thrown([&] { host::run(wrong.decode(wrong.table())); }), "00 is asked for where there are 6"
    );
}

namespace {

// A sort, an attention and rows that are taken by number, all at the beginning of buffers of their own.
class placed_nodes {
  public:
    ggml_tensor * sorted;
    ggml_tensor * attention;
    ggml_tensor * ids;
    ggml_tensor * rows;

    placed_nodes() {
        ggml_context * c = context_.get();
        sorted = ggml_argsort(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 6, 1), GGML_SORT_ORDER_DESC);
        ggml_tensor * keys = ggml_new_tensor_3d(c, GGML_TYPE_F16, 64, 32, 1);
        attention = ggml_flash_attn_ext(
            c, ggml_new_tensor_3d(c, GGML_TYPE_F32, 64, 1, 1), keys, keys, nullptr, 1.0F, 0.0F, 0.0F
        );
        ids = ggml_new_tensor_1d(c, GGML_TYPE_I32, 6);
        rows = ggml_get_rows(c, ggml_new_tensor_2d(c, GGML_TYPE_F32, 8, 6), ids);
        for (ggml_tensor * each : {sorted, attention, ids, rows}) {
            buffers_.emplace_back(ggml_backend_buft_alloc_buffer(opaque_memory::memory(), 1 << 20));
            put(each, buffers_.back().get(), 0);
            each->flags |= GGML_TENSOR_FLAG_COMPUTE;
        }
    }

    void put(ggml_tensor * tensor, ggml_backend_buffer_t buffer, size_t offset) {
        tensor->buffer = buffer;
        tensor->data = static_cast<uint8_t *>(ggml_backend_buffer_get_base(buffer)) + offset;
    }

    // Before which node its numbers are looked at; nothing where they need no look.
    std::vector<size_t> looks() const {
        std::vector<size_t> found;
        for (const mesh::index_check & each : mesh::index_checks({{0, sorted}, {1, attention}, {2, rows}})) {
            found.push_back(each.before);
        }
        return found;
    }

  private:
    ggml_context_ptr context_{ggml_init({1 << 16, nullptr, true})};
    std::vector<ggml_backend_buffer_ptr> buffers_;
};

}  // namespace

TEST("indices: buffers of a device may have the same addresses") {
    opaque_memory::device() = {};
    placed_nodes nodes;
    CHECK(nodes.looks() == std::vector<size_t>{0});  // what a client wrote, not what was sorted
    CHECK(!mesh::byte_range(*nodes.sorted).overlaps(mesh::byte_range(*nodes.ids)));
    CHECK(!mesh::same_place(*nodes.ids, *nodes.sorted));
    ggml_tensor view = *nodes.ids;  // that is not allocated yet
    view.buffer = nullptr;
    view.view_src = nodes.ids;
    CHECK(mesh::begin_together(view, *nodes.ids));
    nodes.put(nodes.ids, nodes.sorted->buffer, 0);
    CHECK(nodes.looks().empty());
}

TEST("indices: numbers behind a result that a kernel writes beyond are looked at after it") {
    opaque_memory::device() = {};
    placed_nodes nodes;
    nodes.put(nodes.ids, nodes.attention->buffer, ggml_nbytes(nodes.attention));
    CHECK(nodes.looks() == std::vector<size_t>{0});
    opaque_memory::device().scratch = 1 << 10;
    CHECK(nodes.looks() == std::vector<size_t>{2});
    opaque_memory::device() = {};
}
