#!/bin/sh
# Writes requirements.lock (what running needs) and requirements-dev.lock (tests and tools besides) from pyproject.toml,
# and the lock file of a client which cannot live beside our own dependencies: exact versions with hashes, for Linux
# and macOS, Python 3.11 and newer.
# Versions that are locked already stay, unless `--upgrade` is given.
set -eu

UV_VERSION=0.13.7

cd "$(dirname "$0")/.."
python=$(sh tools/setup.sh python)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
trap 'exit 130' INT TERM HUP

"$python" -m venv "$scratch/uv"
"$scratch/uv/bin/python" -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION"

# One version for all Pythons (`fewest`): what passed the tests on one is what runs on the other.
lock() {
    "$scratch/uv/bin/uv" pip compile "$@" \
        --quiet --universal --python-version 3.11 --fork-strategy fewest \
        --generate-hashes --no-emit-index-url --no-annotate --custom-compile-command "make lock"
}

lock pyproject.toml --extra engine --extra build --extra setup "$@" --output-file requirements.lock
# In both the same versions: the second is installed on top of the first.
lock pyproject.toml --all-extras --constraint requirements.lock "$@" --output-file requirements-dev.lock
client=tests/clients/litellm
lock "$client/requirements.in" "$@" --output-file "$client/requirements.lock"
echo "requirements.lock: $(grep -c == requirements.lock) packages," \
    "requirements-dev.lock: $(grep -c == requirements-dev.lock)" >&2
