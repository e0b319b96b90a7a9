"""`mesh-llm catalog`: signed by one person, fetched over https by another."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.command import mesh_llm
from tests.support.downloads import Person
from tests.support.hub import Stored
from tests.support.web_front import NEEDS_OPENSSL, front, make_certificate

TEXT = """
[tomorrow]
repo = "maker/Tomorrow-GGUF"
files = ["Tomorrow-Q4_K_M.gguf"]
size_bytes = 5_000_000_000
"""


@NEEDS_OPENSSL
def test_a_catalog_goes_from_one_to_another(person: Person, tmp_path: Path) -> None:
    plain, secret, signed = tmp_path / "plain.toml", tmp_path / "secret", tmp_path / "signed.toml"
    plain.write_text(TEXT)
    made = mesh_llm("catalog", "sign", str(plain), "--secret", str(secret), "-o", str(signed))
    key = made.stdout.strip()
    assert (made.status, len(key)) == (0, 64), made.stderr
    assert secret.stat().st_mode & 0o777 == 0o600
    person.hub.plain["list.toml"] = Stored.of(signed.read_bytes())
    certificate = make_certificate(tmp_path)
    env = {**person.env, "SSL_CERT_FILE": str(certificate[0])}

    with front(passes_to=person.hub.storage_url, tls=certificate) as url:
        address = f"{url}/plain/list.toml"
        updated = mesh_llm("catalog", "update", "--from", address, "--key", key, env=env)
        refused = mesh_llm("catalog", "update", "--key", "0" * 64, env=env)

    assert updated.status == 0, updated.stderr
    assert updated.stdout == f"1 models from {address}, signed by {key}\n"
    assert refused.status == 1
    assert "was not signed with the key 000000000000…" in refused.stderr
    shown = json.loads(mesh_llm("catalog", "show", "--json", env=env).stdout)
    assert (shown["lists"][0]["list"], shown["lists"][0]["models"]) == ("update", 1)
    assert shown["models"] == shown["lists"][1]["models"] + 1
    entry = mesh_llm("catalog", "show", "tomorrow", env=env)
    assert "source        hf:maker/Tomorrow-GGUF:Tomorrow-Q4_K_M.gguf" in entry.stdout
    assert mesh_llm("catalog", "reset", env=env).stdout == "The catalog is mesh-llm's own again\n"
    assert mesh_llm("catalog", "show", "tomorrow", env=env).status == 1
