"""Plain curl: what it shows of the wire is what the engine itself would have sent."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.gateway.headers import SAFE
from tests.support.lone_engine import KEY, LoneEngine
from tests.support.node import ENDLESS, NodeProcess
from tests.support.pairs import Pair
from tests.support.questions import CHAT, TEXT
from tests.support.waiting import until

CURL = shutil.which("curl")
WITHIN_S = "60"
ORIGIN = "http://localhost:5173"
FREE_S = 10.0
"""Left alone, an endless answer holds its slot for some twenty seconds."""

pytestmark = pytest.mark.skipif(CURL is None, reason="curl is not installed")


def curl(*arguments: str, data: Any = None, status: int = 0) -> str:
    """What it prints, with line ends as they came."""
    body = () if data is None else ("--json", "@-")
    done = subprocess.run(
        [str(CURL), "-sS", "--max-time", WITHIN_S, *body, *arguments],
        input=None if data is None else json.dumps(data).encode(),
        capture_output=True,
        check=False,
        timeout=90,
    )
    assert done.returncode == status, done.stderr.decode()
    return done.stdout.decode()


def head_of(answer: str) -> tuple[str, dict[str, str]]:
    """The first line, and the headers that are not of one moment or one connection."""
    first, *lines = answer.split("\r\n\r\n")[0].split("\r\n")
    pairs = (line.partition(": ")[::2] for line in lines)
    headers = {name.lower(): value for name, value in pairs}
    passing = {"date", "connection", "keep-alive", "content-length", "transfer-encoding"}
    kept = {n: v for n, v in headers.items() if n not in passing and not n.startswith("x-mesh-llm-")}
    return first.partition(" ")[2], kept


def offered(answer: str) -> tuple[str, dict[str, str]]:
    """The engine's own head as the gateway passes it on: what is listed, and what keeps it plain data."""
    status, headers = head_of(answer)
    headers.pop("accept-ranges", None)
    if not headers.get("access-control-allow-origin"):
        headers.pop("access-control-allow-origin", None)
    return status, {**headers, **{name.lower(): value for name, value in SAFE.items()}}


def events(answer: str) -> list[str]:
    return [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]


def test_post(api: NodeProcess, engine: LoneEngine) -> None:
    expected = engine.ask("/v1/completions", TEXT).json()

    answer = json.loads(curl(f"{api.url}/v1/completions", data=TEXT))

    assert answer["choices"] == expected["choices"]
    assert answer["usage"] == expected["usage"]


def test_stream_arrives_event_by_event(api: NodeProcess, pair: Pair) -> None:
    argv = [str(CURL), "-sSN", "--max-time", WITHIN_S, "--json", json.dumps(ENDLESS)]
    with subprocess.Popen([*argv, f"{api.url}/v1/completions"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(6)]
        child.kill()

    assert any(json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith(b"data: "))
    until(lambda: pair.busy_slots() == 0, within_s=FREE_S, what="the slot is free")


def test_stream_holds_the_text_of_the_engine(api: NodeProcess, chat_text: str) -> None:
    *chunks, last = events(curl("-N", f"{api.url}/v1/chat/completions", data={**CHAT, "stream": True}))

    assert last == "[DONE]"
    deltas = [json.loads(chunk)["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("content") or "" for delta in deltas) == chat_text


@pytest.mark.parametrize("path", ["/v1/models", "/props"])
def test_head_is_the_engines(api: NodeProcess, engine: LoneEngine, path: str) -> None:
    expected = curl("-I", "-H", f"Authorization: Bearer {KEY}", f"{engine.url}{path}")

    answer = curl("-I", f"{api.url}{path}")

    assert head_of(answer) == offered(expected)
    assert answer.endswith("\r\n\r\n"), "no body"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_preflight_is_the_engines(api: NodeProcess, engine: LoneEngine, method: str) -> None:
    asked = (
        "-i",
        "-X",
        "OPTIONS",
        "-H",
        f"Origin: {ORIGIN}",
        "-H",
        f"Access-Control-Request-Method: {method}",
    )

    answer = curl(*asked, f"{api.url}/v1/chat/completions")

    status, headers = head_of(answer)
    # It is the gateway's to answer, before there is an engine; nobody needs to notice.
    assert headers.pop("server") == "mesh-llm"
    expected = offered(curl(*asked, f"{engine.url}/v1/chat/completions"))
    assert expected[1].pop("server") == "llama.cpp"
    assert (status, headers) == expected
    assert status == "200 OK"
    assert "access-control-allow-methods" in headers


def test_a_page_of_this_machine_may_read_the_answer(api: NodeProcess, engine: LoneEngine) -> None:
    asked = ("-i", "-H", f"Origin: {ORIGIN}")
    expected = curl(*asked, "-H", f"Authorization: Bearer {KEY}", f"{engine.url}/v1/models")

    assert head_of(curl(*asked, f"{api.url}/v1/models")) == offered(expected)


def test_a_page_from_elsewhere_is_refused(api: NodeProcess) -> None:
    answer = curl("-i", "-H", "Origin: https://example.org", f"{api.url}/v1/models")

    assert head_of(answer)[0] == "403 Forbidden"
    assert json.loads(answer.partition("\r\n\r\n")[2])["error"]["code"] == "foreign_origin"


def test_compressed_changes_nothing_but_the_transfer(api: NodeProcess, engine: LoneEngine) -> None:
    asked = ("-i", "--compressed")
    key = ("-H", f"Authorization: Bearer {KEY}")

    answer = curl(*asked, f"{api.url}/v1/completions", data=TEXT)

    assert head_of(answer) == offered(curl(*asked, *key, f"{engine.url}/v1/completions", data=TEXT))
    assert json.loads(answer.partition("\r\n\r\n")[2])["choices"][0]["text"].startswith(" Paris")


def test_a_large_body_waits_for_its_permission(api: NodeProcess, tmp_path: Path) -> None:
    """Larger than what a node keeps in memory to send again."""
    text = "x" * (12 << 20)
    (tmp_path / "body.json").write_text(json.dumps({"content": text}))
    trace = tmp_path / "trace"

    answer = curl(
        *("--trace-ascii", str(trace), "-H", "Expect: 100-continue", "--expect100-timeout", WITHIN_S),
        *("-H", "Content-Type: application/json", "--data-binary", f"@{tmp_path / 'body.json'}"),
        *("-w", "\n%{http_code}", f"{api.url}/detokenize"),
    )

    shown = trace.read_text(errors="replace")
    body, _, status = answer.rpartition("\n")
    assert shown.index("HTTP/1.1 100 Continue") < shown.index("=> Send data")
    assert status == "200"
    assert json.loads(body) == {"content": ""}


def test_http_1_0_gets_a_body_that_ends_with_the_connection(api: NodeProcess, engine: LoneEngine) -> None:
    expected = engine.ask("/v1/completions", TEXT).json()["choices"]

    answer = curl("-i", "--http1.0", f"{api.url}/v1/completions", data={**TEXT, "stream": True})

    head, _, body = answer.partition("\r\n\r\n")
    *chunks, last = events(body)
    assert "transfer-encoding" not in head.lower()
    assert last == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks) == expected[0]["text"]


def test_one_connection_serves_many_requests(api: NodeProcess) -> None:
    url = f"{api.url}/v1/models"

    answer = curl("-o", "/dev/null", "-o", "/dev/null", "-w", "%{num_connects} %{http_code}\n", url, url)

    assert answer == "1 200\n0 200\n"


def test_errors_are_the_engines(api: NodeProcess, engine: LoneEngine) -> None:
    expected = engine.ask("/v1/chat/completions", {"messages": 1})

    answer = curl("-w", "\n%{http_code}", f"{api.url}/v1/chat/completions", data={"messages": 1})

    body, _, status = answer.rpartition("\n")
    assert (int(status), json.loads(body)) == (expected.status, expected.json())


def test_a_refusal_of_the_engine_is_not_held_back(api: NodeProcess) -> None:
    shown = [
        curl("-o", "/dev/null", "-w", "%{http_code} %{time_total}", f"{api.url}/v1/rerank", data={})
        for _ in range(3)
    ]

    assert {text.split()[0] for text in shown} == {"501"}
    assert min(float(text.split()[1]) for text in shown) < 2
