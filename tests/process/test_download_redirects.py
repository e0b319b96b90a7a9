"""Redirects of downloads: never from an encrypted connection to one that is not."""

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

from tests.support.downloads import FILE, NAME, Person, assert_is_here
from tests.support.hub import Stored

NEEDS_OPENSSL = pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
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


@NEEDS_OPENSSL
def test_a_server_must_not_lead_from_https_to_http(
    person: Person, certificate: tuple[Path, Path], stored: Stored
) -> None:
    person.hub.plain[FILE] = stored
    target = f"{person.hub.storage_url}/plain{{path}}"
    with front(redirects_to=target, tls=certificate) as url:
        ended = person.downloads(f"{url}/{FILE}", SSL_CERT_FILE=str(certificate[0]))
        host = url.removeprefix("https://")

    assert ended.status == 1
    assert ended.stderr.splitlines()[-2:] == [
        f"Error: {host} redirects {FILE} from https to {target.format(path=f'/{FILE}')}, "
        "which is not encrypted",
        "Hint: download it from elsewhere: what arrives that way may have been altered",
    ]
    assert person.hub.seen == []
    assert person.part_bytes() == 0
    assert FILE not in person.left()


@NEEDS_OPENSSL
def test_a_hub_must_not_lead_from_https_to_http(
    person: Person, certificate: tuple[Path, Path], stored: Stored
) -> None:
    with front(redirects_to=f"{person.hub.url}{{path}}", tls=certificate) as url:
        ended = person.downloads(NAME, HF_ENDPOINT=url, SSL_CERT_FILE=str(certificate[0]))

    assert ended.status == 1
    assert f"from https to {person.hub.url}/" in ended.stderr
    assert person.hub.seen == []


@NEEDS_OPENSSL
def test_a_hubs_storage_is_encrypted_where_the_hub_is(
    person: Person, certificate: tuple[Path, Path], stored: Stored
) -> None:
    with front(passes_to=person.hub.url, tls=certificate) as url:
        ended = person.downloads(NAME, HF_ENDPOINT=url, SSL_CERT_FILE=str(certificate[0]))

    assert ended.status == 1
    assert f"redirects {FILE} from https to {person.hub.storage_url}/" in ended.stderr
    assert person.hub.got("storage") == []


def test_a_server_must_not_lead_out_of_the_web(person: Person) -> None:
    with front(redirects_to="file:///etc/passwd") as url:
        ended = person.downloads(f"{url}/{FILE}")

    host = url.removeprefix("http://")
    assert ended.status == 1
    assert f"Error: {host} redirects {FILE} to file:, which is not a web address\n" in ended.stderr


def test_a_mirror_without_encryption_may_lead_to_another(person: Person, stored: Stored) -> None:
    person.hub.plain[FILE] = stored
    with front(redirects_to=f"{person.hub.storage_url}/plain{{path}}") as url:
        ended = person.downloads(f"{url}/{FILE}")

    assert ended.status == 0, ended.stderr
    assert_is_here(person, stored.data)
