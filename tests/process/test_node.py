"""One node with the real engine and the real model: what its clients and its owner see."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from mesh_llm import __version__
from mesh_llm.config import NodeConfig
from mesh_llm.gateway.server import Gateway
from mesh_llm.node.node import Node
from mesh_llm.types import Event
from tests.support.command import mesh_llm
from tests.support.node import ENDLESS, SKY, SMALL, NodeProcess, ask, temporary_home
from tests.support.questions import ABOUT_SKY
from tests.support.sampling import first
from tests.support.waiting import until
from tests.support.wheel import direct_answers

CHAT: dict[str, Any] = {**SKY, "cache_prompt": False}
TEXT: dict[str, Any] = {
    "prompt": "The capital of France is",
    "temperature": 0,
    "max_tokens": 16,
    "cache_prompt": False,
}
"""Without the prompt cache: a prompt that is computed in other batches may end in another text."""
FREED_S = 9.0
"""For a slot whose client has left, on a machine that stands still now and then: a moment otherwise."""
ORPHAN_S = 10.0
"""For whatever a killed node has started to be gone, by the same measure: a tenth of a second otherwise."""


@pytest.fixture(scope="module")
def node(smollm2: Path) -> Iterator[NodeProcess]:
    """For tests that leave it as it was."""
    with temporary_home() as home, NodeProcess(*SMALL, home=home, model=smollm2) as node:
        yield node.until_ready()


@pytest.fixture(scope="module")
def direct(smollm2: Path, libraries: dict[str, Path]) -> list[dict[str, Any]]:
    return direct_answers(smollm2, libraries, [("chat", CHAT), ("text", TEXT)])


def busy_slots(node: NodeProcess) -> int:
    return sum(slot["is_processing"] for slot in node.ask("/slots").json())


# -- answers --------------------------------------------------------------------------------------


def test_chat_is_what_the_engine_alone_answers(node: NodeProcess, direct: list[dict[str, Any]]) -> None:
    reply = node.ask("/v1/chat/completions", CHAT)

    expected = direct[0]["choices"][0]["message"]["content"]
    assert re.match(ABOUT_SKY, expected)
    assert reply.status == 200
    assert reply.json()["choices"][0]["message"]["content"] == expected
    assert reply.json()["usage"] == direct[0]["usage"]
    assert reply.json()["usage"]["completion_tokens"] == CHAT["max_tokens"]


def test_completion_is_what_the_engine_alone_answers(node: NodeProcess, direct: list[dict[str, Any]]) -> None:
    reply = node.ask("/v1/completions", TEXT)

    assert direct[1]["choices"][0]["text"].startswith(" Paris")
    assert reply.json()["choices"][0]["text"] == direct[1]["choices"][0]["text"]
    assert reply.json()["usage"] == direct[1]["usage"]


def test_chunks_of_a_stream_make_the_same_text(node: NodeProcess, direct: list[dict[str, Any]]) -> None:
    with node.stream("/v1/chat/completions", {**CHAT, "stream": True}) as stream:
        *chunks, last = stream.data()

    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    pieces = [delta["content"] for delta in deltas if delta.get("content")]
    assert last == "[DONE]"
    assert len(pieces) > CHAT["max_tokens"] // 2
    assert "".join(pieces) == direct[0]["choices"][0]["message"]["content"]


def test_one_connection_serves_many_requests(node: NodeProcess) -> None:
    with closing(node.connect()) as connection:
        first = ask(connection, "/v1/completions", {**TEXT, "max_tokens": 2})
        used = connection.sock
        second = ask(connection, "/v1/completions", {**TEXT, "max_tokens": 2})

        assert used is not None
        assert connection.sock is used
    assert first.json()["choices"] == second.json()["choices"]


def test_openai_client_chats_and_streams(node: NodeProcess, direct: list[dict[str, Any]]) -> None:
    expected = direct[0]["choices"][0]["message"]["content"]
    with openai.OpenAI(base_url=f"{node.url}/v1", api_key="mesh", max_retries=0) as client:
        whole = client.chat.completions.create(
            model="test",
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            temperature=0,
            max_tokens=24,
            extra_body={"cache_prompt": False},
        )
        with client.chat.completions.create(
            model="test",
            messages=[{"role": "user", "content": "Why is the sky blue?"}],
            temperature=0,
            max_tokens=24,
            stream=True,
            extra_body={"cache_prompt": False},
        ) as stream:
            pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
        models = [model.id for model in client.models.list()]

    assert whole.choices[0].message.content == expected
    assert "".join(pieces) == expected
    assert models == ["SmolLM2-135M-Instruct.Q4_1"]


def test_a_client_that_leaves_frees_its_slot(node: NodeProcess) -> None:
    with node.stream("/v1/completions", ENDLESS) as stream:
        stream.next()
        assert busy_slots(node) == 1

    # Nobody else may have to wait for the rest of it, which would take some fifteen seconds.
    until(lambda: busy_slots(node) == 0, within_s=FREED_S, what="the engine's slot is free")


def test_a_client_that_does_not_wait_for_its_whole_answer_frees_its_slot(node: NodeProcess) -> None:
    with closing(node.connect()) as connection:
        connection.request("POST", "/v1/completions", json.dumps({**ENDLESS, "stream": False}))
        until(lambda: busy_slots(node) == 1, within_s=10, what="the engine is at work")

    def is_free_after_a_while() -> bool:
        # The engine looks for its client after a second without a result for anybody; `/slots` is one.
        time.sleep(1.5)
        return busy_slots(node) == 0

    until(is_free_after_a_while, within_s=FREED_S, what="the engine's slot is free")


# -- other routes ---------------------------------------------------------------------------------


def test_health_names_the_model_it_serves(node: NodeProcess) -> None:
    reply = node.ask("/health")

    assert reply.status == 200
    assert reply.json() == {"status": "ok", "state": "serving", "model": "SmolLM2-135M-Instruct.Q4_1"}


def test_metrics_hold_our_series_and_the_engines(node: NodeProcess) -> None:
    node.ask("/v1/completions", {**TEXT, "max_tokens": 1})

    lines = node.ask("/metrics").body.decode().splitlines()

    assert 'mesh_llm_gateway_requests_total{route="/v1/completions",status="200"}' in "\n".join(lines)
    assert any(line.startswith("llamacpp:tokens_predicted_total ") for line in lines)


@pytest.mark.parametrize(
    ("path", "body", "status", "kind"),
    [
        ("/v1/chat/completions", b'{"messages": [', 400, "invalid_request_error"),
        ("/v1/chat/completions", b'{"messages": "none"}', 400, "invalid_request_error"),
        ("/v1/no/such/path", b"{}", 404, "not_found_error"),
    ],
)
def test_errors_have_the_shape_of_openais(
    node: NodeProcess, path: str, body: bytes, status: int, kind: str
) -> None:
    reply = node.ask(path, body)

    error = reply.json()["error"]
    assert (reply.status, error["type"]) == (status, kind)
    # The engine says its status once more; what the gateway refuses itself has a word.
    assert error["code"] == ("not_found" if status == 404 else status)
    assert error["message"]


@pytest.mark.full
def test_alias_is_the_name_it_serves_under(home: Path, smollm2: Path) -> None:
    with NodeProcess("--alias", "little", *SMALL, home=home, model=smollm2) as node:
        node.until_ready()

        assert [model["id"] for model in node.ask("/v1/models").json()["data"]] == ["little"]
        assert node.ask("/health").json()["model"] == "little"
        assert node.status()["model"]["name"] == "little"
        assert f" agent pi --write --home {home} && pi --provider mesh --model little\n" in node.stdout


def test_api_key_is_asked_of_everybody_and_kept_to_itself(home: Path, smollm2: Path) -> None:
    key = "correct-horse-battery-staple"
    env = {"MESH_LLM_API_KEY": key}
    with NodeProcess(*SMALL, home=home, model=smollm2, env=env) as node:
        node.until_ready()
        bare = node.ask("/v1/completions", {**TEXT, "max_tokens": 1})
        wrong = node.ask("/v1/models", headers={"Authorization": "Bearer wrong"})
        right = node.ask(
            "/v1/completions", {**TEXT, "max_tokens": 1}, headers={"Authorization": f"Bearer {key}"}
        )

        assert (bare.status, wrong.status, right.status) == (401, 401, 200)
        assert bare.json()["error"]["code"] == "invalid_api_key"
        assert node.ask("/health").status == 200
        assert key not in node.logs() + node.stdout + node.stderr + json.dumps(node.status())
        lines = node.command_lines().values()
        assert len(lines) > 1
        assert all(key not in part for line in lines for part in line)


# -- status ---------------------------------------------------------------------------------------


def shape(value: Any) -> Any:
    """The types of a document: what INTERFACE.md promises of `status --json`."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [shape(item) for item in value[:1]]
    return type(value).__name__


def until_told(node: NodeProcess) -> dict[str, Any]:
    """Sizes of buffers are read from the engine's log, which may come after the word that it is ready."""
    node.until(lambda: len(node.status()["engine"]["buffers"]) == 4, what="the sizes of its buffers")
    return node.status()


def test_status_says_everything_in_the_promised_form(node: NodeProcess) -> None:
    until_told(node)
    ended = mesh_llm("status", "--json", "--home", node.home)

    document = json.loads(ended.stdout)
    assert ended.status == 0
    # What the node has answered before decides whether there are figures.
    gain, parts = document["model"]["draft"].pop("gain"), document["engine"]["token"].pop("parts")
    assert document["models"][0]["draft"].pop("gain") == gain
    first = document["api"].pop("first_token")
    assert shape(first) == {
        "measured_s": "NoneType" if first["measured_s"] is None else "float",
        "prompt_tokens": "int",
        **dict.fromkeys(("predicted_s", "predicted_low_s", "predicted_high_s"), "float"),
    }
    assert gain is None or gain > 0
    assert all(shape(part) == {"kind": "str", "node": "str", "ms": "float"} for part in parts if part["node"])
    draft = {
        **dict.fromkeys(("name", "off"), "NoneType"),
        **dict.fromkeys(("depth", "drafted", "accepted", "text_drafted", "text_accepted"), "int"),
    }
    assert shape(document) == {
        "version": "str",
        "node": {
            **dict.fromkeys(("id", "name", "role", "state", "reason", "paused", "lend"), "str"),
            "resting": "bool",
        },
        "mesh": {
            "id": "str",
            "nodes": [
                {
                    **dict.fromkeys(("id", "name", "role", "state", "reason", "version", "standing"), "str"),
                    "paused": "str",
                    **dict.fromkeys(("memory_bytes", "lent_bytes"), "int"),
                    "resting": "bool",
                    "owner": "bool",
                    "devices": ["str"],
                    "models": ["str"],
                    "lacks": [],
                    "speed": dict.fromkeys(("read_gb_s", "gflops", "attention_gflops"), "float"),
                    "link": {
                        "kind": "str",
                        "rtt_ms": "float",
                        "via": [],
                        "remote": "NoneType",
                        **dict.fromkeys(
                            ("sent_bytes", "received_bytes", "bytes_per_s", "peak_bytes_per_s"), "int"
                        ),
                    },
                }
            ],
        },
        "model": {
            **dict.fromkeys(("name", "fingerprint", "quantisation"), "str"),
            **dict.fromkeys(("size_bytes", "layers", "context", "slots"), "int"),
            "draft": draft,
            "adapters": [],
        },
        "plan": {
            **dict.fromkeys(("mode", "host", "reason"), "str"),
            **dict.fromkeys(("epoch", "need_bytes", "have_bytes"), "int"),
            **dict.fromkeys(
                ("predicted_tok_s", "predicted_first_token_s", "predicted_prompt_tok_s"), "float"
            ),
            **dict.fromkeys(("predicted_tok_s_low", "predicted_tok_s_high"), "float"),
            **dict.fromkeys(("predicted_first_token_low_s", "predicted_first_token_high_s"), "float"),
            "predicted_from": "str",
            "head_on_worker": "bool",
            "stages": [
                {
                    "node": "str",
                    **dict.fromkeys(("first", "last", "weight_bytes", "need_bytes"), "int"),
                    "share": "float",
                    "device": "NoneType",
                }
            ],
            "excluded": [],
            "lanes": "int",
            "lanes_reason": "str",
        },
        "engine": {
            **dict.fromkeys(("state", "reason"), "str"),
            **dict.fromkeys(("pid", "restarts", "weights_sent_bytes", "weights_resident_bytes"), "int"),
            **dict.fromkeys(("ready_s", "decode_tok_s", "prompt_tok_s"), "float"),
            "buffers": dict.fromkeys(("model", "KV", "compute", "output"), "int"),
            "stages": [],
            "warnings": [],
            "lanes": [{"number": "int", "state": "str", "pid": "int", "requests": "int", "ends": "bool"}],
            "token": {"total_ms": "float", "sentence": "str"},
        },
        "api": {"url": "str", "key_needed": "bool", "keys": [], "shared_url": "NoneType"},
        "console": {"url": "NoneType"},
        "models": [
            {
                **{"name": "str", "fingerprint": "str", "default": "bool", "state": "str", "reason": "str"},
                **{"host": "str", "mode": "str", "context": "int", "slots": "int", "nodes": ["str"]},
                "on_demand": "bool",
                "priority": "int",
                "replicas": [
                    {"host": "str", "mode": "str", "nodes": ["str"], "crowded": "bool", "lanes": "int"}
                ],
                **dict.fromkeys(("replicas_wanted", "replicas_least", "replicas_most"), "int"),
                "draft": draft,
                "adapters": [],
            }
        ],
    }
    assert document["version"] == __version__
    assert (document["node"]["state"], document["node"]["role"]) == ("serving", "host")
    assert document["plan"]["mode"] == "solo"
    assert document["plan"]["host"] == document["node"]["id"]
    assert document["model"]["size_bytes"] == 98362432


def test_stages_cover_the_layers_exactly_once(node: NodeProcess) -> None:
    document = node.status()

    covered = [
        layer for stage in document["plan"]["stages"] for layer in range(stage["first"], stage["last"])
    ]
    assert covered == list(range(30))
    assert document["model"]["layers"] == 30
    assert sum(stage["share"] for stage in document["plan"]["stages"]) == 1.0


def test_memory_that_was_planned_is_what_the_engine_took(node: NodeProcess) -> None:
    document = until_told(node)

    # Without the weights: native code keeps some of them twice, rearranged and as mapped pages of the file.
    buffers = document["engine"]["buffers"]
    taken = buffers["KV"] + buffers["compute"] + buffers["output"]
    planned = document["plan"]["need_bytes"] - document["model"]["size_bytes"]
    # Planned for the largest batches; a slow machine computes in smaller ones, which need less.
    assert taken / 1.1 < planned < 1.5 * taken


def test_status_for_people(node: NodeProcess) -> None:
    ended = mesh_llm("status", "--home", node.home)

    summary, nodes, stages = ended.stdout.split("\n\n")
    rows = dict(line.split(maxsplit=1) for line in summary.splitlines())
    assert rows["state"] == "serving"
    assert rows["model"] == "SmolLM2-135M-Instruct.Q4_1, Q4_1, 30 layers"
    assert rows["context"] == "1 slot of 2048 tokens"
    assert rows["plan"].startswith("solo on ")
    assert "predicted " in rows["speed"]
    seconds = r"(not measured yet, predicted [\d.]+ s \([\d.]+-[\d.]+\)|[\d.]+ s)"
    assert re.search(rf"^first token  {seconds} for a prompt of ", summary, re.M)
    assert rows["api"] == node.url
    heads = ["node", "role", "state", "memory", "lent", "link", "rtt", "traffic", "via"]
    assert nodes.split("\n")[0].split() == heads
    assert len(nodes.splitlines()) == 2
    assert stages.splitlines()[1].split()[1:4] == ["0-29", "100", "%"]


def test_what_a_run_prints(node: NodeProcess) -> None:
    url = node.url.replace("127.0.0.1", "localhost")

    assert f"API ready at {url}\n" in node.stdout
    pi = "&& pi --provider mesh --model SmolLM2-135M-Instruct.Q4_1"
    assert f" agent pi --write --home {node.home} {pi}\n" in node.stdout
    assert (
        f"goose: GOOSE_PROVIDER=openai OPENAI_HOST={url} OPENAI_API_KEY=mesh "
        "GOOSE_MODEL=SmolLM2-135M-Instruct.Q4_1 goose session\n"
    ) in node.stdout


# -- start and end --------------------------------------------------------------------------------


def test_status_and_health_answer_while_the_model_loads(home: Path, slow_model: Path) -> None:
    with NodeProcess(*SMALL, "--engine-set", "check_tensors=true", home=home, model=slow_model) as node:
        node.until(node.status_or_none, what="status answers")
        node.until_state("loading")
        # Two seconds on a quiet machine: it goes on when everything has been asked.
        engine = node.engine()
        engine.suspend()
        document = node.status()
        health = node.ask("/health")
        chat = node.ask("/v1/chat/completions", CHAT)
        engine.resume()

        assert document["node"]["reason"] == "the model is loading"
        assert document["engine"]["state"] == "loading"
        assert health.status == 503
        assert health.json()["state"] == "loading"
        assert health.json()["reason"] == "the model is loading"
        assert chat.status == 503
        assert chat.headers["Retry-After"] == "1"
        node.signal(signal.SIGINT)
        assert node.wait().status == 130


async def test_a_node_that_has_no_network_yet_stops_without_a_word(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def takes_long(gateway: Gateway) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Gateway, "start", takes_long)
    told: list[Event] = []
    config = NodeConfig(home=home, port=0, bind_ip="127.0.0.1", no_relay=True)
    node = Node(config, tell=told.append, progress=lambda _: None)
    node.stop()

    await node.run()

    assert told == []


def test_stop_returns_when_the_node_is_gone(home: Path, smollm2: Path) -> None:
    with NodeProcess(*SMALL, home=home, model=smollm2) as node:
        node.until_ready()
        engine = node.engine()

        stopped = mesh_llm("stop", "--json", "--home", home)

        assert stopped.status == 0
        assert json.loads(stopped.stdout) == {"stopped": node.pid}
        assert gone(engine)
        assert gone(psutil.Process(node.pid))
        assert node.wait().status == 0
        assert not (home / "run" / "control.sock").exists()
        again = mesh_llm("stop", "--home", home)
        assert again.status == 1
        assert again.stderr.startswith(f"Error: no node is running on {home}\nHint: ")


@pytest.mark.parametrize(
    ("number", "status"), first(1, [(signal.SIGTERM, 0), (signal.SIGHUP, 0), (signal.SIGINT, 130)])
)
def test_signals_end_it(home: Path, tiny_model: Path, number: signal.Signals, status: int) -> None:
    with NodeProcess(*SMALL, home=home, model=tiny_model) as node:
        node.until_ready()
        node.signal(number)

        assert node.wait().status == status


def test_first_ctrl_c_lets_an_answer_finish(home: Path, smollm2: Path) -> None:
    with NodeProcess(*SMALL, home=home, model=smollm2) as node:
        node.until_ready()
        with node.stream("/v1/completions", {**ENDLESS, "max_tokens": 200}) as stream:
            stream.next()
            # Or the answer, which takes two seconds, might be over before anybody looks.
            engine = node.engine()
            engine.suspend()
            node.signal(signal.SIGINT)
            node.until_state("draining")
            engine.resume()
            *chunks, last = stream.data()

        assert last == "[DONE]"
        assert json.loads(chunks[-1])["usage"]["completion_tokens"] == 200
        assert node.wait().status == 130
        assert "Stopping after open answers; press Ctrl-C again to stop at once\n" in node.stderr


@pytest.mark.full
def test_second_ctrl_c_does_not_wait(home: Path, smollm2: Path) -> None:
    with NodeProcess(*SMALL, home=home, model=smollm2) as node:
        node.until_ready()
        with node.stream("/v1/completions", ENDLESS) as stream:
            stream.next()
            node.signal(signal.SIGINT)
            node.until_state("draining")
            began = time.monotonic()
            node.signal(signal.SIGINT)
            events = list(stream.data())

        assert node.wait().status == 130
        # The rest of the answer would take longer, and would have its end.
        assert time.monotonic() - began < 10
        assert "[DONE]" not in events
        message = json.loads(events[-1])["error"]["message"]
        assert message in ("this node is stopping", "the engine was stopped")


@pytest.mark.full
def test_two_homes_are_two_nodes(node: NodeProcess, home: Path, tiny_model: Path) -> None:
    with NodeProcess(*SMALL, "--name", "second", home=home, model=tiny_model) as second:
        second.until_ready()
        first, other = node.status(), second.status()

        assert other["node"]["name"] == "second"
        assert first["node"]["id"] != other["node"]["id"]
        assert first["api"]["url"] != other["api"]["url"]
        assert [model["id"] for model in second.ask("/v1/models").json()["data"]] == ["tiny"]
        second.stop()
        assert second.wait().status == 0
    assert node.ask("/health").status == 200


def test_a_node_keeps_its_identity(home: Path, tiny_model: Path) -> None:
    ids = []
    for _ in range(2):
        with NodeProcess(*SMALL, home=home, model=tiny_model) as node:
            node.until(node.status_or_none, what="status answers")
            ids.append(node.status()["node"]["id"])

    assert ids[0] == ids[1]
    assert (home / "identity").stat().st_mode & 0o777 == 0o600


# -- model files that change ----------------------------------------------------------------------


def other_bytes(model: Path) -> bytes:
    data = bytearray(model.read_bytes())
    data[-1] ^= 1
    return bytes(data)


@pytest.mark.full
def test_an_engine_does_not_come_back_with_a_file_that_was_renamed_over(home: Path, tiny_model: Path) -> None:
    model = home / "ours.gguf"
    model.write_bytes(tiny_model.read_bytes())
    with NodeProcess(*SMALL, home=home / "node", model=model) as node:
        node.until_ready()
        engine = node.engine()
        fresh = home / "fresh.gguf"
        fresh.write_bytes(other_bytes(model))
        fresh.replace(model)
        node.until_said(f"{model} is no longer ours, and nothing is computed with it")
        # It has mapped the bytes that it was started with.
        assert node.status()["engine"]["pid"] == engine.pid
        assert node.ask("/v1/chat/completions", CHAT).status == 200
        engine.kill()
        node.until(lambda: node.status()["node"]["state"] != "serving", what="nothing serves")
        node.until(lambda: node.status()["engine"]["pid"] is None, what="no engine is started")

        fresh.write_bytes(tiny_model.read_bytes())
        fresh.replace(model)
        node.until_said(f"{model} is ours, as before")
        assert node.until_state("serving")["engine"]["pid"] != engine.pid


def test_nothing_is_computed_with_a_file_that_was_written_in_place(home: Path, tiny_model: Path) -> None:
    model = home / "ours.gguf"
    model.write_bytes(tiny_model.read_bytes())
    with NodeProcess(*SMALL, home=home / "node", model=model) as node:
        node.until_ready()
        engine = node.engine()
        model.write_bytes(other_bytes(model))
        node.until_said(f"{model} is no longer ours, and nothing is computed with it")
        node.until(lambda: not engine.is_running(), what="its engine is ended")
        assert f"{model} was changed while this node ran; it is checked anew" in node.stdout
        model.write_bytes(tiny_model.read_bytes())
        node.until_said(f"{model} is ours, as before")
        assert node.until_state("serving")["engine"]["pid"] != engine.pid


# -- sudden deaths --------------------------------------------------------------------------------


@pytest.mark.full
def test_a_killed_engine_comes_back(home: Path, smollm2: Path, direct: list[dict[str, Any]]) -> None:
    with NodeProcess(*SMALL, home=home, model=smollm2) as node:
        node.until_ready()
        first = node.engine()
        with node.stream("/v1/completions", {**ENDLESS, "max_tokens": 200}) as stream:
            stream.next()
            first.kill()
            *events, done = list(stream.data())

        # The answer under way has waited for it, and goes on.
        assert done == "[DONE]"
        last = json.loads(events[-1])
        assert last["usage"]["completion_tokens"] == 200
        assert last["choices"][0]["finish_reason"] == "length"
        node.until(lambda: node.status()["engine"]["restarts"] == 1, what="the engine is started again")
        engine = node.until_state("serving")["engine"]
        assert engine["restarts"] == 1
        assert engine["pid"] != first.pid
        reply = node.ask("/v1/chat/completions", CHAT)
        assert reply.json()["choices"][0]["message"] == direct[0]["choices"][0]["message"]
        assert node.stdout.count("Engine lost: the engine was killed (SIGKILL). Restarting it\n") == 1


HANG_S = 60.0
"""To notice and mend an engine that hangs, on a machine that others use, too; ten seconds on a quiet one."""
HUNG = "Engine lost: the engine did not answer for 6 s, and was ended. Restarting it\n"


@pytest.mark.full
def test_an_engine_that_hangs_in_an_answer_comes_back(
    home: Path, smollm2: Path, direct: list[dict[str, Any]]
) -> None:
    with NodeProcess(*SMALL, home=home, model=smollm2) as node:
        node.until_ready()
        first = node.engine()
        with node.stream("/v1/completions", {**ENDLESS, "max_tokens": 200}) as stream:
            stream.next()
            first.suspend()
            # However it ends, it does not hang with the engine.
            list(stream.data())

        node.until(lambda: node.status()["engine"]["restarts"] == 1, what="the engine is started again")
        engine = node.until_state("serving", within_s=HANG_S)["engine"]
        assert engine["pid"] != first.pid
        assert gone(first)
        reply = node.ask("/v1/chat/completions", CHAT)
        assert reply.json()["choices"][0]["message"] == direct[0]["choices"][0]["message"]
        assert node.stdout.count(HUNG) == 1


@pytest.mark.full
def test_an_engine_that_hangs_while_nobody_asks_comes_back(home: Path, tiny_model: Path) -> None:
    with NodeProcess(*SMALL, home=home, model=tiny_model) as node:
        node.until_ready()
        first = node.engine()

        first.suspend()

        node.until_said(HUNG, within_s=HANG_S)
        node.until(lambda: node.status()["engine"]["restarts"] == 1, what="the engine is started again")
        node.until_state("serving", within_s=HANG_S)
        assert gone(first)
        assert node.ask("/v1/completions", {"prompt": "1", "max_tokens": 2}).status == 200


def test_a_killed_node_takes_its_engine_along(home: Path, smollm2: Path) -> None:
    with NodeProcess(*SMALL, home=home, model=smollm2) as node:
        node.until_ready()
        assert node.engine().is_running()

        node.signal(signal.SIGKILL)

        node.until_no_descendants(within_s=ORPHAN_S)
    ended = mesh_llm("status", "--home", home)
    assert ended.status == 1
    assert f"no node is running on {home}" in ended.stderr


@pytest.mark.full
def test_a_killed_node_takes_a_loading_engine_along(home: Path, slow_model: Path) -> None:
    with NodeProcess(*SMALL, "--engine-set", "check_tensors=true", home=home, model=slow_model) as node:
        node.until_state("loading")
        engine = node.engine()
        suspend_while_it_reads(engine)
        node.signal(signal.SIGKILL)
        node.process.wait(30)

        assert_goes_in_the_middle(engine)
        node.until_no_descendants(within_s=ORPHAN_S)


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="without our library only Linux tells an orphan")
def test_without_our_library_a_killed_node_takes_its_engine_along(slow_model: Path) -> None:
    spec = {
        "model": str(slow_model),
        "alias": "slow",
        "context": 512,
        "slots": 1,
        "threads": 1,
        "key": "key",
        "devices": [],
        "settings": {"check_tensors": True},
        "libraries": {},
    }
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, json.dumps(spec)], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL
    )
    assert parent.stdout is not None
    with parent, parent.stdout:
        engine = psutil.Process(int(parent.stdout.readline()))
        suspend_while_it_reads(engine)
        parent.kill()
        parent.wait(30)

        # Not resumed: the kernel needs no help of its own.
        until(lambda: gone(engine), within_s=ORPHAN_S, what="the engine is gone")


PARENT = """
import subprocess, sys, time
child = subprocess.Popen(
    [sys.executable, "-m", "mesh_llm.engine.children.serve"],
    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
)
child.stdin.write(sys.argv[1].encode() + b"\\n")
child.stdin.flush()
print(child.pid, flush=True)
child.wait()
"""


READING_BYTES = 400 << 20
"""Of an engine that is past its start-up: the model's three gigabytes are being read by native code."""
MIDDLE_BYTES = 1600 << 20


def suspend_while_it_reads(engine: psutil.Process) -> None:
    """It stands still, whatever the test's own process is made to wait for, with most of it to be read."""

    def reads() -> bool:
        engine.suspend()
        if engine.memory_info().rss > READING_BYTES:
            return True
        engine.resume()
        return False

    until(reads, within_s=60, what="the model is being read")


def assert_goes_in_the_middle(engine: psutil.Process) -> None:
    """Not when all of the model has been read: told by how far it comes, and not by the clock."""
    sizes = []

    def has_gone() -> bool:
        with suppress(psutil.NoSuchProcess):
            sizes.append(engine.memory_info().rss)
        return gone(engine)

    with suppress(psutil.NoSuchProcess):
        engine.resume()
    until(has_gone, within_s=60, what="the engine is gone")
    assert max(sizes, default=0) < MIDDLE_BYTES


def gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
