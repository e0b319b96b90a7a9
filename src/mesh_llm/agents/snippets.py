"""Commands and snippets for agents, with the real address and model; never with a key in them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict, replace

from mesh_llm.agents import config_files, json_edit
from mesh_llm.agents.config_files import KEY_VARIABLE, NO_KEY, PROVIDER, Endpoint, file_of
from mesh_llm.frozen import frozen

_PI_RESERVE = 16_384
_WANTED = {
    "pi": 32_768,
    "goose": 32_768,
    "aider": 16_384,
    "opencode": 32_768,
    "claude": 65_536,
    "continue": 16_384,
    "zed": 16_384,
    "open-webui": 8_192,
    "llm": 4_096,
}
"""Tokens of context with which they are of use: their instructions, a file or two, and an answer."""


@frozen
class Recipe:
    """How one agent is used."""

    name: str
    title: str
    command: str
    """For a shell."""
    snippet: str = ""
    """For the agent's own config file, or a program; empty where the command is all."""
    note: str = ""


def snippets(
    url: str, model: str, context: int | None = None, *, key_needed: bool = False
) -> list[dict[str, str]]:
    """Every agent as `{name, title, command, snippet, note}`."""
    endpoint = Endpoint(url=url, model=model, context=context, key_needed=key_needed)
    return [asdict(recipe(name, endpoint)) for name in _RECIPES]


def recipe(name: str, endpoint: Endpoint) -> Recipe:
    made = _RECIPES[name](endpoint)
    warning = small_context(name, endpoint)
    return replace(made, note=f"{warning} {made.note}") if warning else made


def lines_at_start(endpoint: Endpoint, write_pi: str) -> list[str]:
    """What a node prints when it serves: the two agents that need one line each. pi knows no other way to be
    told of a server than its file: `write_pi` is the command that writes it."""
    return [f"pi:    {write_pi} && {_pi_command(endpoint)}", f"goose: {_goose_command(endpoint)}"]


def small_context(name: str, endpoint: Endpoint) -> str:
    """A sentence where the node's context is too small for the agent; else nothing."""
    wanted = _WANTED.get(name, 0)
    if endpoint.context is None or endpoint.context >= wanted:
        return ""
    return (
        f"The context has {endpoint.context:,} tokens, and {name} wants {wanted:,} or more: "
        f"start the node with --ctx-size {wanted}, or expect it to forget and fail."
    )


def _key(endpoint: Endpoint) -> str:
    """As a shell argument. A key is named, never shown: commands end up in histories and on screens."""
    return f'"${KEY_VARIABLE}"' if endpoint.key_needed else NO_KEY


def _key_note(endpoint: Endpoint) -> str:
    if endpoint.key_needed:
        return f"This node needs its API key: set {KEY_VARIABLE} to it."
    return f'No key is needed; where an agent insists on one, any will do ("{NO_KEY}").'


def _note(endpoint: Endpoint, *sentences: str) -> str:
    return " ".join((*sentences, _key_note(endpoint)))


def _pi_command(endpoint: Endpoint) -> str:
    return f"pi --provider {PROVIDER} --model {shlex.quote(endpoint.model)}"


def _pi(endpoint: Endpoint) -> Recipe:
    return Recipe(
        name="pi",
        title="pi",
        command=_pi_command(endpoint),
        snippet=json_edit.dumps({"providers": {PROVIDER: config_files.pi_provider(endpoint)}}),
        note=_note(endpoint, f"Put the snippet into {file_of('pi')}.", *_pi_reserve(endpoint)),
    )


def _pi_reserve(endpoint: Endpoint) -> list[str]:
    """pi sums a conversation up when less than this is left: in a small context, after every answer."""
    if endpoint.window > 2 * _PI_RESERVE:
        return []
    return [
        f"pi summarises a conversation when fewer than {_PI_RESERVE} tokens are free: with a context of "
        f"{endpoint.window}, set compaction.reserveTokens in ~/.pi/agent/settings.json to "
        f"{max(256, endpoint.window // 4)}."
    ]


def _goose_command(endpoint: Endpoint) -> str:
    return (
        f"GOOSE_PROVIDER=openai OPENAI_HOST={shlex.quote(endpoint.url)} OPENAI_API_KEY={_key(endpoint)} "
        f"GOOSE_MODEL={shlex.quote(endpoint.model)} goose session"
    )


def _goose(endpoint: Endpoint) -> Recipe:
    return Recipe(
        name="goose",
        title="goose",
        command=_goose_command(endpoint),
        snippet=json_edit.dumps(config_files.goose_provider(endpoint)),
        note=_note(
            endpoint,
            f"The command needs no file. With the snippet saved as {file_of('goose')} this one does: "
            f"GOOSE_PROVIDER={PROVIDER} GOOSE_MODEL={shlex.quote(endpoint.model)} goose session.",
        ),
    )


def _aider(endpoint: Endpoint) -> Recipe:
    return Recipe(
        name="aider",
        title="aider",
        command=f"OPENAI_API_BASE={shlex.quote(endpoint.api)} OPENAI_API_KEY={_key(endpoint)} "
        f"aider --model {shlex.quote(f'openai/{endpoint.model}')}",
        snippet=json_edit.dumps({f"openai/{endpoint.model}": config_files.aider_model(endpoint)}),
        note=_note(
            endpoint,
            f"The snippet, in {file_of('aider')}, tells aider how much fits into the context.",
        ),
    )


def _opencode(endpoint: Endpoint) -> Recipe:
    return Recipe(
        name="opencode",
        title="OpenCode",
        command=f"opencode --model {shlex.quote(f'{PROVIDER}/{endpoint.model}')}",
        snippet=json_edit.dumps({"provider": {PROVIDER: config_files.opencode_provider(endpoint)}}),
        note=_note(endpoint, f"Put the snippet into {file_of('opencode')}."),
    )


def _claude(endpoint: Endpoint) -> Recipe:
    model = shlex.quote(endpoint.model)
    return Recipe(
        name="claude",
        title="Claude Code",
        command=f"ANTHROPIC_BASE_URL={shlex.quote(endpoint.url)} ANTHROPIC_AUTH_TOKEN={_key(endpoint)} "
        f"ANTHROPIC_MODEL={model} ANTHROPIC_DEFAULT_HAIKU_MODEL={model} "
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1 claude",
        note=_note(endpoint, "Its own instructions fill some 20,000 tokens: the context has to be larger."),
    )


def _continue(endpoint: Endpoint) -> Recipe:
    return Recipe(
        name="continue",
        title="Continue",
        command="code .",
        snippet=json_edit.dumps(config_files.continue_block(endpoint)),
        note=_note(
            endpoint,
            f"Save the snippet as {file_of('continue')} (JSON is YAML).",
            "Then choose the model in Continue's list.",
            *(["Continue looks for the key in ~/.continue/.env."] if endpoint.key_needed else []),
        ),
    )


def _zed(endpoint: Endpoint) -> Recipe:
    at = {"language_models": {"openai_compatible": {PROVIDER: config_files.zed_provider(endpoint)}}}
    return Recipe(
        name="zed",
        title="Zed",
        # Zed makes the variable's name from the provider's, and leaves a provider without a key alone.
        command=f"{PROVIDER.upper()}_API_KEY={_key(endpoint)} zed .",
        snippet=json_edit.dumps(at),
        note=_note(
            endpoint, f"Put the snippet into {file_of('zed')}, and choose the model in the agent panel."
        ),
    )


def _open_webui(endpoint: Endpoint) -> Recipe:
    return Recipe(
        name="open-webui",
        title="Open WebUI",
        command=f"OPENAI_API_BASE_URL={shlex.quote(endpoint.api)} OPENAI_API_KEY={_key(endpoint)} "
        f"DEFAULT_MODELS={shlex.quote(endpoint.model)} ENABLE_OLLAMA_API=false open-webui serve",
        note=_note(
            endpoint,
            "These set up a new installation; in one that you have, add the address under Admin Panel, "
            "Settings, Connections. In a container, localhost is host.docker.internal.",
        ),
    )


def _llm(endpoint: Endpoint) -> Recipe:
    key = f"OPENAI_API_KEY={_key(endpoint)} " if endpoint.key_needed else ""
    ollama = f"OLLAMA_HOST={shlex.quote(endpoint.url)} llm -m {shlex.quote(f'ollama/{endpoint.model}')}"
    return Recipe(
        name="llm",
        title="llm",
        command=f"{key}llm -m {shlex.quote(f'{PROVIDER}/{endpoint.model}')} 'Hello!'",
        snippet=json_edit.dumps([config_files.llm_model(endpoint)]),
        note=_note(
            endpoint,
            f"Put the snippet into {file_of('llm')} (JSON is YAML).",
            f"With the plugin llm-ollama no file is needed: {ollama}.",
        ),
    )


def _curl(endpoint: Endpoint) -> Recipe:
    body = {"model": endpoint.model, "messages": [{"role": "user", "content": "Hello!"}]}
    key = f' \\\n  -H "Authorization: Bearer ${KEY_VARIABLE}"' if endpoint.key_needed else ""
    return Recipe(
        name="curl",
        title="curl",
        command=f"curl {shlex.quote(f'{endpoint.api}/chat/completions')} \\\n"
        f'  -H "Content-Type: application/json"{key} \\\n'
        f"  -d {shlex.quote(json.dumps(body, ensure_ascii=False))}",
        note=_key_note(endpoint),
    )


def _openai(endpoint: Endpoint) -> Recipe:
    key = f'os.environ["{KEY_VARIABLE}"]' if endpoint.key_needed else f'"{NO_KEY}"'
    program = [
        "import os" if endpoint.key_needed else "",
        "from openai import OpenAI",
        "",
        f"client = OpenAI(base_url={json.dumps(endpoint.api)}, api_key={key})",
        "stream = client.chat.completions.create(",
        f"    model={json.dumps(endpoint.model)},",
        '    messages=[{"role": "user", "content": "Hello!"}],',
        "    stream=True,",
        ")",
        "for chunk in stream:",
        "    for choice in chunk.choices:",
        '        print(choice.delta.content or "", end="", flush=True)',
        "print()",
    ]
    return Recipe(
        name="openai",
        title="openai-python",
        command="pip install openai",
        snippet="\n".join(program if endpoint.key_needed else program[1:]),
        note=_key_note(endpoint),
    )


_RECIPES: dict[str, Callable[[Endpoint], Recipe]] = {
    "pi": _pi,
    "goose": _goose,
    "aider": _aider,
    "opencode": _opencode,
    "claude": _claude,
    "continue": _continue,
    "zed": _zed,
    "open-webui": _open_webui,
    "llm": _llm,
    "curl": _curl,
    "openai": _openai,
}

NAMES = tuple(_RECIPES)
