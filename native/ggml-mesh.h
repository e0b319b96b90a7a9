#pragma once

// C API of libggml-mesh, called from Python through ctypes and from ggml as a backend.
//
// Every function is safe to call from any thread. None throws, and none keeps
// a pointer that it was given.

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define GGML_MESH_API __attribute__((visibility("default")))

// Version of the engine that this library was compiled against, as the wheel
// spells it. Loading it into another one is refused by the caller: ggml's
// backend structs change between builds.
GGML_MESH_API const char * ggml_mesh_engine_version(void);

// Ends this process when the other end of `fd` closes, that is, when the node
// that holds it dies. A native thread, since the engine keeps Python's lock
// while it loads a model. Returns 0, or an errno.
GGML_MESH_API int ggml_mesh_guard(int fd);

// Checks the CPU device's arithmetic. Returns 0, or 1 with the reason in `why`;
// may also die of an instruction that the CPU lacks: call it in a process made
// for that.
GGML_MESH_API int ggml_mesh_selftest(char * why, size_t why_size);

#ifdef __cplusplus
}
#endif
