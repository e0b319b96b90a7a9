"""How far an engine guesses ahead, and what that takes of the host's memory."""

from __future__ import annotations

from dataclasses import replace

from mesh_llm.defaults import GUESS_TEXT_MAX
from mesh_llm.membership.settings_documents import settings_from_document, settings_to_document
from mesh_llm.mesh_settings import Draft
from mesh_llm.planning.decide import decide
from mesh_llm.planning.fit import advice, compute_bytes, memory_need, stage_need
from mesh_llm.planning.speculation import cache_settings, can_guess, made_by, model_guesses, text_guesses
from mesh_llm.types import Fingerprint, Mode
from tests.support.planning import GB, mesh, model, node, settings

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
    big = model()
    assert (text_guesses(big, GUESSING), model_guesses(big, GUESSING)) == (GUESS_TEXT_MAX, 0)
    assert (text_guesses(big, DRAFTING), model_guesses(big, DRAFTING)) == (GUESS_TEXT_MAX, 6)
    nothing = replace(DRAFTING, guess=False)
    assert (text_guesses(big, nothing), model_guesses(big, nothing)) == (0, 0)


def test_a_state_that_cannot_be_taken_back_is_not_guessed_for() -> None:
    big = model()
    recurrent = replace(
        big,
        layers=(replace(big.layers[0], cache=replace(big.layers[0].cache, state_bytes=1)), *big.layers[1:]),
    )
    assert can_guess(big)
    assert not can_guess(recurrent)
    assert text_guesses(recurrent, DRAFTING) == model_guesses(recurrent, DRAFTING) == 0
    assert cache_settings(recurrent, DRAFTING, 4096).draft_bytes == 0


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
