"""Make a release: what `make release` runs. Everything lands in dist/VERSION.

    mesh_llm-*.whl, mesh_llm-*.tar.gz    the wheel with native libraries for this platform, and the sdist
    mesh-llm-*-SYSTEM-MACHINE.tar.gz     the bundle
    sbom.cdx.json                        what is in the bundle, in CycloneDX's form
    provenance.intoto.json               what it was made of and how, as an in-toto statement
    SHA256SUMS                           of all these

With `--key FILE` (an SSH key) the last two are signed. Check a signature with
    ssh-keygen -Y verify -f allowed_signers -I NAME -n mesh-llm-release -s SHA256SUMS.sig < SHA256SUMS
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import uuid
import zipfile
from email.message import Message
from email.parser import BytesParser
from pathlib import Path
from typing import Any

from mesh_llm import __version__
from mesh_llm.bundle.build import default_name
from mesh_llm.defaults import ENGINE_PACKAGE, ENGINE_VERSION
from mesh_llm.engine.sources import ENGINE_SDIST_SHA256

ROOT = Path(__file__).resolve().parent.parent
NAMESPACE = "mesh-llm-release"
"""Of signatures: one that was made for something else does not count."""


def main() -> None:
    parser = argparse.ArgumentParser(description="make wheel, sdist, bundle, SBOM, provenance and sums")
    parser.add_argument("--key", type=Path, help="SSH key to sign with; unsigned without")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist" / __version__)
    parser.add_argument("--only", nargs="+", metavar="VARIANT", help="of the CPU libraries, these alone")
    arguments = parser.parse_args()
    if arguments.key is not None and not arguments.key.is_file():
        raise SystemExit(f"Error: there is no key {arguments.key}\nHint: ssh-keygen -t ed25519 makes one")
    # Before anything is made: somebody may commit meanwhile.
    commit, clean = git("rev-parse", "HEAD"), git("status", "--porcelain") == ""
    if not clean:
        print("Note: the clone has changes that are in no commit; the provenance says so", file=sys.stderr)
    dist = arguments.dist.resolve()
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)
    make_packages(dist, arguments.only)
    write(dist / "sbom.cdx.json", sbom(dist / default_name()))
    write(dist / "provenance.intoto.json", provenance(dist, commit, clean=clean))
    (dist / "SHA256SUMS").write_text("".join(f"{sum}  {name}\n" for name, sum in sums(dist).items()))
    if arguments.key is None:
        print("Not signed: make release KEY=FILE signs with an SSH key", file=sys.stderr)
    else:
        sign(arguments.key, dist / "SHA256SUMS", dist / "provenance.intoto.json")
    print(dist)


def make_packages(dist: Path, only: list[str] | None) -> None:
    variants = ["--only", *only] if only else []
    run("tools.wheel", "--dist", str(dist), *variants)
    (wheel,) = dist.glob("*.whl")
    run("mesh_llm", "bundle", "--wheel", str(wheel), "-o", str(dist / default_name()))


def run(module: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, "-m", module, *arguments], check=False, cwd=ROOT)
    if done.returncode != 0:
        raise SystemExit(done.returncode)


def write(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2, sort_keys=True) + "\n")


def sums(folder: Path) -> dict[str, str]:
    """By file name, as far as there are files."""
    found = {}
    for path in sorted(folder.iterdir()):
        with path.open("rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


# -- what is in it ----------------------------------------------------------------------------------


def sbom(bundle: Path) -> dict[str, Any]:
    """Of the wheels in a bundle; their hashes were checked against the lock file when it was made."""
    components: dict[str, dict[str, Any]] = {"": engine_sources()}
    with tarfile.open(bundle) as tar:
        for member in tar:
            if member.name.endswith(".whl"):
                content = tar.extractfile(member)
                assert content is not None
                add_wheel(components, Path(member.name).name, content.read())
    own = components.pop("mesh-llm")
    listed = [components[name] for name in sorted(components)]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        # From what it lists: equal bundles have equal ones.
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([own, *listed]))}",
        "metadata": {"component": {**own, "type": "application"}},
        "components": listed,
    }


def engine_sources() -> dict[str, Any]:
    return {
        "type": "library",
        "name": f"{ENGINE_PACKAGE} (sources)",
        "version": ENGINE_VERSION,
        "description": "ggml, from the llama.cpp in this sdist, is compiled into mesh-llm's libraries; "
        "mesh-llm's wheel carries llama.cpp's web page",
        "hashes": [{"alg": "SHA-256", "content": ENGINE_SDIST_SHA256}],
        "licenses": [{"license": {"id": "MIT"}}],
    }


def add_wheel(components: dict[str, dict[str, Any]], file: str, content: bytes) -> None:
    """One component for each package; it may have a wheel for each Python."""
    metadata = read_metadata(content)
    name = re.sub(r"[-_.]+", "-", metadata["Name"]).lower()
    version = metadata["Version"]
    component = components.setdefault(
        name,
        {
            "type": "library",
            "name": name,
            "version": version,
            "purl": f"pkg:pypi/{name}@{version}",
            "bom-ref": f"pkg:pypi/{name}@{version}",
            "externalReferences": [],
            **({"licenses": [found]} if (found := licence(metadata)) else {}),
        },
    )
    digest = {"alg": "SHA-256", "content": hashlib.sha256(content).hexdigest()}
    component["externalReferences"].append({"type": "distribution", "url": file, "hashes": [digest]})


def read_metadata(content: bytes) -> Message:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return BytesParser().parsebytes(archive.read(name), headersonly=True)


def licence(metadata: Message) -> dict[str, Any] | None:
    """As the package tells; None where it does not."""
    if expression := metadata["License-Expression"]:
        return {"expression": expression}
    named = (metadata["License"] or "").strip()
    if named and "\n" not in named:
        return {"license": {"name": named}}
    kinds = [
        kind.rpartition(" :: ")[2]
        for kind in metadata.get_all("Classifier", [])
        if kind.startswith("License :: OSI Approved :: ")
    ]
    return {"license": {"name": " or ".join(kinds)}} if kinds else None


# -- how it was made --------------------------------------------------------------------------------


def provenance(dist: Path, commit: str | None, *, clean: bool) -> dict[str, Any]:
    """An in-toto statement with SLSA's predicate, as far as this machine can tell."""
    lock = hashlib.sha256((ROOT / "requirements.lock").read_bytes()).hexdigest()
    sources = [{"uri": "requirements.lock", "digest": {"sha256": lock}}]
    if commit:
        sources.append({"uri": "git", "digest": {"gitCommit": commit}})
    sources.append(
        {"uri": f"pkg:pypi/{ENGINE_PACKAGE}@{ENGINE_VERSION}", "digest": {"sha256": ENGINE_SDIST_SHA256}}
    )
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": name, "digest": {"sha256": sum}} for name, sum in sums(dist).items()],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:mesh-llm:make-release:1",
                "externalParameters": {"version": __version__, "uncommitted_changes": not clean},
                "internalParameters": {"python": sys.version.split()[0], "platform": sys.platform},
                "resolvedDependencies": sources,
            },
            "runDetails": {"builder": {"id": "urn:mesh-llm:clone"}},
        },
    }


def git(*arguments: str) -> str | None:
    """None where this is no clone."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def sign(key: Path, *files: Path) -> None:
    for file in files:
        argv = ["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(file)]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(f"Error: {file.name} could not be signed: {done.stderr.strip()}")


if __name__ == "__main__":
    main()
