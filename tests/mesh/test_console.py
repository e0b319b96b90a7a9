"""What people see of a mesh: `status` and `plan` over two nodes that split a model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import tiny_gguf
from tests.support.command import mesh_llm, start
from tests.support.node import SKY, SMALL, NodeProcess, status_of, temporary_home

WAIT_S = 60.0


def token(node: NodeProcess) -> str:
    node.until_said("Invite token: ", within_s=WAIT_S)
    return next(line for line in node.stdout.splitlines() if line.startswith("Invite token: ")).split()[-1]


@contextmanager
def pair(
    model: Path, *, names: tuple[str, str] = ("one", "two")
) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    """The first hosts; both serve, split."""
    options = (*SMALL, "--split", "--hosting", "prefer", "--name", names[0])
    with (
        temporary_home() as home,
        temporary_home() as other_home,
        NodeProcess(*options, home=home, model=model) as first,
        NodeProcess(
            "--threads", "1", "--name", names[1], "--join", token(first), home=other_home, model=model
        ) as second,
    ):
        for node in (first, second):
            node.until(partial(is_split, node), what="it serves split", within_s=WAIT_S)
        yield first, second


def is_split(node: NodeProcess) -> bool:
    document = node.status_or_none()
    return (
        document is not None
        and document["node"]["state"] == "serving"
        and len(document["plan"]["stages"]) == 2
        and [member["state"] for member in document["mesh"]["nodes"]] == ["serving", "serving"]
    )


def is_told(home: Path, *names: str) -> bool:
    """Whether the node there knows exactly these, and that they serve."""
    document = status_of(home)
    members = document["mesh"]["nodes"] if document is not None else []
    return sorted((member["name"], member["state"]) for member in members) == sorted(
        (name, "serving") for name in names
    )


@pytest.fixture(scope="module")
def nodes(smollm2: Path) -> Iterator[tuple[NodeProcess, NodeProcess]]:
    with pair(smollm2) as nodes:
        yield nodes


def rows(text: str, header: str) -> list[list[str]]:
    """The table below the line that begins with `header`, in words."""
    lines = iter(text.splitlines())
    for line in lines:
        if line.split()[:1] == [header]:
            break
    found = []
    for line in lines:
        if not line:
            break
        found.append(line.split())
    return found


# -- status ---------------------------------------------------------------------------------------


def test_status_shows_nodes_links_plan_and_stages(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    first = nodes[0]
    first.ask("/v1/chat/completions", SKY)
    # The engine reports once a second what its links have carried.
    first.until(lambda: first.status()["engine"]["stages"][0]["bytes_per_token"], what="a link has worked")
    first.until(lambda: first.status()["engine"]["decode_tok_s"], what="a speed was measured")
    texts = [mesh_llm("status", "--home", node.home).stdout for node in nodes]

    summary = dict(line.split(maxsplit=1) for line in texts[0].split("\n\n")[0].splitlines())
    assert summary["node"] == "one (host)"
    assert summary["plan"] == "split over 2 nodes, hosted by one"
    # What else it says depends on whether the first one served alone before the second came.
    assert summary["why"].startswith("--split: over all 2 nodes that can take part")
    assert summary["weights"] == "66 MB in memory, 0 MB sent over links"
    assert " tok/s, predicted " in summary["speed"]
    assert summary["api"] == first.url

    table = rows(texts[0].split("\n\n", 1)[1], "node")
    assert [row[:3] for row in table] == [["one", "host", "serving"], ["two", "worker", "serving"]]
    assert "self" in table[0]
    assert "local" in table[1]
    mirrored = rows(texts[1].split("\n\n", 1)[1], "node")
    assert [row[:3] for row in mirrored] == [row[:3] for row in table]
    assert ("local" in mirrored[0], "self" in mirrored[1]) == (True, True)

    stages = rows(texts[0], "stage")
    assert [row[:4] for row in stages] == [["one", "0-14", "50", "%"], ["two", "15-29", "50", "%"]]
    assert int(stages[1][-1]) > 0  # bytes per token over the link


def test_status_lists_every_layer_once(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    text = mesh_llm("status", "--layers", "--home", nodes[1].home).stdout

    assert rows(text, "layer") == [
        ["embedding", "one"],
        *([str(layer), "one" if layer < 15 else "two"] for layer in range(30)),
        ["head", "one"],
    ]


def test_the_document_says_the_same_on_both_nodes(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    one, two = (node.status() for node in nodes)

    for key in ("model", "plan"):
        foretold = dict.fromkeys((name for name in one[key] if name.startswith("predicted_")), 0)
        assert one[key] | foretold == two[key] | foretold
    assert [node["id"] for node in one["mesh"]["nodes"]] == [node["id"] for node in two["mesh"]["nodes"]]
    assert one["engine"]["weights_sent_bytes"] == 0
    assert [node["link"]["via"] for node in one["mesh"]["nodes"]] == [[], []]


@pytest.mark.full
def test_a_client_sees_the_same_and_stands_last(nodes: tuple[NodeProcess, NodeProcess], home: Path) -> None:
    invited = mesh_llm("invite", "--role", "client", "--home", nodes[0].home).stdout.strip()
    arguments = ("--client", "--join", invited, "--home", home, "--port", "0", "--name", "asker")
    with start(*arguments) as client:
        client.until_said("API ready at ", within_s=WAIT_S)
        # What it hears of the others takes a moment.
        client.until(lambda: is_told(home, "one", "two", "asker"), what="it knows them all", within_s=WAIT_S)
        status = mesh_llm("status", "--home", home).stdout
        plan = mesh_llm("plan", "--home", home)
    # The tests that follow count the nodes.
    for node in nodes:
        node.until(partial(is_told, node.home, "one", "two"), what="it has left", within_s=WAIT_S)

    assert [row[:3] for row in rows(status.split("\n\n", 1)[1], "node")] == [
        ["one", "host", "serving"],
        ["two", "worker", "serving"],
        ["asker", "client", "serving"],
    ]
    assert "\nplan         split over 2 nodes, hosted by one\n" in status
    assert plan.status == 0, plan.stderr
    assert "\nplan     split over 2 nodes, hosted by one\n" in plan.stdout


@pytest.mark.full
def test_watching_in_a_pipe_gives_a_block_for_each_change(smollm2: Path) -> None:
    with (
        pair(smollm2, names=("twin", "twin")) as (first, second),
        start("status", "--watch", "--home", first.home) as watching,
    ):
        watching.until_said("split over 2 nodes", within_s=WAIT_S)
        ids = [node["id"][:6] for node in first.status()["mesh"]["nodes"]]
        watching.until(
            lambda: all(f"twin ({id})" in watching.stdout for id in ids), what="twins are told apart"
        )
        second.stop()
        watching.until_said("solo on twin", within_s=WAIT_S)
        first.stop()
        ended = watching.wait(within_s=WAIT_S)

    assert ended.status == 1
    assert ended.stderr.startswith(f"Error: no node is running on {first.home}\n")
    blocks = ended.stdout.split("\nnode")
    assert "\x1b" not in ended.stdout
    # A second apart, and only where something has changed: not one block for each look.
    assert all(before != after for before, after in pairwise(blocks))


# -- plan -----------------------------------------------------------------------------------------


def planned(*arguments: str | Path) -> dict[str, Any]:
    ended = mesh_llm("plan", "--json", *arguments)
    assert ended.status == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


def test_the_plan_of_a_running_mesh(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    document = planned("--home", nodes[1].home)
    status = nodes[0].status()

    assert document["scope"] == "mesh"
    assert document["assumed"] == []
    assert document["plan"]["host"] == status["plan"]["host"]
    assert [stage["link"]["kind"] for stage in document["plan"]["stages"]] == ["self", "local"]
    ours = [(stage["node"], stage["first"], stage["last"]) for stage in document["plan"]["stages"]]
    assert ours == [(stage["node"], stage["first"], stage["last"]) for stage in status["plan"]["stages"]]
    assert document["alternative"]["mode"] == "solo"
    assert document["alternative"]["plan"]["mode"] == "solo"


def test_a_plan_for_people(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    text = mesh_llm("plan", "--home", nodes[0].home).stdout

    assert "plan     split over 2 nodes, hosted by one\n" in text
    assert "over     the mesh as it is now, 2 nodes\n" in text
    assert "\nchosen   split over 2 nodes, hosted by one  " in text
    assert "\ninstead  solo on one " in text


def test_a_plan_with_other_options_changes_nothing(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    before = nodes[0].status()["plan"]["epoch"]
    document = planned("--home", nodes[0].home, "--tensor-split", "2,1", "--ctx-size", "1024")

    assert [stage["last"] - stage["first"] for stage in document["plan"]["stages"]] == [20, 10]
    assert document["model"]["context"] == 1024
    assert document["plan"]["reason"] == "as --tensor-split says"
    assert nodes[0].status()["plan"]["epoch"] == before


def test_a_plan_for_another_model_is_as_if_every_node_had_it(
    nodes: tuple[NodeProcess, NodeProcess], tmp_path: Path
) -> None:
    other = tiny_gguf.write(tmp_path / "other.gguf", "llama")
    document = planned("--home", nodes[0].home, "--model", other, "--split")
    text = mesh_llm("plan", "--home", nodes[0].home, "--model", other).stdout

    assert document["model"]["name"] == "other"
    assert sorted(document["assumed"]) == sorted(node["id"] for node in document["nodes"])
    assert {stage["node"] for stage in document["plan"]["stages"]} == set(document["assumed"])
    assert "\nassumed  every node had the file; not there yet: one, two\n" in text


@pytest.mark.full
def test_a_plan_for_a_model_that_nobody_has(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    document = planned("--home", nodes[0].home, "--model", "Kimi-K2.5")
    with_more = planned("--home", nodes[0].home, "--model", "Kimi-K2.5", "--with", "here,big=600GB:cuda")
    rows = json.loads(mesh_llm("models", "--fits", "--json", "--home", nodes[0].home).stdout)["models"]
    fits = {row["name"]: row for row in rows}

    assert document["scope"] == "mesh"
    assert document["plan"]["mode"] == "waiting"
    sizes, beside = document["notes"]
    assert sizes == "Kimi-K2.5 is not here: its sizes are the catalog's"
    assert beside.startswith("planned beside SmolLM2-135M-Instruct.Q4_1, which holds ")
    # Two nodes of one machine have its memory once: not more than the machine has.
    assert document["plan"]["have_bytes"] <= psutil.virtual_memory().total
    assert fits["Kimi-K2.5"]["have_bytes"] <= psutil.virtual_memory().total
    assert fits["smollm2"]["fits"]
    assert {node["name"] for node in with_more["nodes"]} == {"big", "one", "two"}
    assert with_more["plan"]["mode"] != "waiting"


def test_options_of_a_node_are_not_the_plans_of_a_mesh(nodes: tuple[NodeProcess, NodeProcess]) -> None:
    ended = mesh_llm("plan", "--home", nodes[0].home, "--max-memory", "1GB")

    assert ended.status == 2
    assert ended.stderr.startswith(
        f"Error: --max-memory is an option of each node, and a node is running on {nodes[0].home}\n"
    )


def test_without_a_node_the_plan_is_for_this_machine(home: Path, smollm2: Path) -> None:
    document = planned("--home", home, "--model", "smollm2", "--ctx-size", "2048", "--parallel", "1")
    short = mesh_llm("plan", "--home", home, "--model", "smollm2", "--max-memory", "60MB")

    assert document["scope"] == "machine"
    assert document["plan"]["mode"] == "solo"
    assert document["model"]["context"] == 2048
    assert document["alternative"]["plan"] is None
    assert short.status == 0
    assert "plan     waiting\n" in short.stdout
    assert "have 60 MB on 1 node\n" in short.stdout
    assert list(home.iterdir()) == []  # nothing was started, or written


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no-such-model", "no-such-model is neither a file nor a model that mesh-llm knows by name"),
        ("/no/such/file.gguf", "/no/such/file.gguf"),
        ("", "--model is empty"),
    ],
)
def test_plans_for_what_is_no_model(home: Path, model: str, message: str) -> None:
    ended = mesh_llm("plan", "--home", home, "--model", model)

    assert ended.status in (1, 2)
    assert message in ended.stderr
    assert ended.stdout == ""


@pytest.mark.full
def test_a_plan_for_a_model_that_could_be_downloaded(home: Path, tmp_path: Path) -> None:
    ended = mesh_llm("plan", "--home", home, "--model", "smollm2", env={"MESH_LLM_MODELS": str(tmp_path)})

    assert ended.status == 0, ended.stderr
    assert "smollm2 is not here: its sizes are the catalog's" in ended.stdout
