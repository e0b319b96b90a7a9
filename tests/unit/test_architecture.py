"""The rules of the code base that a machine can keep: who imports whom, who spawns, who prints."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "mesh_llm"

BASE = {"types", "errors", "defaults", "frozen", "mesh_settings", "loopback", "sanitise", "third_party"}
BASE |= {"web_files"}
TASKS = {"tasks", "same_user", "file_stamp"}
PURE = {"membership", "planning", "agents"}
MIDDLE = {"gateway", "console", "engine", "transport", "models", "download", "peer_fetch", "relay", "pairing"}
NODE = {"local", "peers", "worker", "host", "report"}
PERSON = {"config", "home"}
MAY_IMPORT: dict[str, set[str]] = {
    "__init__": set(),
    "__main__": {"cli"},
    **dict.fromkeys(BASE, BASE),
    **dict.fromkeys(PERSON, BASE | PERSON),
    **dict.fromkeys(PURE, BASE),
    **dict.fromkeys(TASKS, BASE),
    "status_schema": BASE | {"membership"},
    **dict.fromkeys(MIDDLE, BASE | PURE | TASKS | {"home"}),
    "console": BASE | PURE | PERSON | TASKS,
    "bundle": BASE | {"engine"},
    "download": BASE | TASKS | {"home", "models"},
    "peer_fetch": BASE | TASKS | {"home", "models"},
    "relay": BASE | TASKS | {"transport"},
    "pairing": BASE | TASKS | {"transport"},
    "local": BASE | PURE | MIDDLE | TASKS | PERSON,
    "peers": BASE | PURE | MIDDLE | TASKS | {"home", "status_schema"},
    "worker": BASE | PURE | MIDDLE | TASKS,
    "host": BASE | PURE | MIDDLE | TASKS | PERSON | {"local", "peers"},
    "report": BASE | PURE | MIDDLE | TASKS | PERSON | {"local", "peers", "host", "worker", "status_schema"},
    "node": BASE | PURE | MIDDLE | NODE | PERSON | TASKS | {"status_schema"},
    "doctor": BASE | MIDDLE | PERSON,
    "cli": BASE
    | PURE
    | MIDDLE
    | NODE
    | PERSON
    | TASKS
    | {"node", "lab", "bench", "results", "status_schema", "doctor", "bundle"},
    "results": BASE,
    "lab": BASE | PURE | MIDDLE | NODE | PERSON | TASKS | {"node", "cli", "results"},
    "bench": BASE
    | PURE
    | MIDDLE
    | NODE
    | PERSON
    | TASKS
    | {"node", "cli", "lab", "results", "status_schema"},
}
IMPURE = {"asyncio", "socket", "time", "subprocess", "os", "random"}
SPAWNS_OR_SIGNALS = {
    *("subprocess", "multiprocessing", "pty"),
    *("asyncio.create_subprocess_exec", "asyncio.create_subprocess_shell"),
    *(
        "os.kill",
        "os.killpg",
        "os.fork",
        "os.forkpty",
        "os.posix_spawn",
        "os.posix_spawnp",
        "os.system",
        "os.popen",
    ),
    *("signal.pthread_kill", "signal.raise_signal"),
}
SPAWNER = "engine/process.py"
CHILDREN = {
    *(
        f"engine/children/{name}.py"
        for name in (
            "cuda_driver",
            "describe",
            "external",
            "gguf",
            "measure",
            "page",
            "serve",
            "vocabulary",
            "worker",
        )
    ),
    "engine/sources.py",
    "lab/delay.py",
    "lab/member.py",
    "lab/quic.py",
}
METHODS_LIMIT = 25


def names_used(tree: ast.Module) -> Iterator[str]:
    """Every import and every `module.attribute`, as dotted names."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import; write mesh_llm. in full"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield f"{node.func.id}()"


def methods(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Of each class."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            functions = [
                each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
            yield node.name, len(functions)


def imports(name: str, source: str, modules: Set[str]) -> set[str]:
    """Modules of ours that a module names, for type checkers alone or within a function, too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    # A package stands for its own names only where no module of it is meant.
    below = {name.rpartition(".")[0] for name in found & modules}
    return (found & modules) - below - {name}


def circle(graph: Mapping[str, Set[str]]) -> list[str]:
    """Modules that lead back to the first of them; empty where there are none."""
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        done.add(name)
        return next((found for other in sorted(graph[name]) if (found := walk(other, [*path, name]))), [])

    return next((found for name in sorted(graph) if (found := walk(name, []))), [])


def offences(path: str, source: str) -> list[str]:
    """What the file `path` (below mesh_llm/) does that is another's to do."""
    part = path.split("/")[0].removesuffix(".py")
    names = set(names_used(ast.parse(source)))
    roots = {name.split(".")[0] for name in names}
    ours = {name.split(".")[1] for name in names if name.startswith("mesh_llm.")} - {"__version__"}
    if part not in MAY_IMPORT:
        return [f"{part} has no place among the layers"]
    found = [f"imports {other}" for other in ours - MAY_IMPORT[part] - {part}]
    if part in PURE | BASE:
        found += [f"is pure and uses {name}" for name in roots & IMPURE]
    if path != SPAWNER:
        found += [f"uses {name}, as only {SPAWNER} may" for name in (names | roots) & SPAWNS_OR_SIGNALS]
    if part != "cli" and path not in CHILDREN:
        found += [f"prints ({name}), as only cli/ may" for name in names & {"print()", "sys.stdout"}]
    found += [
        f"{name} has {count} methods: find the missing noun"
        for name, count in methods(ast.parse(source))
        if count > METHODS_LIMIT
    ]
    if Path(path).name == "utils.py":
        found.append("is called utils: find the missing noun")
    return sorted(found)


def test_every_file_keeps_to_its_layer() -> None:
    sources = {file.relative_to(SOURCE).as_posix(): file.read_text("utf-8") for file in SOURCE.rglob("*.py")}
    assert sources
    assert {path: wrong for path, text in sources.items() if (wrong := offences(path, text))} == {}


def test_no_module_imports_itself_through_others() -> None:
    sources = {
        ".".join(("mesh_llm", *file.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__"): (
            file.read_text("utf-8")
        )
        for file in SOURCE.rglob("*.py")
    }
    assert circle({name: imports(name, text, sources.keys()) for name, text in sources.items()}) == []


def test_no_two_classes_have_one_name() -> None:
    names: dict[str, list[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names.setdefault(node.name, []).append(file.name)
    assert {name: files for name, files in names.items() if len(files) > 1} == {}


def test_a_circle_is_found() -> None:
    sources = {
        "mesh_llm.a": "from mesh_llm.b import x",
        "mesh_llm.b": "def f():\n    from mesh_llm.c import x",
        "mesh_llm.c": "if TYPE_CHECKING:\n    from mesh_llm import b",
    }
    graph = {name: imports(name, text, sources.keys()) for name, text in sources.items()}
    assert circle(graph) == ["mesh_llm.b", "mesh_llm.c", "mesh_llm.b"]


@pytest.mark.parametrize(
    ("path", "source", "offence"),
    [
        ("engine/build.py", "from mesh_llm.models.facts import model_facts", "imports models"),
        ("engine/build.py", "from mesh_llm import node", "imports node"),
        ("gateway/proxy.py", "import mesh_llm.config", "imports config"),
        ("node.py", "def f():\n    from mesh_llm.lab import delay", "imports lab"),
        ("types.py", "import mesh_llm.planning.fit", "imports planning"),
        ("log.py", "", "log has no place among the layers"),
        ("planning/fit.py", "import os.path", "is pure and uses os"),
        ("membership/view.py", "from time import monotonic", "is pure and uses time"),
        ("cli/serve.py", "import subprocess", "uses subprocess, as only engine/process.py may"),
        ("home.py", "import os\nos.kill(1, 9)", "uses os.kill, as only engine/process.py may"),
        ("home.py", "from os import killpg", "uses os.killpg, as only engine/process.py may"),
        ("node.py", "print('ready')", "prints (print()), as only cli/ may"),
        ("engine/build.py", "import sys\nsys.stdout.write('')", "prints (sys.stdout), as only cli/ may"),
        (
            "lab/delay.py",
            "class Line:\n" + "    def f(self): ...\n" * 26,
            "Line has 26 methods: find the missing noun",
        ),
        ("cli/utils.py", "", "is called utils: find the missing noun"),
    ],
)
def test_an_offence_is_found(path: str, source: str, offence: str) -> None:
    assert offences(path, source) == [offence]


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("engine/process.py", "import os, subprocess\nos.killpg(1, 9)"),
        ("engine/children/serve.py", "print('{}')"),
        ("cli/main.py", "from mesh_llm import __version__, lab, node\nprint(__version__)"),
        ("console/routes.py", "from mesh_llm.home import Home"),
        ("lab/faults.py", "from mesh_llm.cli.main import main"),
    ],
)
def test_what_is_allowed_is_no_offence(path: str, source: str) -> None:
    assert offences(path, source) == []
