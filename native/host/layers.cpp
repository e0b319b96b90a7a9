#include "host/layers.h"

#include "host/registry.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <vector>

namespace mesh {

namespace {

// Of the tensors that a node is computed from, back to those with a layer in their names. Most have their own.
constexpr size_t MAX_LOOKED_AT = 256;

std::map<int, const void *> & owners() {
    static std::map<int, const void *> all;
    return all;
}

// The number at `digits`, if it ends the name or is followed by what ggml adds to the names of views and copies.
int number_at(const char * digits) {
    char * end = nullptr;
    if (std::isdigit(static_cast<unsigned char>(*digits)) == 0) {
        return NO_LAYER;
    }
    const long number = std::strtol(digits, &end, 10);
    return *end == 0 || std::strncmp(end, " (", 2) == 0 ? static_cast<int>(number) : NO_LAYER;
}

// After the last `mark` that a layer's number follows.
int number_after_last(const char * name, const char * mark) {
    int found = NO_LAYER;
    for (const char * at = std::strstr(name, mark); at != nullptr; at = std::strstr(at + 1, mark)) {
        found = std::max(found, number_at(at + std::strlen(mark)));
    }
    return found;
}

bool lies_on_a_worker(const ggml_tensor * tensor) {
    ggml_backend_dev_t place = ggml_backend_buft_get_device(tensor->buffer->buft);
    return place != nullptr && place->reg == ggml_mesh_registry();
}

bool reads_weight(const ggml_tensor * node, bool of_worker) {
    return std::any_of(std::begin(node->src), std::end(node->src), [&](const ggml_tensor * source) {
        return source != nullptr && source->op == GGML_OP_NONE && source->buffer != nullptr &&
               source->buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS && lies_on_a_worker(source) == of_worker;
    });
}

}  // namespace

int layer_in(const char * name) {
    // T5 has two stacks of layers.
    if (std::strncmp(name, "enc.", 4) == 0 || std::strncmp(name, "dec.", 4) == 0) {
        name += 4;
    }
    if (std::strncmp(name, "blk.", 4) == 0) {
        const bool numbered = std::isdigit(static_cast<unsigned char>(name[4])) != 0;
        return numbered ? static_cast<int>(std::strtol(name + 4, nullptr, 10)) : NO_LAYER;
    }
    const int node = number_after_last(name, "-");
    return node != NO_LAYER ? node : number_after_last(name, "_l");  // of a cache
}

int layer_of(const ggml_tensor * node) {
    int last = NO_LAYER;
    std::vector<const ggml_tensor *> open = {node};
    for (size_t looked_at = 0; !open.empty(); ++looked_at) {
        if (looked_at == MAX_LOOKED_AT) {
            return last == NO_LAYER ? UNKNOWN_LAYER : last;
        }
        const ggml_tensor * tensor = open.back();
        open.pop_back();
        const int layer = layer_in(tensor->name);
        if (layer != NO_LAYER) {
            last = std::max(last, layer);
            continue;
        }
        for (const ggml_tensor * source : tensor->src) {
            if (source != nullptr && source != tensor) {
                open.push_back(source);
            }
        }
    }
    return last;
}

// --- all nodes of a graph ---

graph_layers::graph_layers(const ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; ++i) {
        add(graph->nodes[i]);
    }
    for (int i = graph->n_nodes - 1; i >= 0; --i) {
        tell_sources(graph->nodes[i]);
    }
}

// After all that it is computed from.
void graph_layers::add(const ggml_tensor * node) {
    place here;
    here.of_worker = reads_weight(node, true);
    for (const ggml_tensor * source : node->src) {
        const auto found = places_.find(source);
        if (found != places_.end()) {
            here.of_worker = here.of_worker || found->second.of_worker;
            here.layer = std::max(here.layer, found->second.layer);
            here.order = std::max(here.order, found->second.order);
        } else if (source != nullptr) {
            here.layer = std::max(here.layer, layer_in(source->name));
        }
    }
    const int own = layer_in(node->name);
    here.layer = own != NO_LAYER ? own : here.layer;
    here.order = std::max(here.order, here.layer);
    here.from_inputs = here.layer == NO_LAYER;
    here.of_host = here.from_inputs && !here.of_worker && reads_weight(node, false);
    places_[node] = here;
}

// After all that use it.
void graph_layers::tell_sources(const ggml_tensor * node) {
    place & here = places_.at(node);
    const bool unused = here.layer == NO_LAYER;
    here.of_host = here.of_host || (unused && !here.of_worker);
    for (const ggml_tensor * source : node->src) {
        const auto found = places_.find(source);
        if (found == places_.end() || !found->second.from_inputs) {
            continue;
        }
        place & there = found->second;
        const bool parted = !unused && there.layer != NO_LAYER && owner_of(there.layer) != owner_of(here.layer);
        there.of_host = !there.of_worker && (there.of_host || here.of_host || parted);
        if (!unused) {
            there.layer = there.layer == NO_LAYER ? here.layer : std::min(there.layer, here.layer);
            there.order = there.order == NO_LAYER ? here.order : std::min(there.order, here.order);
        }
    }
}

int graph_layers::of(const ggml_tensor * node) const {
    const auto found = places_.find(node);
    if (found == places_.end()) {
        return NO_LAYER;
    }
    return found->second.of_host ? HOSTS_LAYER : found->second.layer;
}

void graph_layers::sort(ggml_cgraph * graph) const {
    const auto order_of = [&](const ggml_tensor * node) {
        const place & here = places_.at(node);
        return here.of_host ? NO_LAYER : here.order;
    };
    std::stable_sort(
        graph->nodes, graph->nodes + graph->n_nodes,
        [&](const ggml_tensor * a, const ggml_tensor * b) { return order_of(a) < order_of(b); }
    );
}

const graph_layers *& scheduled_layers() {
    thread_local const graph_layers * current = nullptr;
    return current;
}

// --- whose layers are whose ---

void note_layers(const void * owner, ggml_tensor ** weights, int count) {
    for (int i = 0; i < count; ++i) {
        const int layer = layer_in(ggml_get_name(weights[i]));
        if (layer != NO_LAYER) {
            owners()[layer] = owner;
        }
    }
}

const void * owner_of(int layer) {
    const auto found = owners().find(layer);
    return found != owners().end() ? found->second : nullptr;
}

bool any_layer_is_owned() {
    return !owners().empty();
}

}  // namespace mesh
