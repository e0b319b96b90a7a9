"""What a person may ask of a node, and what is refused before anything starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig, parse_size
from mesh_llm.engine.spec import DraftSpec, EngineSpec, LinkSpec, PaceSpec, parse_setting
from mesh_llm.errors import UsageError

HOME = Path("/home")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "--ctx-size 0 is not between 1 and 134,217,728"),
        ({"context": -1}, "--ctx-size -1 is not between 1 and 134,217,728"),
        (
            {"context": 10**9},
            "--ctx-size 1000000000 is not between 1 and 134,217,728",
        ),
        ({"slots": 0}, "--parallel 0 is not between 1 and 256"),
        ({"slots": 257}, "--parallel 257 is not between 1 and 256"),
        ({"threads": 0}, "--threads 0 is not between 1 and 1,024"),
        ({"port": 65536}, "--port 65536 is not between 0 and 65,535"),
        ({"port": -1}, "--port -1 is not between 0 and 65,535"),
        ({"max_memory_bytes": 0}, "--max-memory 0 leaves no memory for a model"),
        ({"gpu_layers": -1}, "--gpu-layers -1 is not between 0 and 10,000"),
        ({"tls_cert": Path("cert")}, "--tls-cert and --tls-key belong together"),
        ({"tls_key": Path("key")}, "--tls-cert and --tls-key belong together"),
        ({"api_key": "  "}, "--api-key is empty"),
        (
            {"listen": "0.0.0.0"},
            "--listen 0.0.0.0 opens the API to the network, but there is no --api-key",
        ),
        (
            {"listen": "example.org"},
            "--listen example.org opens the API to the network, but there is no --api-key",
        ),
        ({"mmproj": Path("/no/such")}, "--mmproj /no/such: there is no such file"),
        (
            {"settings": {"warmup": False}, "bin_dir": Path("/bin")},
            "--engine-set is for the bundled engine and cannot be used with --bin-dir",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        NodeConfig(home=HOME, **options)

    assert caught.value.message == message
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("listen", ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost"])
def test_this_machine_alone_needs_no_key(listen: str) -> None:
    assert NodeConfig(home=HOME, listen=listen).listen == listen


def test_beyond_this_machine_with_a_key() -> None:
    config = NodeConfig(home=HOME, listen="0.0.0.0", api_key="secret")

    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    ("text", "size"),
    [("8GB", 8 * 10**9), ("500 MB", 5 * 10**8), ("1.5g", 15 * 10**8), ("123", 123), ("2T", 2 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "much", "-1GB", "1GiB", "8 GB x"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_size(text)

    assert caught.value.message == f"{text!r} is not a size"


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("n_batch=512", ("n_batch", 512)),
        ("warmup=off", ("warmup", False)),
        ("warmup=TRUE", ("warmup", True)),
        ("rope_freq_base=1e4", ("rope_freq_base", 10000.0)),
        ("chat_template=a=b", ("chat_template", "a=b")),
    ],
)
def test_engine_settings(text: str, setting: tuple[str, object]) -> None:
    assert parse_setting(text) == setting


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n_batch", "--engine-set n_batch: no such setting"),
        ("n_bath=1", "--engine-set n_bath=1: no such setting"),
        ("port=80", "--engine-set port=80: no such setting"),
        ("api_keys=x", "--engine-set api_keys=x: no such setting"),
        ("n_batch=many", "--engine-set n_batch=many: n_batch takes a whole number"),
        ("warmup=perhaps", "--engine-set warmup=perhaps: warmup takes true or false"),
        ("rope_freq_base=x", "--engine-set rope_freq_base=x: rope_freq_base takes a number"),
    ],
)
def test_unknown_engine_settings_are_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_setting(text)

    assert caught.value.message == message


def test_a_spec_survives_its_line() -> None:
    spec = EngineSpec(
        model="/m.gguf",
        alias="m",
        context=512,
        slots=1,
        threads=1,
        key="key",
        devices=("CUDA0",),
        libraries={"mesh": "/lib.so"},
        settings={"warmup": False},
        pace=PaceSpec(usual=65, fewest=17),
        draft=DraftSpec(text_depth=8),
        links=(LinkSpec(name="w", fd=3, layers=4),),
        files=("/m.gguf",),
    )

    line = spec.to_line()

    assert line.count(b"\n") == 1
    assert EngineSpec.from_line(line.decode()) == spec
    unpaced = replace(spec, pace=None)
    assert EngineSpec.from_line(unpaced.to_line().decode()) == unpaced
