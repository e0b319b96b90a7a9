# How the tests and their ggml are compiled.
#
#   MESH_SANITIZE=address   AddressSanitizer and UndefinedBehaviorSanitizer; with clang also the fuzzer
#   MESH_SANITIZE=thread    ThreadSanitizer

set(MESH_SANITIZE "" CACHE STRING "sanitizer of the tests: empty, address or thread")
set_property(CACHE MESH_SANITIZE PROPERTY STRINGS "" address thread)

set(mesh_with_fuzzer OFF)
set(mesh_sanitizers "")
if (MESH_SANITIZE STREQUAL "address")
    # Not `alignment` and not `function`: ggml casts both on purpose, on every platform that it runs on.
    set(mesh_sanitizers -fsanitize=address,undefined -fno-sanitize=alignment,shift,float-cast-overflow
        -fno-sanitize-recover=all -fno-omit-frame-pointer)
    if (CMAKE_CXX_COMPILER_ID MATCHES "Clang")
        list(APPEND mesh_sanitizers -fno-sanitize=function)
        set(mesh_with_fuzzer ON)
    endif()
elseif (MESH_SANITIZE STREQUAL "thread")
    set(mesh_sanitizers -fsanitize=thread -fno-omit-frame-pointer)
elseif (MESH_SANITIZE)
    message(FATAL_ERROR "MESH_SANITIZE is empty, address or thread")
endif()

set(mesh_coverage $<$<BOOL:${mesh_with_fuzzer}>:-fsanitize=fuzzer-no-link>)
