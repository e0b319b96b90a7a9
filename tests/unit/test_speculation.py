"""How far an engine guesses ahead, and what that takes of the host's memory."""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.defaults import GUESS_TEXT_MAX, MTP_DRAFT_MAX
from mesh_llm.membership.settings_documents import settings_from_document, settings_to_document
from mesh_llm.mesh_settings import Adapter, Draft, SideFile
from mesh_llm.planning.decide import decide
from mesh_llm.planning.fit import (
    CHECKPOINTS,
    advice,
    cache_bytes,
    checkpoint_bytes,
    compute_bytes,
    memory_need,
    stage_need,
)
from mesh_llm.planning.layer_costs import load_of
from mesh_llm.planning.speculation import (
    cache_settings,
    draft_off,
    kept_input_bytes,
    made_by,
    model_draft_depth,
    mtp_draft_depth,
    needs_states,
    text_draft_depth,
)
from mesh_llm.types import Fingerprint, LayerCache, Mode, ModelFacts, NodeId
from tests.support.planning import GB, mesh, model, node, plan_of, settings

DRAFT = Draft(
    name="small",
    fingerprint=Fingerprint("d" * 32),
    weight_bytes=500_000_000,
    cache_bytes=10_000,
    compute_bytes=80_000_000,
)
GUESSING = settings(guess=True)
DRAFTING = replace(GUESSING, draft=DRAFT, draft_max=6)


def test_what_is_guessed_with() -> None:
    assert (text_draft_depth(GUESSING), model_draft_depth(GUESSING)) == (GUESS_TEXT_MAX, 0)
    assert (text_draft_depth(DRAFTING), model_draft_depth(DRAFTING)) == (GUESS_TEXT_MAX, 6)
    nothing = replace(DRAFTING, guess=False)
    assert (text_draft_depth(nothing), model_draft_depth(nothing)) == (0, 0)


def test_an_eagle3_head_is_off_where_what_it_reads_would_cross_a_link() -> None:
    head = replace(DRAFTING, draft=replace(DRAFT, layers=(2, 20, 37)))
    ann, ben = NodeId("ann"), NodeId("ben")
    alone, near = plan_of((ann, 0, 40)), plan_of((ann, 0, 37), (ben, 37, 40))
    far = plan_of((ann, 0, 19), (ben, 19, 40))
    assert [draft_off(plan, head) for plan in (alone, near)] == [None, None]
    assert draft_off(far, head) == "small is off: what it reads of layers 20, 37 is on other nodes"
    assert draft_off(replace(near, head_on_worker=True), head) == (
        "small is off: the output head is on another node"
    )
    assert draft_off(far, DRAFTING) is None


def test_what_an_eagle3_head_reads_is_kept() -> None:
    head = replace(model(), read_layers=(1, 2, 3), read_width=1000)
    assert kept_input_bytes(head, 2) == 4 * 3 * 1000 * (2048 + 512 * 2)
    assert kept_input_bytes(model(), 2) == 0


def recurrent(facts: ModelFacts, state_bytes: int) -> ModelFacts:
    layers = tuple(
        replace(layer, cache=replace(layer.cache, state_bytes=state_bytes)) for layer in facts.layers
    )
    return replace(facts, layers=layers)


def test_a_state_that_cannot_be_cut_back_is_saved_once_more() -> None:
    big = recurrent(model(), 1000)
    assert needs_states(big)
    assert not needs_states(model())
    states = 1000 * len(big.layers)
    plain, guessing = (cache_settings(big, settings(guess=guess, slots=2), 4096) for guess in (False, True))
    assert checkpoint_bytes(big.layers, plain) == 2 * CHECKPOINTS * states
    assert checkpoint_bytes(big.layers, guessing) == 2 * (CHECKPOINTS + 1) * states


def test_a_head_of_its_own_guesses_where_no_draft_model_does() -> None:
    big = replace(model(), mtp_cache=LayerCache(k_width=128, v_width=64))
    assert mtp_draft_depth(big, GUESSING) == MTP_DRAFT_MAX
    assert mtp_draft_depth(big, DRAFTING) == mtp_draft_depth(model(), GUESSING) == 0
    assert mtp_draft_depth(big, replace(GUESSING, guess=False)) == 0
    with_head, without = (cache_settings(facts, GUESSING, 4096) for facts in (big, model()))
    more = memory_need(big, with_head).total_bytes - memory_need(big, without).total_bytes
    cache, weights = 4096 * 2 * (128 + 64), big.layers[-1].weight_bytes
    assert more > cache + weights
    whole = (0, len(big.layers))
    worker = stage_need(big, with_head, whole, host=False, head=False)
    assert worker == stage_need(big, without, whole, host=False, head=False)


def test_states_of_the_last_tokens_are_counted() -> None:
    big = replace(recurrent(model(), 1000), mtp_cache=LayerCache(k_width=8, v_width=8))
    plain = cache_bytes(big, cache_settings(big, GUESSING, 4096))
    kept = replace(big, keeps_snapshots=True)
    states = 1000 * len(big.layers) * GUESSING.slots
    assert cache_bytes(kept, cache_settings(kept, GUESSING, 4096)) == plain + MTP_DRAFT_MAX * states


def test_a_head_that_does_not_fit_guesses_nothing() -> None:
    big = replace(model(), mtp_cache=LayerCache(k_width=128, v_width=64))
    bare = memory_need(big, cache_settings(big, settings(guess=False), 4096)).total_bytes
    tight = decide(mesh(node("a", (bare + 50_000_000) / GB)), big, GUESSING, current=None)
    assert tight.mode is Mode.SOLO
    assert made_by(tight, big, GUESSING) == replace(GUESSING, guess=False)
    wide = decide(mesh(node("a", (bare + 10 * GB) / GB)), big, GUESSING, current=None)
    assert made_by(wide, big, GUESSING) == GUESSING


def test_guesses_keep_their_logits_and_the_draft_lies_on_the_host() -> None:
    big = model()
    plain = cache_settings(big, settings(), 4096)
    guessing = cache_settings(big, GUESSING, 4096)
    drafting = cache_settings(big, DRAFTING, 4096)
    logits = 4 * big.vocabulary * GUESS_TEXT_MAX
    assert compute_bytes(big, guessing) - compute_bytes(big, plain) == logits
    draft_bytes = DRAFT.weight_bytes + 4096 * DRAFT.cache_bytes + DRAFT.compute_bytes
    assert memory_need(big, drafting).total_bytes - memory_need(big, guessing).total_bytes == draft_bytes
    whole = (0, len(big.layers))
    host = stage_need(big, drafting, whole, host=True, head=True).total_bytes
    assert host - stage_need(big, guessing, whole, host=True, head=True).total_bytes == draft_bytes
    worker = stage_need(big, drafting, whole, host=False, head=False)
    assert worker == stage_need(big, plain, whole, host=False, head=False)


def test_adapters_lie_on_every_node_that_computes() -> None:
    big, size = model(), 300_000_000
    style = Adapter(file=SideFile(name="style", size_bytes=size, digest="e" * 64), scale=1.0)
    plain = cache_settings(big, GUESSING, 4096)
    styled = cache_settings(big, replace(GUESSING, adapters=(style,)), 4096)
    assert memory_need(big, styled).total_bytes - memory_need(big, plain).total_bytes == size
    for lanes, host, more in ((1, True, size), (2, True, 2 * size), (2, False, size)):
        without, with_style = (replace(each, lanes=lanes) for each in (plain, styled))
        need, bare = (
            stage_need(big, each, (0, 9), host=host, head=False).total_bytes for each in (with_style, without)
        )
        assert need - bare == more
        scratch, least = (
            load_of(big, each).scratch_bytes(host=host, head=False) for each in (with_style, without)
        )
        assert scratch - least == more


def test_a_draft_that_does_not_fit_is_left_out() -> None:
    need = memory_need(model(), cache_settings(model(), GUESSING, 4096)).total_bytes
    tight = mesh(node("a", (need + 100_000_000) / GB))
    bare = decide(tight, model(), DRAFTING, current=None)
    assert bare == decide(tight, model(), GUESSING, current=None)
    assert bare.mode is Mode.SOLO
    assert made_by(bare, model(), DRAFTING) == replace(DRAFTING, draft=None)
    wide = decide(mesh(node("a", (need + 10 * GB) / GB)), model(), DRAFTING, current=None)
    assert made_by(wide, model(), DRAFTING) == DRAFTING
    short = mesh(node("a", (need - 100_000_000) / GB))
    assert decide(short, model(), DRAFTING, current=None).mode is Mode.WAITING


def test_who_has_no_room_for_a_draft_is_told_to_leave_it_out() -> None:
    drafting = cache_settings(model(), DRAFTING, 4096)
    have = memory_need(model(), cache_settings(model(), GUESSING, 4096)).total_bytes
    assert advice(model(), drafting, have).startswith("--no-draft")
    assert "--no-draft" not in advice(model(), drafting, have // 2)
    assert "--no-draft" not in advice(model(), replace(drafting, draft=None), have // 2)


def test_settings_travel_with_their_draft() -> None:
    for sent in (GUESSING, DRAFTING, settings()):
        assert settings_from_document(settings_to_document(sent)) == sent
    # As an older node writes them: it knows nothing of guesses, and they do no harm.
    old = {
        key: value
        for key, value in settings_to_document(DRAFTING).items()
        if key not in ("guess", "draft", "draft_max")
    }
    assert settings_from_document(old) == GUESSING
