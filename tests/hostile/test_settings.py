"""The mesh's settings are its owners', whoever publishes others."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.local.model_files import ModelFiles
from mesh_llm.membership.checked_fields import counts_up_to
from mesh_llm.mesh_settings import MeshSettings
from mesh_llm.types import Fingerprint
from tests.hostile.adversary import FORGERIES, LARGEST, Adversary
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    QUICK_S,
    address_of,
    comes_to,
    id_of,
    membership,
    restarted,
    serves,
    settings_kept,
    soon,
)
from tests.support.joining import PLAN, JoiningNode, Lab, write_model

REFUSALS = ("invalid signature", "by a node that is not an owner of the mesh")


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model that is not the mesh's."""
    return write_model(tmp_path / "other", name="other.gguf", seed=7, layers=4)


def fingerprint_of(path: Path) -> Fingerprint:
    return asyncio.run(ModelFiles().look(path)).fingerprint


def overriding(bad: Adversary, other: Path, version: int = 1000) -> dict[str, Any]:
    """The creator's settings, but for the model."""
    return bad.settings_of_creator() | {
        "version": version,
        "model": "other",
        "alias": "other",
        "fingerprint": fingerprint_of(other),
    }


def test_a_member_does_not_choose_the_creators_model(
    nodes: Lab, villain: Villain, other: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "models"
    one = nodes.create("one", models=folder)
    before, text = settings_kept(one), serves(one)
    bad = villain(one.token())
    settings = overriding(bad, other)
    fingerprint = Fingerprint(settings["fingerprint"])
    bad.offer(fingerprint, other, tmp_path / "digests")
    # As 0.1 published them, and as they are claimed today.
    bad.introduce(models=[bad.held(fingerprint, "other", other.stat().st_size)], settings=settings)

    for way in FORGERIES:
        assert not bad.said(bad.settings_claim(settings, way)), "it may stay, whatever it claims"
        assert any(words in bad.refusal() for words in REFUSALS)
        bad.connect(bad.inviter, address_of(one))
    soon(lambda: one.status()["model"]["fingerprint"] == fingerprint)

    model = one.status()["model"]
    assert (model["name"], model["fingerprint"]) == (nodes.model.stem, before.fingerprint)
    assert settings_kept(one) == before
    assert not any(folder.iterdir()), "it fetched a file that its user never asked for"
    assert serves(one) == text
    bad.end()
    one = restarted(nodes, one, "--model", nodes.model, *PLAN, models=folder)
    assert settings_kept(one) == before
    assert serves(one) == text


@pytest.mark.full
def test_a_member_does_not_choose_what_a_joiner_goes_by(nodes: Lab, villain: Villain, other: Path) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    before, text = settings_kept(two), serves(two)
    bad = villain(one.token())
    settings = overriding(bad, other)
    two_id, address = id_of(two), address_of(two)

    for way in FORGERIES:
        bad.connect(two_id, address)
        assert not bad.said(bad.settings_claim(settings, way), to=two_id)
        assert any(words in bad.refusal(two_id) for words in REFUSALS)
    soon(lambda: settings_kept(two) != before, within_s=3.0)

    assert settings_kept(two) == before
    assert serves(two) == text


@pytest.mark.full
def test_the_creator_can_change_settings_after_somebody_counted_to_the_end(
    nodes: Lab, villain: Villain
) -> None:
    """A node, which has no say; an owner, which has one."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    settings_kept(two)
    for role, version in (
        ("node", LARGEST),
        ("owner", LARGEST),
        ("owner", counts_up_to(time.time())),
    ):
        bad = villain(one.token(role=role))
        mine = bad.settings_of_creator() | {"version": version, "alias": "mine"}
        assert bad.said(bad.settings_claim(mine)) == (role == "owner"), bad.refusal()
        counts = role == "owner" and version != LARGEST
        assert comes_to(lambda: settings_of(two).alias == "mine", expected=counts) == counts
        bad.end()

    one = restarted(nodes, one, "--model", nodes.model, "--ctx-size", "256", "--parallel", "1")
    two.until(
        lambda: settings_of(two).context == 256,
        what="it goes by the creator's new settings",
        within_s=QUICK_S,
    )
    assert serves(two) == serves(one)


def settings_of(node: JoiningNode) -> MeshSettings:
    settings = membership(node.home).settings
    assert settings is not None
    return settings
