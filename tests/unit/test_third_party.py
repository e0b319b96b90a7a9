"""What we rely on in other people's code: each thing that is missing is told in a sentence."""

from __future__ import annotations

import importlib.metadata
import inspect
import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm import third_party
from mesh_llm.engine.diagnostics import Cause, buffer_bytes, explain, redacted
from mesh_llm.errors import MeshError
from mesh_llm.gateway.client_connection import ClientConnection, ClientServer
from mesh_llm.relay.connections import Connection, RelayConnections
from mesh_llm.third_party import AIOHTTP, ENGINE_TEXTS, IROH, EngineSymbol

ROOT = Path(__file__).parents[2]
SYMBOL = EngineSymbol(
    name="one", feature="chunked prefill", without="answers pause", replaced=True, found=True
)


def test_a_feature_is_off_where_a_symbol_is_missing() -> None:
    symbols = [
        SYMBOL,
        replace(SYMBOL, name="two", found=False),
        replace(SYMBOL, name="three", found=False),
        replace(SYMBOL, feature="draft policy"),
    ]

    assert third_party.features_off(symbols) == (
        "chunked prefill is off, answers pause: this engine has no two and no three",
    )
    assert third_party.features_off([SYMBOL]) == ()


def test_a_platform_on_which_nothing_can_be_replaced_is_told() -> None:
    assert third_party.features_off([replace(SYMBOL, name="", found=False)]) == (
        "chunked prefill is off, answers pause: functions of the engine cannot be replaced on this platform",
    )


def test_a_text_that_the_engine_does_not_write_is_told(tmp_path: Path) -> None:
    texts = [literal for text in ENGINE_TEXTS for literal in text.literals]
    engine = tmp_path / "engine.so"
    engine.write_bytes("\0".join(texts).encode())
    assert third_party.texts_missing(engine) == ()

    engine.write_bytes("\0".join(texts).replace("api_keys: ****", "keys: ****").encode())
    (missing,) = third_party.texts_missing(engine)
    assert missing.endswith("this engine does not write 'api_keys: ****'")


def test_what_is_listed_is_what_is_read() -> None:
    """The patterns of diagnostics.py match the engine's own format strings, filled in."""
    buffers, stamp, key, deaths, *_ = ENGINE_TEXTS

    for literal in buffers.literals:
        assert buffer_bytes("CPU " + literal.replace("%8.2f", "    1.00")) is not None
    assert redacted(key.literals[0] + "fXw_") == "api_keys: …"
    prefix = stamp.literals[0] % (0, 0, 1, 0)
    for literal in deaths.literals:
        death = explain(status=1, failed=None, lines=[f"{prefix} I {literal}"], oom_killed=False)
        assert death.cause is not Cause.EXIT
        assert death.evidence == (literal,)


def test_private_attributes_are_there() -> None:
    assert third_party.attributes_missing((*AIOHTTP, *IROH)) == ()


@pytest.mark.parametrize("owner", ["aiohttp.web_protocol.RequestHandler", "aiohttp.web_protocol.Gone"])
def test_an_aiohttp_with_other_insides_is_refused(owner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(AIOHTTP[0], owner=owner, names=("_gone",))
    monkeypatch.setattr(third_party, "AIOHTTP", (entry,))

    with pytest.raises(MeshError) as refused:
        third_party.require_aiohttp(entry.read_by)

    assert refused.value.message == (
        f"aiohttp {importlib.metadata.version('aiohttp')} is not one that this mesh-llm knows: "
        f"{entry.without}: {owner} has no _gone"
    )
    third_party.require_aiohttp("another module")


@pytest.mark.parametrize(
    ("path", "ours"),
    [
        ("gateway/client_connection.py", (ClientConnection, ClientServer)),
        ("relay/connections.py", (Connection, RelayConnections)),
    ],
)
def test_every_private_attribute_of_aiohttp_is_listed(path: str, ours: tuple[type, ...]) -> None:
    """Whatever our classes use, and inherit from aiohttp's."""
    used = {
        name
        for one in ours
        for name in re.findall(r"\._[a-z]\w*", inspect.getsource(one))
        if hasattr(one.__base__, name[1:])
    }
    assert used == {f".{name}" for entry in AIOHTTP if entry.read_by == path for name in entry.names}


def test_the_package_names_the_versions_that_it_knows() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert "aiohttp>=3.14,<3.15" in wanted
    assert "iroh==1.2.0" in wanted
