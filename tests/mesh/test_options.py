"""Options about the plan: they belong to the mesh, are obeyed to the letter, and explain who is left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import parse_size
from mesh_llm.errors import UsageError
from mesh_llm.mesh_settings import parse_layers, parse_shares
from tests.support.command import mesh_llm
from tests.support.joining import (
    PLAN,
    TEXT,
    JoiningNode,
    Lab,
    host_of,
    lab,
    left_out,
    refused,
    stages_of,
    write_model,
)


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[tuple[Lab, JoiningNode]]:
    with lab(model) as nodes:
        yield nodes, nodes.create("one", "--cache-type-v", "f32")


def text_of(node: JoiningNode) -> str:
    reply = node.ask("/v1/completions", TEXT)
    assert reply.status == 200, reply.body
    return str(reply.json()["choices"][0]["text"])


# -- whose options count --------------------------------------------------------------------------


MORE_OPTIONS = [
    (("--parallel", "3"), "1"),
    (("--alias", "mine"), "tiny"),
    (("--tensor-split", "1,1"), "not set"),
    (("--layers", "one=0-29"), "not set"),
    (("--cache-type-v", "f16"), "f32"),
    (("--predict", "9"), "not set"),
]


@pytest.mark.parametrize(
    ("options", "there"),
    [
        (("--ctx-size", "1024"), "512"),
        (("--split",), "not set"),
        (("--model", "smollm2"), "tiny"),
        *(pytest.param(*more, marks=pytest.mark.full) for more in MORE_OPTIONS),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_one_who_joins_cannot_change_the_plan(
    shared: tuple[Lab, JoiningNode], options: tuple[str, ...], there: str
) -> None:
    nodes, one = shared
    ended = mesh_llm("--home", nodes.folder / "joiner", "--port", "0", "--join", one.token(), *options)

    assert refused(ended) == f"only owners of the mesh can set {options[0]}; it is {there}"
    assert not (nodes.folder / "joiner" / "mesh.json").exists()


@pytest.mark.full
def test_another_model_file_is_refused_and_the_same_options_are_fine(
    shared: tuple[Lab, JoiningNode], tmp_path: Path
) -> None:
    nodes, one = shared
    other = write_model(tmp_path, seed=1)
    arguments = ("--join", one.token(), *PLAN, "--cache-type-v", "f32", "--alias", "tiny")
    ended = mesh_llm("--home", nodes.folder / "other", "--port", "0", *arguments, "--model", other)
    assert "is another file" in refused(ended)

    two = nodes.start("two", *arguments, "--model", nodes.model).until_ready()
    two.until_nodes("one", "two")
    two.stop()
    # A member that returns is held to them, too.
    ended = mesh_llm("--home", two.home, "--port", "0", "--ctx-size", "1024")
    assert refused(ended) == "only owners of the mesh can set --ctx-size; it is 512"


@pytest.mark.full
def test_all_follow_when_the_creator_comes_back_with_other_options(nodes: Lab, tmp_path: Path) -> None:
    """Also where it is not the creator who hosts, and where only the engine's own options differ."""
    one = nodes.start("one", "--model", nodes.model, *PLAN, "--hosting", "never")
    one.until_state("waiting")
    two = nodes.join("two", one, models=tmp_path / "two")
    two.until_plan(("two", 0, 30))
    one.stop()

    one = nodes.create("one", "--hosting", "never", "--alias", "renamed")
    two.until_status(lambda status: status["model"]["name"] == "renamed", what="the new name")
    two.until(
        lambda: two.ask("/v1/models").json()["data"][0]["id"] == "renamed", what="it is served by that name"
    )
    one.until_plan(("two", 0, 30))
    one.stop()

    one = nodes.create("one", "--hosting", "never", "--split", "--predict", "5")
    two.until_plan(("two", 0, 15), ("one", 15, 30), host="two")
    unlimited = {name: value for name, value in TEXT.items() if name != "max_tokens"}
    usage = one.ask("/v1/completions", unlimited).json()["usage"]
    assert usage["completion_tokens"] == 5, "it answers at greater length than the mesh's settings allow"
    assert one.ask("/v1/completions", TEXT).json()["usage"]["completion_tokens"] == TEXT["max_tokens"]
    one.stop()

    # Another model: it is fetched, and then served.
    other = write_model(tmp_path / "other", name="other.gguf", seed=2, layers=4)
    one = nodes.start("one", "--model", other, *PLAN, "--split", "--hosting", "never")
    status = two.until_plan(("two", 0, 2), ("one", 2, 4), host="two")
    assert status["model"]["name"] == "other"
    assert (tmp_path / "two" / "other.gguf").read_bytes() == other.read_bytes()
    assert text_of(two) == text_of(one.until_ready())


# -- shares ---------------------------------------------------------------------------------------


def test_shares_and_layers_are_obeyed_to_the_letter(nodes: Lab) -> None:
    split = ("--hosting", "prefer")
    one = nodes.start("one", "--model", nodes.model, *PLAN, *split, "--tensor-split", "1,2,1")
    status = one.until_status(lambda s: s["node"]["state"] == "waiting" and s["plan"], what="it waits")
    assert status["plan"]["reason"] == "--tensor-split names 3 nodes, 1 is here"
    token = one.token()
    others = [nodes.start(name, "--join", token) for name in ("two", "three")]
    second, third = sorted((node.until_ready() for node in others), key=id_of)
    for node in (one, second, third):
        node.until_plan(("one", 0, 8), (second.name, 8, 23), (third.name, 23, 30), host="one")
    first = text_of(second)
    one.stop()

    one = nodes.start("one", *PLAN, *split, "--tensor-split", "0,1,1")
    for node in (one, second, third):
        node.until_plan((second.name, 0, 15), (third.name, 15, 30), host="one")
    assert text_of(one) == first
    one.stop()

    one = nodes.start("one", *PLAN, *split, "--layers", "one=0-9,two=10-19,three=20-29")
    for node in (one, second, third):
        node.until_plan(("one", 0, 10), ("two", 10, 20), ("three", 20, 30), host="one")
    assert text_of(third) == first


def id_of(node: JoiningNode) -> str:
    return str(node.status()["node"]["id"])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--tensor-split", "0,0"), "--tensor-split 0,0: shares must be at least 0, and one of them above 0"),
        (("--layers", "one=0-9,two=11-29"), "--layers two=11-29: layer 10 is missing"),
        (("--layers", "one=0-19"), "--layers gives 20 layers, the model has 30"),
        (("--device", "CUDA7"), "--device CUDA7: there is no such device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_makes_no_sense_is_refused(
    nodes: Lab, model: Path, options: tuple[str, ...], sentence: str
) -> None:
    ended = mesh_llm("--home", nodes.folder / "one", "--port", "0", "--model", model, *PLAN, *options)
    assert refused(ended, status=2) == sentence


@pytest.mark.parametrize(
    ("parse", "text", "sentence"),
    [
        (parse_shares, "1,x", "--tensor-split 1,x: shares are numbers, as in 3,1 or 0.75,0.25"),
        (parse_shares, "nan", "--tensor-split nan: shares must be at least 0, and one of them above 0"),
        (parse_shares, "1,-1", "--tensor-split 1,-1: shares must be at least 0, and one of them above 0"),
        (parse_layers, "one", "--layers one: give layers by node name"),
        (parse_layers, "one=5-3", "--layers one=5-3: give layers by node name"),
        (parse_size, "much", "'much' is not a size"),
    ],
)
def test_texts_that_mean_nothing(parse: Callable[[str], object], text: str, sentence: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert caught.value.message == sentence


# -- each node's own ------------------------------------------------------------------------------


@pytest.mark.full
def test_a_node_that_never_hosts_waits_for_one_that_may(nodes: Lab) -> None:
    one = nodes.start("one", "--model", nodes.model, *PLAN, "--hosting", "never", "--device", "none")
    status = one.until_status(lambda s: s["node"]["state"] == "waiting" and s["plan"], what="it waits")
    assert status["plan"]["mode"] == "waiting"
    assert "host" in status["plan"]["reason"]
    reply = one.ask("/v1/completions", TEXT)
    assert (reply.status, reply.json()["error"]["type"]) == (503, "unavailable_error")

    two = nodes.join("two", one, "--device", "CPU", "--gpu-layers", "3")
    status = one.until_plan(("two", 0, 30), host="two")
    assert [node["devices"] for node in status["mesh"]["nodes"]] == [["CPU"], ["CPU"]]
    assert text_of(one) == text_of(two)


@pytest.mark.full
def test_memory_that_is_not_lent_is_not_used(nodes: Lab) -> None:
    one = nodes.start("one", "--model", nodes.model, *PLAN, "--max-memory", "2MB")
    status = one.until_status(lambda s: s["node"]["state"] == "waiting" and s["plan"], what="it waits")
    plan = status["plan"]
    assert (plan["mode"], plan["have_bytes"]) == ("waiting", 2_000_000)
    assert plan["need_bytes"] > 2_000_000
    assert one.status()["mesh"]["nodes"][0]["memory_bytes"] == 2_000_000
    one.until_said("Waiting for more peers: need ")

    two = nodes.join("two", one)
    status = one.until_plan(("two", 0, 30), host="two")
    assert "one" in left_out(status)
    two.stop()
    one.until_state("waiting")


# -- who is left out ------------------------------------------------------------------------------


@pytest.mark.full
def test_every_node_that_is_left_out_has_its_reason(nodes: Lab, tmp_path: Path) -> None:
    one = nodes.create("one", "--split")
    token = one.token()
    other = write_model(tmp_path / "other", seed=3)
    started = [
        nodes.start("bare", "--join", token, "--no-fetch", models=tmp_path / "bare"),
        nodes.start("other", "--join", token, "--no-fetch", models=other.parent),
        nodes.start("small", "--join", token, "--max-memory", "1MB"),
        nodes.start("client", "--join", one.token(role="client"), "--client"),
    ]
    for node in started:
        node.until_ready()

    status = one.until_status(lambda s: len(left_out(s)) == 4 and settled(s), what="four are left out")
    reasons = left_out(status)
    assert reasons["bare"] == "no such model file"
    # And not which ones it has: what is on its disk is its owner's business.
    assert reasons["other"] == "no such model file"
    assert reasons["small"].startswith("not enough memory: ")
    assert reasons["client"] == "is a client"
    assert stages_of(status) == [("one", 0, 30)]
    for node in started:
        node.until_status(lambda s: left_out(s) == reasons, what=f"it knows why: {reasons}")
        assert text_of(node) == text_of(one)
    started[0].until_said("tiny is not on this machine and --no-fetch is set; not acting as a worker")
    assert list((tmp_path / "bare").iterdir()) == []


def settled(status: dict[str, Any]) -> bool:
    return "is starting" not in left_out(status).values()


@pytest.mark.full
def test_a_model_that_fits_on_one_stays_there(nodes: Lab) -> None:
    one = nodes.create("one")
    before = one.status()
    two = nodes.join("two", one, "--hosting", "auto")
    status = one.until_status(lambda s: "two" in left_out(s) and settled(s), what="two is left out")

    reason = left_out(status)["two"]
    assert reason.startswith(("not needed: ", "would make it slower: "))
    two.until_status(lambda s: host_of(s) == "one", what="it knows who hosts")
    after = one.status()
    assert (after["plan"]["mode"], after["plan"]["epoch"]) == ("solo", before["plan"]["epoch"])
    assert after["engine"]["pid"] == before["engine"]["pid"]
    assert text_of(two) == text_of(one)
