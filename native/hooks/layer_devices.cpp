// Keeps the layers behind a model's last one on the host.
//
// llama.cpp hands out layers in one row, so a head for further tokens (MTP) would be on the last worker, and each drafted
// token would cross its link. Its weights can be put elsewhere by their names, its cache cannot: that lies where the model
// says that the layer is.

#include "ggml-mesh.h"
#include "hooks/engine_symbols.h"

#include "ggml-backend.h"

#ifdef __linux__

namespace {

using layer_device = ggml_backend_dev_t (*)(const void *, int);

struct kept_layers {
    int first = -1;
    ggml_backend_dev_t device = nullptr;
};

kept_layers & kept() {
    static kept_layers layers;
    return layers;
}

}  // namespace

extern "C" {

GGML_MESH_API ggml_backend_dev_t mesh_layer_device(const void * model, int layer) __asm__(LAYER_DEVICE);

ggml_backend_dev_t mesh_layer_device(const void * model, int layer) {
    static const layer_device original = [] {
        layer_device found = nullptr;
        mesh::find_in_engine(found, LAYER_DEVICE);
        return found;
    }();
    return kept().first >= 0 && layer >= kept().first ? kept().device : original(model, layer);
}

int ggml_mesh_keep_layers(int first, const char * device) {
    kept() = {first, ggml_backend_dev_by_name(device)};
    return mesh::engine_has(mesh::feature::mtp_head) && kept().device != nullptr ? 0 : 1;
}

}  // extern "C"

#else  // not __linux__

extern "C" int ggml_mesh_keep_layers(int, const char *) {
    return 1;
}

#endif
