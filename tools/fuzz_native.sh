#!/bin/sh
# Fuzzes a worker's session, and a client over a worker that lies, for a while: tools/fuzz_native.sh SECONDS
#
# Sessions start from the recordings in native/fuzz/corpus and from sessions of the native tests. What is learnt stays
# in build/native-tests/address/corpus and corpus-answers; a finding is left in findings beside them, and is run again
# with
#   build/native-tests/address/tests/mesh-fuzz FILE
#   build/native-tests/address/tests/mesh-fuzz-answers FILE
set -eu

cd "$(dirname "$0")/.."
seconds=${1:?usage: $0 SECONDS}
build=build/native-tests/address

said=$(MESH_TARGETS='mesh-tests mesh-fuzz mesh-fuzz-answers' sh tools/test_native.sh address) || { echo "$said"; exit 1; }
case $said in *skipped:*) echo "skipped: fuzzing: ${said#*skipped: }"; exit 0 ;; esac

export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}"
mkdir -p "$build/corpus" "$build/corpus-answers" "$build/findings"
if [ ! -f "$build/corpus/add" ]; then
    MESH_RECORD="$build/corpus" "$build/tests/mesh-tests" 'session: every example' >/dev/null
    MESH_RECORD="$build/corpus" "$build/tests/mesh-tests" 'weights: they are attached' >/dev/null
    MESH_RECORD="$build/corpus" "$build/tests/mesh-tests" 'states: what was saved' >/dev/null
fi

export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"

# fuzz PROGRAM SECONDS OPTION|FOLDER…
fuzz() {
    program=$1 time=$2
    shift 2
    # Kept back unless it fails: it says a line for each thing that it learns.
    if ! "$build/tests/$program" -max_total_time="$time" -timeout=20 -rss_limit_mb=3000 -print_final_stats=1 \
        -artifact_prefix="$build/findings/" "$@" >"$build/$program.log" 2>&1; then
        tail -n 60 "$build/$program.log"
        exit 1
    fi
    grep -E '^#[0-9]+.*cov:' "$build/$program.log" | tail -n 1
    grep -E '^(Done|stat::)' "$build/$program.log"
}

# Answers are few and short: a sixth of the time is plenty.
fuzz mesh-fuzz $((seconds - seconds / 6)) -max_len=60000 -len_control=0 "$build/corpus" native/fuzz/corpus
fuzz mesh-fuzz-answers $((seconds / 6)) -max_len=600 "$build/corpus-answers"
