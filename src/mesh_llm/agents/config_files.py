"""What agents' own config files have to say about a node, and what that makes of the files that are there.

Only what has a name of its own in such a file is written: a provider, a model. What would
become the default of everything else that the agent does is the person's to decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mesh_llm.agents import json_edit
from mesh_llm.errors import AgentConfigRefused
from mesh_llm.frozen import frozen

PROVIDER = "mesh"
"""Under this name agents know the node."""
KEY_VARIABLE = "MESH_LLM_API_KEY"
"""Files and commands name the variable: the key itself stays where the person keeps it."""
NO_KEY = "mesh"
"""For clients that insist on a key where the node asks for none."""
_UNKNOWN_CONTEXT = 8192
"""Until a plan says otherwise: little enough for any model that an agent can work with."""
_LONGEST_ANSWER = 32_768

_FILES = {
    "pi": "~/.pi/agent/models.json",
    "goose": f"~/.config/goose/custom_providers/{PROVIDER}.json",
    "aider": "~/.aider.model.metadata.json",
    "opencode": "~/.config/opencode/opencode.json",
    # In both YAML is read, and JSON is YAML.
    "continue": f"~/.continue/models/{PROVIDER}.yaml",
    "llm": "~/.config/io.datasette.llm/extra-openai-models.yaml",
    "zed": "~/.config/zed/settings.json",
}
WRITTEN = frozenset(_FILES)
"""Agents with a file in which a provider or a model has a place of its own."""
_NOT_WRITTEN = {
    "claude": "Claude Code's settings apply to everything it does, so they are not changed for one model",
    "open-webui": "Open WebUI keeps its settings in a database, so they are given where it is started",
    "curl": "curl needs no config file",
    "openai": "openai-python needs no config file",
}


@frozen
class Endpoint:
    """A node, as its clients see it."""

    url: str
    """Without a path: http://localhost:9337."""
    model: str
    context: int | None = None
    """Tokens of one conversation; None while no plan says."""
    key_needed: bool = False

    @property
    def api(self) -> str:
        return f"{self.url}/v1"

    @property
    def window(self) -> int:
        return self.context or _UNKNOWN_CONTEXT

    @property
    def longest_answer(self) -> int:
        """Half of the context at most: the question is in it, too."""
        return max(1, min(self.window // 2, _LONGEST_ANSWER))


def as_typed(url: str) -> str:
    """An address as people write it."""
    return url.replace("//127.0.0.1:", "//localhost:")


def file_of(name: str) -> str:
    """The file that `--write` changes, as people write it; refused for agents without one."""
    if name in _NOT_WRITTEN:
        raise AgentConfigRefused(_NOT_WRITTEN[name], hint=f"mesh-llm agent {name} shows what to type instead")
    return _FILES[name]


def rewritten(name: str, text: str, endpoint: Endpoint) -> str:
    """The content of the agent's file, given the one that it has now (empty: none)."""
    return _WRITERS[name](text, endpoint)


# -- pi --------------------------------------------------------------------------------------------


def pi_provider(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "baseUrl": endpoint.api,
        "api": "openai-completions",
        # The name of a variable, which pi looks up; where there is none it is a key like any other.
        "apiKey": KEY_VARIABLE,
        "models": [_pi_model(endpoint)],
    }


def _pi_model(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "id": endpoint.model,
        "name": f"{endpoint.model} (mesh)",
        "reasoning": False,
        "input": ["text"],
        "contextWindow": endpoint.window,
        "maxTokens": endpoint.longest_answer,
        "compat": {
            "supportsUsageInStreaming": True,
            "maxTokensField": "max_tokens",
            "supportsDeveloperRole": False,
        },
    }


def _write_pi(text: str, endpoint: Endpoint) -> str:
    provider = pi_provider(endpoint)
    models = provider.pop("models")
    at = ("providers", PROVIDER)
    text = json_edit.merge(text, _nested(at, provider), keep={(*at, "apiKey")})
    return json_edit.merge_item(
        text, (*at, "models"), models[0], by="id", keep={("name",), ("reasoning",), ("input",)}
    )


# -- the others ------------------------------------------------------------------------------------


def goose_provider(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "name": PROVIDER,
        "engine": "openai",
        "display_name": "mesh-llm",
        "description": "The model that this machine's mesh serves",
        "api_key_env": KEY_VARIABLE if endpoint.key_needed else "",
        "base_url": f"{endpoint.api}/chat/completions",
        "models": [_goose_model(endpoint)],
        "supports_streaming": True,
        "requires_auth": endpoint.key_needed,
    }


def _goose_model(endpoint: Endpoint) -> dict[str, Any]:
    return {"name": endpoint.model, "context_limit": endpoint.window}


def _write_goose(text: str, endpoint: Endpoint) -> str:
    provider = goose_provider(endpoint)
    models = provider.pop("models")
    text = json_edit.merge(text, provider, keep={("display_name",), ("description",)})
    return json_edit.merge_item(text, ("models",), models[0], by="name")


def aider_model(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "max_tokens": endpoint.longest_answer,
        "max_input_tokens": endpoint.window,
        "max_output_tokens": endpoint.longest_answer,
        "input_cost_per_token": 0,
        "output_cost_per_token": 0,
        "litellm_provider": "openai",
        "mode": "chat",
    }


def _write_aider(text: str, endpoint: Endpoint) -> str:
    return json_edit.merge(text, {f"openai/{endpoint.model}": aider_model(endpoint)})


def opencode_provider(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mesh-llm",
        "options": {
            "baseURL": endpoint.api,
            # Replaced by opencode; where there is no such variable, by nothing, and no key is sent.
            "apiKey": f"{{env:{KEY_VARIABLE}}}",
        },
        "models": {
            endpoint.model: {
                "name": f"{endpoint.model} (mesh)",
                "limit": {"context": endpoint.window, "output": endpoint.longest_answer},
            }
        },
    }


def _write_opencode(text: str, endpoint: Endpoint) -> str:
    at = ("provider", PROVIDER)
    keep = {(*at, "name"), (*at, "options", "apiKey"), (*at, "models", endpoint.model, "name")}
    changes = _nested(at, opencode_provider(endpoint))
    if not text.strip():
        changes = {"$schema": "https://opencode.ai/config.json", **changes}
    return json_edit.merge(text, changes, keep=keep)


def continue_block(endpoint: Endpoint) -> dict[str, Any]:
    return {"name": PROVIDER, "version": "1.0.0", "schema": "v1", "models": [_continue_model(endpoint)]}


def _continue_model(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "name": f"{endpoint.model} (mesh)",
        "provider": "openai",
        "model": endpoint.model,
        "apiBase": endpoint.api,
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}" if endpoint.key_needed else NO_KEY,
        "roles": ["chat", "edit", "apply"],
        "defaultCompletionOptions": {
            "contextLength": endpoint.window,
            "maxTokens": endpoint.longest_answer,
        },
    }


def _write_continue(text: str, endpoint: Endpoint) -> str:
    block = continue_block(endpoint)
    models = block.pop("models")
    text = json_edit.merge(text, block, keep={("name",), ("version",), ("schema",)})
    return json_edit.merge_item(text, ("models",), models[0], by="model", keep={("name",), ("roles",)})


def llm_model(endpoint: Endpoint) -> dict[str, Any]:
    key = {"api_key_name": PROVIDER} if endpoint.key_needed else {}
    return {
        "model_id": f"{PROVIDER}/{endpoint.model}",
        "model_name": endpoint.model,
        "api_base": endpoint.api,
        "supports_schema": True,
        "supports_tools": True,
        **key,
    }


def _write_llm(text: str, endpoint: Endpoint) -> str:
    return json_edit.merge_item(text, (), llm_model(endpoint), by="model_id")


def zed_provider(endpoint: Endpoint) -> dict[str, Any]:
    return {"api_url": endpoint.api, "available_models": [_zed_model(endpoint)]}


def _zed_model(endpoint: Endpoint) -> dict[str, Any]:
    return {
        "name": endpoint.model,
        "display_name": f"{endpoint.model} (mesh)",
        "max_tokens": endpoint.window,
        "max_output_tokens": endpoint.longest_answer,
        "capabilities": {
            "tools": True,
            "images": False,
            "parallel_tool_calls": False,
            "prompt_cache_key": False,
        },
    }


def _write_zed(text: str, endpoint: Endpoint) -> str:
    at = ("language_models", "openai_compatible", PROVIDER)
    text = json_edit.merge(text, _nested(at, {"api_url": endpoint.api}))
    kept = {("display_name",), *(("capabilities", name) for name in _zed_model(endpoint)["capabilities"])}
    return json_edit.merge_item(text, (*at, "available_models"), _zed_model(endpoint), by="name", keep=kept)


def _nested(path: tuple[str, ...], value: dict[str, Any]) -> dict[str, Any]:
    for name in reversed(path):
        value = {name: value}
    return value


_WRITERS: dict[str, Callable[[str, Endpoint], str]] = {
    "pi": _write_pi,
    "goose": _write_goose,
    "aider": _write_aider,
    "opencode": _write_opencode,
    "continue": _write_continue,
    "llm": _write_llm,
    "zed": _write_zed,
}
