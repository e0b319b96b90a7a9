// ggml-mesh as a ggml backend: other machines as devices.
//
// The registry is empty when the library is loaded, so that loading it changes
// nothing; `ggml_mesh_connect` adds one device per worker to ggml's own list.

#include "host/registry.h"
#include "ggml-mesh.h"

#include "ggml-backend-impl.h"

namespace {

const char * reg_get_name(ggml_backend_reg_t) {
    return "MESH";
}

size_t reg_get_device_count(ggml_backend_reg_t) {
    return 0;
}

ggml_backend_dev_t reg_get_device(ggml_backend_reg_t, size_t) {
    return nullptr;
}

void * reg_get_proc_address(ggml_backend_reg_t, const char *) {
    return nullptr;
}

const ggml_backend_reg_i REG_INTERFACE = {
    /* .get_name         = */ reg_get_name,
    /* .get_device_count = */ reg_get_device_count,
    /* .get_device       = */ reg_get_device,
    /* .get_proc_address = */ reg_get_proc_address,
};

}  // namespace

const char * ggml_mesh_engine_version(void) {
    return MESH_ENGINE_VERSION;
}

extern "C" GGML_MESH_API ggml_backend_reg_t ggml_backend_init(void);

ggml_backend_reg_t ggml_mesh_registry() {
    static ggml_backend_reg reg = {
        /* .api_version = */ GGML_BACKEND_API_VERSION,
        /* .iface       = */ REG_INTERFACE,
        /* .context     = */ nullptr,
    };
    return &reg;
}

ggml_backend_reg_t ggml_backend_init(void) {
    return ggml_mesh_registry();
}
