"""Redirects of downloads: never from an encrypted connection to one that is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.downloads import FILE, NAME, Person, assert_is_here
from tests.support.hub import Stored
from tests.support.web_front import NEEDS_OPENSSL, front, make_certificate


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    return make_certificate(tmp_path)


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
