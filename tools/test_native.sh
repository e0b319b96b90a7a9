#!/bin/sh
# Builds and runs the native tests: tools/test_native.sh [plain|address|thread] [part of a test's name]
#
# ggml is compiled once for each kind, and kept for all clones in ~/.cache/mesh-llm/native-tests, in a folder named
# after all that goes into it. Our own code is compiled in build/native-tests. ENGINE_SOURCE names the llama.cpp tree
# of the engine's sdist, where .venv cannot tell.
set -eu

cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH  # CMake and ninja come with the dependencies
kind=${1:-plain}
name=${2:-}
build=build/native-tests/$kind
cache=${MESH_LLM_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mesh-llm}/native-tests

skip() {
    echo "skipped: native tests ($kind): $1"
    exit 0
}

compiles() {
    echo 'int main(void) { return 0; }' >"$build/probe.c"
    clang "$@" "$build/probe.c" -o "$build/probe" >/dev/null 2>&1 && "$build/probe"
}

# Runs cmake and ninja in a folder; what they say is shown only where they fail.
make_in() {
    folder=$1 source=$2
    shift 2
    cmake -S "$source" -B "$folder" -G Ninja -DENGINE_SOURCE="$ENGINE_SOURCE" "$@" >"$folder/configure.log" 2>&1 ||
        { cat "$folder/configure.log"; exit 1; }
    # shellcheck disable=SC2086  # several words, or none
    ninja -C "$folder" ${MESH_JOBS:+-j "$MESH_JOBS"} $targets >"$folder/build.log" 2>&1 ||
        { tail -n 50 "$folder/build.log"; exit 1; }
}

# -march=native makes the processor part of it.
key_of_ggml() {
    {
        echo "$kind $ENGINE_SOURCE"
        "$1" --version
        grep -m 1 -E '^(flags|Features)' /proc/cpuinfo 2>/dev/null || uname -mp
        find "$ENGINE_SOURCE/ggml/include" "$ENGINE_SOURCE/ggml/src/ggml-cpu" "$ENGINE_SOURCE"/ggml/src/*.* \
            native/tests/ggml native/tests/sanitizers.cmake -type f | sort | xargs cat
    } | cksum | tr ' ' -
}

mkdir -p "$build"
case $kind in
    plain) compiler=${CXX:-c++}; set -- ;;
    address | thread)
        compiler=clang++
        set -- "-DMESH_SANITIZE=$kind" -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++
        ;;
    *) echo "usage: $0 [plain|address|thread] [part of a test's name]" >&2; exit 2 ;;
esac

command -v cmake >/dev/null || skip "cmake is not installed"
command -v ninja >/dev/null || skip "ninja is not installed"
command -v "$compiler" >/dev/null || skip "$compiler is not installed"
if [ "$kind" != plain ]; then
    compiles "-fsanitize=$kind" || skip "clang has no $kind sanitizer here (libclang-rt-*-dev)"
fi
if [ -z "${ENGINE_SOURCE:-}" ]; then
    ENGINE_SOURCE=$(.venv/bin/python -m mesh_llm.engine.sources 2>/dev/null) ||
        skip "the engine's sources are not here (.venv/bin/python -m mesh_llm.engine.sources says why)"
fi

ggml=$cache/$(basename "$ENGINE_SOURCE")-$kind-$(key_of_ggml "$compiler")
if [ ! -d "$ggml" ]; then
    # In a folder of its own, renamed when done: another clone that does the same just comes second.
    mkdir -p "$cache"
    making=$(mktemp -d "$cache/making.XXXXXX")
    trap 'rm -rf "$making"' EXIT
    trap 'exit 130' INT TERM HUP
    started=$(date +%s)
    targets='ggml ggml-cpu ggml-base mesh-assertion'
    make_in "$making" native/tests/ggml "$@"
    mv "$making/lib" "$ggml" 2>/dev/null || [ -d "$ggml" ]
    rm -rf "$making"
    trap - EXIT INT TERM HUP
    echo "ggml for the native tests ($kind): compiled in $(($(date +%s) - started)) s"
fi

targets=${MESH_TARGETS:-mesh-tests}
make_in "$build" native -DMESH_TESTS=ON -DMESH_WERROR=ON -DMESH_ENGINE_VERSION=tests -DMESH_GGML="$ggml" "$@"
[ "$targets" = mesh-tests ] || exit 0

# On arm64 clang's search for leaks takes three seconds, in each of some hundred processes: others look for them.
case $(uname -m) in aarch64 | arm64) leaks=0 ;; *) leaks=1 ;; esac
export ASAN_OPTIONS="detect_leaks=$leaks:abort_on_error=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="halt_on_error=1:${TSAN_OPTIONS:-}"
exec "$build/tests/mesh-tests" ${name:+"$name"}
