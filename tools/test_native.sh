#!/bin/sh
# Builds and runs the native tests: tools/test_native.sh [plain|address|thread] [part of a test's name]
#
# MESH_NATIVE_CACHE names the folder of the builds (default: build/native-tests); ggml is compiled once for each
# kind. ENGINE_SOURCE names the llama.cpp tree of the engine's sdist, where .venv cannot tell.
set -eu

cd "$(dirname "$0")/.."
kind=${1:-plain}
name=${2:-}

skip() {
    echo "skipped: native tests ($kind): $1"
    exit 0
}

compiles() {
    echo 'int main(void) { return 0; }' >"$cache/probe.c"
    clang "$@" "$cache/probe.c" -o "$cache/probe" >/dev/null 2>&1 && "$cache/probe"
}

cache=${MESH_NATIVE_CACHE:-build/native-tests}/$kind
mkdir -p "$cache"

case $kind in
    plain) set -- ;;
    address) set -- -DMESH_SANITIZE=address -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ ;;
    thread) set -- -DMESH_SANITIZE=thread -DCMAKE_C_COMPILER=clang -DCMAKE_CXX_COMPILER=clang++ ;;
    *) echo "usage: $0 [plain|address|thread] [part of a test's name]" >&2; exit 2 ;;
esac

command -v cmake >/dev/null || skip "cmake is not installed"
command -v ninja >/dev/null || skip "ninja is not installed"
if [ "$kind" != plain ]; then
    command -v clang++ >/dev/null || skip "clang is not installed"
    compiles "-fsanitize=$kind" || skip "clang has no $kind sanitizer here (libclang-rt-*-dev)"
fi
if [ -z "${ENGINE_SOURCE:-}" ]; then
    ENGINE_SOURCE=$(.venv/bin/python -m mesh_llm.engine.sources 2>/dev/null) ||
        skip "the engine's sources are not here (.venv/bin/python -m mesh_llm.engine.sources says why)"
fi

cmake -S native -B "$cache" -G Ninja -DENGINE_SOURCE="$ENGINE_SOURCE" -DMESH_TESTS=ON -DMESH_WERROR=ON \
    -DMESH_ENGINE_VERSION=tests "$@" >"$cache/configure.log" 2>&1 || { cat "$cache/configure.log"; exit 1; }
ninja -C "$cache" ${MESH_JOBS:+-j "$MESH_JOBS"} mesh-tests >"$cache/build.log" 2>&1 || { tail -n 50 "$cache/build.log"; exit 1; }

export ASAN_OPTIONS="detect_leaks=1:abort_on_error=1:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
export TSAN_OPTIONS="halt_on_error=1:${TSAN_OPTIONS:-}"
exec "$cache/tests/mesh-tests" ${name:+"$name"}
