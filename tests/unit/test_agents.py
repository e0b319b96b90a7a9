"""What people type and paste for agents, and what `agent --write` makes of the files that they have."""

from __future__ import annotations

import json
import os
import shlex
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from mesh_llm.agents import config_files, snippets
from mesh_llm.agents.config_files import Endpoint
from mesh_llm.cli import agent
from mesh_llm.errors import AgentConfigRefused, MeshError
from mesh_llm.node.announcements import api_lines

HERE = Endpoint(url="http://localhost:9337", model="Qwen2.5-32B-Instruct-Q4_K_M", context=65536)
WITH_KEY = Endpoint(url="https://localhost:9000", model="m", context=2048, key_needed=True)
ODD = Endpoint(url="http://localhost:1", model="it's a $model", context=None)


@pytest.fixture(autouse=True)
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PI_CODING_AGENT_DIR", "XDG_CONFIG_HOME", "OPENCODE_CONFIG", "LLM_USER_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def models_json(person: Path, text: str) -> Path:
    path = person / ".pi" / "agent" / "models.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode())
    return path


# -- texts -----------------------------------------------------------------------------------------


def test_the_lines_at_start_are_those_that_the_documents_promise() -> None:
    assert api_lines(
        "Qwen2.5-32B-Instruct-Q4_K_M",
        "http://127.0.0.1:9337",
        key_needed=False,
        write_pi="mesh-llm agent pi --write",
    ) == {
        "api": "API ready at http://localhost:9337",
        "agent": "pi:    mesh-llm agent pi --write && pi --provider mesh --model Qwen2.5-32B-Instruct-Q4_K_M",
        "agent-goose": "goose: GOOSE_PROVIDER=openai OPENAI_HOST=http://localhost:9337 OPENAI_API_KEY=mesh "
        "GOOSE_MODEL=Qwen2.5-32B-Instruct-Q4_K_M goose session",
    }


def test_every_agent_is_described() -> None:
    told = snippets.snippets(HERE.url, HERE.model, HERE.context)
    assert [entry["name"] for entry in told] == [
        *("pi", "goose", "aider", "opencode", "claude", "continue", "zed", "open-webui", "llm"),
        *("curl", "openai"),
    ]
    for entry in told:
        assert list(entry) == ["name", "title", "command", "snippet", "note"]
        assert HERE.model in entry["command"] + entry["snippet"]
        assert "localhost:9337" in entry["command"] + entry["snippet"]
        assert entry["note"].endswith(".")


def test_a_key_is_named_and_never_shown() -> None:
    for entry in snippets.snippets(WITH_KEY.url, WITH_KEY.model, WITH_KEY.context, key_needed=True):
        assert "MESH_LLM_API_KEY" in entry["command"] + entry["snippet"]
        assert "set MESH_LLM_API_KEY to it" in entry["note"]
    goose = snippets.recipe("goose", WITH_KEY).command
    assert 'OPENAI_HOST=https://localhost:9000 OPENAI_API_KEY="$MESH_LLM_API_KEY" ' in goose


@pytest.mark.parametrize("name", snippets.NAMES)
def test_odd_names_survive_a_shell(name: str) -> None:
    recipe = snippets.recipe(name, ODD)
    assert "it's a $model" in " ".join(shlex.split(recipe.command)) + recipe.snippet


def test_the_program_for_openai_is_one() -> None:
    for endpoint in (HERE, WITH_KEY, ODD):
        compile(snippets.recipe("openai", endpoint).snippet, "snippet", "exec")


def test_an_answer_takes_half_of_the_context_at_most() -> None:
    assert [Endpoint(url="", model="", context=n).longest_answer for n in (1, 2048, 65536, 1 << 20)] == [
        *(1, 1024, 32768, 32768)
    ]


def test_small_contexts_get_the_advice_that_pi_needs_there() -> None:
    assert "compaction.reserveTokens" not in snippets.recipe("pi", HERE).note
    assert "with a context of 2048, set compaction.reserveTokens" in snippets.recipe("pi", WITH_KEY).note


# -- pi's file -------------------------------------------------------------------------------------

PI = {
    "baseUrl": "http://localhost:9337/v1",
    "api": "openai-completions",
    "apiKey": "MESH_LLM_API_KEY",
    "models": [
        {
            "id": "Qwen2.5-32B-Instruct-Q4_K_M",
            "name": "Qwen2.5-32B-Instruct-Q4_K_M (mesh)",
            "reasoning": False,
            "input": ["text"],
            "contextWindow": 65536,
            "maxTokens": 32768,
            "compat": {
                "supportsUsageInStreaming": True,
                "maxTokensField": "max_tokens",
                "supportsDeveloperRole": False,
            },
        }
    ],
}


def test_without_a_file_one_is_written_for_its_owner_alone(person: Path) -> None:
    written = agent.write_config("pi", HERE)
    path = person / ".pi" / "agent" / "models.json"
    assert written == agent.Written(file=path, changed=True, backup=None)
    assert json.loads(path.read_text()) == {"providers": {"mesh": PI}}
    assert path.read_text().endswith("}\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["models.json"]


def test_the_snippet_is_what_is_written(person: Path) -> None:
    agent.write_config("pi", HERE)
    assert (person / ".pi/agent/models.json").read_text() == snippets.recipe("pi", HERE).snippet + "\n"


@pytest.mark.parametrize("name", sorted(config_files.WRITTEN))
def test_twice_is_once(name: str) -> None:
    first = agent.write_config(name, HERE)
    content, entries = first.file.read_bytes(), sorted(first.file.parent.iterdir())
    assert agent.write_config(name, HERE) == agent.Written(file=first.file, changed=False)
    assert first.file.read_bytes() == content
    assert sorted(first.file.parent.iterdir()) == entries


def test_an_empty_file_is_kept_as_its_own_backup(person: Path) -> None:
    path = models_json(person, "")
    written = agent.write_config("pi", HERE)
    assert json.loads(path.read_text()) == {"providers": {"mesh": PI}}
    assert written.backup is not None
    assert written.backup.read_bytes() == b""


def test_other_providers_and_keys_stay_in_their_order(person: Path) -> None:
    text = '{\n    "z": 1,\n    "providers": {\n        "ollama": {"models": []}\n    },\n    "a": [2,3]\n}\n'
    path = models_json(person, text)
    path.chmod(0o640)
    written = agent.write_config("pi", HERE)
    after = path.read_text()
    assert after.startswith(text.partition("\n    },")[0])
    assert after.endswith('\n    },\n    "a": [2,3]\n}\n')
    assert json.loads(after)["providers"]["mesh"] == PI
    assert path.stat().st_mode & 0o777 == 0o640
    assert written.backup == path.with_name("models.json.bak")
    assert written.backup.read_text() == text
    assert written.backup.stat().st_mode & 0o777 == 0o640


def test_a_provider_made_by_hand_keeps_what_is_the_persons_own(person: Path) -> None:
    by_hand: dict[str, Any] = {
        "headers": {"x": "y"},
        "baseUrl": "http://localhost:1/v1",
        "api": "openai-completions",
        "apiKey": "!pass mesh",
        "models": [
            {"id": "other", "contextWindow": 1},
            {"id": HERE.model, "name": "Big one", "reasoning": True, "compat": {"supportsStore": False}},
        ],
    }
    path = models_json(person, json.dumps({"providers": {"mesh": by_hand}}, indent=2))
    agent.write_config("pi", HERE)
    mesh = json.loads(path.read_text())["providers"]["mesh"]
    assert list(mesh) == list(by_hand)
    assert mesh["headers"] == {"x": "y"}
    assert mesh["apiKey"] == "!pass mesh"
    assert mesh["baseUrl"] == "http://localhost:9337/v1"
    assert mesh["models"][0] == {"id": "other", "contextWindow": 1}
    assert mesh["models"][1] == {
        **PI["models"][0],  # type: ignore[dict-item]
        "name": "Big one",
        "reasoning": True,
        "compat": {"supportsStore": False, **PI["models"][0]["compat"]},  # type: ignore[index]
    }


def test_another_port_or_plan_changes_only_that(person: Path) -> None:
    agent.write_config("pi", HERE)
    path = person / ".pi/agent/models.json"
    before = path.read_text()
    agent.write_config("pi", Endpoint(url="http://localhost:1234", model=HERE.model, context=4096))
    assert path.read_text() == before.replace("9337", "1234").replace("65536", "4096").replace(
        "32768", "2048"
    )


def test_older_backups_are_kept(person: Path) -> None:
    path = models_json(person, "{}")
    for port in (1, 2, 3):
        agent.write_config("pi", Endpoint(url=f"http://localhost:{port}", model="m"))
    names = {entry.name: entry.read_text() for entry in path.parent.iterdir()}
    assert sorted(names) == ["models.json", "models.json.bak", "models.json.bak2", "models.json.bak3"]
    assert names["models.json.bak"] == "{}"
    assert ":2/v1" in names["models.json.bak3"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"a": 1', "it is not plain JSON (line 1: Expecting ',' delimiter)"),
        (b'{\n// mine\n"a": 1}', "it is not plain JSON (it has comments, which would be lost)"),
        (b"[]", "it is not a JSON object"),
        (b'{"providers": []}', "providers is not an object there"),
        (b'{"providers": {"mesh": {"models": {}}}}', "providers.mesh.models is not a list there"),
        (b'{"\xff": 1}', "it is not UTF-8"),
        (b" " * (5 << 20), "it is too large for a config file"),
    ],
)
def test_what_cannot_be_changed_safely_is_left_as_it_is(person: Path, content: bytes, said: str) -> None:
    path = models_json(person, "")
    path.write_bytes(content)
    with pytest.raises(AgentConfigRefused) as refused:
        agent.write_config("pi", HERE)
    assert refused.value.message == f"{path} was not changed: {said}"
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_in_its_place_is_refused(person: Path) -> None:
    path = person / ".pi/agent/models.json"
    path.mkdir(parents=True)
    with pytest.raises(AgentConfigRefused, match="is not a file"):
        agent.write_config("pi", HERE)


@pytest.mark.parametrize("relative", [True, False])
def test_a_link_stays_and_what_it_points_to_changes(person: Path, relative: bool) -> None:
    real = person / "dotfiles" / "models.json"
    real.parent.mkdir()
    real.write_text("{}")
    link = person / ".pi/agent/models.json"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../dotfiles/models.json" if relative else real)
    written = agent.write_config("pi", HERE)
    assert link.is_symlink()
    assert json.loads(real.read_text()) == {"providers": {"mesh": PI}}
    assert written.backup == link.with_name("models.json.bak")
    assert [entry.name for entry in real.parent.iterdir()] == ["models.json"]


def test_a_link_to_itself_is_refused(person: Path) -> None:
    link = person / ".pi/agent/models.json"
    link.parent.mkdir(parents=True)
    link.symlink_to(link)
    with pytest.raises((AgentConfigRefused, OSError)):
        agent.write_config("pi", HERE)


def test_a_link_to_nothing_gets_its_file(person: Path) -> None:
    link = person / ".pi/agent/models.json"
    link.parent.mkdir(parents=True)
    link.symlink_to(person / "elsewhere.json")
    assert agent.write_config("pi", HERE).backup is None
    assert json.loads((person / "elsewhere.json").read_text()) == {"providers": {"mesh": PI}}


@contextmanager
def unprivileged_home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Permissions mean nothing to root."""
    was, nobody = os.geteuid(), 65534
    with tempfile.TemporaryDirectory(prefix="mesh-", dir="/tmp") as folder:
        monkeypatch.setenv("HOME", folder)
        agent_folder = Path(folder, ".pi", "agent")
        agent_folder.mkdir(parents=True)
        (agent_folder / "models.json").write_text("{}")
        if was == 0:
            for path in (Path(folder), agent_folder.parent, agent_folder, agent_folder / "models.json"):
                os.chown(path, nobody, nobody)
            os.seteuid(nobody)
        try:
            yield agent_folder
        finally:
            agent_folder.chmod(0o700)
            os.seteuid(was)


def test_a_folder_that_may_not_be_written_to_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with unprivileged_home(monkeypatch) as folder:
        folder.chmod(0o500)
        with pytest.raises(MeshError) as refused:
            agent.write_config("pi", HERE)
        assert refused.value.message == f"cannot write {folder / 'models.json.bak'}: Permission denied"
        assert refused.value.hint == "mesh-llm agent pi shows what to paste"
        assert [entry.name for entry in folder.iterdir()] == ["models.json"]
        assert (folder / "models.json").read_text() == "{}"


def test_a_file_that_may_not_be_written_to_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with unprivileged_home(monkeypatch) as folder:
        (folder / "models.json").chmod(0o400)
        with pytest.raises(MeshError, match=r"^cannot write .*/models.json: Permission denied$"):
            agent.write_config("pi", HERE)
        assert (folder / "models.json").read_text() == "{}"
        assert [entry.name for entry in folder.iterdir()] == ["models.json"]


# -- the others' files -----------------------------------------------------------------------------


def test_opencode_gets_a_provider(person: Path) -> None:
    path = agent.write_config("opencode", WITH_KEY).file
    assert path == person / ".config/opencode/opencode.json"
    assert json.loads(path.read_text()) == {
        "$schema": "https://opencode.ai/config.json",
        "provider": {
            "mesh": {
                "npm": "@ai-sdk/openai-compatible",
                "name": "mesh-llm",
                "options": {"baseURL": "https://localhost:9000/v1", "apiKey": "{env:MESH_LLM_API_KEY}"},
                "models": {"m": {"name": "m (mesh)", "limit": {"context": 2048, "output": 1024}}},
            }
        },
    }


def test_opencodes_other_name_is_honoured_and_its_comments_are_safe(person: Path) -> None:
    path = person / ".config/opencode/opencode.jsonc"
    path.parent.mkdir(parents=True)
    path.write_text("{ // mine\n}")
    with pytest.raises(AgentConfigRefused, match="comments"):
        agent.write_config("opencode", HERE)
    path.write_text("{}")
    assert agent.write_config("opencode", HERE).file == path
    assert list(path.parent.glob("*.json")) == []


def test_goose_gets_a_file_of_its_own(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(person / "xdg"))
    path = agent.write_config("goose", HERE).file
    assert path == person / "xdg/goose/custom_providers/mesh.json"
    document = json.loads(path.read_text())
    assert document["base_url"] == "http://localhost:9337/v1/chat/completions"
    assert document["models"] == [{"name": HERE.model, "context_limit": 65536}]
    assert document["requires_auth"] is False


def test_aider_learns_the_models_limits(person: Path) -> None:
    path = person / ".aider.model.metadata.json"
    path.write_text('{"openai/other": {"max_tokens": 1}}\n')
    agent.write_config("aider", HERE)
    document = json.loads(path.read_text())
    assert document["openai/other"] == {"max_tokens": 1}
    assert document[f"openai/{HERE.model}"]["max_input_tokens"] == 65536


def test_continue_gets_a_file_of_its_own(person: Path) -> None:
    path = agent.write_config("continue", WITH_KEY).file
    assert path == person / ".continue/models/mesh.yaml"
    block = yaml.safe_load(path.read_text())
    assert (block["name"], block["version"], block["schema"]) == ("mesh", "1.0.0", "v1")
    (model,) = block["models"]
    assert (model["provider"], model["model"], model["apiBase"]) == (
        "openai",
        "m",
        "https://localhost:9000/v1",
    )
    assert model["apiKey"] == "${{ secrets.MESH_LLM_API_KEY }}"
    assert model["defaultCompletionOptions"] == {"contextLength": 2048, "maxTokens": 1024}
    assert yaml.safe_load(snippets.recipe("continue", WITH_KEY).snippet) == block


def test_a_file_in_yaml_by_hand_is_left_as_it_is(person: Path) -> None:
    path = person / ".continue/models/mesh.yaml"
    path.parent.mkdir(parents=True)
    path.write_text("name: mine\n")
    with pytest.raises(AgentConfigRefused, match="not plain JSON"):
        agent.write_config("continue", HERE)
    assert path.read_text() == "name: mine\n"


def test_llm_gets_one_more_model(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_USER_PATH", str(person / "llm"))
    path = person / "llm/extra-openai-models.yaml"
    path.parent.mkdir()
    path.write_text('[{"model_id": "mine", "model_name": "x"}]\n')
    assert agent.write_config("llm", HERE).file == path
    agent.write_config("llm", WITH_KEY)
    mine, first, second = yaml.safe_load(path.read_text())
    assert mine == {"model_id": "mine", "model_name": "x"}
    assert (first["model_id"], first["api_base"]) == (f"mesh/{HERE.model}", "http://localhost:9337/v1")
    assert (second["model_id"], second["api_key_name"]) == ("mesh/m", "mesh")
    path.write_text("{}")
    with pytest.raises(AgentConfigRefused, match="list"):
        agent.write_config("llm", HERE)


def test_zed_learns_of_a_provider(person: Path) -> None:
    path = person / ".config/zed/settings.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"theme": "One Dark", "language_models": {"ollama": {"api_url": "x"}}}')
    assert agent.write_config("zed", HERE).file == path
    settings = json.loads(path.read_text())
    assert settings["theme"] == "One Dark"
    assert settings["language_models"]["ollama"] == {"api_url": "x"}
    provider = settings["language_models"]["openai_compatible"]["mesh"]
    assert provider["api_url"] == "http://localhost:9337/v1"
    (model,) = provider["available_models"]
    assert (model["name"], model["max_tokens"], model["max_output_tokens"]) == (HERE.model, 65536, 32768)
    # What a person has changed there stays.
    model["capabilities"]["images"] = True
    path.write_text(json.dumps(settings))
    agent.write_config("zed", WITH_KEY)
    agent.write_config("zed", HERE)
    models = json.loads(path.read_text())["language_models"]["openai_compatible"]["mesh"]["available_models"]
    assert [(each["name"], each["capabilities"]["images"]) for each in models] == [
        (HERE.model, True),
        ("m", False),
    ]


@pytest.mark.parametrize("name", [name for name in snippets.NAMES if name not in ("curl", "openai")])
def test_a_small_context_is_warned_of(name: str) -> None:
    assert "wants" in snippets.recipe(name, WITH_KEY).note
    assert "2,048 tokens" in snippets.small_context(name, WITH_KEY)
    assert snippets.small_context(name, HERE) == snippets.small_context(name, ODD) == ""


@pytest.mark.parametrize("name", ["claude", "curl", "openai", "open-webui"])
def test_agents_without_a_place_of_our_own_are_refused(person: Path, name: str) -> None:
    with pytest.raises(AgentConfigRefused) as refused:
        agent.write_config(name, HERE)
    assert refused.value.hint == f"mesh-llm agent {name} shows what to type instead"
    assert list(person.iterdir()) == []


def test_pi_is_found_where_it_was_told_to_be(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PI_CODING_AGENT_DIR", "~/elsewhere")
    assert agent.write_config("pi", HERE).file == person / "elsewhere" / "models.json"
