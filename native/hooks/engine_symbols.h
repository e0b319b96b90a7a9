#pragma once

// Functions of the engine that this library has by the same names.
//
// Where it was loaded before the engine, with global symbols, the engine calls ours; they go on to its own.

#include <dlfcn.h>

namespace mesh {

// The engine's own function of a name that is also ours: looked up in the library that ggml is in.
inline void * in_engine(const char * name) {
    Dl_info engine{};
    // By name: an address in our own tables would have to be known before the engine is there.
    void * known = dlsym(RTLD_DEFAULT, "ggml_backend_dev_count");
    if (known == nullptr || dladdr(known, &engine) == 0) {
        return nullptr;
    }
    void * library = dlopen(engine.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    return library != nullptr ? dlsym(library, name) : nullptr;
}

// The same, as a pointer that can be called.
template <typename function> void find_in_engine(function & pointer, const char * name) {
    pointer = reinterpret_cast<function>(in_engine(name));
}

}  // namespace mesh
