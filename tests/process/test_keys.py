"""`mesh-llm keys` and `mesh-llm share` with a running node and the real engine; on loopback only."""

from __future__ import annotations

import json
import ssl
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError

import pytest

from tests.support.command import mesh_llm
from tests.support.joining import TEXT, JoiningNode, Lab, lab, refused, said, write_model

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture
def nodes(libraries: dict[str, Path], tmp_path: Path) -> Iterator[Lab]:
    with lab(write_model(tmp_path / "models")) as nodes:
        yield nodes


def test_keys_and_guests_of_a_running_node(nodes: Lab) -> None:
    node = nodes.create("one", "--api-key", "the-nodes-own-key")
    anna = mesh_llm("keys", "add", "anna", "--requests-per-day", "2", "--home", node.home).stdout.strip()
    assert (
        refused(mesh_llm("keys", "add", "anna", "--home", node.home)) == "there is a key named anna already"
    )
    assert [asked(node, anna) for _ in range(3)] == [200, 200, 429]
    # Counted by the engine's own words; the same wherever it is looked at.
    [of_anna] = usage(node)
    assert (of_anna["requests_today"], of_anna["completion_tokens"]) == (2, 16)
    assert of_anna["prompt_tokens"] > 0
    assert node.status()["api"]["keys"][-1]["name"] == "anna"

    here = ("--listen", "127.0.0.1", "--port", "0")
    shown = mesh_llm("share", *here, "--tokens-per-day", "1000", "--home", node.home)
    assert shown.status == 0, shown.stderr
    address = next(line for line in shown.stdout.splitlines() if "/share#key=" in line)
    url, _, guest = address.partition("/share#key=")
    assert "▄" in shown.stdout
    assert "guest may chat until" in shown.stdout
    second = said(mesh_llm("share", "--name", "bert", "--json", "--home", node.home))
    assert second["url"].startswith(f"{url}/share#key=mk-")
    assert shared(node, url, "/v1/chat/completions", guest, CHAT) == 200
    assert shared(node, url, "/v1/models", "") == 401
    assert shared(node, url, "/share", "") == 200
    assert shared(node, url, "/metrics", guest) == 403
    mesh_llm("keys", "revoke", "guest", "--home", node.home)
    assert shared(node, url, "/v1/models", guest) == 401
    assert shared(node, url, "/v1/models", second["key"]) == 200

    ended = mesh_llm("share", "--stop", "--revoke", "--home", node.home)
    assert ended.stdout == f"No longer shared at {url}\nRevoked bert\n"
    with pytest.raises(URLError):
        shared(node, url, "/share", "")
    node.stop()
    # Without a node the files tell it.
    assert usage(node)[-1]["requests_today"] == 2
    for key in (anna, guest, second["key"]):
        secret = key.rpartition("-")[2]
        assert secret not in node.stdout + node.stderr
        for file in node.home.rglob("*"):
            assert not file.is_file() or secret not in file.read_text(errors="replace"), file


def test_words_for_what_cannot_be(tmp_path: Path) -> None:
    home = ("--home", tmp_path / "home")
    assert refused(mesh_llm("keys", "revoke", "anna", *home)) == "there is no key named anna"
    assert "cannot be the name" in refused(mesh_llm("keys", "add", "a b", *home), status=2)
    assert "is not a duration" in refused(mesh_llm("keys", "add", "anna", "--expires", "x", *home), status=2)
    assert refused(mesh_llm("share", "--revoke", *home), status=2) == "--revoke goes with --stop"
    assert "no node is running" in refused(mesh_llm("share", *home))


def usage(node: JoiningNode) -> list[dict[str, Any]]:
    found = said(mesh_llm("keys", "usage", "--json", "--home", node.home))["keys"]
    assert isinstance(found, list)
    return found


def asked(node: JoiningNode, key: str) -> int:
    return node.ask("/v1/completions", TEXT, headers={"Authorization": f"Bearer {key}"}).status


def shared(node: JoiningNode, url: str, path: str, key: str, body: object = None) -> int:
    """The status of an answer on the shared port, whose certificate has to be the node's."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **({"x-api-key": key} if key else {})}
    request = urllib.request.Request(url + path, data=data, headers=headers)
    context = ssl.create_default_context(cafile=str(node.home / "share-certificate.pem"))
    try:
        with urllib.request.urlopen(request, timeout=60, context=context) as answer:
            return int(answer.status)
    except HTTPError as error:
        error.close()
        return error.code
