"""Options from a file in the home: which of several sources counts, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh_llm.cli import config_file
from mesh_llm.cli.main import Verbs, command_group
from mesh_llm.cli.options import node_config, node_parameters
from mesh_llm.errors import UsageError

ALL = """
model = "~/models/x.gguf"
port = 9400
max-memory = "8GB"
no-relay = true
hosting = "never"
engine-set = ["n_batch=64", "n_ubatch=32"]
console = 3132
name = "attic"
threads = 3
"""


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("JOIN", "API_KEY", "BIND_IP", "NO_RELAY", "HOME"):
        monkeypatch.delenv(f"MESH_LLM_{name}", raising=False)


def write(home: Path, text: str, mode: int = 0o600) -> Path:
    file = home / "config.toml"
    file.write_text(text)
    file.chmod(mode)
    return file


def options(home: Path, *arguments: str) -> dict[str, Any]:
    """As `mesh-llm` would run with them."""
    group = command_group()
    assert isinstance(group, Verbs)
    with group.make_context("mesh-llm", ["--home", str(home), *arguments]) as ctx:
        return dict(ctx.params)


def refused(home: Path, text: str, mode: int = 0o600) -> tuple[str, str | None]:
    file = write(home, text, mode)
    with pytest.raises(UsageError) as caught:
        config_file.read(file)
    assert caught.value.exit_code == 2
    return caught.value.message.replace(str(home), "HOME"), caught.value.hint


def test_any_option_can_stand_in_it(tmp_path: Path) -> None:
    write(tmp_path, ALL)

    config = node_config(options(tmp_path))

    assert config.model == str(Path("~/models/x.gguf").expanduser())
    assert (config.port, config.max_memory_bytes, config.no_relay) == (9400, 8_000_000_000, True)
    assert (config.hosting, config.console, config.name) == ("never", 3132, "attic")
    assert config.settings == {"n_batch": 64, "n_ubatch": 32}


def test_every_option_of_a_node_has_a_type_for_it(tmp_path: Path) -> None:
    for key, option in node_parameters().items():
        if key == "home":
            continue
        expected = config_file._expected(option)
        samples: dict[str, Any] = {"true or false": True, "a whole number": 3}
        value = samples.get(
            expected.text, ["a=1"] if option.multiple else getattr(option.type, "choices", ["x"])[0]
        )
        assert expected.holds(value), key


def test_a_flag_comes_first_then_the_environment_then_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, 'bind-ip = "10.0.0.1"\napi-key = "of the file"\nport = 9400\n')

    assert node_config(options(tmp_path)).bind_ip == "10.0.0.1"
    assert node_config(options(tmp_path)).api_key == "of the file"
    monkeypatch.setenv("MESH_LLM_BIND_IP", "10.0.0.2")
    monkeypatch.setenv("MESH_LLM_API_KEY", "of the environment")
    assert node_config(options(tmp_path)).bind_ip == "10.0.0.2"
    monkeypatch.setenv("MESH_LLM_API_KEY", "of the environment")
    assert node_config(options(tmp_path)).api_key == "of the environment"
    assert node_config(options(tmp_path, "--bind-ip", "10.0.0.3", "--port=0")).bind_ip == "10.0.0.3"
    assert node_config(options(tmp_path, "--bind-ip", "10.0.0.3", "--port=0")).port == 0


def test_the_environment_can_turn_off_what_the_file_turns_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "no-relay = true")
    monkeypatch.setenv("MESH_LLM_NO_RELAY", "0")

    assert node_config(options(tmp_path)).no_relay is False


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("no-relay = true", ["--relay", "http://relay.example:3340"]),
        ('layers = "a=0-3"', ["--tensor-split", "1,1"]),
        ("no-draft = true", ["--draft-max", "4"]),
        ('model = "smollm2"\nthreads = 2\nname = "x"', ["--client"]),
    ],
)
def test_a_flag_replaces_what_excludes_it(tmp_path: Path, text: str, arguments: list[str]) -> None:
    write(tmp_path, text)

    node_config(options(tmp_path, *arguments))


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("\nbind-prot = 1", "line 2: there is no option bind-prot", "did you mean bind-port?"),
        ("bind_port = 1", "line 1: there is no option bind_port", "did you mean bind-port?"),
        ("zzz = 1", "line 1: there is no option zzz", "mesh-llm --help lists the options"),
        ("[node]\nport = 1", "line 1: there is no option node", "did you mean model?"),
        ('port = "9337"', 'line 1: port must be a whole number, not "9337"', None),
        ("port = true", "line 1: port must be a whole number, not true", None),
        ("split = 1", "line 1: split must be true or false, not 1", None),
        ("model = 7", 'line 1: model must be a text or a list of texts, like ["x", "y"], not 7', None),
        ('hosting = "maybe"', 'line 1: hosting must be one of auto, prefer, never, not "maybe"', None),
        (
            "engine-set = 1",
            'line 1: engine-set must be a text or a list of texts, like ["x", "y"], not 1',
            None,
        ),
        (
            "model.x = 1",
            'line 1: model must be a text or a list of texts, like ["x", "y"], not a table',
            None,
        ),
        ('home = "/x"', "line 1: home cannot be set in a file that lies in it", "--home, or MESH_LLM_HOME"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, message: str, hint: str | None) -> None:
    assert refused(tmp_path, text) == (f"HOME/config.toml {message}", hint)


def test_what_is_not_toml(tmp_path: Path) -> None:
    message, hint = refused(tmp_path, "port = 1\nport 2")

    assert message.startswith("HOME/config.toml is not TOML: ")
    assert "line 2" in message
    assert hint == 'a line is like port = 9400, or name = "attic"'


@pytest.mark.parametrize("key", ["api-key", "join"])
def test_a_secret_that_others_can_read_is_refused(tmp_path: Path, key: str) -> None:
    message, hint = refused(tmp_path, f'{key} = "s3cret"', mode=0o644)

    assert message == f"HOME/config.toml holds {key}, and other users of this machine can read it"
    assert hint == f"chmod 600 {tmp_path}/config.toml"


def test_others_may_read_where_a_secret_lies(tmp_path: Path) -> None:
    file = write(tmp_path, 'api-key = "@/etc/key"\nport = 1', mode=0o644)

    assert config_file.read(file) == {"api-key": "@/etc/key", "port": 1}


def test_help_and_other_verbs_do_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "nonsense")
    monkeypatch.setenv("MESH_LLM_HOME", str(tmp_path))

    for arguments in (["stop"], ["status"]):
        with command_group().make_context("mesh-llm", arguments):
            pass
    with pytest.raises(UsageError):
        command_group().make_context("mesh-llm", [])


def test_the_example_in_the_documents(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text("utf-8")

    found = config_file.read(write(tmp_path, page.split("```toml\n")[1].split("```")[0]))

    assert (found["port"], found["no-relay"]) == (9400, True)
