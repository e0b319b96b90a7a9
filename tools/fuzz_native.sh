#!/bin/sh
# Fuzzes a worker's session for a while: tools/fuzz_native.sh SECONDS
#
# Starts from the recordings in native/fuzz/corpus and from sessions of the native tests. What it learns stays in
# build/native-tests/address/corpus; a finding is left in findings beside it, and is run again with
#   build/native-tests/address/tests/mesh-fuzz FILE
set -eu

cd "$(dirname "$0")/.."
seconds=${1:?usage: $0 SECONDS}
build=build/native-tests/address

said=$(MESH_TARGETS='mesh-tests mesh-fuzz' sh tools/test_native.sh address) || { echo "$said"; exit 1; }
case $said in *skipped:*) echo "skipped: fuzzing: ${said#*skipped: }"; exit 0 ;; esac

export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}"
mkdir -p "$build/corpus" "$build/findings"
if [ ! -f "$build/corpus/add" ]; then
    MESH_RECORD="$build/corpus" "$build/tests/mesh-tests" 'session: every example' >/dev/null
    MESH_RECORD="$build/corpus" "$build/tests/mesh-tests" 'weights: they are attached' >/dev/null
fi

export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
# Kept back unless it fails: it says a line for each thing that it learns.
if ! "$build/tests/mesh-fuzz" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -max_len=60000 -len_control=0 \
    -print_final_stats=1 -artifact_prefix="$build/findings/" "$build/corpus" native/fuzz/corpus >"$build/fuzz.log" 2>&1; then
    tail -n 60 "$build/fuzz.log"
    exit 1
fi
grep -E '^#[0-9]+.*cov:' "$build/fuzz.log" | tail -n 1
grep -E '^(Done|stat::)' "$build/fuzz.log"
