"""An HTTP client that sends what it is told and shows what it got, byte for byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.upstream import WAIT_S, read_chunk


@dataclass(slots=True, kw_only=True)
class Answer:
    version: str
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    chunks: list[bytes] = field(default_factory=list)
    whole: bool = False
    """The body ended as its framing says it should."""

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(slots=True, kw_only=True)
class RawClient:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def request(self, method: str, target: str, *headers: str, body: bytes = b"") -> Answer:
        await self.send(request_bytes(method, target, *headers, body=body))
        return await self.answer(head_only=method == "HEAD")

    async def head(self) -> Answer:
        async with asyncio.timeout(WAIT_S):
            raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode().removesuffix("\r\n\r\n").split("\r\n")
        version, status, reason = first.split(" ", 2)
        headers = [(name, value) for name, _, value in (line.partition(": ") for line in lines)]
        return Answer(version=version, status=int(status), reason=reason, headers=headers)

    async def chunk(self) -> bytes:
        async with asyncio.timeout(WAIT_S):
            return await read_chunk(self.reader)

    async def answer(self, *, head_only: bool = False) -> Answer:
        answer = await self.head()
        if head_only or answer.status in (204, 304):
            answer.whole = True
            return answer
        async with asyncio.timeout(WAIT_S):
            await self._body(answer)
        return answer

    async def rest(self, answer: Answer) -> Answer:
        """Read on in an answer whose head, and perhaps part of its body, were read before."""
        async with asyncio.timeout(WAIT_S):
            await self._body(answer)
        return answer

    async def end(self) -> bytes:
        """What comes until the other side closes."""
        async with asyncio.timeout(WAIT_S):
            return await self.reader.read()

    async def _body(self, answer: Answer) -> None:
        length = answer.header("Content-Length")
        try:
            if answer.header("Transfer-Encoding") == ["chunked"]:
                while chunk := await read_chunk(self.reader):
                    answer.chunks.append(chunk)
                    answer.body += chunk
            elif length:
                answer.body += await self.reader.readexactly(int(length[0]))
            else:
                while data := await self.reader.read(1 << 16):
                    answer.body += data
            answer.whole = True
        except asyncio.IncompleteReadError as error:
            if length:
                answer.body += error.partial
        except ConnectionError:
            pass


def request_bytes(method: str, target: str, *headers: str, body: bytes = b"") -> bytes:
    lines = [f"{method} {target} HTTP/1.1", *headers]
    if not any(line.lower().startswith("host:") for line in headers):
        lines.insert(1, "Host: localhost:9337")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@asynccontextmanager
async def connect(port: int) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield RawClient(reader=reader, writer=writer)
    finally:
        writer.close()
