// Keeps the engine from reading the layers of a model that live on other machines.
//
// llama.cpp maps a model's files and asks the kernel for all of their pages at
// once. Its constructor for that is replaced by the one below, which asks for
// none where layers live elsewhere: only what is used is read then. Works where
// this library has been loaded, with global symbols, before the engine; elsewhere
// it is never called, and the files are read as ever.

#include "hooks/file_mapping.h"

#include "ggml-mesh.h"
#include "hooks/engine_symbols.h"

#include <atomic>
#include <stdexcept>

namespace {

std::atomic<bool> & sparing() {
    static std::atomic<bool> yes{false};
    return yes;
}

}  // namespace

void mesh::map_files_sparingly() {
    sparing() = engine_has(feature::sparse_mapping);
}

#ifdef __linux__

extern "C" GGML_MESH_API void
mesh_llama_mmap(void * self, void * file, size_t prefetch, bool numa, const void * lazy) __asm__(LLAMA_MMAP);

void mesh_llama_mmap(void * self, void * file, size_t prefetch, bool numa, const void * lazy) {
    using constructor = void (*)(void *, void *, size_t, bool, const void *);
    static const auto original = reinterpret_cast<constructor>(mesh::in_engine(LLAMA_MMAP));
    if (original == nullptr) {
        throw std::runtime_error("the engine has lost its way of mapping files");
    }
    original(self, file, sparing() ? 0 : prefetch, numa, lazy);
}

#endif
