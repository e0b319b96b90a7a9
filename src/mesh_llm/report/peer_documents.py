"""What other nodes say, made fit to be shown: they may be anybody's.

Texts end up on a terminal, in a page and in logs, figures in sums and formats. What is
missing or makes no sense becomes nothing, so that neither an older version nor a wrong
one keeps a person from seeing the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mesh_llm.membership.checked_fields import WHOLE_LIMIT, is_number
from mesh_llm.membership.plan_documents import NAME_CHARS, clean

_SENTENCE_CHARS = 400
_LINE_CHARS = 2000
_FIGURE_MOST = 1e18
_LAYERS_MOST = 10_000
_STAGES = 64
_EXCLUDED = 128
_BUFFERS = 16

Read = Callable[[object], Any]


def refusal(document: Mapping[str, Any], otherwise: str) -> str:
    """Why another node does not do what it was asked for."""
    return _text(_SENTENCE_CHARS)(document.get("refused")) or otherwise


def line(text: str) -> str:
    """A sentence of our own in which others, or an engine that quotes them, may have had a say."""
    return clean(text, _LINE_CHARS)


def about(document: Mapping[str, Any]) -> dict[str, Any]:
    """Model, plan and engine, as their host tells of them (status.serving)."""
    return {name: read(document.get(name)) for name, read in _ABOUT.items()}


def _text(limit: int) -> Read:
    return lambda value: clean(value, limit) if isinstance(value, str) else ""


def _figure(value: object) -> Any:
    return value if is_number(value, _FIGURE_MOST) else 0


def _whole(most: int = WHOLE_LIMIT) -> Read:
    return lambda value: value if isinstance(value, int) and is_number(value, most) else 0


def _flag(value: object) -> bool:
    return value is True


def _maybe(read: Read) -> Read:
    return lambda value: None if value is None else read(value)


def _list(limit: int, read: Read) -> Read:
    return lambda value: [read(item) for item in value[:limit]] if isinstance(value, list) else []


def _record(**fields: Read) -> Read:
    def read(value: object) -> dict[str, Any]:
        known = value if isinstance(value, Mapping) else {}
        return {name: each(known.get(name)) for name, each in fields.items()}

    return read


def _buffers(value: object) -> dict[str, int]:
    known = list(value.items())[:_BUFFERS] if isinstance(value, Mapping) else []
    return {_NAME(kind): _whole()(size) for kind, size in known}


_NAME = _text(NAME_CHARS)
_SENTENCE = _text(_SENTENCE_CHARS)
_LAYER = _whole(_LAYERS_MOST)
_TRAFFIC = _record(
    sent_bytes=_whole(), received_bytes=_whole(), bytes_per_s=_whole(), peak_bytes_per_s=_whole()
)

_ABOUT: dict[str, Read] = {
    "model": _maybe(
        _record(
            name=_NAME,
            fingerprint=_NAME,
            size_bytes=_whole(),
            layers=_LAYER,
            quantisation=_NAME,
            context=_maybe(_whole()),
            slots=_maybe(_whole()),
            draft=_maybe(
                _record(
                    name=_maybe(_NAME),
                    depth=_figure,
                    drafted=_whole(),
                    accepted=_whole(),
                    text_drafted=_whole(),
                    text_accepted=_whole(),
                    gain=_maybe(_figure),
                )
            ),
        )
    ),
    "plan": _maybe(
        _record(
            epoch=_maybe(_whole()),
            mode=_NAME,
            host=_maybe(_NAME),
            need_bytes=_whole(),
            have_bytes=_whole(),
            predicted_tok_s=_figure,
            predicted_first_token_s=_maybe(_figure),
            predicted_prompt_tok_s=_maybe(_figure),
            head_on_worker=_flag,
            stages=_list(
                _STAGES,
                _record(
                    node=_NAME,
                    first=_LAYER,
                    last=_LAYER,
                    weight_bytes=_whole(),
                    need_bytes=_whole(),
                    share=_figure,
                ),
            ),
            excluded=_list(_EXCLUDED, _record(node=_NAME, reason=_SENTENCE)),
            reason=_SENTENCE,
        )
    ),
    "engine": _record(
        state=_NAME,
        reason=_SENTENCE,
        pid=_maybe(_whole()),
        restarts=_whole(),
        ready_s=_figure,
        buffers=_buffers,
        weights_sent_bytes=_whole(),
        weights_resident_bytes=_whole(),
        decode_tok_s=_figure,
        prompt_tok_s=_figure,
        stages=_list(
            _STAGES,
            _record(
                node=_NAME,
                link=_maybe(_NAME),
                pushes=_flag,
                compute_ms=_figure,
                wait_ms=_figure,
                bytes_per_token=_whole(),
                traffic=_TRAFFIC,
                pushed=_TRAFFIC,
            ),
        ),
        token=_maybe(
            _record(
                total_ms=_figure,
                parts=_list(3 * _STAGES, _record(kind=_NAME, node=_maybe(_NAME), ms=_figure)),
                sentence=_SENTENCE,
            )
        ),
    ),
}
