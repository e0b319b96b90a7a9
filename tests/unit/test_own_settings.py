"""What an owner's start asks for, over settings that were signed before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.home import Home
from mesh_llm.local.own_settings import given_over, own_settings
from mesh_llm.mesh_settings import Draft, MeshSettings, ModelSettings, SideFile, as_one
from mesh_llm.node.joining import Joining
from mesh_llm.transport.identity import Identity
from mesh_llm.types import Fingerprint, ModelFacts
from tests.support import planning

BIG = planning.model()
REPLACED = planning.model(fingerprint=Fingerprint("a" * 64))
CODER = planning.model(files=(Path("coder.gguf"),), fingerprint=Fingerprint("c" * 64))
DRAFT = Draft(name="small", fingerprint=Fingerprint("d" * 64), weight_bytes=1, cache_bytes=1, compute_bytes=1)
PROJECTOR = SideFile(name="mmproj", size_bytes=1, digest="e" * 64)
BESIDE = ModelSettings(
    model="coder", fingerprint=CODER.fingerprint, alias="coder", context=2048, slots=2, changed=1
)


def config(**given: Any) -> NodeConfig:
    return NodeConfig(home=Path("home"), **given)


def signed(draft: Draft | None = None, **options: Any) -> MeshSettings:
    """By an earlier start."""
    return own_settings(config(context=512, slots=1, **options), BIG, draft)


def started(
    old: MeshSettings, file: ModelFacts = BIG, *, mine: bool = True, found: Draft | None = None, **given: Any
) -> MeshSettings:
    """Again, with these options."""
    asked = config(**given)
    return given_over(asked, old, own_settings(asked, file, found), mine=mine)


@pytest.mark.parametrize("model", [None, "big"])
@pytest.mark.parametrize("mine", [True, False])
def test_a_start_without_options_leaves_what_was_signed(model: str | None, mine: bool) -> None:
    old = replace(
        signed(DRAFT, alias="ours", split=True, temp=0.5, priority=3), digest="ff", others=(BESIDE,)
    )
    assert started(old, mine=mine, model=model).models == old.models


def test_an_option_that_differs_is_signed_and_no_other() -> None:
    old = signed(alias="ours", split=True)
    assert started(old, model="big", context=1024) == replace(old, context=1024)
    assert started(old, alias="mine") == replace(old, alias="mine")


def test_options_that_exclude_each_other_take_each_others_place() -> None:
    shares = started(signed(layers=(("one", 0, 40),)), tensor_split=(3.0, 1.0))
    assert (shares.tensor_split, shares.layers) == ((3.0, 1.0), None)
    layers = started(shares, layers=(("one", 0, 40),))
    assert (layers.tensor_split, layers.layers) == (None, (("one", 0, 40),))

    without = started(signed(DRAFT), no_draft=True)
    assert (without.guess, without.draft) == (False, None)
    # No start gives its draft back, unless it is asked to.
    assert not started(without, found=DRAFT).draft
    again = started(without, draft="small", found=DRAFT)
    assert (again.guess, again.draft) == (True, DRAFT)


def test_a_draft_that_is_found_is_taken_where_there_was_none() -> None:
    assert started(signed(), found=DRAFT).draft == DRAFT
    assert started(signed(DRAFT), draft_max=5).draft_max == 5
    # What it takes depends on the slots.
    larger = replace(DRAFT, compute_bytes=9)
    assert started(signed(DRAFT), found=larger, slots=8).draft == larger
    assert started(signed(DRAFT), found=larger).draft == DRAFT


def test_a_projector_that_is_named_counts() -> None:
    old = replace(signed(), projector=PROJECTOR)
    assert started(old).projector == PROJECTOR
    assert started(old, model="big").projector == PROJECTOR
    assert started(old, mmproj=Path("none")).projector is None


def test_a_file_that_was_replaced_is_served_with_the_same_options() -> None:
    old = replace(signed(DRAFT, alias="ours"), digest="ff")
    for name in (None, "big"):
        new = started(old, REPLACED, model=name)
        assert new == replace(old, fingerprint=REPLACED.fingerprint, digest="", draft=None)
    # Another owner's choice stands until this one names a file.
    assert started(old, REPLACED, mine=False, predict=9) == replace(old, predict=9)


def test_another_default_model() -> None:
    old = replace(signed(split=True), others=(BESIDE,))
    swapped = started(old, CODER, model="coder", predict=9)
    assert swapped.models[0].alias == "coder"
    assert (swapped.context, swapped.slots, swapped.predict, swapped.split) == (2048, 2, 9, False)
    assert [as_one(each) for each in swapped.others] == [as_one(replace(old, others=()))]
    # One that was not served before has none of the earlier one's options.
    fresh = started(replace(old, others=()), CODER, model="coder")
    assert (fresh.alias, fresh.context, fresh.split, fresh.others) == ("coder", None, False, ())


def test_a_creator_that_restarts_signs_nothing_anew(tmp_path: Path) -> None:
    home, identity = Home(tmp_path), Identity.from_secret(bytes(range(32)))
    home.create()

    def start(**given: Any) -> MeshSettings:
        joining = Joining(home, NodeConfig(home=tmp_path, **given), identity)
        joining.read()
        settings = joining.settle(BIG, None)
        assert settings is not None
        return settings

    first = start(context=512)
    assert start() == first
    assert start(model="big", context=512) == first
    assert start(context=1024).version == first.version + 1
    assert start().context == 1024
