#!/bin/sh
# Installs mesh-llm from the folder that this file lies in: no package index, no compiler, no root.
#
#   sh install.sh                    below ~/.local; again with a newer bundle to upgrade
#   sh install.sh --prefix DIR       below DIR
#   sh install.sh --client           without the engine: for a lite client, or a relay
#   sh install.sh --uninstall        removes it; models and ~/.mesh-llm stay
#   sh install.sh --uninstall --purge    removes these as well (of models, those that mesh-llm brought)
#
# Each run installs into a new folder, and PREFIX/bin/mesh-llm is switched to it last, in one step: whatever fails
# before leaves the old version working, and what it left behind is removed by the next run.
set -eu

# A package found on PYTHONPATH would look installed to pip.
unset PYTHONPATH PYTHONHOME
# With it, `cd` may go elsewhere, and say so.
unset CDPATH

here=$(cd -- "$(dirname -- "$0")" && pwd -P)
prefix=$HOME/.local
action=install
purge=no
extra='[engine]'
new=''
part=''

fail() {
    printf 'Error: %s\nHint: %s\n' "$1" "$2" >&2
    exit 1
}

usage() {
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0"
}

# --- what is asked for ---------------------------------------------------------------------------

# The copy that an installation keeps for its own removal knows where it lies.
case $here in
    */share/mesh-llm) prefix=${here%/share/mesh-llm} ;;
esac
while [ $# -gt 0 ]; do
    case $1 in
        --prefix)
            [ -n "${2:-}" ] || { echo 'Error: --prefix needs a folder' >&2; exit 2; }
            prefix=$2
            shift
            ;;
        --prefix=?*) prefix=${1#--prefix=} ;;
        --client) extra='' ;;
        --uninstall) action=uninstall ;;
        --purge) purge=yes ;;
        -h | --help) usage; exit ;;
        *) printf 'Error: %s is not an option\nHint: sh install.sh --help lists them\n' "$1" >&2; exit 2 ;;
    esac
    shift
done
case $prefix in
    /*) ;;
    *) prefix=$(pwd)/$prefix ;;
esac
# `--prefix DIR/` is DIR, the next time as well.
while [ "$prefix" != "${prefix%/}" ]; do prefix=${prefix%/}; done
share=$prefix/share/mesh-llm
link=$prefix/bin/mesh-llm
models=${MESH_LLM_MODELS:-$HOME/.models}

# The folder of all versions, as the command spells it: a home may be reached by a symbolic link, too.
linked_share() {
    target=$(readlink "$link" 2>/dev/null) || return 0
    case $target in
        */share/mesh-llm/*/bin/mesh-llm) ;;
        *) return 0 ;;
    esac
    spelt=${target%/*/bin/mesh-llm}
    if [ "$spelt" = "$share" ] || [ "$(cd "$spelt" 2>/dev/null && pwd -P)" = "$(cd "$share" 2>/dev/null && pwd -P)" ]; then
        printf '%s\n' "$spelt"
    fi
}

# Where the command leads now; empty where it is not ours.
linked() {
    spelt=$(linked_share)
    [ -n "$spelt" ] || return 0
    target=$(readlink "$link")
    printf '%s\n' "$share${target#"$spelt"}"
}

# --- uninstall -----------------------------------------------------------------------------------

remove_downloaded_models() {
    for note in "$models"/*.gguf.sha256; do
        [ -e "$note" ] && rm -f "$note" "${note%.sha256}"
    done
    rmdir "$models" 2>/dev/null || true
}

# $1: what make_folder noted. Folders that others use by now stay.
remove_made_folders() {
    printf '%s\n' "$1" | while IFS= read -r folder; do
        [ -z "$folder" ] || rmdir "$folder" 2>/dev/null || true
    done
}

# Those of this very installation, one for each home: they would start what is no longer there.
uninstall_services() {
    for unit in "${XDG_CONFIG_HOME:-$HOME/.config}"/systemd/user/mesh-llm*.service; do
        if grep -Fqs -e "$share/" -e "$(linked_share)/" -e "$link" "$unit"; then
            home=$(sed -n 's/^Description=mesh-llm node on //p' "$unit")
            # Where systemd cannot be asked, as over sudo, its file is all that can be removed.
            "$link" service uninstall --home "$home" >/dev/null 2>&1 || rm -f "$unit"
        fi
    done
}

uninstall() {
    [ -e "$share/made-folders" ] || fail "mesh-llm is not installed below $prefix" \
        "name the folder that it was installed to: sh install.sh --uninstall --prefix DIR"
    if [ -n "$(linked)" ]; then
        uninstall_services
        "$link" stop >/dev/null 2>&1 || true
        rm -f "$link" || fail "$prefix/bin may not be written to" "run this as the user who installed mesh-llm"
    fi
    made=$(cat "$share/made-folders" 2>/dev/null) || made=''
    cache=${XDG_CACHE_HOME:-$HOME/.cache}
    rm -rf "$share" "$cache/mesh-llm"
    rmdir "$cache" 2>/dev/null || true
    remove_made_folders "$made"
    if [ "$purge" = yes ]; then
        remove_downloaded_models
        rm -rf "$HOME/.mesh-llm"
        echo "Removed mesh-llm from $prefix, its state and the models that it brought" >&2
    else
        echo "Removed mesh-llm from $prefix; its state (~/.mesh-llm) and models ($models) are still there" >&2
    fi
}

if [ "$action" = uninstall ]; then
    uninstall
    exit
fi

# --- whether this machine will do ----------------------------------------------------------------

value() {
    sed -n "s/^$1 //p" "$here/bundle.txt"
}

again='copy the bundle again, and unpack it into an empty folder'

check_machine() {
    if [ ! -e "$here/bundle.txt" ] || [ ! -e "$here/SHA256SUMS" ]; then
        fail "$here is not a whole bundle" "$again"
    fi
    version=$(value version)
    wanted="$(value system) $(value machine)"
    found="$(uname -s) $(uname -m)"
    [ "$wanted" = "$found" ] || fail "this bundle is for $wanted; this machine is $found" \
        "run mesh-llm bundle on a machine of this kind"
}

# Prints: version, whether the bundle has packages for it, whether venv is there, the C library.
PROBE='
import os, struct, sys, sysconfig
name = "%d.%d" % sys.version_info[:2]
fits = name in sys.argv[1].split() and sys.implementation.name == "cpython"
fits = fits and struct.calcsize("P") == 8 and not sysconfig.get_config_var("Py_GIL_DISABLED")
try:
    import venv
    parts = "whole"
except ImportError:
    parts = "bare"
libc = "none"
if sys.platform == "linux":
    try:
        libc = os.confstr("CS_GNU_LIBC_VERSION").split()[1]
    except (ValueError, OSError, AttributeError):
        libc = "musl"
print(name, "fits" if fits else "unfit", parts, libc)
'

# Sets `python`. A chosen $PYTHON is taken or refused, never replaced by another one.
find_python() {
    pythons=$(value pythons)
    python='' unfit='' bare=''
    if [ -n "${PYTHON:-}" ]; then
        set -- "$PYTHON"
    else
        set -- python3 python3.13 python3.12 python3.14 python3.11
    fi
    for candidate; do
        # Version managers put commands on the PATH that only say "not installed".
        answer=$("$candidate" -c "$PROBE" "$pythons" 2>/dev/null) || continue
        case $answer in
            *" fits whole "*) python=$(command -v "$candidate"); libc=${answer##* }; return ;;
            *" fits bare "*) bare=${bare:-${answer%% *}} ;;
            *) unfit=${unfit:-${answer%% *}} ;;
        esac
    done
    if [ -n "$bare" ]; then
        fail "Python $bare lacks its venv module" "sudo apt install python3-venv, or name another: PYTHON=… sh install.sh"
    fi
    fail "Python ${pythons%% *} to ${pythons##* } is needed; found ${unfit:-none}${PYTHON:+ at PYTHON=$PYTHON}" \
        "install one (sudo apt install python3, brew install python@3.12), or name it: PYTHON=… sh install.sh"
}

check_libc() {
    case $libc in
        none) ;;
        musl) fail "this system has musl instead of glibc, and the packages need glibc" \
            "use a distribution with glibc (Debian, Ubuntu, Fedora …), in a container if need be" ;;
        *)
            minor=${libc#2.}
            needed=$(value glibc)
            [ "${minor%%[!0-9]*}" -ge "${needed#2.}" ] || fail "glibc $needed is needed; this system has $libc" \
                "use a newer release of the distribution, in a container if need be"
            ;;
    esac
}

# Also finds files that are missing, and those that another bundle left in this folder: pip would take the newest of all.
SUMS='
import hashlib, os, sys
here = sys.argv[1]
names = set()
for line in open(os.path.join(here, "SHA256SUMS"), encoding="utf-8"):
    wanted, name = line.rstrip("\n").split("  ", 1)
    names.add(name)
    found = hashlib.sha256()
    try:
        with open(os.path.join(here, name), "rb") as file:
            while chunk := file.read(1 << 20):
                found.update(chunk)
    except OSError:
        sys.exit(name + " is missing")
    if found.hexdigest() != wanted:
        sys.exit(name + " is damaged")
for folder in "wheels", "models":
    path = os.path.join(here, folder)
    for name in sorted(os.listdir(path)) if os.path.isdir(path) else ():
        if folder + "/" + name not in names:
            sys.exit(folder + "/" + name + " does not belong to it")
'

check_sums() {
    flaw=$("$python" -c "$SUMS" "$here" 2>&1) ||
        fail "the bundle is not whole: $(printf '%s\n' "$flaw" | tail -n 1)" "$again"
}

# $1: kilobytes, $2: a folder that may not be there yet
check_space() {
    folder=$2
    while [ ! -d "$folder" ]; do folder=$(dirname "$folder"); done
    free=$(df -Pk "$folder" 2>/dev/null | awk 'NR == 2 { print $4 }')
    case $free in
        '' | *[!0-9]*) return ;;
    esac
    [ "$free" -ge "$1" ] || fail "$2 needs $(($1 / 1000 + 1)) MB of free disk space; $((free / 1000)) MB is free" \
        "make room (df -h shows where), or choose another disk: sh install.sh --prefix DIR"
}

# --- install -------------------------------------------------------------------------------------

# Makes a folder and those above it, and notes which were not there before, the deepest first: uninstalling removes these.
make_folder() {
    [ ! -d "$1" ] || return 0
    make_folder "$(dirname "$1")"
    mkdir "$1" 2>/dev/null || [ -d "$1" ] || fail "$1 cannot be made: is $prefix writable?" \
        "choose another folder: sh install.sh --prefix DIR"
    made="$1
${made:-}"
}

prepare() {
    if [ -e "$link" ] || [ -L "$link" ]; then
        [ -n "$(linked)" ] || fail "$link belongs to another installation" \
            "remove that one (pipx uninstall mesh-llm, if it was pipx), or choose another folder: sh install.sh --prefix DIR"
    fi
    made=''
    make_folder "$prefix/bin"
    make_folder "$share"
    for folder in "$prefix/bin" "$share"; do
        [ -w "$folder" ] || fail "$folder may not be written to" "choose another folder: sh install.sh --prefix DIR"
    done
    printf '%s' "$made" >>"$share/made-folders"
    # Belongs to this shell and its children: it ends with the last of them, so none is left behind by a kill.
    exec 9>"$share/lock"
    "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null ||
        fail "another installation below $prefix is under way" "wait for its end, then run this again"
    before=$(linked)
    remove_all_but "$(dirname "$(dirname "${before:-$share/none/bin/none}")")"
    new=$(mktemp -d "$share/$version.XXXXXX")
    trap give_up EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    trap 'exit 129' HUP
    # mktemp makes it for one user alone; a prefix may be for all.
    chmod 755 "$new"
}

# Versions that no command leads to: what was there before the last upgrade, and what failed.
remove_all_but() {
    for folder in "$share"/*/; do
        folder=${folder%/}
        [ "$folder" = "$1" ] || rm -rf "$folder"
    done
}

give_up() {
    # Interrupted right after the switch: it is installed.
    { [ -n "$new" ] && [ "$(linked)" != "$new/bin/mesh-llm" ]; } || return 0
    rm -rf "$new" "$part" "$link.$$" "$share/install.sh.$$"
    if [ -z "$before" ]; then
        made=$(cat "$share/made-folders")
        rm -rf "$share"
        remove_made_folders "$made"
    fi
}

install_packages() {
    log=$new/install.log
    # No ensurepip: the bundle has a pip of its own, which runs as it lies in its wheel.
    set -- "$here"/wheels/pip-*.whl
    if "$python" -m venv --without-pip "$new" >"$log" 2>&1 &&
        "$new/bin/python" "$1/pip" --isolated install --no-index --find-links "$here/wheels" --no-cache-dir \
            --disable-pip-version-check --no-input "mesh-llm$extra==$version" >>"$log" 2>&1; then
        answer=$("$new/bin/mesh-llm" --version 2>>"$log") || answer=''
        # Behind it stand the versions of the engine and the protocol.
        case "$answer " in
            "mesh-llm, version $version "*) return 0 ;;
        esac
    fi
    if grep -Eiq 'no space left on device|disk quota exceeded' "$log"; then
        fail "the disk was full before mesh-llm was installed" "make room (df -h shows where), then run this again"
    fi
    tail -n 5 "$log" >&2
    fail "the packages could not be installed on this machine" \
        "read the lines above; another Python may do: PYTHON=python3.12 sh install.sh"
}

# Before the model has its name: by this file, uninstalling knows that it was brought.
write_sum() {
    grep "  models/${1##*/}\$" "$here/SHA256SUMS" | sed 's|  models/|  |' >"$1.sha256"
}

install_models() {
    for model in "$here"/models/*; do
        [ -e "$model" ] || continue
        target=$models/${model##*/}
        if [ ! -e "$target" ]; then
            part=$target.part
            if ! { mkdir -p "$models" && cp "$model" "$part" && write_sum "$target" && mv "$part" "$target"; } 2>/dev/null; then
                rm -f "$target.sha256"
                fail "$target could not be written" "make room, or name another folder: MESH_LLM_MODELS=DIR sh install.sh"
            fi
        fi
    done
}

# A rename: there is no moment without a command.
switch() {
    # What may fail, on a full disk, comes before it.
    if ! { cp "$here/install.sh" "$share/install.sh.$$" && ln -s "$new/bin/mesh-llm" "$link.$$"; } 2>/dev/null; then
        fail "$prefix could not be written to" "make room (df -h shows where), then run this again"
    fi
    mv -f "$share/install.sh.$$" "$share/install.sh"
    mv -f "$link.$$" "$link"
    new=''
}

tell() {
    echo "Installed mesh-llm $version: $link" >&2
    if [ -n "$before" ]; then
        echo "Nodes that run keep the old version until they are restarted; the next upgrade removes it" >&2
    fi
    case :$PATH: in
        *:"$prefix/bin":*) ;;
        *) echo "Note: $prefix/bin is not on your PATH; add to ~/.profile: export PATH=\"$prefix/bin:\$PATH\"" >&2 ;;
    esac
    if [ -n "$extra" ] && [ "$libc" != none ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libgomp.so.1")' 2>/dev/null; then
        echo "Note: the engine needs libgomp.so.1, which is missing here: sudo apt install libgomp1" >&2
    fi
    echo "To remove it: sh $share/install.sh --uninstall" >&2
}

check_machine
find_python
check_libc
check_sums
check_space "$(value need_kb)" "$share"
[ ! -d "$here/models" ] || check_space "$(value models_kb)" "$models"
prepare
echo "Installing mesh-llm $version below $prefix …" >&2
install_packages
install_models
switch
tell
