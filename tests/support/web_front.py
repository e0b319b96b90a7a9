"""A web server on loopback, with TLS if that is wanted, that leads elsewhere."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import pytest

NEEDS_OPENSSL = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Of localhost, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    command += ["-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


@contextmanager
def front(
    *, redirects_to: str = "", passes_to: str = "", tls: tuple[Path, Path] | None = None
) -> Iterator[str]:
    """A web server on loopback that redirects each request, or passes it on to another one."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if passes_to:
                self._pass_on()
                return
            self.send_response(302)
            self.send_header("Location", redirects_to.format(path=self.path))
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def _pass_on(self) -> None:
            with closing(HTTPConnection(urlsplit(passes_to).netloc, timeout=30)) as connection:
                connection.request(self.command, self.path)
                answer = connection.getresponse()
                body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("connection", "transfer-encoding"):
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*tls)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, name="front")
    with ExitStack() as stack:
        stack.callback(server.server_close)
        thread.start()
        stack.callback(thread.join)
        stack.callback(server.shutdown)
        yield f"http{'s' if tls else ''}://localhost:{server.server_port}"
