"""A node in a person's terminal: the live view, its keys, and the terminal as it was afterwards."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from aiohttp import web

from tests.support import tiny_gguf
from tests.support.command import MESH_LLM, marked, mesh_llm
from tests.support.node import ENDLESS, SMALL, NodeProcess, send, status_of, temporary_home
from tests.support.sampling import first, sampled
from tests.support.screen import Screen, in_terminal
from tests.support.waiting import until

TITLE = "── desk host serving ─"


@pytest.fixture(autouse=True, scope="module")
def hanging_up_counts() -> Iterator[None]:
    """Under nohup, which the tests may run under themselves, their programs would ignore it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


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
    assert screen.has_cursor()
    assert "q quits" not in screen.text


def test_the_view_stands_below_the_lines_that_were_told(screen: Screen) -> None:
    row = re.compile(r"desk  host  serving  0-\d+ +\S.* GB  self  - +-")
    lines = screen.until_lines(
        lambda lines: row.fullmatch(lines[-1]) and any(line.startswith("Engine ready in ") for line in lines),
        what="the whole view, below the word that the engine is ready",
    )
    title = next(index for index, line in enumerate(lines) if line.startswith(TITLE))
    above, view = lines[:title], lines[title:]
    assert [line.partition(" ")[0] for line in above if line[:1].isupper()][:2] == ["Model", "Invite"]
    url = re.search(r"^API ready at (http://localhost:[0-9]+)$", "\n".join(above), re.MULTILINE)
    assert url is not None
    # The window has wrapped it.
    assert "&&pi--providermesh--modeltiny" in "".join("".join(above).split())
    assert any(line.startswith(f"goose: GOOSE_PROVIDER=openai OPENAI_HOST={url[1]} ") for line in above)
    assert view[0].endswith(" q quits ──")
    assert f"api    {url[1]}" in view
    assert "plan   solo on desk" in view
    screen.until(lambda: "green" in screen.colours, what="colours")
    # Each line stands there once, however often the view was drawn.
    screen.until(
        lambda: [screen.everything.count(words) for words in ("Invite token: ", TITLE)] == [1, 1],
        what="each line stands there once",
    )


def test_q_drains_and_quits(screen: Screen) -> None:
    screen.press(b"q")
    assert screen.wait() == 0
    restored(screen)
    assert screen.lines[-2:] == [
        "Stopping after open answers; press Ctrl-C again to stop at once",
        "Stopped",
    ]
    # What was told stays to be read.
    assert "Invite token: " in screen.everything
    assert "API ready at " in screen.everything


def test_ctrl_c_is_as_before(screen: Screen) -> None:
    screen.press(b"\x03")
    assert screen.wait() == 130
    restored(screen)


@pytest.mark.full
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
                screen.until_seen("Stopping after ")
                screen.until_seen("draining")
                assert answer.readline() is not None
                screen.press(b"\x03")
                assert screen.wait() == 130
        restored(screen)


@pytest.mark.parametrize("number", sampled([signal.SIGTERM, signal.SIGHUP], signal.SIGTERM))
def test_a_signal_leaves_the_terminal_as_it_was(screen: Screen, number: signal.Signals) -> None:
    screen.signal(number)
    assert screen.wait() == 0
    restored(screen)


@pytest.mark.full
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


def test_a_stopped_node_gives_the_terminal_back_and_takes_it_again(home: Path, tiny: Path) -> None:
    """As a job of a real shell: Ctrl-Z, `fg`, and in the background no view at all."""
    if shutil.which("bash") is None:
        pytest.skip("bash is missing")
    with Screen(["bash", "--norc", "--noprofile", "-i"], env={"PS1": "% "}) as screen:
        screen.until_seen("%")
        where = ("--home", home, "--model", tiny, "--port", "0", "--name", "desk")
        screen.press(shlex.join(map(str, (*MESH_LLM, *where, *SMALL))).encode() + b"\r")
        screen.until_seen(TITLE)
        screen.press(b"\x1a")
        screen.until_seen("Stopped")
        # The view is gone, and what is typed is seen: the shell has its terminal.
        screen.until(lambda: "q quits" not in screen.text, what="the view is gone")
        assert screen.has_cursor()
        screen.press(b"echo mine\r")
        screen.until(lambda: "mine" in screen.lines, what="the shell answers")
        screen.press(b"bg\r")
        screen.until_seen("&")
        screen.press(b"q")
        screen.until(lambda: screen.lines[-1].endswith("% q"), what="the key is the shell's")
        assert (status_of(home) or {})["node"]["state"] == "serving"
        screen.press(b"\x7ffg\r")
        screen.until_seen(TITLE)
        assert not screen.has_cursor()
        screen.press(b"q")
        screen.until(lambda: screen.lines[-1:] == ["%"], what="it has ended, and the shell is back")
        screen.press(b"echo status $?\r")
        screen.until(lambda: "status 0" in screen.lines, what="it has ended well")
        assert screen.has_cursor()
        assert "q quits" not in screen.text
        screen.press(b"exit\r")
        assert screen.wait() == 0


def test_the_window_may_change_at_any_time(screen: Screen) -> None:
    # Keys that mean nothing here do nothing, and are not shown.
    screen.press(b"x\r\x1b[A ")
    for columns in (40, 72, 36, 100):
        screen.resize(columns, 30)
        rule = "─" * (columns - 33)
        title = f"── desk host serving {rule} q quits ──"
        screen.until_lines(
            lambda lines: (
                title in lines  # noqa: B023
                and sum(line.startswith("── ") for line in lines) == 1
                and sum(line.startswith("plan ") for line in lines) == 1
            ),
            what=f"the view, once, in {columns} columns",
        )
    assert "API ready at " in screen.text
    assert "^[" not in screen.text
    screen.press(b"Q")
    assert screen.wait() == 0


@pytest.mark.full
def test_forty_columns_from_the_start(home: Path, tiny: Path) -> None:
    with node_in(home, tiny, columns=40) as screen:
        screen.until_seen("── desk host serving ─────── q quits ──")
        # Long lines that stay are wrapped by the terminal, not cut: they are to be copied.
        token = "".join(screen.everything.split("\n")).partition("Invite token: ")[2]
        assert re.match(r"mesh1-[A-Za-z0-9_-]{150,}", token)
        screen.press(b"q")
        assert screen.wait() == 0
        restored(screen)


@pytest.mark.full
def test_no_colour_where_none_is_wanted(home: Path, tiny: Path) -> None:
    with node_in(home, tiny, NO_COLOR="1") as screen:
        screen.until_seen(TITLE)
        assert screen.colours == set()
        assert re.search(rb"\x1b\[[0-9;]*m", screen.raw) is None
        screen.press(b"q")
        assert screen.wait() == 0


@pytest.mark.parametrize("how", sampled(["--plain", "dumb", "json"], "--plain"))
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


@pytest.mark.full
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
        assert screen.has_cursor()


@pytest.mark.parametrize("closed", sampled(["<&-", ">&-", "<&- >&-"], "<&-"))
def test_a_node_needs_no_standard_streams(home: Path, closed: str) -> None:
    """As some supervisors start it; what cannot work is still said where it can be."""
    command = shlex.join([*MESH_LLM, "--home", str(home), "--port", "0", "--model", "/there/is/none.gguf"])
    ended = subprocess.run(
        ["sh", "-c", f"exec {command} {closed}"], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith("Error: there is no file /there/is/none.gguf\n")


HANG_UP = """
import asyncio, os, signal, sys
from mesh_llm.cli.output import Output
from mesh_llm.cli.serve import until_stopped

class Node:
    def __init__(self):
        self.told = asyncio.Event()
        self.patience_s = float(sys.argv[1])
    async def run(self):
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGHUP)
        try:
            async with asyncio.timeout(self.patience_s):
                await self.told.wait()
        except TimeoutError:
            print("goes on")
    def stop(self):
        self.told.set()
        print("stops")

async def main():
    return await until_stopped(Node(), Output(), None)

sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize(
    ("before", "what", "patience_s"), [("", "stops", 30.0), ("trap '' HUP; ", "goes on", 0.5)]
)
def test_a_terminal_that_is_closed_ends_its_node_but_not_one_under_nohup(
    before: str, what: str, patience_s: float
) -> None:
    command = shlex.join([sys.executable, "-c", HANG_UP, str(patience_s)])
    ended = subprocess.run(
        ["sh", "-c", f"{before}exec {command}"], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout == f"{what}\n"


STUMBLE = """
import asyncio, os, signal, sys
from mesh_llm.cli.output import Output
from mesh_llm.cli.serve import until_stopped

class Node:
    def __init__(self):
        self.told = asyncio.Event()
    async def run(self):
        await asyncio.sleep(0)
        if sys.argv[1]:
            os.kill(os.getpid(), getattr(signal, sys.argv[1]))
            await self.told.wait()
        raise RuntimeError("the way down is steep")
    def stop(self):
        self.told.set()

async def main():
    return await until_stopped(Node(), Output(), None)

sys.exit(asyncio.run(main()))
"""


@pytest.mark.parametrize(("asked", "status"), first(1, [("SIGINT", 130), ("SIGTERM", 1), ("", 1)]))
def test_ctrl_c_is_how_it_ended_whatever_went_wrong_on_the_way_down(asked: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", STUMBLE, asked], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == status, ended.stderr
    assert ("Stopped, but not cleanly: the way down is steep\n" in ended.stderr) is bool(asked)


BARS = """
import asyncio, sys
from mesh_llm.cli.live import Live
from mesh_llm.cli.terminal import Terminal
from mesh_llm.types import Progress

async def show(live):
    done = asyncio.Event()
    live.on_quit = done.set
    async def status():
        return None
    looking = asyncio.create_task(live.run(status))
    for step in range(1, 46):
        live.progress(Progress(what="Fetching", done=step * 10**7, total=10**9, unit="bytes"))
    live.progress(Progress(what="Loading", done=1, total=2))
    await done.wait()
    done.clear()
    live.progress(Progress(what="Loading", done=2, total=2))
    live.tell("Something came of it")
    live.progress(Progress(what="Next", done=0, total=0))
    await done.wait()
    looking.cancel()
    await asyncio.wait([looking])
    raise RuntimeError("it crashed")

with Terminal() as terminal:
    asyncio.run(show(Live(terminal)))
"""


def test_bars_live_in_the_view_and_a_crash_restores_the_terminal() -> None:
    with Screen([sys.executable, "-c", BARS], columns=60) as screen:
        bars = [
            "Fetching ━━━━━━━━━━━─────────────  45 %  450 MB of 1.0 GB",
            "Loading ━━━━━━━━━━━━────────────  50 %",
        ]
        screen.until_lines(lambda lines: lines[1:] == bars, what="both bars, and nothing else")
        screen.press(b"q")
        screen.until_lines(
            lambda lines: lines[:1] == ["Something came of it"] and lines[2:] == ["Next …"],
            what="the line that was told, and the next bar alone",
        )
        screen.press(b"q")
        assert screen.wait() == 1
        restored(screen)
        assert screen.lines[0] == "Something came of it"
        assert screen.lines[-1] == "RuntimeError: it crashed"


QUESTION = """
import asyncio
from mesh_llm.cli.live import Live
from mesh_llm.cli.terminal import Terminal

async def show(live):
    done = asyncio.Event()
    live.on_quit = done.set
    live.question = lambda status: "mini uses this node: q again stops it"
    async def status():
        return {}
    looking = asyncio.create_task(live.run(status))
    await done.wait()
    looking.cancel()
    await asyncio.wait([looking])

with Terminal() as terminal:
    asyncio.run(show(Live(terminal)))
"""


def test_q_asks_before_it_ends_a_node_that_others_use() -> None:
    with Screen([sys.executable, "-c", QUESTION], columns=60) as screen:
        screen.until_seen("q quits")
        screen.press(b"q")
        screen.until_seen("mini uses this node: q again stops it")
        screen.press(b"n")
        screen.until(lambda: "mini uses" not in screen.text, what="the question is gone")
        screen.press(b"q")
        screen.until_seen("mini uses this node: q again stops it")
        screen.press(b"q")
        assert screen.wait() == 0
        restored(screen)


# -- from outside ----------------------------------------------------------------------------------


@pytest.fixture
def node(home: Path, tiny: Path) -> Iterator[NodeProcess]:
    with NodeProcess("--name", "desk", *SMALL, home=home, model=tiny) as node:
        yield node.until_ready()


@pytest.mark.full
def test_status_watch_shows_the_same_view(node: NodeProcess) -> None:
    with in_terminal("status", "--watch", "--home", node.home) as screen:
        api = f"api    {node.url.replace('127.0.0.1', 'localhost')}"
        screen.until_lines(
            lambda lines: (
                lines and lines[0].startswith(TITLE) and lines[0].endswith(" q quits ──") and api in lines
            ),
            what="the title with the key that quits, and the address",
        )
        screen.press(b"q")
        assert screen.wait() == 0
        assert screen.mode() == screen.mode_before
        assert screen.has_cursor()
        # The last look stays, and the next line of the shell comes below it.
        assert screen.lines[0].startswith(TITLE)
    assert node.running


def test_status_watch_shows_what_happens(node: NodeProcess, home: Path) -> None:
    """With a node's feed, of which the first frame and what follows are written here."""
    document = node.status()
    with telling_node(document) as (other, say), in_terminal("status", "--watch", "--home", other) as screen:
        event = re.compile(r"[0-9]{2}:[0-9]{2}:[0-9]{2}  Elected as host")
        screen.until_lines(lambda lines: lines and event.fullmatch(lines[-1]), what="the first event")
        say("progress", {"what": "Fetching", "done": 1, "total": 4, "unit": ""})
        screen.until_seen("Fetching ━━━━━━──────────────────  25 %")
        say("event", {"t": 0.0, "kind": "x", "text": "mini joined"})
        screen.until_lines(
            lambda lines: (
                lines
                and lines[-1].endswith("  mini joined")
                and not any(line.startswith("Fetching") for line in lines)
            ),
            what="the event is shown, and what led to it no longer",
        )
        screen.press(b"q")
        assert screen.wait() == 0


@contextmanager
def telling_node(status: dict[str, Any]) -> Iterator[tuple[Path, Callable[[str, Any], None]]]:
    """A control socket with a status and a feed of events, and a way to add to them."""
    loop = asyncio.new_event_loop()
    queue: asyncio.Queue[bytes] = asyncio.Queue()

    def say(kind: str, document: Any) -> None:
        frame = f"event: {kind}\ndata: {json.dumps(document)}\n\n".encode()
        loop.call_soon_threadsafe(queue.put_nowait, frame)

    async def get_status(request: web.Request) -> web.Response:
        return web.json_response(status)

    async def get_events(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while frame := await queue.get():
            await response.write(frame)
        return response

    async def start(path: Path) -> web.AppRunner:
        app = web.Application()
        app.router.add_get("/api/status", get_status)
        app.router.add_get("/api/events", get_events)
        runner = web.AppRunner(app, shutdown_timeout=5)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        return runner

    with temporary_home() as home:
        (home / "run").mkdir()
        thread = threading.Thread(target=loop.run_forever, name="telling node")
        thread.start()
        runner = asyncio.run_coroutine_threadsafe(start(home / "run" / "control.sock"), loop).result(10)
        first = [{"t": 0.0, "kind": "elected", "text": "Elected as host"}]
        say("snapshot", {"status": status, "history": {}, "events": first, "progress": []})
        try:
            yield home, say
        finally:
            loop.call_soon_threadsafe(queue.put_nowait, b"")
            asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


@pytest.mark.full
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
            assert screen.has_cursor()


@pytest.mark.full
def test_status_watch_ends_with_its_node(node: NodeProcess) -> None:
    with in_terminal("status", "--watch", "--layers", "--home", node.home) as screen:
        screen.until_seen("embedding")
        node.stop()
        assert screen.wait() == 1
        assert screen.lines[-2] == f"Error: no node is running on {node.home}"
        assert screen.mode() == screen.mode_before


@pytest.mark.full
def test_status_watch_in_a_dumb_terminal_prints_every_change(node: NodeProcess) -> None:
    with in_terminal("status", "--watch", "--home", node.home, env={"TERM": "dumb"}) as screen:
        screen.until_seen("layers")
        assert b"\x1b" not in screen.raw
        screen.press(b"\x03")
        assert screen.wait() == 130


@pytest.mark.full
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
    assert again.stdout.splitlines()[0] == "~/.pi/agent/models.json is up to date already; nothing changed"


TWO_AT_ONCE = """
from mesh_llm.cli.output import Output
from mesh_llm.types import Progress

with Output() as output:
    for step in range(1, 5):
        output.progress(Progress(what="Downloading", done=step * 10**7, total=10**8, unit="bytes"))
        output.progress(Progress(what="Building", done=step, total=10, unit="files"))
    input()
    output.progress(Progress(what="Building", done=10, total=10, unit="files"))
    input()
"""


def test_bars_of_what_goes_on_at_the_same_time() -> None:
    with Screen([sys.executable, "-c", TWO_AT_ONCE], columns=80) as screen:
        screen.until_lines(
            lambda lines: re.fullmatch(
                r"Downloading \S+ 40/100 MB .*\nBuilding +\S+ 4/10 .*", "\n".join(lines)
            ),
            what="a bar for each",
        )
        screen.press(b"\n")
        screen.until_lines(
            lambda lines: "40/100 MB" in lines[-1] and not any("Building" in line for line in lines),
            what="the one that goes on",
        )
        screen.press(b"\n")
        assert screen.wait() == 0
