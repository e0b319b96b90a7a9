"""Notice programs that call somebody beyond this machine."""

from __future__ import annotations

import socket
import threading
from types import TracebackType


class Strangers:
    """A proxy for everything that is not loopback: it lets nobody through, and remembers who tried."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._accept, name="strangers", daemon=True)
        self.called: list[str] = []
        """The first line of each call."""

    def environment(self) -> dict[str, str]:
        url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), url)
        beside = dict.fromkeys(("NO_PROXY",), "127.0.0.1,localhost")
        both = proxies | beside
        return both | {name.lower(): value for name, value in both.items()}

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listening.accept()
            except OSError:
                return
            with caller:
                caller.settimeout(2)
                try:
                    line = caller.recv(4096).partition(b"\r\n")[0]
                except OSError as error:
                    line = repr(error).encode()
                self.called.append(line.decode(errors="replace"))

    def __enter__(self) -> Strangers:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Wakes the thread, which `close` alone would not.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._thread.join(5)
