#!/bin/sh
# clang-format and clang-tidy over native/. Each is skipped by name where it cannot run; newer
# versions format and warn differently, so only the one that the code is written with decides.
set -eu

LLVM=14
ENGINE_DEFINES="-DGGML_BACKEND_DL -DGGML_BACKEND_BUILD -DGGML_BACKEND_SHARED -DGGML_SHARED"

cd "$(dirname "$0")/.."

skip() {
    echo "skipped: $1"
}

# Sets `tool` to the command of the wanted version, or says why there is none.
find_tool() {
    tool='' seen=''
    for candidate in "$1-$LLVM" "$1"; do
        command -v "$candidate" >/dev/null || continue
        seen=$("$candidate" --version | sed -n 's/.*version \([0-9]*\).*/\1/p' | head -n 1)
        if [ "$seen" = "$LLVM" ]; then
            tool=$candidate
            return 0
        fi
    done
    if [ -n "$seen" ]; then
        skip "$1 $seen is installed, the code is written with $LLVM (sudo apt install $1-$LLVM)"
    else
        skip "$1 is not installed (sudo apt install $1)"
    fi
    return 1
}

check_format() {
    find_tool clang-format || return 0
    find native \( -name '*.cpp' -o -name '*.h' \) -exec "$tool" --dry-run -Werror {} +
}

check_tidy() {
    find_tool clang-tidy || return 0
    if ! engine=$(.venv/bin/python -m mesh_llm.engine.sources 2>/dev/null) || [ ! -d "$engine/ggml/include" ]; then
        skip "clang-tidy: the engine's sources are not here (.venv/bin/python -m mesh_llm.engine.sources says why)"
        return 0
    fi
    # Two files at a time on each core. Kept back unless it fails: clang-tidy counts the warnings that it does not show.
    flags="-std=c++17 -Inative $ENGINE_DEFINES -DMESH_ENGINE_VERSION=\"check\" -isystem $engine/ggml/include -isystem $engine/ggml/src -isystem $engine/include -isystem $engine/common"
    # What passed is not looked at again: it takes minutes.
    passed=build/clang-tidy.passed
    sources=$( (echo "$flags" && find native -type f -exec cksum {} + | sort) | cksum)
    if [ "$(cat "$passed" 2>/dev/null)" = "$sources" ]; then
        return 0
    fi
    # shellcheck disable=SC2016  # the inner shell expands them
    if ! said=$(find native -name '*.cpp' -not -path 'native/tests/*' -not -path 'native/fuzz/*' -print0 | TOOL=$tool FLAGS=$flags xargs -0 -n 2 -P "$(getconf _NPROCESSORS_ONLN)" \
        sh -c '"$TOOL" --quiet "$@" -- $FLAGS' - 2>&1); then
        echo "$said"
        exit 1
    fi
    mkdir -p build
    echo "$sources" >"$passed"
}

check_format
check_tidy
