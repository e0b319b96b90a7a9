"""Commands and snippets for agents, with the real address and model; never with a key in them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import asdict

from mesh_llm.agents import config_files, json_edit
from mesh_llm.agents.config_files import KEY_VARIABLE, NO_KEY, PROVIDER, Endpoint, file_of
from mesh_llm.frozen import frozen

_PI_RESERVE = 16_384


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
    return [asdict(make(endpoint)) for make in _RECIPES.values()]


def recipe(name: str, endpoint: Endpoint) -> Recipe:
    return _RECIPES[name](endpoint)


def lines_at_start(endpoint: Endpoint, write_pi: str) -> list[str]:
    """What a node prints when it serves: the two agents that need one line each. pi knows no other way to be
    told of a server than its file: `write_pi` is the command that writes it."""
    return [f"pi:    {write_pi} && {_pi_command(endpoint)}", f"goose: {_goose_command(endpoint)}"]


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
    "curl": _curl,
    "openai": _openai,
}

NAMES = tuple(_RECIPES)
