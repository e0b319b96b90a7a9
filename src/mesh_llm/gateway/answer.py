"""One answer to one client, from however many engines it takes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web
from multidict import CIMultiDict

from mesh_llm.gateway import api_errors
from mesh_llm.gateway.answer_writer import AnswerWriter
from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.dialects.base import Dialect, Document, Said, Seam
from mesh_llm.gateway.engine_connection import EngineError, EngineLost
from mesh_llm.gateway.engine_errors import EngineRefusal
from mesh_llm.gateway.headers import OURS
from mesh_llm.gateway.http_framing import MalformedAnswer
from mesh_llm.gateway.keep_alive import beating
from mesh_llm.gateway.limits import Limits
from mesh_llm.gateway.metrics import BROKEN, Exchange
from mesh_llm.gateway.model_list import MODELS_PATH, first_name
from mesh_llm.gateway.resume_cut import Cut, cut_back
from mesh_llm.gateway.resume_join import Continuing, Joint, Matching, Repeating
from mesh_llm.gateway.resume_replay import replay
from mesh_llm.gateway.sse import EventCutter, data_of, dump
from mesh_llm.gateway.text_request import TextRequest
from mesh_llm.gateway.token_counts import tokens_in

GATEWAY_DOCUMENT_BYTES = 128 << 20
"""Of the events that an answer in one document is put together from: half a million tokens."""
GATEWAY_TRANSCRIPT_BYTES = 32 << 20
"""Of an answer, kept to go on with it elsewhere: some 100,000 tokens as events."""


Count = Callable[[str, Document | None], Awaitable[Document]]
"""Asks the next engine for something small; without a document it is only to be shown."""

log = logging.getLogger(__name__)

_STREAM = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
    **OURS,
}
"""Of a stream that begins before an engine is there."""
_COLON = ord(":")
_LAST_EVENTS = 8
"""Of an answer: why it ends, what it has cost, and that this is all."""
_PROGRESS = b'"prompt_progress":{'


class FirstEvent:
    """Holds an answer back until its first event is made: that takes a question to the engine."""

    def __init__(self, first: Coroutine[Any, Any, bytes], send: Callable[[bytes], None]) -> None:
        self._send = send
        self._held: list[bytes] = []
        self._is_open = False
        self._task = asyncio.create_task(self._open(first), name="first event of an answer")

    def send(self, event: bytes) -> None:
        """After the first one."""
        if self._is_open:
            self._send(event)
        else:
            self._held.append(event)

    async def first(self) -> bytes:
        """What was made, and sent."""
        return await self._task

    def give_up(self, first: bytes) -> None:
        """Begin with `first`, unless a better one was sent."""
        if not self._is_open:
            self._task.cancel()
            self._let_go(first)

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait((self._task,))

    async def _open(self, first: Coroutine[Any, Any, bytes]) -> bytes:
        event = await first
        self._let_go(event)
        return event

    def _let_go(self, first: bytes) -> None:
        self._is_open = True
        held, self._held = self._held, []
        for event in (first, *held):
            self._send(event)


class EngineRefused(EngineError):
    """It does not take a question of ours."""


class EngineGaveUp(EngineError):
    """It lives, and says that it cannot go on: a worker was lost, or the request is too much for it."""

    def __init__(self, event: bytes) -> None:
        super().__init__("the engine could not go on")
        self.event = event


class Answer:
    """Keeps what the client was told, so that another engine can go on with it."""

    def __init__(
        self, request: web.BaseRequest, generation: TextRequest, exchange: Exchange, limits: Limits
    ) -> None:
        self._request = request
        self._generation = generation
        self._dialect = generation.dialect
        self._exchange = exchange
        self._limits = limits
        self._headers = CIMultiDict[str]()
        self._cutter = EventCutter()
        self._joint: Joint | None = None
        self._has_differed = False
        """An engine was to say the end of what was told once more, and said something else."""
        self._polish = generation.dialect.polish(generation.body)
        self._told: list[bytes] = []
        self._told_bytes = 0
        self._last = b""
        self._prompt_tokens: int | None = None
        self._looks_for_progress = generation.dialect.reports_progress
        self._ask: Count | None = None
        self._first_event: FirstEvent | None = None
        """Of an answer whose start the engine has left out."""
        self._began_s = time.monotonic()
        self.doing = ""
        """What its client waits for, in a word or two."""
        self.cannot_continue = False
        """An engine has refused to go on from the text: it is made again."""
        self.is_whole = False
        """The last event has come: nothing is missing."""
        self.answer_writer: AnswerWriter | None = None
        """The way to a client that wants the events, once there is something to send."""

    @property
    def has_begun(self) -> bool:
        """Something of it has been told: another engine has to fit in with that."""
        return bool(self._told)

    @property
    def is_too_long(self) -> bool:
        """Not all that was told is remembered."""
        return self._generation.streamed and self._told_bytes > GATEWAY_TRANSCRIPT_BYTES

    # -- from the engine -----------------------------------------------------------------------

    async def open(self, headers: CIMultiDict[str]) -> None:
        """The engine takes the request on; what `headers` say of its stream goes for the answer."""
        self.doing = "is computing"
        self._cutter = EventCutter()
        self._headers = headers
        if self._generation.streamed and self.answer_writer is None:
            if self._dialect.content_type:
                headers["Content-Type"] = self._dialect.content_type
            self.answer_writer = self._exchange.answer_writer = await AnswerWriter.open(
                self._request,
                status=200,
                reason="OK",
                headers=headers,
                silence_s=self._limits.silence_s,
            )

    async def wait(self, reason: str) -> None:
        """The model is being loaded: where that takes a while, a stream begins and tells how far it is."""
        self.doing = reason
        is_due = time.monotonic() - self._began_s >= self._limits.beat_s
        if is_due and self._generation.streamed and self.answer_writer is None:
            await self.open(CIMultiDict({**_STREAM, **self._exchange.headers}))
            self.doing = reason
            self.remark(reason)

    def take(self, payload: bytes) -> None:
        """Every payload of every engine's answer passes here, in order."""
        for event in self._cutter.feed(payload):
            if event[0] == _COLON:
                continue  # a comment: the engine's sign of life; we have our own
            if self._looks_for_progress and self._is_progress(event):
                continue
            if self._dialect.is_error(event):
                raise EngineGaveUp(event)
            told = event if self._joint is None else self._joint.feed(event)
            if told is not None:
                self._tell(told)

    def _tell(self, event: bytes) -> None:
        if self._dialect.is_last(event) and not self.is_too_long:
            _check_reason(self._dialect, [*self._told[-_LAST_EVENTS:], event])
        if not self._told:
            self._exchange.first_event_s = time.monotonic()
            if self._first_event is None and self._dialect.lacks_start(event):
                self._first_event = FirstEvent(self._start(), self._send)
        if self._exchange.lost_s:
            self._exchange.found_again()
        self._told_bytes += len(event)
        if not self._generation.streamed and self._told_bytes > GATEWAY_DOCUMENT_BYTES:
            raise MalformedAnswer("the answer is too long")
        self._last = event
        if not self.is_too_long:
            self._told.append(event)
        self._exchange.events += 1
        if self.answer_writer is not None:
            polished = event if self._polish is None else self._polish.feed(event)
            (self._send if self._first_event is None else self._first_event.send)(polished)

    def _send(self, event: bytes) -> None:
        if self.answer_writer is not None:
            self.answer_writer.take(event)

    async def _start(self) -> bytes:
        """What the engine's would have said, as far as the engine tells it otherwise."""
        model, tokens = "", self._prompt_tokens
        try:
            if self._ask is not None:
                model = first_name(await self._ask(MODELS_PATH, None))
                tokens = await self._count(self._ask, self._generation.asked) if tokens is None else tokens
        except EngineError as error:
            log.warning("answer begins without a count of its prompt error=%r", error)
        return self._dialect.start(model=model, prompt_tokens=tokens or 0)

    def _is_progress(self, event: bytes) -> bool:
        """A report on the prompt, which only comes before the text; of several, before each of them."""
        if _PROGRESS not in event:
            self._looks_for_progress = self._generation.is_several
            return False
        progress = (data_of(event) or {}).get("prompt_progress") or {}
        if self._prompt_tokens is None and isinstance(progress.get("total"), int):
            self._prompt_tokens = progress["total"]
            found = progress.get("cache")
            self._exchange.prompt_total = progress["total"]
            self._exchange.prompt_tokens = progress["total"] - (found if isinstance(found, int) else 0)
        if not self._generation.hides_progress and self._joint is None and self.answer_writer is not None:
            # Asked for, and yet no part of the answer: another engine's would differ.
            self.answer_writer.take(event)
        return True

    # -- from one engine to the next -----------------------------------------------------------

    def check_end(self) -> bool:
        """Whether the last event has come, now that the stream has ended as it should."""
        self.is_whole = bool(self._last) and self._dialect.is_last(self._last)
        return self.is_whole

    def can_end(self) -> bool:
        """Whether nothing is missing but the end, or not even that, although the stream broke off."""
        if self._generation.is_several or not self._told or self.is_too_long:
            return False
        if self.check_end():
            return True
        if self._dialect.said(self._told).ended:
            ending = self._dialect.ending(self._told, self._generation.asked)
            if ending is not None:
                self._tell(ending)
                self.is_whole = True
        return self.is_whole

    async def next_requests(self, count: Count, *, predict: int | None = None) -> list[Document]:
        """What to ask the next engine for: of several, only the last one's answer is for the client.

        `predict`: the engine's own limit, where the request has none.
        """
        self._ask = count
        self._has_differed |= isinstance(self._joint, Repeating) and self._joint.has_differed
        self._joint = None
        self._looks_for_progress = self._dialect.reports_progress
        self.doing = "waiting for a slot"
        if self._generation.is_several and not self._generation.streamed:
            # Nobody has seen it, and in another run the choices' events come in another order.
            self._forget()
        if not self._told:
            return [self._generation.asked]
        if self.is_too_long:
            raise api_errors.not_resumed("the answer is too long to be continued by another engine")
        said = self._dialect.said(self._told)
        body = None if self.cannot_continue else self._generation.continued(said)
        if body is not None and not await self._is_continuation(count, body, said):
            body = None
        if body is None:
            self._joint = Matching(self._told)
            return [self._generation.asked]
        if self._prompt_tokens is None:
            self._prompt_tokens = await self._count(count, self._generation.asked)
        # The same text as before, and by the same tokens as long as those were the usual ones for it.
        tokens = len(said.tokens) or max(0, await self._count_answer(count, body))
        cut = whole = Cut(events=len(self._told), said=said, body=body, tokens=tokens)
        if not said.tokens:
            cut = await cut_back(cut, self._told, self._generation, partial(self._count_answer, count))
        if self._has_differed:
            # From all that was told, then, if not from its very tokens; they still count as they came.
            cut = replace(whole, tokens=cut.tokens + whole.events - cut.events)
        limits = {name: int(body[name]) for name in self._dialect.limits(body)}
        if not limits and predict is not None:
            # The engine would count from here.
            limits = {"n_predict": predict}
        left = {name: max(0, limit - cut.tokens) for name, limit in limits.items()}
        is_full = any(limit == 0 for limit in left.values())
        # Of a text that was written in other tokens than the usual ones there may be more than were allowed.
        tokens = min(cut.tokens, *limits.values()) if is_full else cut.tokens
        seam = Seam(said=cut.said, prompt_tokens=self._prompt_tokens, tokens=tokens, is_full=is_full)
        self._joint = Continuing(self._dialect, seam, self._told)
        if cut.events < len(self._told):
            self._joint = Repeating(self._joint, self._told[cut.events :])
        replayed = replay(self._generation, self._told, cut)
        # It goes on from there, even if its client wants nothing remembered. And an engine makes one token at
        # least; that one is left out.
        remembered = {"cache_prompt": True} if replayed else {}
        rest = {**cut.body, **remembered, **{name: max(1, limit) for name, limit in left.items()}}
        return [*replayed, rest]

    def _forget(self) -> None:
        self._told.clear()
        self._told_bytes, self._last = 0, b""

    async def _is_continuation(self, ask: Count, body: Document, said: Said) -> bool:
        """Whether the prompt of `body` is the first one's and what was said, and no template added to it."""
        before, after = self._dialect.rendering(self._generation.asked), self._dialect.rendering(body)
        if before is None or after is None:
            return True
        try:
            old, new = (await ask(*before))["prompt"], (await ask(*after))["prompt"]
        except (EngineRefused, LookupError, TypeError):
            return False
        if not isinstance(old, str) or not isinstance(new, str):
            return False
        return new.startswith(old) if said.reasoning else new == old + said.content

    async def _count_answer(self, count: Count, body: Document) -> int:
        return await self._count(count, body) - (self._prompt_tokens or 0)

    async def _count(self, count: Count, body: Document) -> int:
        question = self._dialect.counting(body)
        if question is None:
            raise EngineError("the length of the answer is unknown")
        try:
            return self._dialect.counted(await count(*question))
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError("the next engine does not report the length of the answer") from error

    # -- to the client -------------------------------------------------------------------------

    def beating(self) -> AbstractContextManager[None]:
        """Until the end of the block, a stream that has nothing to say gives signs of life."""
        return beating(
            self._limits.beat_s, lambda: self._exchange.sent_bytes, lambda: self.remark(self.doing)
        )

    def remark(self, text: str) -> None:
        """For whoever looks at the stream; no client parses it."""
        if self.answer_writer is not None:
            self.answer_writer.take(self._dialect.sign_of_life(f"mesh-llm {text}"))

    async def finish(self) -> web.StreamResponse:
        start = () if self._first_event is None else (await self._first_event.first(),)
        if self.answer_writer is not None:
            await self.answer_writer.finish()
            return self.answer_writer.response
        return self._whole(dump(self._dialect.assembled([*start, *self._told], self._generation.body)), 200)

    async def close(self) -> None:
        if self._exchange.key:
            self._note_tokens()
        if self._first_event is not None:
            await self._first_event.close()

    def _note_tokens(self) -> None:
        prompt, answer = tokens_in((*self._told[:2], *self._told[-3:]))
        if self._exchange.prompt_total is None:
            self._exchange.prompt_total = prompt
        if self.is_whole and not self._generation.is_several:
            # Else each event counts as one: what was cut off was computed, too.
            self._exchange.completion_tokens = answer

    def _whole(self, body: bytes, status: int) -> web.Response:
        headers = CIMultiDict(self._headers)
        for name in ("Content-Type", "X-Accel-Buffering"):
            headers.popall(name, None)
        headers["Content-Type"] = "application/json; charset=utf-8"
        self._exchange.answered(body)
        return web.Response(status=status, body=body, headers=headers)

    def refuse(self, event: bytes) -> web.Response:
        """What the engine says against it is said to the client; raises the `ApiError` in an open stream.

        There the engine ends properly after its complaint. Passed on like that, an answer that was
        cut in the middle would look like one that has nothing more to say.
        """
        error = _error_of(event)
        if self.answer_writer is not None:
            raise api_errors.engine_gave_up(error)
        self._exchange.outcome = BROKEN
        code = error.get("code")
        status = code if isinstance(code, int) and 400 <= code < 600 else 500
        refusal = EngineRefusal.of(self._request.path, status, error)
        return self._whole(refusal.body, refusal.status)

    def last_words(self, failure: ApiError) -> bytes:
        if self._first_event is not None:
            self._first_event.give_up(self._dialect.start(model="", prompt_tokens=self._prompt_tokens or 0))
        return self._dialect.failed(failure, self._told)


def _check_reason(dialect: Dialect, events: Sequence[bytes]) -> None:
    """No engine means to end without saying why: the client must not take it for the end."""
    if not dialect.said(events).ended:
        raise EngineLost("the answer ended without a reason")


def _error_of(event: bytes) -> dict[str, Any]:
    data = data_of(event) or {}
    error = data.get("error", data)
    return error if isinstance(error, dict) else {"message": str(error)}
