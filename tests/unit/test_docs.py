"""The design pages keep their length, name only files that exist, and link to pages that exist."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest

from bench import summary
from mesh_llm.cli.groups import ImportedVerbs
from mesh_llm.cli.main import command_group
from mesh_llm.models import catalog
from mesh_llm.results import plots
from tools import error_messages

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "mesh_llm"
DESIGN = ROOT / "DESIGN.md"
PAGES = [DESIGN, *sorted((ROOT / "docs" / "design").glob("*.md"))]
README = ROOT / "README.md"
LINKING_PAGES = [*PAGES, README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w-]+(/[\w-]+)*/?(\.(py|toml|cpp|h|md|txt|js))?")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def is_path(text: str) -> bool:
    """Whether words in backticks name a file, a folder or a test module of ours."""
    return bool(PATH.fullmatch(text)) and ("/" in text or "." in text or text.startswith("test_"))


ENGINES_OWN = ("common/", "ggml/", "tools/server/")
"""Folders of the engine's sources, which are not here."""


def exists(path: str) -> bool:
    if path.startswith("test_"):
        return any((ROOT / "tests").rglob(f"{path.removesuffix('.py')}.py"))
    if path.startswith(ENGINES_OWN):
        return True
    if path.endswith((".cpp", ".h")) and "/" not in path:
        return any((ROOT / "native").rglob(path))
    return any((base / path).exists() for base in (ROOT, PACKAGE, ROOT / "native"))


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_design_can_be_read_in_a_quarter_of_an_hour() -> None:
    assert len(DESIGN.read_text("utf-8").split()) <= 3500


def test_the_glossary_is_short_and_has_one_meaning_for_each_word() -> None:
    glossary = DESIGN.read_text("utf-8").split("## 3. Glossary")[1].split("\n## ")[0]
    words = re.findall(r"^\| ([^|]+) \|", glossary, re.MULTILINE)[2:]
    assert 20 <= len(words) <= 40
    assert len(set(words)) == len(words)


def test_every_package_is_on_the_map() -> None:
    packages = {init.parent.relative_to(PACKAGE).as_posix() for init in PACKAGE.glob("*/__init__.py")}
    named = set(re.findall(r"^\| `([\w/]+)` \|", DESIGN.read_text("utf-8"), re.MULTILINE))
    assert named >= packages


@pytest.mark.parametrize("init", sorted(PACKAGE.glob("*/**/__init__.py")), ids=name)
def test_every_package_lists_its_modules(init: Path) -> None:
    docstring = ast.get_docstring(ast.parse(init.read_text("utf-8"))) or ""
    listed = set(re.findall(r"^ *(\w+)  +\S", docstring, re.MULTILINE))
    assert {file.stem for file in init.parent.glob("*.py")} - {"__init__"} - listed == set()


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page: Path) -> None:
    text = FENCE.sub("", page.read_text("utf-8"))
    assert [path for path in CODE.findall(text) if is_path(path) and not exists(path)] == []


def test_models_with_wide_heads_are_named() -> None:
    """Those of the catalog whose answers may continue with another word."""
    section = (ROOT / "docs/design/resume-and-numerics.md").read_text("utf-8").partition("### Wide heads")[2]
    named = {word for row in re.findall(r"^\| `.*", section, re.MULTILINE) for word in CODE.findall(row)}
    writing = [entry for entry in catalog.load().entries if "embedding" not in entry.good_for]
    wide = [entry for entry in writing if head_size(dict(entry.shape)) > 128]
    assert {entry.architecture for entry in wide} == named
    narrow = [entry.name for entry in writing if entry.architecture in named and entry not in wide]
    assert narrow == ["Gemma-3-27B"]


def head_size(shape: dict[str, Any]) -> int:
    size: int = shape.get("attention.key_length") or (
        shape["embedding_length"] // shape["attention.head_count"]
    )
    return size


def test_what_each_role_cannot_do_is_tested() -> None:
    table = DESIGN.read_text("utf-8").split("| role | can | cannot | shown by |")[1].split("\n\n")[0]
    rows = table.strip().splitlines()[1:]
    assert [row for row in rows if not CODE.search(row.split("|")[4])] == []


@pytest.mark.parametrize("page", LINKING_PAGES, ids=name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in LINK.findall(page.read_text("utf-8")):
        target, _, anchor = link.partition("#")
        if "://" in target:
            continue
        file = (page.parent / target).resolve() if target else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize(
    ("text", "checked"),
    [
        ("planning/fit.py", True),
        ("protocol.h", True),
        ("tests/hostile", True),
        ("test_clients", True),
        ("/v1/messages", False),
        ("~/.models", False),
        ("logs/access.log", False),
        ("--no-fetch", False),
        ("lease", False),
    ],
)
def test_what_counts_as_a_path(text: str, checked: bool) -> None:
    assert is_path(text) is checked


@pytest.mark.parametrize("path", ["planning/fit.py", "protocol.h", "test_clients"])
def test_a_file_that_exists_is_found(path: str) -> None:
    assert exists(path)


@pytest.mark.parametrize("path", ["planning/nothing.py", "nothing.h", "test_nothing_at_all"])
def test_a_missing_file_is_noticed(path: str) -> None:
    assert not exists(path)


COMMAND = re.compile(r"(?:^(?:[A-Z_]+=\S+ +)*|`)mesh-llm ([^`\n]*)", re.MULTILINE)
READ_PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def unknown_words(words: list[str]) -> list[str]:
    """Of a command line: options that its command does not have."""
    command: click.Command = command_group()
    context = click.Context(command)
    options: set[str] = {"--help"}
    unknown = []
    for word in words:
        options |= {each for part in command.params for each in (*part.opts, *part.secondary_opts)}
        found = command.get_command(context, word) if isinstance(command, click.Group) else None
        if found is None and isinstance(command, ImportedVerbs) and command.default is not None:
            command = command.get_command(context, command.default) or command
            options |= {each for part in command.params for each in part.opts}
        if found is not None:
            command = found
        elif word.startswith("--") and len(word) > 2 and word.partition("=")[0] not in options:
            unknown.append(word)
        elif word in ("|", "&&", ";", "#"):
            break
    return unknown


@pytest.mark.parametrize("page", READ_PAGES, ids=name)
def test_commands_have_the_options_that_the_pages_show(page: Path) -> None:
    text = page.read_text("utf-8").replace("\\\n", " ")
    lines = [match[1] for match in COMMAND.finditer(text)]
    assert {line: unknown for line in lines if (unknown := unknown_words(line.split()))} == {}


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("--model smollm2 --splt", ["--splt"]),
        ("invite --role owner --fro=7", ["--fro=7"]),
        ("service install --model M --name N", []),
        ("serve --port 0 | grep --no-such", []),
    ],
)
def test_an_option_that_is_not_there_is_noticed(line: str, unknown: list[str]) -> None:
    assert unknown_words(line.split()) == unknown


SHOWN = re.compile(r"(?:^|[|;&]) *(?:[A-Z_]+=\S+ +)*(?:\S*/)?mesh-llm((?: [^\s|;&#]+)*)", re.MULTILINE)
"""In a block: a command as far as the next program, a comment, or the wide gap before a remark."""


def shown(page: Path) -> list[str]:
    """Commands of all blocks, whatever they are marked as."""
    return [
        line.strip()
        for block in FENCE.findall(re.sub(r"\\\n *", "", page.read_text("utf-8")))
        for line in SHOWN.findall(block)
    ]


def refusal(line: str) -> str:
    """What the command line says of it before anything runs; nothing where it is taken."""
    try:
        command_group().main(shlex.split(line), prog_name="mesh-llm", standalone_mode=False)
    except click.ClickException as error:
        return error.format_message()
    return ""


@pytest.fixture
def only_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESH_LLM_HOME", str(tmp_path))
    monkeypatch.setattr(click.Command, "invoke", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    for file in ("A", "B"):  # that a page speaks of
        (tmp_path / file).touch()


@pytest.mark.usefixtures("only_parsed")
@pytest.mark.parametrize("page", [*PAGES, *READ_PAGES], ids=name)
def test_commands_in_blocks_are_taken(page: Path) -> None:
    assert {line: why for line in shown(page) if (why := refusal(line))} == {}


@pytest.mark.usefixtures("only_parsed")
@pytest.mark.parametrize(
    "line",
    ["--model", "statsu", "status --layer 3", "invite rewoke ID", "bench compare A B C", "demo --nodes many"],
)
def test_a_command_that_is_not_taken_is_noticed(line: str) -> None:
    assert refusal(line)


def test_commands_are_found_wherever_they_stand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "mesh-llm is fine\n```text\nA=1 mesh-llm one --x 2   a remark\n"
        "git diff | .venv/bin/mesh-llm two 'a b' | cat\n"
        "mesh-llm three \\\n  --y # why\nmesh-llm\nsaid by mesh-llm here\n```\n`mesh-llm four`\n"
    )
    assert shown(page) == ["one --x 2", "two 'a b'", "three --y", ""]


@pytest.mark.parametrize("page", summary.PAGES, ids=name)
def test_measured_tables_are_what_the_results_say(page: Path) -> None:
    assert summary.page(page) == page.read_text("utf-8"), "python -m bench.summary"


def test_all_that_was_measured_is_shown_once() -> None:
    shown = [found[2] for page in summary.PAGES for found in summary.PART.finditer(page.read_text("utf-8"))]
    assert sorted(shown) == sorted(summary.PARTS)


def test_measured_pictures_show_what_the_results_say() -> None:
    for path, plot in summary.pictures().items():
        assert plots.digest(plot) in path.read_text("utf-8"), "python -m bench.summary"


def test_every_error_message_is_on_its_page() -> None:
    page = error_messages.PAGE.read_text("utf-8")
    assert error_messages.page(page, PACKAGE) == page, "python tools/error_messages.py"
