// Puts the nodes of a graph in the order of their layers before the scheduler cuts it into pieces for its devices.
//
// Works where this library has been loaded, with global symbols, before the engine; elsewhere the scheduler sees graphs
// as llama.cpp builds them, and cuts some stages into more pieces than one.

#include "ggml-mesh.h"
#include "hooks/engine_symbols.h"
#include "host/device.h"
#include "host/layers.h"

#include "ggml-backend.h"

#ifdef __linux__

extern "C" GGML_MESH_API void mesh_split_graph(ggml_backend_sched_t sched, ggml_cgraph * graph) __asm__(SPLIT_GRAPH
);

void mesh_split_graph(ggml_backend_sched_t sched, ggml_cgraph * graph) {
    using function = void (*)(ggml_backend_sched_t, ggml_cgraph *);
    static const auto original = reinterpret_cast<function>(mesh::in_engine(SPLIT_GRAPH));
    if (!mesh::any_layer_is_owned()) {
        original(sched, graph);
        return;
    }
    const mesh::graph_layers layers(graph);
    layers.sort(graph);
    mesh::ask_ahead(graph, layers);
    mesh::scheduled_layers() = &layers;
    original(sched, graph);
    mesh::scheduled_layers() = nullptr;
}

#endif
