"""The first stream of a connection: the handshake's frames, then control messages."""

from __future__ import annotations

from typing import Any

from mesh_llm.defaults import FRAME_LIMIT_BYTES
from mesh_llm.transport.framing import Frame, FrameError, FrameParser, FrameType, encode_frame

READ_BYTES = 64 << 10


class ControlStream:
    """Frames over iroh's handles; errors of iroh's pass through."""

    def __init__(self, pair: Any, *, limit_bytes: int = FRAME_LIMIT_BYTES) -> None:
        self._sending = pair.send()
        self._receiving = pair.recv()
        self._parser = FrameParser(limit_bytes=limit_bytes)

    def trust(self) -> None:
        """From now on frames may be as large as members' may."""
        self._parser.limit_bytes = FRAME_LIMIT_BYTES

    async def read(self) -> Frame | None:
        """The next frame; None at the end."""
        while (frame := self._parser.next()) is None:
            data = await self._receiving.read(READ_BYTES)
            if not data:
                if self._parser.has_rest:
                    raise FrameError("an end within a frame")
                return None
            self._parser.feed(data)
        return frame

    async def expect(self, type: FrameType) -> dict[str, Any]:
        frame = await self.read()
        if frame is None or frame.type != type:
            raise FrameError(f"a frame that is not {type.name}")
        return frame.body

    async def write(self, type: FrameType, body: dict[str, Any]) -> None:
        await self._sending.write_all(encode_frame(type, body))

    async def write_encoded(self, data: bytes) -> None:
        await self._sending.write_all(data)
