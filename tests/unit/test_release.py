"""What a release says of itself: SBOM, provenance, sums, signatures."""

from __future__ import annotations

import hashlib
import io
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import release


def wheel(metadata: str) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("some-1.0.dist-info/METADATA", metadata)
    return content.getvalue()


WHEELS = {
    "mesh_llm-0.2.0-py3-none-any.whl": wheel(
        "Name: mesh-llm\nVersion: 0.2.0\nLicense-Expression: Apache-2.0\n"
    ),
    "some_thing-1.0-cp311-cp311-any.whl": wheel("Name: Some_Thing\nVersion: 1.0\nLicense: MIT\n"),
    "some_thing-1.0-cp312-cp312-any.whl": wheel("Name: Some_Thing\nVersion: 1.0\nLicense: MIT\n\nText: no"),
    "other-2.0-py3-none-any.whl": wheel(
        "Name: other\nVersion: 2.0\nClassifier: License :: OSI Approved :: BSD License\n"
    ),
}


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundle.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for name, content in WHEELS.items():
            entry = tarfile.TarInfo(f"mesh-llm-0.2.0/wheels/{name}")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return path


def test_the_sbom_lists_what_is_in_the_bundle(bundle: Path) -> None:
    document = release.sbom(bundle)

    assert document["metadata"]["component"]["name"] == "mesh-llm"
    sources, other, some = document["components"]
    assert sources["name"] == "xllamacpp (sources)"
    assert other["licenses"] == [{"license": {"name": "BSD License"}}]
    assert (some["purl"], some["licenses"]) == ("pkg:pypi/some-thing@1.0", [{"license": {"name": "MIT"}}])
    assert {file["url"]: file["hashes"][0]["content"] for file in some["externalReferences"]} == {
        name: hashlib.sha256(content).hexdigest()
        for name, content in WHEELS.items()
        if name.startswith("some_thing")
    }
    assert release.sbom(bundle) == document


def test_the_provenance_names_every_file_and_what_it_was_made_of(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"a")

    statement = release.provenance(tmp_path, "0123abcd", clean=False)

    assert statement["subject"] == [{"name": "a.whl", "digest": {"sha256": hashlib.sha256(b"a").hexdigest()}}]
    made = statement["predicate"]["buildDefinition"]
    assert made["externalParameters"]["uncommitted_changes"] is True
    assert [source["uri"] for source in made["resolvedDependencies"]][:2] == ["requirements.lock", "git"]
    assert made["resolvedDependencies"][1]["digest"] == {"gitCommit": "0123abcd"}


@pytest.mark.skipif(not shutil.which("ssh-keygen"), reason="there is no ssh-keygen")
def test_a_signature_can_be_checked(tmp_path: Path) -> None:
    key, signed = tmp_path / "key", tmp_path / "SHA256SUMS"
    signed.write_text("0  a\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    public = key.with_suffix(".pub").read_text()
    (tmp_path / "allowed").write_text(f"releaser {public}")

    release.sign(key, signed)

    verify = ["ssh-keygen", "-Y", "verify", "-f", str(tmp_path / "allowed"), "-I", "releaser"]
    verify += ["-n", release.NAMESPACE, "-s", f"{signed}.sig"]
    for text, status in ((b"0  a\n", 0), (b"1  a\n", 255)):
        checked = subprocess.run(verify, input=text, capture_output=True, check=False)
        assert checked.returncode == status, checked.stderr


def test_a_key_that_will_not_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="file could not be signed"):
        release.sign(tmp_path / "nothing", tmp_path / "file")
