"""Pairing without a network: codes, attempts, and what an announcement may say."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from zeroconf import ServiceStateChange

from mesh_llm.cli import pair as command
from mesh_llm.config import NodeConfig
from mesh_llm.errors import JoinRefused, MeshError, UsageError
from mesh_llm.pairing import announcement
from mesh_llm.pairing.announcement import FOUND_LIMIT, LABEL_CHARS, SERVICE, FoundMesh, fit_label, read
from mesh_llm.pairing.exchange import CODE_DIGITS, new_code, shown, typed
from mesh_llm.pairing.offer import ATTEMPTS_AN_HOUR, Attempts

ID = "ab" * 32


def test_a_code_is_read_as_people_type_it() -> None:
    code = new_code()
    assert len(code) == CODE_DIGITS
    for text in (code, shown(code), f" {code[:3]}-{code[3:]}\t"):
        assert typed(text) == code


@pytest.mark.parametrize("text", ["", "12345", "1234567", "12345a", "١٢٣٤٥٦", "abcdef"])
def test_what_is_no_code_is_none(text: str) -> None:
    assert typed(text) is None


def test_ten_wrong_codes_an_hour() -> None:
    now = 0.0
    attempts = Attempts(lambda: now)
    for _ in range(ATTEMPTS_AN_HOUR):
        assert attempts.begin() is not None
    assert attempts.left == 0
    assert attempts.begin() is None
    now = 3600.0
    assert attempts.left == ATTEMPTS_AN_HOUR
    begun = attempts.begin()
    assert begun is not None
    attempts.succeeded(begun)
    assert attempts.left == ATTEMPTS_AN_HOUR


@pytest.mark.parametrize(
    ("text", "label"),
    [
        ("Home office", "Home office"),
        ("  a.b  ", "a b"),
        ("\x1b[2Jevil", "?[2Jevil"),
        ("", "mesh"),
        ("é" * 100, "é" * 31),
        ("x" * 100, "x" * LABEL_CHARS),
    ],
)
def test_a_label_is_one_of_dns(text: str, label: str) -> None:
    assert fit_label(text) == label


def test_an_announcement_is_read() -> None:
    found = read(f"Home.{SERVICE}", {b"id": ID.encode()}, ["192.168.1.7"], 9)
    assert found is not None
    assert (found.label, found.node, found.address.direct) == ("Home", ID, ("192.168.1.7:9",))


@pytest.mark.parametrize(
    ("properties", "addresses", "port"),
    [
        ({}, ["192.168.1.7"], 9),
        ({b"id": None}, ["192.168.1.7"], 9),
        ({b"id": b"\xff" * 64}, ["192.168.1.7"], 9),
        ({b"id": ID.encode()}, [], 9),
        ({b"id": ID.encode()}, ["192.168.1.7"], 0),
        ({b"id": ID.encode()}, ["8.8.8.8", "0.0.0.0"], 9),
    ],
)
def test_an_announcement_that_is_not_ours_is_left_out(
    properties: dict[bytes, bytes | None], addresses: list[str], port: int
) -> None:
    assert read(f"Home.{SERVICE}", properties, addresses, port) is None


def test_a_label_from_the_network_is_fit_for_a_terminal() -> None:
    found = read(f"\x1b[31m{'x' * 200}.{SERVICE}", {b"id": ID.encode()}, ["10.0.0.1"], 9)
    assert found is not None
    assert found.label.isprintable()
    assert len(found.label) <= LABEL_CHARS


async def test_names_that_nobody_answers_for_hide_no_offer(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [*(f"ghost {number}.{SERVICE}" for number in range(FOUND_LIMIT - 1)), f"Home.{SERVICE}"]
    asked: list[str] = []

    class Browser:
        def __init__(self, _zeroconf: object, _type: str, handlers: list[Callable[..., None]]) -> None:
            for name in names:
                handlers[0](name=name, state_change=ServiceStateChange.Added)

        async def async_cancel(self) -> None:
            pass

    @asynccontextmanager
    async def no_network(_ip: str | None) -> AsyncIterator[Any]:
        yield SimpleNamespace(zeroconf=None)

    async def resolved(_zeroconf: object, name: str) -> FoundMesh | None:
        asked.append(name)
        if not name.startswith("Home"):
            await asyncio.sleep(60)
        return mesh(name.removesuffix(f".{SERVICE}"))

    monkeypatch.setattr("zeroconf.asyncio.AsyncServiceBrowser", Browser)
    monkeypatch.setattr(announcement, "_zeroconf", no_network)
    monkeypatch.setattr(announcement, "_resolved", resolved)
    async with asyncio.timeout(10):
        found = await announcement.find(within_s=0.5, ip=None)
    assert [each.label for each in found] == ["Home"]
    assert len(asked) == FOUND_LIMIT


# -- who types the code ---------------------------------------------------------------------------


def mesh(label: str) -> FoundMesh:
    found = read(f"{label}.{SERVICE}", {b"id": ID.encode()}, ["192.168.1.7"], 9)
    assert found is not None
    return found


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`mesh-llm join` in a terminal: what is found there, and what is typed; the code is 123456."""

    def joins(label: str | None, *, found: list[str], typed: list[Any]) -> Any:
        async def find(**_: object) -> list[FoundMesh]:
            return [mesh(each) for each in found]

        async def pair(chosen: FoundMesh, *, code: str, **_: object) -> str:
            if code != "123456":
                raise JoinRefused("the code is wrong", hint="type it again")
            return chosen.label

        monkeypatch.setattr(command, "find", find)
        monkeypatch.setattr(command, "pair", pair)
        monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
        monkeypatch.setattr(click, "prompt", lambda *_, **__: typed.pop(0))
        return command._paired(label, "laptop", None)

    return joins


def test_the_meshes_that_are_found_are_listed_and_one_is_chosen(
    joins: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert joins(None, found=["Home", "Office"], typed=[2, "123 456"]) == "Office"
    said = capsys.readouterr().out
    assert "1. Home (192.168.1.7:9)\n2. Office (192.168.1.7:9)\n" in said
    assert "Joining 'Office'. The code stands on its owner's screen.\n" in said
    # The only one, and one that was named, need no choice.
    assert joins(None, found=["Home"], typed=["123456"]) == "Home"
    assert joins("Office", found=["Home", "Office"], typed=["123456"]) == "Office"


def test_a_mesh_that_is_not_found_says_which_are(joins: Callable[..., Any]) -> None:
    with pytest.raises(MeshError, match="no mesh called 'Attic' is announced here; there is 'Home'"):
        joins("Attic", found=["Home"], typed=[])
    with pytest.raises(MeshError, match="no mesh is announced here"):
        joins(None, found=[], typed=[])


def test_three_codes_may_be_typed(joins: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert joins("Home", found=["Home"], typed=["1", "000000", "111111", "123456"]) == "Home"
    told = capsys.readouterr().err
    assert told.count("the code is wrong: type it again") == 2
    assert "a code has 6 digits" in told
    with pytest.raises(JoinRefused, match="the code is wrong"):
        joins("Home", found=["Home"], typed=["000000"] * 3)


def test_a_node_keeps_the_secrets_that_it_was_given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are read once: a second time the variables are gone, and so is a pipe's content."""
    started: list[NodeConfig] = []
    monkeypatch.setattr(command, "_paired", lambda *_: "mesh1-token")
    monkeypatch.setattr(command, "run_with_options", lambda config, _: started.append(config))
    monkeypatch.setenv("MESH_LLM_API_KEY", "a-key")
    monkeypatch.setenv("MESH_LLM_RELAY_TOKEN", "a-relay-token")

    options = ["--home", str(tmp_path), "--api-key", "$MESH_LLM_API_KEY"]
    command.join.main(["Home", *options], standalone_mode=False)

    (config,) = started
    assert (config.join, config.api_key, config.relay_token) == ("mesh1-token", "a-key", "a-relay-token")


@pytest.mark.parametrize(
    ("options", "variables", "why"),
    [
        (["--new-mesh"], {}, "--join and --new-mesh cannot be used together"),
        ([], {"MESH_LLM_JOIN": "mesh1-token"}, "mesh-llm join finds a mesh by itself"),
        (["--api-key", "-"], {}, "--api-key - and the code cannot both be read from standard input"),
    ],
)
def test_what_is_wrong_is_said_before_a_code_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], variables: dict[str, str], why: str
) -> None:
    monkeypatch.setattr(command, "_paired", lambda *_: pytest.fail("it looks for a mesh"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(UsageError, match=why):
        command.join.main(["--home", str(tmp_path), *options], standalone_mode=False)
