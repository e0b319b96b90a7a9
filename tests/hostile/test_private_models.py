"""Files on a machine that are not the mesh's model are nobody's business."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from mesh_llm.local.model_files import ModelFiles
from tests.hostile.conftest import Villain
from tests.hostile.honest import address_of, id_of, serves
from tests.support.joining import Lab, write_model

NAME = "diary-of-ann"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder with a model that has nothing to do with the mesh."""
    return write_model(tmp_path / "own", name=f"{NAME}.gguf", seed=3, layers=4)


def test_nobody_hears_of_a_joiners_other_models(nodes: Lab, villain: Villain, private: Path) -> None:
    fingerprint = asyncio.run(ModelFiles().look(private)).fingerprint
    one = nodes.create("one")
    bad = villain(one.token())
    client = villain(one.token(role="client"), name="client")
    client.introduce()
    two = nodes.join("two", one, models=private.parent)
    two_id = id_of(two)
    told = bad.models_of(two_id)
    bad.connect(two_id, address_of(two))
    bad.settle(two_id)

    answer = bad.open("file", bad.to_manifest(fingerprint), to=two_id).all()
    wanted = bad.to_bytes(fingerprint, size_bytes=private.stat().st_size)
    data = bad.open("file", wanted, to=two_id).all()

    assert told == [one.status()["model"]["fingerprint"]], "the mesh was told of a private file"
    heard = json.dumps([*bad.heard(), *client.heard(), one.status()])
    assert NAME not in heard, "the mesh was told the name of a private file"
    assert fingerprint not in heard, "the mesh was told the fingerprint of a private file"
    assert answer is None or b"refused" in answer, f"a private file was described: {answer!r}"
    assert data is None or b"refused" in data, f"a private file was sent: {data!r}"
    serves(two)


def test_a_private_model_cannot_be_asked_for_by_its_fingerprint(
    nodes: Lab, villain: Villain, private: Path
) -> None:
    fingerprint = asyncio.run(ModelFiles().look(private)).fingerprint
    one = nodes.create("one")
    two = nodes.join("two", one, models=private.parent)
    bad = villain(one.token())
    two_id = id_of(two)
    bad.connect(two_id, address_of(two))
    # From then on it has read what is in its folder.
    bad.models_of(two_id)

    manifest = bad.open("file", bad.to_manifest(fingerprint), to=two_id).all()
    lent = bad.open("lease", bad.to_lease(fingerprint), to=two_id)

    assert manifest is None or b"refused" in manifest, f"a private file was described: {manifest!r}"
    answer = lent.document()
    assert answer is None or "refused" in answer, f"a private file was loaded: {answer}"
