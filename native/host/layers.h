#pragma once

// Which layer of a model a node of a graph belongs to.
//
// llama.cpp's scheduler knows no layers. It hands nodes without weights to the
// device of a neighbour in the graph, which at a boundary may be the next stage:
// the result then has to come back, a round trip for each token. A device can
// say that it does not compute a node, so it says so of other devices' layers.

#include "ggml-backend.h"

#include <unordered_map>

namespace mesh {

constexpr int NO_LAYER = -1;       // it is computed from inputs alone
constexpr int UNKNOWN_LAYER = -2;  // what it is computed from was too much to look at
constexpr int HOSTS_LAYER = -3;    // it is computed from inputs alone, and is the host's

// By its own name, as llama.cpp gives them, or the last of the layers of what it is computed from.
int layer_of(const ggml_tensor * node);

// The same for all nodes of a graph, without a limit. Nodes that are computed from inputs alone, such as masks, belong to
// the first layer that uses them. They are the host's where layers of several devices do (the first device would have to
// send them to others, with some of which it has no link), where no layer does, and where something is computed from
// them with a weight of the host.
class graph_layers {
  public:
    explicit graph_layers(const ggml_cgraph * graph);

    // NO_LAYER where the node is not in the graph; HOSTS_LAYER where it is the host's.
    int of(const ggml_tensor * node) const;

    // Puts nodes in the order of their layers, the host's before all others, each after what it is computed from, else as
    // they were. llama.cpp has the first nodes of a recurrent layer before the last ones of the layer before: a stage
    // would compute in pieces.
    void sort(ggml_cgraph * graph) const;

  private:
    struct place {
        int layer = NO_LAYER;
        int order = NO_LAYER;  // no less than that of anything it is computed from
        bool from_inputs = false;
        bool of_worker = false;  // it is computed from a weight there
        bool of_host = false;
    };

    std::unordered_map<const ggml_tensor *, place> places_;

    void add(const ggml_tensor * node);
    void tell_sources(const ggml_tensor * node);
};

// While the scheduler looks at a graph: what is known of its nodes, for this thread. Null else.
const graph_layers *& scheduled_layers();

// The layer that a tensor's name speaks of: "blk.3.attn_q.weight", "cache_k_l3 (view)", "ffn_out-3". NO_LAYER if none.
int layer_in(const char * name);

// Remembers whose the layers of these weights are.
void note_layers(const void * owner, ggml_tensor ** weights, int count);

// Who holds a layer's weights; null where no worker does.
const void * owner_of(int layer);
bool any_layer_is_owned();

}  // namespace mesh
