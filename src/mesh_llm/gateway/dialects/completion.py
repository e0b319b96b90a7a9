"""`/v1/completions`, and llama-server's own `/completion`."""

from __future__ import annotations

from collections.abc import Sequence

from mesh_llm.gateway.api_errors import ApiError
from mesh_llm.gateway.dialects.base import (
    Dialect,
    Document,
    Polish,
    Said,
    Seam,
    answers_for_each_prompt,
    documents,
    head_of,
    is_several,
)
from mesh_llm.gateway.dialects.chat import count
from mesh_llm.gateway.dialects.choices import OneUsage, total_usage, usages_of
from mesh_llm.gateway.sse import data_of, make


class _Prompted(Dialect):
    """A prompt of the client's own, and the text that follows it."""

    def is_plain(self, body: Document) -> bool:
        return super().is_plain(body) and not any(
            body.get(name) for name in ("suffix", "input_suffix", "echo")
        )

    def continued(self, body: Document, said: Said) -> Document | None:
        match body.get("prompt"):
            case [str(prompt)] | str(prompt) if said.tokens:
                return {**body, "prompt": [prompt, *said.tokens]}
            case [str(prompt)] | str(prompt):
                return {**body, "prompt": prompt + said.content}
            case [*tokens] if tokens and said.tokens:
                return {**body, "prompt": [*tokens, *said.tokens]}
        # A text after tokens is not always cut into the tokens that it would be cut into within a text.
        return None

    def counting(self, body: Document) -> tuple[str, Document] | None:
        return "/tokenize", {"content": body["prompt"], "add_special": True, "parse_special": True}

    def counted(self, answer: Document) -> int:
        return len(answer["tokens"])


class Completion(_Prompted):
    assembles_several = True

    def said(self, events: Sequence[bytes]) -> Said:
        choices = [choice for data in documents(events) for choice in data.get("choices", ())]
        return Said(
            content="".join(choice.get("text") or "" for choice in choices),
            ended=any(choice.get("finish_reason") is not None for choice in choices),
        )

    def is_last(self, event: bytes) -> bool:
        return event.startswith(b"data: [DONE]")

    def ending(self, events: Sequence[bytes], body: Document) -> bytes | None:
        return b"data: [DONE]\n\n"

    def joined(self, data: Document, seam: Seam) -> Document | None:
        if usage := data.get("usage"):
            count(usage, seam)
        for choice in data.get("choices", ()):
            if seam.is_full:
                if choice.get("finish_reason") is None:
                    return None
                choice.update(text="", finish_reason="length")
        return data

    def polish(self, body: Document) -> Polish | None:
        return OneUsage(body) if is_several(body) else None

    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        told = documents(events)
        texts: dict[int, list[str]] = {}
        ends: dict[int, Document] = {}
        for data in told:
            for choice in data.get("choices", ()):
                texts.setdefault(choice["index"], []).append(choice.get("text") or "")
                if choice.get("finish_reason") is not None:
                    ends[choice["index"]] = data
        whole = [{**ends[index]["choices"][0], "text": "".join(texts[index])} for index in sorted(texts)]
        usage = total_usage(usages_of(told), answers_for_each_prompt(body))
        return {**ends[whole[0]["index"]], "choices": whole, "usage": usage}

    def failed(self, failure: ApiError, events: Sequence[bytes]) -> bytes:
        choice = {"text": "", "index": 0, "logprobs": None, "finish_reason": "error"}
        return make({**head_of(events), **failure.document(), "choices": [choice]})


class Native(_Prompted):
    def is_plain(self, body: Document) -> bool:
        return super().is_plain(body) and not body.get("input_prefix")

    def said(self, events: Sequence[bytes]) -> Said:
        told = documents(events)
        spoken = list(told)
        while spoken and not spoken[-1].get("content"):
            # Held back, since a stop sequence may begin with it: the next engine will say it.
            spoken.pop()
        tokens = tuple(token for data in spoken for token in data.get("tokens", ()))
        if not spoken or len(tokens) != spoken[-1].get("tokens_predicted"):
            # Of a letter that takes several tokens only the last one is told.
            tokens = ()
        return Said(
            content="".join(data.get("content") or "" for data in told),
            tokens=tokens,
            ended=any(data.get("stop") is True for data in told),
        )

    def is_last(self, event: bytes) -> bool:
        return b'"stop":true' in event and (data_of(event) or {}).get("stop") is True

    def joined(self, data: Document, seam: Seam) -> Document | None:
        last = data.get("stop") is True
        if seam.is_full:
            if not last:
                return None
            data.update(content="", tokens=[], stop_type="limit", stopping_word="", tokens_predicted=0)
        data["tokens_predicted"] = data.get("tokens_predicted", 0) + seam.tokens
        data["tokens_evaluated"] = seam.prompt_tokens
        if isinstance(data.get("prompt"), str) and data["prompt"].endswith(seam.said.content):
            data["prompt"] = data["prompt"][: len(data["prompt"]) - len(seam.said.content)]
        return data

    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        told = documents(events)
        tokens = [token for data in told for token in data.get("tokens", ())]
        whole = {"content": self.said(events).content, "tokens": tokens if body.get("return_tokens") else []}
        return {**told[-1], **whole}
