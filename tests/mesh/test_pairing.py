"""Pairing between machines of one network: whole nodes and commands in namespaces, with multicast."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support import namespaces
from tests.support.command import MESH_LLM, Running
from tests.support.joining import write_model
from tests.support.namespaces import Host
from tests.support.networks import FREE, SMALL_NODE, SOON_S, HostNode, Lab, do, names
from tests.support.node import temporary_home

ATTACKERS = (sys.executable, str(Path(__file__).parents[1] / "support" / "pairing_attackers.py"))
NO_PLAN = ("--hosting", "never")
LABEL = "Home office"


@pytest.fixture(scope="module", autouse=True)
def _networks_can_be_built() -> None:
    if (reason := do(namespaces.unavailable())) is not None:
        pytest.skip(reason)


@pytest.fixture
def lab(libraries: dict[str, Path], tmp_path: Path) -> Iterator[Lab]:
    with Lab(write_model(tmp_path)) as lab:
        yield lab


@contextmanager
def offered(owner: HostNode, *, agrees: str) -> Iterator[tuple[Running, str]]:
    """`mesh-llm invite --pair`, and the code that it shows."""
    argv: list[str | Path] = [*MESH_LLM, "invite", "--pair", "--as", LABEL, "--home", owner.home]
    with Running(owner.host.command(argv), typed=f"{agrees}\n") as running:
        running.until_said("Code: ")
        code = next(line for line in running.stdout.splitlines() if line.startswith("Code: "))
        yield running, code.removeprefix("Code: ")


@contextmanager
def joining(host: Host, code: str, *arguments: str) -> Iterator[Running]:
    """`mesh-llm join`, by somebody who types that code."""
    with temporary_home() as home:
        options = ("--home", home, "--name", "laptop", "--port", "0", *SMALL_NODE, *NO_PLAN)
        argv = host.command([*MESH_LLM, "join", *arguments, *options])
        with Running(argv, env=FREE, typed=f"{code}\n") as running:
            yield running


@contextmanager
def attacking(host: Host, *arguments: str | Path) -> Iterator[Running]:
    with Running(host.command([*ATTACKERS, *arguments])) as running:
        running.until_said("ready")
        yield running


def test_a_code_lets_a_machine_in_and_who_listens_learns_nothing(lab: Lab, tmp_path: Path) -> None:
    one, two = lab.build(namespaces.switch(2))
    owner = lab.found("desk", one, *NO_PLAN)
    owner.until_said("Invite token: ", within_s=SOON_S)
    heard = tmp_path / "frames"
    # On the owner's own cable: nobody on the network hears more.
    with (
        attacking(one, "listen", heard),
        offered(owner, agrees="y") as (offer, code),
        joining(two, code) as laptop,
    ):
        laptop.until_said(f"Joining {LABEL!r}. ")
        laptop.until_said("The code is right")
        laptop.until_said("Joined the mesh of desk")
        assert offer.wait().status == 0
        assert re.search(r"laptop \([0-9.]+\) knows the code\. Let it in\?", offer.stdout)
        assert offer.stdout.endswith("laptop is let in\n")
        owner.until_status(lambda status: names(status) == ["desk", "laptop"], what="it sees the laptop")
    frames = heard.read_bytes()
    assert LABEL.encode() in frames
    assert code.replace(" ", "").encode() not in frames
    assert b"mesh1-" not in frames


@pytest.mark.full
def test_a_person_refuses_and_a_wrong_code_costs_an_attempt(lab: Lab) -> None:
    one, two = lab.build(namespaces.switch(2))
    owner = lab.found("desk", one, *NO_PLAN)
    owner.until_said("Invite token: ", within_s=SOON_S)
    with offered(owner, agrees="n") as (_, code):
        wrong = "000000" if code != "000 000" else "000001"
        with joining(two, wrong, LABEL) as laptop:
            ended = laptop.wait()
            assert ended.status == 1
            assert "the code is wrong" in ended.stderr
        with joining(two, code, LABEL) as laptop:
            ended = laptop.wait()
            assert ended.status == 1
            assert "the owner of the mesh did not agree" in ended.stderr
    assert names(owner.status()) == ["desk"]


@pytest.mark.full
def test_somebody_in_between_gets_nothing(lab: Lab) -> None:
    one, two, three = lab.build(namespaces.switch(3))
    owner = lab.found("desk", one, *NO_PLAN)
    owner.until_said("Invite token: ", within_s=SOON_S)
    with (
        offered(owner, agrees="y") as (offer, code),
        attacking(three, "between", "Home office!", LABEL) as attacker,
        joining(two, code, "Home office!") as laptop,
    ):
        ended = laptop.wait()
        assert ended.status == 1
        assert "the code is wrong" in ended.stderr
        attacker.until(lambda: attacker.stdout.count("\n") > 1, what="it tells what it has read")
        heard = bytes.fromhex(attacker.stdout.splitlines()[1])
        assert b'"refused":"wrong"' in heard
        assert b"token" not in heard
        assert "Let it in?" not in offer.stdout
    assert names(owner.status()) == ["desk"]
