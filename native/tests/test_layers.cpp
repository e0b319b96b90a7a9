// Which layer a node belongs to, and graphs in the order of their layers.

#include "host/layers.h"
#include "tests/check.h"

#include "ggml-cpp.h"
#include "ggml-impl.h"

using mesh::layer_in;
using mesh::NO_LAYER;

namespace {

struct builder {
    ggml_context_ptr context{ggml_init({1 << 20, nullptr, true})};
    ggml_cgraph * graph = ggml_new_graph(context.get());

    ggml_tensor * input(const char * name) const {
        return ggml_set_name(ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 4), name);
    }

    ggml_tensor * sum(ggml_tensor * a, ggml_tensor * b, const char * name = "") const {
        return ggml_set_name(ggml_add(context.get(), a, b), name);
    }

    void expand(ggml_tensor * tensor) const {
        ggml_build_forward_expand(graph, tensor);
    }
};

}  // namespace

TEST("layers: names") {
    CHECK_EQUAL(layer_in("blk.12.attn_q.weight"), 12);
    CHECK_EQUAL(layer_in("blk.3.ffn_norm.weight (view)"), 3);
    CHECK_EQUAL(layer_in("enc.blk.2.attn_q.weight"), 2);
    CHECK_EQUAL(layer_in("cache_k_l7"), 7);
    CHECK_EQUAL(layer_in("cache_r_l10 (view) (permuted)"), 10);
    CHECK_EQUAL(layer_in("dsv4_csa_state_kv_l4"), 4);
    CHECK_EQUAL(layer_in("l_out-5"), 5);
    CHECK_EQUAL(layer_in("Qcur-31 (reshaped) (permuted)"), 31);
    CHECK_EQUAL(layer_in("node_17"), NO_LAYER);
    CHECK_EQUAL(layer_in("leaf_3"), NO_LAYER);
    CHECK_EQUAL(layer_in("output.weight"), NO_LAYER);
    CHECK_EQUAL(layer_in("blk.attn"), NO_LAYER);
    CHECK_EQUAL(layer_in("some-thing-4b"), NO_LAYER);
    CHECK_EQUAL(layer_in(""), NO_LAYER);
}

TEST("layers: a node without a name is of the last layer that it is computed from") {
    const builder b;
    ggml_tensor * first = b.sum(b.input("x"), b.input("blk.1.bias"));
    ggml_tensor * second = b.sum(first, b.input("l_out-4"));
    CHECK_EQUAL(mesh::layer_of(first), 1);
    CHECK_EQUAL(mesh::layer_of(second), 4);
    CHECK_EQUAL(mesh::layer_of(b.sum(second, second, "ffn_inp-2")), 2);
    CHECK_EQUAL(mesh::layer_of(b.sum(b.input("x"), b.input("y"))), NO_LAYER);
    ggml_tensor * far = b.input("x");
    for (int i = 0; i < 300; ++i) {
        far = b.sum(far, far);
    }
    CHECK_EQUAL(mesh::layer_of(far), mesh::UNKNOWN_LAYER);
}

TEST("layers: a graph is put in the order of its layers, and otherwise left as it is") {
    const builder b;
    ggml_tensor * state = b.sum(b.input("cache_r_l2"), b.input("zero"));  // the next layer's, too early
    ggml_tensor * mask = b.sum(b.input("kq_mask"), b.input("slope"));     // from inputs alone
    ggml_tensor * tail = b.sum(b.input("blk.1.bias"), b.input("x"));
    ggml_tensor * out = b.sum(tail, b.input("y"), "l_out-1");
    ggml_tensor * next = b.sum(b.sum(out, state), mask, "l_out-2");
    for (ggml_tensor * each : {state, mask, out, next}) {
        b.expand(each);
    }
    CHECK(b.graph->nodes[0] == state);
    const mesh::graph_layers layers(b.graph);
    CHECK_EQUAL(layers.of(state), 2);
    CHECK_EQUAL(layers.of(mask), 2);
    CHECK_EQUAL(layers.of(tail), 1);
    CHECK_EQUAL(layers.of(b.input("other")), NO_LAYER);
    layers.sort(b.graph);
    CHECK(b.graph->nodes[0] == tail && b.graph->nodes[1] == out);
    CHECK(b.graph->nodes[2] == state && b.graph->nodes[3] == mask);
    CHECK(b.graph->nodes[5] == next);
}

TEST("layers: what is computed from inputs alone for layers of two devices is the host's") {
    const builder b;
    const int two_devices[2] = {};
    ggml_tensor * weights[] = {b.input("blk.1.bias"), b.input("blk.2.bias"), b.input("blk.3.bias")};
    mesh::note_layers(&two_devices[0], weights, 2);
    mesh::note_layers(&two_devices[1], weights + 2, 1);
    ggml_tensor * embedded = b.sum(b.input("tokens"), b.input("token_embd.weight"));
    ggml_tensor * all_layers = b.sum(embedded, b.input("y"));  // an input of each layer
    ggml_tensor * mask = b.sum(b.input("kq_mask"), b.input("slope"));
    ggml_tensor * first = b.sum(b.sum(embedded, mask), weights[0], "l_out-1");
    ggml_tensor * second = b.sum(b.sum(b.sum(first, all_layers), mask), weights[1], "l_out-2");
    ggml_tensor * third = b.sum(b.sum(second, all_layers, "ffn_inp-3"), weights[2], "l_out-3");
    ggml_tensor * unused = b.sum(b.input("z"), b.input("y"));
    b.expand(third);
    b.expand(unused);
    const mesh::graph_layers layers(b.graph);
    CHECK_EQUAL(layers.of(unused), mesh::HOSTS_LAYER);
    CHECK_EQUAL(layers.of(all_layers), mesh::HOSTS_LAYER);
    CHECK_EQUAL(layers.of(embedded), mesh::HOSTS_LAYER);
    CHECK_EQUAL(layers.of(mask), 1);  // of one device's layers alone
    CHECK_EQUAL(layers.of(third), 3);
    CHECK(b.graph->nodes[1] == mask);
    layers.sort(b.graph);
    CHECK(b.graph->nodes[0] == embedded && b.graph->nodes[1] == all_layers);
    CHECK(b.graph->nodes[b.graph->n_nodes - 1] == third);
    mesh::note_layers(nullptr, weights, 3);
}

TEST("layers: a layer that comes round again does not go before what it is computed from") {
    const builder b;
    ggml_tensor * once = b.sum(b.input("x"), b.input("blk.3.bias"), "out-3");
    ggml_tensor * again = b.sum(once, b.input("blk.0.bias"), "out-0");
    b.expand(again);
    const mesh::graph_layers layers(b.graph);
    layers.sort(b.graph);
    CHECK_EQUAL(layers.of(again), 0);
    CHECK(b.graph->nodes[0] == once && b.graph->nodes[1] == again);
}
