"""API keys with names: who gets in, what is counted, and what a limit refuses."""

from __future__ import annotations

import asyncio
import fcntl
import json
import logging
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from mesh_llm.errors import MeshError, UsageError
from mesh_llm.gateway import access, key_usage
from mesh_llm.gateway.access import ApiAccess, may_manage
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.key_usage import KeyCounts
from mesh_llm.gateway.keys import KEYS_LIMIT, ApiKey, Keys, NewKey
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.server import Gateway, GatewayConfig
from tests.net.conftest import StartGateway
from tests.support.raw_http import Answer, connect
from tests.support.upstream import LAST_CHUNK, SSE_HEAD, FakeEngine, Script, Seen, Wire, plain

OWN = "the-key-of-the-node"
CHAT = "/v1/chat/completions"
PROGRESS = {"prompt_progress": {"total": 9, "cache": 4, "processed": 9}, "choices": []}
TIMINGS = {"timings": {"cache_n": 4, "prompt_n": 5, "predicted_n": 3}}


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys.json")


@pytest.fixture
def config(tmp_path: Path) -> GatewayConfig:
    return GatewayConfig(
        port=0,
        api_key=OWN,
        keys_file=tmp_path / "keys.json",
        key_usage_file=tmp_path / "key-usage.json",
    )


def new(keys: Keys, name: str = "anna", **options: Any) -> str:
    return keys.add(NewKey(name=name, **options), time.time())[1]


def chunk(data: dict[str, Any]) -> bytes:
    document = {"id": "chat-1", "created": 5, "model": "tiny", "object": "chat.completion.chunk", **data}
    return f"data: {json.dumps(document, separators=(',', ':'))}\n\n".encode()


def word(text: str) -> bytes:
    return chunk({"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]})


EVENTS = (
    chunk(PROGRESS),
    *(word(text) for text in ('{"completion_tokens":', "a", "b")),
    chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], **TIMINGS}),
    chunk({"choices": [], "usage": {"completion_tokens": 3, "prompt_tokens": 9, "total_tokens": 12}}),
    b"data: [DONE]\n\n",
)


def streams(*events: bytes, ends: bool = True) -> Script:
    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(SSE_HEAD)
        for one in events:
            await wire.send_chunk(one)
        if ends:
            await wire.send(LAST_CHUNK)
        else:
            await wire.gone()

    return script


async def ask(gateway: Gateway, key: str, *, stream: bool = True, path: str = CHAT, **body: Any) -> Answer:
    async with connect(gateway.port) as client:
        document = {"messages": [], "stream": stream, **body}
        return await client.request(
            "POST", path, f"Authorization: Bearer {key}", body=json.dumps(document).encode()
        )


async def get(gateway: Gateway, path: str, key: str = "") -> Answer:
    async with connect(gateway.port) as client:
        return await client.request("GET", path, *([f"x-api-key: {key}"] if key else []))


def counts(gateway: Gateway, name: str = "anna") -> KeyCounts:
    [found] = [report.usage for report in gateway.key_usage.reports() if report.key.name == name]
    return found


# -- who gets in --------------------------------------------------------------------------------


async def test_what_is_added_and_revoked_holds_at_once(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys
) -> None:
    gateway = await start_gateway(config)
    key = new(keys)
    assert (await get(gateway, "/v1/models", key)).status == 200
    assert (await get(gateway, "/v1/models", key + "x")).status == 401
    assert (await get(gateway, "/v1/models", key[:-1])).status == 401
    other = new(keys, "other")
    assert (await get(gateway, "/v1/models", key[:12] + other[12:])).status == 401
    keys.revoke("anna")
    assert (await get(gateway, "/v1/models", key)).status == 401
    assert (await get(gateway, "/v1/models", other)).status == 200
    assert (await get(gateway, "/v1/models", OWN)).status == 200


async def test_an_expired_key_is_refused_and_said_to_be_so(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys
) -> None:
    gateway = await start_gateway(config)
    _, key = keys.add(NewKey(name="anna", lifetime_s=60.0), time.time() - 61)
    answer = await get(gateway, "/v1/models", key)
    assert (answer.status, answer.json()["error"]["message"]) == (401, "the key anna has expired")


async def test_a_damaged_file_opens_nothing(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys, tmp_path: Path
) -> None:
    gateway = await start_gateway(config)
    key = new(keys)
    (tmp_path / "keys.json").write_text('{"keys": [{"id": 1}]}')
    assert (await get(gateway, "/v1/models", key)).status == 401
    assert (await get(gateway, "/v1/models", OWN)).status == 200
    with pytest.raises(MeshError, match="damaged"):
        new(keys, "other")


async def test_without_a_key_for_the_node_all_is_as_before(
    start_gateway: StartGateway, tmp_path: Path, keys: Keys
) -> None:
    gateway = await start_gateway(GatewayConfig(port=0, keys_file=tmp_path / "keys.json"))
    key = new(keys)
    for offered in ("", "sk-anything", key):
        assert (await get(gateway, "/v1/models", offered)).status == 200
    async with connect(gateway.port) as client:
        answer = await client.request("GET", "/v1/models", "Host: evil.example", f"x-api-key: {key}")
    assert answer.status == 403


def test_the_file_is_private_and_holds_no_key(keys: Keys, tmp_path: Path) -> None:
    key = new(keys)
    for file in (tmp_path / "keys.json", tmp_path / "keys.lock"):
        assert file.stat().st_mode & 0o077 == 0
    written = (tmp_path / "keys.json").read_text()
    assert key not in written
    assert key.rpartition("-")[2] not in written


@pytest.mark.parametrize("name", ["", "api-key", "a b", "-x", "x" * 41, "é", "a\n", '"'])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(UsageError):
        NewKey(name=name)


@pytest.mark.parametrize(
    "options", [{"lifetime_s": 0.0}, {"requests_per_day": 0}, {"tokens_per_day": -1}, {"lifetime_s": 1e12}]
)
def test_limits_that_cannot_be(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        NewKey(name="anna", **options)


def test_names_are_given_once_and_keys_are_bounded(keys: Keys) -> None:
    new(keys)
    with pytest.raises(MeshError, match="already"):
        new(keys)
    with pytest.raises(MeshError, match="no key named"):
        keys.revoke("berta")
    for number in range(KEYS_LIMIT - 1):
        new(keys, f"key-{number}")
    with pytest.raises(MeshError, match="200 keys"):
        new(keys, "one-more")


def test_a_lock_that_is_held_is_not_waited_for_without_a_bound(keys: Keys, tmp_path: Path) -> None:
    new(keys)
    with (tmp_path / "keys.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(MeshError, match="another command"):
            new(keys, "berta")
    new(keys, "berta")


# -- rights -------------------------------------------------------------------------------------


def admitted(access: ApiAccess, key: str | None) -> web.Request:
    headers = {"Host": "localhost", **({"x-api-key": key} if key else {})}
    request = make_mocked_request("POST", "/models/load", headers=headers)
    with suppress(ApiError):
        access.check(request)
    return request


def test_who_may_manage(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    asks, manages = new(keys, "asks"), new(keys, "manages", manage=True)
    keyed = ApiAccess(api_key=OWN, listen="127.0.0.1", keys=keys)
    expected = {asks: False, manages: True, OWN: True, "wrong": False, None: False}
    assert {key: may_manage(admitted(keyed, key)) for key in expected} == expected
    # Without a key, whoever is on this machine; a key that may not says what its holder may.
    open_to_us = ApiAccess(api_key=None, listen="127.0.0.1", keys=keys)
    monkeypatch.setattr(access, "is_of_another_user", lambda _: False)
    expected = {asks: False, manages: True, "wrong": True, None: True}
    assert {key: may_manage(admitted(open_to_us, key)) for key in expected} == expected


async def test_metrics_name_everybody_and_are_for_managers(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys, engine: FakeEngine
) -> None:
    gateway = await start_gateway(config)
    engine.on(CHAT, streams(*EVENTS))
    asks, manages = new(keys), new(keys, "boss", manage=True)
    assert (await ask(gateway, asks)).status == 200
    refused = await get(gateway, "/metrics", asks)
    assert (refused.status, refused.json()["error"]["code"]) == (403, "key_may_not_manage")
    told = (await get(gateway, "/metrics", manages)).body.decode()
    assert 'mesh_llm_key_requests_total{key="anna"} 1.0' in told
    assert 'mesh_llm_key_prompt_tokens_total{key="anna"} 9.0' in told
    assert 'mesh_llm_key_completion_tokens_total{key="anna"} 3.0' in told
    assert (await get(gateway, "/metrics", OWN)).status == 200


# -- usage and limits ---------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_are_counted(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys, engine: FakeEngine, stream: bool
) -> None:
    gateway = await start_gateway(config)
    engine.on(CHAT, streams(*EVENTS))
    key = new(keys)
    for _ in range(2):
        assert (await ask(gateway, key, stream=stream)).status == 200
    assert (await ask(gateway, OWN, stream=stream)).status == 200
    await get(gateway, "/v1/models", key)
    assert (await ask(gateway, key, path="/v1/streams/lookup")).status == 400
    seen, own = counts(gateway), counts(gateway, "api-key")
    assert (seen.requests, seen.prompt_tokens, seen.completion_tokens) == (2, 18, 6)
    assert (seen.requests_today, seen.prompt_tokens_today, seen.completion_tokens_today) == (2, 18, 6)
    assert (own.requests, own.prompt_tokens, own.completion_tokens) == (1, 9, 3)


async def test_answers_that_pass_as_they_are_count_too(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys, engine: FakeEngine
) -> None:
    gateway = await start_gateway(config)
    body = json.dumps({"usage": {"prompt_tokens": 7, "total_tokens": 7}, "data": [0.5] * 20_000}).encode()

    async def script(_: Seen, wire: Wire) -> None:
        await wire.send(plain(body, b"Content-Type: application/json"))

    engine.on("/v1/embeddings", script)
    assert (await ask(gateway, new(keys), path="/v1/embeddings", input="x")).status == 200
    assert (counts(gateway).requests, counts(gateway).prompt_tokens) == (1, 7)


async def test_an_answer_whose_client_leaves_counts_as_far_as_it_came(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys, engine: FakeEngine
) -> None:
    gateway = await start_gateway(config)
    engine.on(CHAT, streams(*EVENTS[:4], ends=False))
    key = new(keys, tokens_per_day=12)
    async with connect(gateway.port) as client:
        await client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n"
            + f"Authorization: Bearer {key}\r\n\r\n".encode()
            + b'{"messages":[],"stream": true}'
        )
        await client.head()
        for _ in range(3):
            await client.chunk()
        # Under way, it counts already.
        refused = await ask(gateway, key)
        assert (refused.status, refused.json()["error"]["type"]) == (429, "tokens")
    while gateway.active:
        await asyncio.sleep(0.01)
    assert (counts(gateway).prompt_tokens, counts(gateway).completion_tokens) == (9, 3)


async def test_a_limit_refuses_as_openai_does_and_survives_a_restart(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys, engine: FakeEngine
) -> None:
    gateway = await start_gateway(config)
    engine.on(CHAT, streams(*EVENTS))
    few, short, free = new(keys, requests_per_day=1), new(keys, "short", tokens_per_day=12), new(keys, "free")
    for key in (few, short, free):
        assert (await ask(gateway, key)).status == 200
    await gateway.stop()
    gateway = await start_gateway(config)
    asked = len(engine.seen)
    for key, what, limit in ((few, "requests", 1), (short, "tokens", 12)):
        answer = await ask(gateway, key)
        error = answer.json()["error"]
        assert (answer.status, error["type"], error["code"]) == (429, what, "rate_limit_exceeded")
        assert f"its {limit} {what} of today" in error["message"]
        assert 1 <= int(answer.header("Retry-After")[0]) <= 86400
        # What costs nothing is still answered.
        assert (await get(gateway, "/v1/models", key)).status == 200
    assert len(engine.seen) == asked + 2
    assert (await ask(gateway, free)).status == 200
    assert counts(gateway).requests == 1


PROMPTS = {"prompt": ["a", "b"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", PROMPTS),
        ("/completion", {**PROMPTS, "stream": False}),
        ("/completion", {"prompt": "a", "n_cmpl": 2, "stream": False}),
        ("/v1/completions", {"prompt": [[1, 2], [3, 4]]}),
        ("/v1/completions", {**PROMPTS, "logprobs": 1, "stream": False}),
        (CHAT, {"n": 2, "logprobs": True, "stream": False}),
        ("/completion", {"prompt": "a", "response_fields": ["content"]}),
        ("/embedding", {"content": "a"}),
        ("/embeddings", {"content": ["a", "b"]}),
        ("/v1/rerank", {"query": "a", "texts": ["b", "c"]}),
        ("/completion", {**PROMPTS, "x": [0] * 1_000_001}),
    ],
)
async def test_what_would_not_be_counted_needs_a_key_without_a_limit(
    start_gateway: StartGateway,
    config: GatewayConfig,
    keys: Keys,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
) -> None:
    gateway = await start_gateway(config)
    engine.on(path, streams(*EVENTS))
    limited, free = new(keys, tokens_per_day=12), new(keys, "free", requests_per_day=9)
    refused = await ask(gateway, limited, path=path, **body)
    assert refused.status == 400
    assert any(word in refused.json()["error"]["message"] for word in ("limit on tokens", "1,000,000 parts"))
    assert engine.seen == []
    await ask(gateway, free, path=path, **body)
    assert len(engine.seen) > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [("/completion", {"prompt": ["x" * 2000] * 2}), (CHAT, {"n": 2, "logprobs": True, "user": "x" * 2000})],
)
async def test_answers_to_a_body_that_is_not_read_are_not_counted_either(
    start_gateway: StartGateway,
    config: GatewayConfig,
    keys: Keys,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
) -> None:
    gateway = await start_gateway(replace(config, limits=Limits(replay_bytes=1000)))
    engine.on(path, streams(*EVENTS))
    limited, free = new(keys, tokens_per_day=12), new(keys, "free")
    refused = await ask(gateway, limited, path=path, **body)
    assert (refused.status, refused.json()["error"]["code"]) == (413, "body_too_large")
    assert (await ask(gateway, free, path=path, **body)).status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/v1/rerank", {"query": "a", "documents": ["b", "c"]}),
        ("/completion", {"prompt": ["a"]}),
        ("/completion", {"prompt": [1, 2, 3]}),
        ("/completion", {"prompt": ["a", 1, 2]}),
        (CHAT, {"n": 2}),
        (CHAT, {"n": 2, "stream": False}),
        (CHAT, {"logprobs": True, "stream": False}),
    ],
)
async def test_one_prompt_is_taken_with_a_limit(
    start_gateway: StartGateway,
    config: GatewayConfig,
    keys: Keys,
    engine: FakeEngine,
    path: str,
    body: dict[str, Any],
) -> None:
    gateway = await start_gateway(config)
    engine.on(path, streams(*EVENTS))
    await ask(gateway, new(keys, tokens_per_day=12), path=path, **body)
    assert [seen.target for seen in engine.seen][:1] == [path]


async def test_the_next_day_begins_anew(
    start_gateway: StartGateway,
    config: GatewayConfig,
    keys: Keys,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway = await start_gateway(config)
    engine.on(CHAT, streams(*EVENTS))
    key = new(keys, requests_per_day=1)
    assert [(await ask(gateway, key)).status for _ in range(2)] == [200, 429]
    tomorrow = time.time() + 86400
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    assert [(await ask(gateway, key)).status for _ in range(2)] == [200, 429]
    assert (counts(gateway).requests, counts(gateway).requests_today) == (2, 1)


async def test_keys_are_read_by_nobody_but_the_loop(
    start_gateway: StartGateway,
    config: GatewayConfig,
    keys: Keys,
    engine: FakeEngine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever reads them meanwhile would have the old ones."""
    read_by: set[int] = set()
    read = Keys.all

    def reading(self: Keys) -> Mapping[str, ApiKey]:
        read_by.add(threading.get_ident())
        return read(self)

    monkeypatch.setattr(Keys, "all", reading)
    monkeypatch.setattr(key_usage, "KEY_USAGE_WRITE_S", 0.01)
    gateway = await start_gateway(config)
    engine.on(CHAT, streams(*EVENTS))
    assert (await ask(gateway, new(keys))).status == 200
    assert config.key_usage_file is not None
    async with asyncio.timeout(20):
        while not config.key_usage_file.exists():
            await asyncio.sleep(0.01)
    await gateway.stop()
    assert read_by == {threading.get_ident()}
    assert list(json.loads(config.key_usage_file.read_text())) == list(keys.all())


async def test_damaged_usage_is_counted_anew(
    start_gateway: StartGateway, config: GatewayConfig, keys: Keys, tmp_path: Path
) -> None:
    (tmp_path / "key-usage.json").write_text('{"x": 1}')
    gateway = await start_gateway(config)
    assert (await ask(gateway, new(keys))).status == 200
    assert counts(gateway).requests == 1


async def test_keys_are_in_no_log(
    start_gateway: StartGateway,
    config: GatewayConfig,
    keys: Keys,
    engine: FakeEngine,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    caplog.set_level(logging.DEBUG)
    gateway = await start_gateway(config)
    engine.on(CHAT, streams(*EVENTS))
    key = new(keys, requests_per_day=1)
    for path in (CHAT, f"/v1/models/{key[:5]}"):
        await ask(gateway, key, path=path)
    await gateway.stop()
    assert "key=anna" in caplog.text
    secret = key.rpartition("-")[2]
    assert secret not in caplog.text
    for file in tmp_path.iterdir():
        assert secret not in file.read_text()
