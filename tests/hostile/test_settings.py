"""The mesh's settings are its creator's, whoever publishes others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.node.shelf import Shelf
from mesh_llm.types import Fingerprint
from tests.hostile.adversary import LARGEST, Adversary
from tests.hostile.conftest import Villain
from tests.hostile.honest import (
    QUICK_S,
    address_of,
    id_of,
    remembered,
    restarted,
    serves,
    settings_kept,
    soon,
)
from tests.support.joining import PLAN, JoiningNode, Lab, write_model


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model that is not the mesh's."""
    return write_model(tmp_path / "other", name="other.gguf", seed=7, layers=4)


def fingerprint_of(path: Path) -> Fingerprint:
    return asyncio.run(Shelf().look(path)).fingerprint


def overriding(bad: Adversary, creator: JoiningNode, other: Path, version: int = 1000) -> dict[str, Any]:
    """The creator's settings, but for the model."""
    return bad.settings_of(id_of(creator)) | {
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
    settings = overriding(bad, one, other)
    fingerprint = Fingerprint(settings["fingerprint"])
    bad.offer(fingerprint, other, tmp_path / "digests")

    bad.introduce(models=[bad.held(fingerprint, "other", other.stat().st_size)], settings=settings)
    soon(lambda: one.status()["model"]["fingerprint"] == fingerprint)

    model = one.status()["model"]
    assert (model["name"], model["fingerprint"]) == (nodes.model.stem, before[0])
    assert settings_kept(one) == before
    assert not any(folder.iterdir()), "it fetched a file that its user never asked for"
    assert serves(one) == text
    bad.end()
    one = restarted(nodes, one, "--model", nodes.model, *PLAN, models=folder)
    assert settings_kept(one) == before
    assert serves(one) == text


@pytest.mark.parametrize("about", ["itself", "the creator"])
def test_a_member_does_not_choose_what_a_joiner_goes_by(
    nodes: Lab, villain: Villain, other: Path, about: str
) -> None:
    """By a record of its own, or by one of the creator's that it has changed."""
    one = nodes.create("one")
    two = nodes.join("two", one)
    before, text = settings_kept(two), serves(two)
    bad = villain(one.token())
    settings = overriding(bad, one, other)
    bad.connect(id_of(two), address_of(two))

    if about == "itself":
        bad.introduce(to=id_of(two), settings=settings)
    else:
        bad.tell(bad.altered(id_of(one), settings=settings), to=id_of(two))
    soon(lambda: settings_kept(two) != before)

    assert settings_kept(two) == before
    assert serves(two) == text


def test_the_creator_can_change_settings_after_somebody_counted_to_the_end(
    nodes: Lab, villain: Villain
) -> None:
    one = nodes.create("one")
    two = nodes.join("two", one)
    bad = villain(one.token())
    settings = bad.settings_of(id_of(one)) | {"version": LARGEST}
    bad.introduce(settings=settings)
    soon(lambda: remembered(two.home)["settings"]["version"] == LARGEST)
    bad.end()

    one = restarted(nodes, one, "--model", nodes.model, "--ctx-size", "256", "--parallel", "1")

    two.until(
        lambda: remembered(two.home)["settings"]["context"] == 256,
        what="it goes by the creator's new settings",
        within_s=QUICK_S,
    )
    assert serves(two) == serves(one)
