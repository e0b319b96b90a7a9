#!/bin/sh
# Fuzzes a worker's session for a while: tools/fuzz_native.sh SECONDS
#
# Starts from the recordings in native/fuzz/corpus and from sessions of the native tests, and keeps what it learns in
# the cache (MESH_NATIVE_CACHE, default build/native-tests). A finding is left there as a file, and is run again with
#   build/native-tests/address/tests/mesh-fuzz FILE
set -eu

cd "$(dirname "$0")/.."
seconds=${1:?usage: $0 SECONDS}
cache=${MESH_NATIVE_CACHE:-build/native-tests}/address

# Builds, or says why not; one test is enough to know which.
said=$(sh tools/test_native.sh address 'link: shut') || { echo "$said"; exit 1; }
case $said in skipped:*) echo "skipped: fuzzing: ${said#skipped: }"; exit 0 ;; esac
ninja -C "$cache" ${MESH_JOBS:+-j "$MESH_JOBS"} mesh-fuzz >"$cache/build.log" 2>&1 || { tail -n 50 "$cache/build.log"; exit 1; }

mkdir -p "$cache/corpus" "$cache/findings"
if [ ! -f "$cache/corpus/add" ]; then
    MESH_RECORD="$cache/corpus" "$cache/tests/mesh-tests" 'session: every example' >/dev/null
    MESH_RECORD="$cache/corpus" "$cache/tests/mesh-tests" 'weights: they are attached' >/dev/null
fi

export ASAN_OPTIONS="detect_leaks=0:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"
exec "$cache/tests/mesh-fuzz" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=3000 -max_len=60000 -len_control=0 \
    -print_final_stats=1 -artifact_prefix="$cache/findings/" "$cache/corpus" native/fuzz/corpus
