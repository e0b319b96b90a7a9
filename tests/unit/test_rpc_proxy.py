"""Frames of stock ggml-rpc in whatever pieces they arrive: none is changed, each is counted once."""

from __future__ import annotations

import random
import struct

import pytest

from mesh_llm.lab.rpc_proxy import COMMANDS, COMPUTING, RpcRefused, RpcSession

HELLO_ANSWER = bytes((8, 0, 3, 0)) + bytes(24)


def request(name: str, body: bytes = b"") -> bytes:
    return struct.pack("<BQ", COMMANDS.index(name), len(body)) + body


def answer(body: bytes) -> bytes:
    return struct.pack("<Q", len(body)) + body


def greeted() -> RpcSession:
    session = RpcSession()
    session.requests(memoryview(request("HELLO", bytes(24))))
    session.answers(memoryview(answer(HELLO_ANSWER)))
    return session


def test_the_numbers_are_the_protocols() -> None:
    numbers = {name: COMMANDS.index(name) for name in ("HELLO", "GRAPH_COMPUTE", "GRAPH_RECOMPUTE")}
    assert numbers == {"HELLO": 14, "GRAPH_COMPUTE": 10, "GRAPH_RECOMPUTE": 16}
    assert len(COMMANDS) == 23


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_size(seed: int) -> None:
    noise = random.Random(seed)
    names = [
        noise.choice(("SET_TENSOR", "GRAPH_COMPUTE", "GET_TENSOR", "GRAPH_RECOMPUTE")) for _ in range(60)
    ]
    frames = [request(name, noise.randbytes(noise.choice((0, 1, 30, 700)))) for name in names]
    said = b"".join(frames)
    session = greeted()
    passed, slowed = b"", b""
    while said:
        part, said = said[: (size := noise.randint(1, 400))], said[size:]
        for piece, computes in session.requests(memoryview(part)):
            passed += piece
            slowed += bytes(piece) if computes else b""
    assert passed == b"".join(frames)
    counts = session.report().counts
    for name in set(names):
        assert counts[name].commands == names.count(name)
        of_name = sum(len(frame) for frame, each in zip(frames, names, strict=True) if each == name)
        assert counts[name].sent_bytes == of_name
    # All of a computing command but for parts of its head that had come before the rest of it.
    computing = sum(len(f) for f, name in zip(frames, names, strict=True) if name in COMPUTING)
    assert computing - 9 * 60 < len(slowed) <= computing


def test_answers_belong_to_the_commands_that_have_one() -> None:
    session = greeted()
    asked = (("SET_TENSOR", 50), ("GRAPH_COMPUTE", 40), ("GET_TENSOR", 20), ("GET_ALIGNMENT", 4))
    for name, size in asked:
        session.requests(memoryview(request(name, bytes(size))))
    data = answer(bytes(1000)) + answer(bytes(8))
    for at in range(0, len(data), 7):
        piece = memoryview(data)[at : at + 7]
        assert session.answers(piece) == [(piece, False)]
    counts = session.report().counts
    assert counts["GET_TENSOR"].received_bytes == 1008
    assert counts["GET_ALIGNMENT"].received_bytes == 16
    assert counts["SET_TENSOR"].received_bytes == 0
    assert session.report().total(COMPUTING).commands == 1


@pytest.mark.parametrize(
    ("hello", "sentence"),
    [
        (bytes((7, 0, 0, 0)) + bytes(24), "the server speaks ggml-rpc 7.0"),
        (bytes((9, 1, 0, 0)) + bytes(24), "the server speaks ggml-rpc 9.1"),
        (bytes((8, 0, 0, 0)) + b"\1" + bytes(23), "RDMA"),
    ],
)
def test_another_protocol_is_refused_in_a_sentence(hello: bytes, sentence: str) -> None:
    session = RpcSession()
    session.requests(memoryview(request("HELLO", bytes(24))))
    with pytest.raises(RpcRefused, match=sentence):
        session.answers(memoryview(answer(hello)))
    assert sentence in str(session.report().refused)


def test_what_is_not_the_protocol_is_refused() -> None:
    with pytest.raises(RpcRefused, match="did not begin with HELLO"):
        RpcSession().requests(memoryview(request("SET_TENSOR", b"x")))
    with pytest.raises(RpcRefused, match="command 99"):
        greeted().requests(memoryview(bytes((99,)) + bytes(8)))
    with pytest.raises(RpcRefused, match="nobody had asked"):
        greeted().answers(memoryview(answer(b"x")))
