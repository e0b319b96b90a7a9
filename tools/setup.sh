#!/bin/sh
# Sets up .venv from requirements.lock; when that is done already, says nothing and takes milliseconds.
#
#   sh tools/setup.sh            what running needs (what `make setup` runs)
#   sh tools/setup.sh dev        and what tests and tools need, from requirements-dev.lock
#   sh tools/setup.sh python     print the Python that a set-up would use
#
# Nothing counts as done before its stamp lies in .venv, and stamps are written last: after an
# interruption the next run finds no stamp and starts afresh, so there is never anything to undo.
set -eu

NEED_KB=1500000    # .venv takes about half; pip unpacks every package once more while it installs
WAIT_S=900         # for another set-up in this clone, on a slow network

# A package found on PYTHONPATH would look installed to pip, and would be gone in the next shell.
unset PYTHONPATH PYTHONHOME
# `user = true` in a person's pip configuration cannot work inside an environment.
export PIP_USER=0

cd "$(dirname "$0")/.."
root=$(pwd -P)
log=.venv/setup.log

fail() {
    printf 'Error: %s\nHint: %s\n' "$1" "$2" >&2
    exit 1
}

on_macos() {
    [ "$(uname -s)" = Darwin ]
}

# --- which Python ------------------------------------------------------------------------------

PROBE='
import sys
try:
    import ensurepip, venv
    parts = "whole"
except ImportError:
    parts = "bare"
age = "new" if sys.version_info[:2] >= (3, 11) else "old"
print("%d.%d.%d" % tuple(sys.version_info[:3]), age, parts)
'

# Sets `python`. A chosen $PYTHON is taken or refused, never replaced by another one.
find_python() {
    python='' old='' bare=''
    for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.14 python3.11}; do
        # Version managers put commands on the PATH that only say "not installed".
        found=$("$candidate" -c "$PROBE" 2>/dev/null) || continue
        version=${found%% *}
        case $found in
            *" new whole") python=$(command -v "$candidate"); return ;;
            *" new bare") bare=${bare:-$version} ;;
            *) old=${old:-$version} ;;
        esac
    done
    if [ -n "$bare" ]; then
        if on_macos; then hint='brew install python@3.12'; else hint='sudo apt install python3-venv'; fi
        fail "Python $bare lacks its venv module" "$hint"
    elif [ -n "$old" ]; then
        if on_macos; then hint='brew install python@3.12'; else hint='sudo apt install python3.11 python3.11-venv'; fi
        fail "Python 3.11 or newer is needed; found $old" "$hint"
    else
        if on_macos; then hint='brew install python@3.12'; else hint='sudo apt install python3 python3-venv'; fi
        fail "Python 3.11 or newer is needed; found none${PYTHON:+ at PYTHON=$PYTHON}" "$hint"
    fi
}

# --- what is done already ----------------------------------------------------------------------

# Scripts in .venv name their interpreter by its full path: a clone that moved is another one.
fingerprint() {
    { echo "$root"; cat "$@"; } | cksum | tr ' ' -
}

# `import pip` and not just a start: after an upgrade of the system's Python the environment's
# own command still runs, without any of its packages.
venv_works() {
    .venv/bin/python -c 'import pip' 2>/dev/null
}

is_finished() {
    [ -e "$stamp" ] && { [ -z "$dev" ] || [ -e "$dev" ]; } && venv_works
}

# --- steps -------------------------------------------------------------------------------------

# The lock belongs to the open file that this shell and its children share: it ends with the last
# of them, so none is left behind by a kill.
wait_for_other_setups() {
    exec 9>.setup.lock
    "$python" -c '
import fcntl, sys, time

end = time.monotonic() + float(sys.argv[1])
said = False
while True:
    try:
        fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
        break
    except OSError:
        if time.monotonic() > end:
            sys.exit(1)
        if not said:
            sys.stderr.write("Waiting for another set-up in this clone …\n")
            sys.stderr.flush()
            said = True
        time.sleep(0.2)
' "$WAIT_S" || fail "another set-up in $root has not ended for $((WAIT_S / 60)) minutes" \
        "end it (fuser .setup.lock names it), then run make setup again"
}

check_disk() {
    free_kb=$(df -Pk . 2>/dev/null | awk 'NR == 2 { print $4 }')
    case $free_kb in
        '' | *[!0-9]*) return ;;
    esac
    [ "$free_kb" -ge "$NEED_KB" ] || fail \
        "set-up needs 1.5 GB of free disk space in $root; $(gigabytes "$free_kb") GB is free" \
        "make room on that disk (df -h . shows it), then run make setup again"
}

gigabytes() {
    awk -v kb="$1" 'BEGIN { printf "%.1f", kb / 1000000 }'
}

pip_install() {
    .venv/bin/python -m pip install --no-input --disable-pip-version-check "$@" >>"$log" 2>&1 || explain_pip
}

NO_NETWORK='connection (broken|error|refused|reset|aborted)|max retries|name resolution|unreachable|timed out|sslerror|proxyerror'

log_says() {
    grep -Eiq "$1" "$log"
}

explain_pip() {
    echo "The last lines of $log:" >&2
    tail -n 5 "$log" >&2
    again='then run make setup again'
    if log_says 'no space left on device|disk quota exceeded'; then
        rm -rf .venv
        fail "the disk was full before set-up was done" \
            "make room (df -h . ~ /tmp shows where), $again"
    elif log_says 'do not match the hashes'; then
        fail "a downloaded package is not the one that the lock file names" \
            "clear pip's cache ($python -m pip cache purge), $again"
    elif log_says "$NO_NETWORK"; then
        fail "no package index can be reached" \
            "check the network and pip's settings ($python -m pip config list), $again"
    elif log_says 'no matching distribution'; then
        fail "a package is not there ready-made for this machine ($(uname -sm), Python $version)" \
            "use Python 3.11 to 3.14 on Linux with glibc, not musl (x86-64, arm64), or macOS 13 or newer: PYTHON=python3.12 make setup"
    else
        fail "pip could not install the dependencies" "read $log, $again"
    fi
}

install_dependencies() {
    rm -rf .venv
    mkdir .venv
    "$python" -m venv .venv >"$log" 2>&1 || explain_pip
    install_locked requirements.lock
    : >"$locked"
}

# Ready-made packages only: compiling one takes an hour and fails late. pip would write bytecode on one core.
install_locked() {
    pip_install --require-hashes --only-binary :all: --no-compile -r "$1"
    compile_bytecode .venv/lib
}

# On all cores. Some packages carry files that are no Python of this version.
compile_bytecode() {
    .venv/bin/python -m compileall -q -j 0 "$@" >>"$log" 2>&1 || true
}

install_project() {
    rm -f .venv/.stamp-*
    pip_install --no-deps --no-build-isolation --editable .
    # Where PYTHONDONTWRITEBYTECODE is set, every start of a node would else compile all of it: a quarter of a second.
    compile_bytecode src
    : >"$stamp"
}

note_compiler() {
    if on_macos; then
        xcode-select -p >/dev/null 2>&1 && return
        mend='xcode-select --install'
    else
        for compiler in "${CXX:-c++}" g++ clang++; do
            command -v "$compiler" >/dev/null && return
        done
        mend='sudo apt install g++'
    fi
    echo "Note: no C++ compiler here, so the engine runs its ready-made, slower CPU code ($mend;" \
        "mesh-llm engine build explains)" >&2
}

# -----------------------------------------------------------------------------------------------

if [ "${1:-}" = python ]; then
    find_python
    echo "$python"
    exit
fi

locked=.venv/.locked-$(fingerprint requirements.lock)
stamp=.venv/.stamp-$(fingerprint requirements.lock pyproject.toml)
dev=''
[ "${1:-}" != dev ] || dev=.venv/.dev-$(fingerprint requirements-dev.lock)
is_finished && exit

find_python
wait_for_other_setups
is_finished && exit

started=$(date +%s)
if [ -e "$locked" ] && venv_works; then
    echo "Setting up .venv (a few seconds) …" >&2
else
    check_disk
    echo "Setting up .venv (one minute the first time) …" >&2
    install_dependencies
fi
if [ -n "$dev" ] && [ ! -e "$dev" ]; then
    echo "Installing what tests and tools need …" >&2
    rm -f .venv/.dev-*
    install_locked requirements-dev.lock
    : >"$dev"
fi
[ -e "$stamp" ] || install_project
echo "Set up in $(($(date +%s) - started)) s: .venv/bin/mesh-llm" >&2
note_compiler
