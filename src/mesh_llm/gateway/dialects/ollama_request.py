"""Requests of Ollama's API, in the words of the engine's. Pure.

What it calls `options` stands beside the prompt there, `format` is a response's format, an image is a part
of a message's content, and arguments of a call are a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from mesh_llm.gateway import api_errors
from mesh_llm.gateway.dialects.base import Document

_NUMBERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "seed": "seed",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
    "num_keep": "n_keep",
}
"""Options, and what the engine calls them."""
_OF_NODE = frozenset(
    {
        *("num_ctx", "num_batch", "num_gpu", "main_gpu", "num_thread", "use_mmap", "use_mlock", "low_vram"),
        *("numa", "f16_kv", "logits_all", "vocab_only", "embedding_only", "tfs_z", "penalize_newline"),
    }
)
"""Options that are set where a node is started, or that the engine no longer has."""
_STOPS = 64
"""Sequences that end an answer: each is looked for after every token."""
_EFFORTS = ("low", "medium", "high", "max")
_NO_TIME = re.compile(r"-?0+(\.0*)?(ns|us|µs|ms|s|m|h)?")
"""A duration as Go writes it, or a number."""
_IMAGES = {"/9j/": "jpeg", "R0lGOD": "gif", "UklGR": "webp", "Qk": "bmp"}
"""How they begin in base64; the engine looks at the bytes itself."""


def chat(asked: Document) -> Document:
    """Of `/api/chat`."""
    messages = asked.get("messages")
    if not isinstance(messages, list):
        raise api_errors.mistake("messages must be a list")
    body = {"messages": _messages(messages), **_common(asked)}
    if asked.get("tools"):
        body["tools"] = asked["tools"]
    return body


def generate(asked: Document) -> Document:
    """Of `/api/generate`: a conversation of one question, by the model's own template."""
    if asked.get("template"):
        raise api_errors.mistake(
            "template is not supported: the model's own is used; "
            "with raw set to true the prompt is read as you write it"
        )
    question = {"role": "user", "content": text_of(asked, "prompt"), "images": asked.get("images")}
    system = [{"role": "system", "content": text_of(asked, "system")}] if asked.get("system") else []
    return {"messages": _messages([*system, question]), **_common(asked)}


def raw(asked: Document) -> Document:
    """Of `/api/generate`, with the prompt as it is."""
    if asked.get("images"):
        raise api_errors.mistake("images need the model's template: leave raw out")
    body = {"prompt": text_of(asked, "prompt"), **_options(asked, limit="n_predict")}
    match asked.get("format"):
        case "json":
            body["json_schema"] = {"type": "object"}
        case dict(schema):
            body["json_schema"] = schema
    return body


def infill(asked: Document) -> Document:
    """Of `/api/generate`, with a text before and one behind what is missing."""
    around = {"input_prefix": text_of(asked, "prompt"), "input_suffix": text_of(asked, "suffix")}
    return {**around, "prompt": "", **_options(asked, limit="n_predict")}


def ignored(asked: Document) -> list[str]:
    """What it asks for and does not get."""
    options = asked.get("options")
    told = sorted(_OF_NODE.intersection(options)) if isinstance(options, dict) else []
    return [*told, *(["context"] if asked.get("context") else [])]


def is_load(asked: Document) -> bool:
    """Whether it asks for nothing but the model to be there."""
    return not any(asked.get(name) for name in ("messages", "prompt", "images", "suffix"))


def is_stop(asked: Document) -> bool:
    """Whether it asks for nothing but the model to go, as `ollama stop` does."""
    keep = asked.get("keep_alive")
    written = str(keep) if isinstance(keep, int | float | str) and not isinstance(keep, bool) else ""
    return is_load(asked) and _NO_TIME.fullmatch(written) is not None


def text_of(asked: Mapping[str, Any], name: str) -> str:
    value = asked.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise api_errors.mistake(f"{name} must be a text")
    return value


# -- fields of both --------------------------------------------------------------------------------


def _common(asked: Document) -> Document:
    body = _options(asked, limit="max_tokens")
    match asked.get("format"):
        case "json":
            body["response_format"] = {"type": "json_object"}
        case dict(schema):
            body["response_format"] = {"type": "json_schema", "json_schema": {"schema": schema}}
        case None | "":
            pass
        case _:
            raise api_errors.mistake('format must be "json" or a JSON schema')
    if (thinking := _thinking(asked.get("think"))) is not None:
        body["chat_template_kwargs"] = thinking
    if asked.get("logprobs"):
        body |= {"logprobs": True, "top_logprobs": asked.get("top_logprobs") or 0}
    # How many tokens there were is part of the last line.
    return {**body, "stream_options": {"include_usage": True}}


def _options(asked: Document, *, limit: str) -> Document:
    options = asked.get("options")
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise api_errors.mistake("options must be an object")
    body: Document = {
        theirs: _number(options, ours) for ours, theirs in _NUMBERS.items() if options.get(ours) is not None
    }
    if options.get("num_predict") is not None and (most := int(_number(options, "num_predict"))) >= 0:
        body[limit] = most
    stop = options.get("stop")
    if stop is not None:
        body["stop"] = [stop] if isinstance(stop, str) else stop
        if not _are_texts(body["stop"]) or len(body["stop"]) > _STOPS:
            raise api_errors.mistake(f"the option stop must be a text, or a list of at most {_STOPS} texts")
    return body


def _number(options: Document, name: str) -> float:
    value = options[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1 << 53:
        raise api_errors.mistake(f"the option {name} must be a number")
    return value


def _thinking(think: Any) -> Document | None:
    """How templates are told; those that know nothing of it leave it out."""
    match think:
        case None:
            return None
        case bool():
            return {"enable_thinking": think}
        case str() if think in _EFFORTS:
            return {"enable_thinking": True, "reasoning_effort": think}
    raise api_errors.mistake(f"think must be true, false or one of {', '.join(_EFFORTS)}")


# -- messages --------------------------------------------------------------------------------------


def _messages(given: list[Any]) -> list[Document]:
    told: list[Document] = []
    waiting: list[tuple[str, str]] = []  # calls that have no result yet: id and name
    for message in given:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise api_errors.mistake("each message must be an object with a role")
        text = text_of(message, "content")
        one: Document = {"role": message["role"], "content": _content(text, message.get("images"))}
        if message["role"] == "tool":
            one |= _result(message, waiting)
        if message.get("thinking"):
            one["reasoning_content"] = text_of(message, "thinking")
        if message.get("tool_calls"):
            one["tool_calls"] = _calls(message["tool_calls"], len(told))
            waiting = [(call["id"], call["function"]["name"]) for call in one["tool_calls"]]
        told.append(one)
    return told


def _content(text: str, images: Any) -> str | list[Document]:
    if not images:
        return text
    if not isinstance(images, list) or not _are_texts(images):
        raise api_errors.mistake("images must be a list of images in base64")
    shown = [{"type": "image_url", "image_url": {"url": _url(image)}} for image in images]
    return [*([{"type": "text", "text": text}] if text else []), *shown]


def _url(image: str) -> str:
    if image.startswith("data:"):
        return image
    kind = next((kind for start, kind in _IMAGES.items() if image.startswith(start)), "png")
    return f"data:image/{kind};base64,{image}"


def _calls(given: Any, number: int) -> list[Document]:
    calls = []
    for at, call in enumerate(given if isinstance(given, list) else [None]):
        match call:
            case {"function": {"name": str(name), **function}}:
                arguments = function.get("arguments") or {}
                text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
                id = call.get("id")
                calls.append(
                    {
                        "id": id if isinstance(id, str) and id else f"call_{number}_{at}",
                        "type": "function",
                        "function": {"name": name, "arguments": text},
                    }
                )
            case _:
                raise api_errors.mistake("each of tool_calls must be an object with a function and its name")
    return calls


def _result(message: Document, waiting: list[tuple[str, str]]) -> Document:
    """Which call it answers: the one that it names, else the first of that function, else the first."""
    name = text_of(message, "tool_name") or text_of(message, "name")
    id = text_of(message, "tool_call_id")
    found = next((call for call in waiting if call[1] == name), waiting[0] if waiting else ("call_0_0", name))
    if not id:
        id = found[0]
    waiting[:] = [call for call in waiting if call[0] != id]
    return {"tool_call_id": id, "name": name or found[1]}


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
