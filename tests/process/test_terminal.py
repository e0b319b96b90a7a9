"""A node in a person's terminal: the live view, its keys, and the terminal as it was afterwards."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from tests.support import tiny_gguf
from tests.support.command import marked, mesh_llm
from tests.support.node import ENDLESS, SMALL, NodeProcess, send, status_of
from tests.support.screen import Screen, in_terminal
from tests.support.waiting import until

TITLE = "── desk host serving ─"


@pytest.fixture(scope="module")
def tiny(libraries: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_gguf.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "llama")


def node_in(home: Path, model: Path, *options: str, columns: int = 100, **env: str) -> Screen:
    where: tuple[str | Path, ...] = ("--home", home, "--model", model, "--port", "0", "--name", "desk")
    return in_terminal(*where, *SMALL, *options, columns=columns, env=env)


@pytest.fixture
def screen(home: Path, tiny: Path) -> Iterator[Screen]:
    with node_in(home, tiny) as screen:
        screen.until_seen(TITLE)
        yield screen


def restored(screen: Screen) -> None:
    """As it was before the program came, and nothing of the view is left in it."""
    assert screen.mode() == screen.mode_before
    assert screen.has_cursor
    assert "q quits" not in screen.text


def test_the_view_stands_below_the_lines_that_were_told(screen: Screen) -> None:
    screen.until_seen("Engine ready in ")
    lines = screen.lines
    title = next(index for index, line in enumerate(lines) if line.startswith(TITLE))
    above, view = lines[:title], lines[title:]
    assert [line.partition(" ")[0] for line in above if line[:1].isupper()][:2] == ["Model", "Invite"]
    url = re.search(r"^API ready at (http://localhost:[0-9]+)$", "\n".join(above), re.MULTILINE)
    assert url is not None
    assert "pi:    pi --provider mesh --model tiny" in above
    assert any(line.startswith(f"goose: GOOSE_PROVIDER=openai OPENAI_HOST={url[1]} ") for line in above)
    assert view[0].endswith(" q quits ──")
    assert f"api    {url[1]}" in view
    assert "plan   solo on desk" in view
    assert re.fullmatch(r"desk  host  serving  0-\d+ +\S.* GB  self  -", view[-1])
    assert "green" in screen.colours
    # Each line stands there once, however often the view was drawn.
    assert screen.everything.count("Invite token: ") == 1
    assert screen.everything.count(TITLE) == 1


def test_q_drains_and_quits(screen: Screen) -> None:
    screen.press(b"q")
    assert screen.wait() == 0
    restored(screen)
    assert screen.lines[-1] == "Stopping; Ctrl-C again does not wait for answers under way"
    # What was told stays to be read.
    assert "Invite token: " in screen.everything
    assert "API ready at " in screen.everything


def test_ctrl_c_is_as_before(screen: Screen) -> None:
    screen.press(b"\x03")
    assert screen.wait() == 130
    restored(screen)


def test_ctrl_c_after_q_does_not_wait(home: Path, smollm2: Path) -> None:
    with node_in(home, smollm2) as screen:
        screen.until_seen(TITLE)
        document = status_of(home)
        assert document is not None
        with closing(HTTPConnection(urlsplit(document["api"]["url"]).netloc, timeout=30)) as connection:
            send(connection, "/v1/completions", ENDLESS)
            with connection.getresponse() as answer:
                assert answer.readline()
                screen.press(b"q")
                screen.until_seen("Stopping; ")
                screen.until_seen("draining")
                assert answer.readline() is not None
                screen.press(b"\x03")
                assert screen.wait() == 130
        restored(screen)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_the_terminal_as_it_was(screen: Screen, number: signal.Signals) -> None:
    screen.signal(number)
    assert screen.wait() == 0
    restored(screen)


def test_quitting_the_hard_way_leaves_it_as_it_was(screen: Screen) -> None:
    screen.press(b"\x1c")
    assert screen.process.wait(30) == -signal.SIGQUIT
    until(lambda: not marked(screen.marker), within_s=30, what="its children have followed")
    screen.catch_up()
    restored(screen)


def test_a_node_that_cannot_start_says_so_on_a_clean_terminal(home: Path) -> None:
    with in_terminal("--home", home, "--model", "/there/is/no.gguf", "--port", "0") as screen:
        assert screen.wait() == 1
        restored(screen)
        assert screen.lines[0].startswith("Error: ")


def test_a_stopped_node_gives_the_terminal_back_and_takes_it_again(screen: Screen) -> None:
    process = psutil.Process(screen.pid)
    # As the leader of its session it has no shell above it, and Ctrl-Z does nothing then.
    screen.press(b"\x1a")
    screen.until_seen(TITLE)
    # What a shell does with a job: stop it, use the terminal, let it go on.
    screen.signal(signal.SIGSTOP)
    until(lambda: process.status() == psutil.STATUS_STOPPED, within_s=10, what="it is stopped")
    screen.set_mode(screen.mode_before)
    screen.signal(signal.SIGCONT)
    screen.until(lambda: screen.mode() != screen.mode_before, what="keys come one by one again")
    screen.press(b"q")
    assert screen.wait() == 0
    restored(screen)


def test_the_window_may_change_at_any_time(screen: Screen) -> None:
    # Keys that mean nothing here do nothing, and are not shown.
    screen.press(b"x\r\x1b[A ")
    for columns in (40, 72, 36, 100):
        screen.resize(columns, 30)
        rule = "─" * (columns - 33)
        screen.until_seen(f"── desk host serving {rule} q quits ──\n")
        assert sum(line.startswith("── ") for line in screen.lines) == 1
        assert sum(line.startswith("plan ") for line in screen.lines) == 1
    assert "API ready at " in screen.text
    assert "^[" not in screen.text
    screen.press(b"Q")
    assert screen.wait() == 0


def test_forty_columns_from_the_start(home: Path, tiny: Path) -> None:
    with node_in(home, tiny, columns=40) as screen:
        screen.until_seen("── desk host serving ─────── q quits ──")
        # Long lines that stay are wrapped by the terminal, not cut: they are to be copied.
        token = "".join(screen.everything.split("\n")).partition("Invite token: ")[2]
        assert re.match(r"mesh1-[A-Za-z0-9_-]{150,}", token)
        screen.press(b"q")
        assert screen.wait() == 0
        restored(screen)


def test_no_colour_where_none_is_wanted(home: Path, tiny: Path) -> None:
    with node_in(home, tiny, NO_COLOR="1") as screen:
        screen.until_seen(TITLE)
        assert screen.colours == set()
        assert re.search(rb"\x1b\[[0-9;]*m", screen.raw) is None
        screen.press(b"q")
        assert screen.wait() == 0


@pytest.mark.parametrize("how", ["--plain", "dumb", "json"])
def test_plain_lines_where_a_view_is_not_wanted_or_cannot_be(home: Path, tiny: Path, how: str) -> None:
    options = {"--plain": ["--plain"], "json": ["--log-format", "json"]}.get(how, [])
    with node_in(home, tiny, *options, TERM="dumb" if how == "dumb" else "xterm") as screen:
        screen.until_seen("API ready at ")
        # The mode is the person's, and so are the keys.
        assert screen.mode() == screen.mode_before
        screen.press(b"q")
        screen.press(b"\x03")
        assert screen.wait() == 130
        assert "──" not in screen.text
        if how != "json":
            assert b"\x1b[" not in screen.raw.replace(b"\x1b[?25h", b"")


def test_a_terminal_that_does_not_take_anything_does_not_stop_the_node(home: Path, tiny: Path) -> None:
    with node_in(home, tiny) as screen:
        screen.until_seen(TITLE)
        screen.freeze()
        # Each change of the window is a picture more that nobody takes: far more than a terminal holds.
        for columns in range(60, 160):
            screen.resize(columns, 30)
            document = status_of(home)
            assert document is not None
            assert document["node"]["state"] == "serving"
        screen.thaw()
        screen.resize(80, 30)
        screen.until(lambda: any(line.startswith(TITLE) for line in screen.lines), what="it is drawn again")
        screen.press(b"q")
        assert screen.wait() == 0
        assert screen.mode() == screen.mode_before
        assert screen.has_cursor


# -- from outside ----------------------------------------------------------------------------------


@pytest.fixture
def node(home: Path, tiny: Path) -> Iterator[NodeProcess]:
    with NodeProcess("--name", "desk", *SMALL, home=home, model=tiny) as node:
        yield node.until_ready()


def test_status_watch_shows_the_same_view(node: NodeProcess) -> None:
    with in_terminal("status", "--watch", "--home", node.home) as screen:
        screen.until_seen(TITLE)
        assert screen.lines[0].endswith(" q quits ──")
        assert f"api    {node.url.replace('127.0.0.1', 'localhost')}" in screen.lines
        screen.press(b"q")
        assert screen.wait() == 0
        assert screen.mode() == screen.mode_before
        assert screen.has_cursor
        # The last look stays, and the next line of the shell comes below it.
        assert screen.lines[0].startswith(TITLE)
    assert node.running


def test_status_watch_ends_with_ctrl_c_and_with_signals(node: NodeProcess) -> None:
    for keys, number, status in ((b"\x03", None, 130), (b"", signal.SIGTERM, 143), (b"", signal.SIGHUP, 129)):
        with in_terminal("status", "--watch", "--home", node.home) as screen:
            screen.until_seen(TITLE)
            if number is None:
                screen.press(keys)
            else:
                screen.signal(number)
            assert screen.wait() == status
            assert screen.mode() == screen.mode_before
            assert screen.has_cursor


def test_status_watch_ends_with_its_node(node: NodeProcess) -> None:
    with in_terminal("status", "--watch", "--layers", "--home", node.home) as screen:
        screen.until_seen("embedding")
        node.stop()
        assert screen.wait() == 1
        assert screen.lines[-2] == f"Error: no node is running on {node.home}"
        assert screen.mode() == screen.mode_before


def test_status_watch_in_a_dumb_terminal_prints_every_change(node: NodeProcess) -> None:
    with in_terminal("status", "--watch", "--home", node.home, env={"TERM": "dumb"}) as screen:
        screen.until_seen("layers")
        assert b"\x1b" not in screen.raw
        screen.press(b"\x03")
        assert screen.wait() == 130


def test_agent_asks_the_running_node(node: NodeProcess, tmp_path: Path) -> None:
    env = {"HOME": str(tmp_path)}
    url = node.url.replace("127.0.0.1", "localhost")
    shown = mesh_llm("agent", "pi", "--home", node.home, env=env)
    assert (shown.status, shown.stderr) == (0, "")
    assert shown.stdout.splitlines()[0] == "pi --provider mesh --model tiny"
    assert f'"baseUrl": "{url}/v1"' in shown.stdout
    assert '"contextWindow": 2048' in shown.stdout
    assert list(tmp_path.iterdir()) == []
    first = mesh_llm("agent", "pi", "--write", "--home", node.home, env=env)
    assert first.stdout.splitlines() == ["Wrote ~/.pi/agent/models.json", "", shown.stdout.splitlines()[0]]
    again = mesh_llm("agent", "pi", "--write", "--home", node.home, env=env)
    assert again.stdout.splitlines()[0] == "~/.pi/agent/models.json says so already: nothing changed"
