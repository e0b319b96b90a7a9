"""A hub of one folder for `bench/download.py`: files go out by sendfile, at a pace if one is given.

Prints its port, and ends with its input.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

_STEP_BYTES = 1 << 20


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    digests: dict[str, str]

    def do_HEAD(self) -> None:
        """The hub: where the file is, how long it is, and its hash."""
        parts = urlsplit(self.path)
        name = parts.path.rsplit("/", 1)[-1]
        pace = parts.path.split("/")[1]
        self.send_response(302)
        self.send_header("X-Repo-Commit", "c" * 40)
        self.send_header("X-Linked-Etag", f'"{self.digests[name]}"')
        self.send_header("X-Linked-Size", str((self.folder / name).stat().st_size))
        self.send_header("ETag", f'"{self.digests[name]}"')
        _, port = self.connection.getsockname()
        self.send_header("Location", f"http://localhost:{port}/{name}?pace={pace}")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        """The storage: the bytes."""
        parts = urlsplit(self.path)
        pace = float(parse_qs(parts.query).get("pace", ["0"])[0])
        with (self.folder / parts.path.lstrip("/")).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            start = int(asked[1]) if asked else 0
            end = min(int(asked[2]) + 1, size) if asked and asked[2] else size
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            self.wfile.flush()
            self._send(file.fileno(), start, end, pace)

    def _send(self, source: int, start: int, end: int, bytes_per_s: float) -> None:
        began, at = time.perf_counter(), start
        while at < end:
            at += os.sendfile(self.connection.fileno(), source, at, min(_STEP_BYTES, end - at))
            if bytes_per_s:
                early_s = (at - start) / bytes_per_s - (time.perf_counter() - began)
                if early_s > 0:
                    time.sleep(early_s)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nobody reads it."""


def main() -> None:
    folder = Path(sys.argv[1])
    _Handler.folder = folder
    _Handler.digests = {}
    for path in folder.iterdir():
        with path.open("rb") as file:
            _Handler.digests[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print(server.server_address[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
