#pragma once

#include "ggml-backend.h"

// The registry that all mesh devices belong to.
ggml_backend_reg_t ggml_mesh_registry();
