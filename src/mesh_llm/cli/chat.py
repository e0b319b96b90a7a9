"""`mesh-llm chat`: a conversation in the terminal, or one answer to what is piped in."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import ssl
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from mesh_llm.cli import config_file, secret
from mesh_llm.cli.control import call, running_home
from mesh_llm.cli.options import debug_option, home_option
from mesh_llm.cli.output import is_terminal, print_error
from mesh_llm.errors import MeshError, UsageError
from mesh_llm.home import Home
from mesh_llm.loopback import is_loopback
from mesh_llm.models import catalog
from mesh_llm.models.names import tagged
from mesh_llm.status_schema import Status, from_document

WORDS_S = 300.0
"""Without a word or a sign of life: a node sends comments while an answer waits for its turn."""
LOADING_S = 60
"""That a question waits for a model that is being loaded."""
_LINE_BYTES = 4 << 20
_HELP = """\
Ctrl-C ends an answer, and at the prompt the chat. A line that ends with \\ goes on in the next one;
\"\"\" begins and ends a text of several lines.
/clear  forget the conversation    /model NAME  ask another model    /bye  end the chat"""
_BLOCK = '"""'
_RESUMED = re.compile(r": mesh-llm resumed \d+, served by (.+?): (.+)")


@click.command()
@click.argument("text", nargs=-1)
@click.option("--model", metavar="NAME", help="ask this model (default: the mesh's default one)")
@click.option("--system", metavar="TEXT", help="instructions that come before the conversation")
@click.option("--api-key", metavar="KEY|@FILE", help="the node's key, if it has one (also MESH_LLM_API_KEY)")
@home_option
@debug_option
def chat(
    text: tuple[str, ...],
    model: str | None,
    system: str | None,
    api_key: str | None,
    home: Path | None,
    debug: bool,
) -> None:
    """Chat with the model of the running node; any node will do, a lite client, too.

    With TEXT, or with a text on standard input, it gives one answer and ends:
    `git diff | mesh-llm chat "Write a commit message for this"`.
    """
    converse(running_home(home), " ".join(text), model=model, system=system, api_key=api_key)


def converse(
    home: Home,
    question: str = "",
    *,
    model: str | None = None,
    system: str | None = None,
    api_key: str | None = None,
) -> None:
    """With the node on `home`."""
    piped = "" if is_terminal(sys.stdin) else _piped()
    status = from_document(Status, asyncio.run(call(home, "GET", "/api/status")))
    names = [each.name for each in status.models]
    conversation = Conversation(
        _api(home, status, api_key), model=served(model, names), system=system, tell=_remark
    )
    if question or not is_terminal(sys.stdin):
        asked = "\n\n".join(part for part in (question, piped) if part)
        if not asked.strip():
            raise UsageError("there is nothing to answer", hint="type a text behind mesh-llm chat")
        _answer(conversation, asked)
    else:
        _talk(conversation, names)


def _piped() -> str:
    return sys.stdin.read().strip("\n") if sys.stdin is not None else ""


def served(name: str | None, names: Sequence[str]) -> str | None:
    """Which of the served models is meant. A node with one model would take any name for it."""
    if name is None or name in names:
        return name
    entry = tagged(name, catalog.load())
    stem = entry.stem if entry is not None else Path(name).stem if name.endswith(".gguf") else name
    found = [each for each in names if catalog.key_of(stem) in catalog.key_of(each)]
    if len(found) == 1:
        return found[0]
    listed = f"served here: {', '.join(names)}; " if names else ""
    raise MeshError(f"{visible(name)} is not served here", hint=f"{listed}mesh-llm load NAME serves one more")


# -- the API ---------------------------------------------------------------------------------------


class ChatApi:
    """The API of the running node, as any client reaches it."""

    def __init__(self, url: str, key: str | None) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port
        self._context = _trusting(self._host) if parts.scheme == "https" else None
        self._headers = {"Content-Type": "application/json", "Prefer": f"wait={LOADING_S}"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    def events(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of one streamed answer. Whoever stops reading ends the answer."""
        connection = self._connection()
        with closing(connection):
            try:
                connection.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
                response = connection.getresponse()
                if response.status != 200:
                    raise _refusal(response.status, response.read(_LINE_BYTES))
                while line := response.readline(_LINE_BYTES):
                    if (event := _event(line)) is not None:
                        yield event
            except (http.client.HTTPException, OSError, ValueError) as error:
                raise MeshError(f"the answer was cut off: {error or type(error).__name__}") from None

    def _connection(self) -> http.client.HTTPConnection:
        if self._context is None:
            return http.client.HTTPConnection(self._host, self._port, timeout=WORDS_S)
        return http.client.HTTPSConnection(self._host, self._port, timeout=WORDS_S, context=self._context)


def _event(line: bytes) -> dict[str, Any] | None:
    """What a line of the stream says; of the gateway's comments only that another engine goes on."""
    if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
        event = json.loads(data)
        return event if isinstance(event, dict) else None
    if (found := _RESUMED.match(line.decode(errors="replace"))) is not None:
        return {"resumed": f"{found[2]}; {found[1]} goes on with the answer"}
    return None


def _trusting(host: str) -> ssl.SSLContext:
    """On loopback the node itself, asked through its private socket, has named the port."""
    context = ssl.create_default_context()
    if is_loopback(host):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _refusal(status: int, body: bytes) -> MeshError:
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the node answered with HTTP {status}"
    if status == 401:
        return MeshError("this node needs its API key", hint="set MESH_LLM_API_KEY, or give --api-key @FILE")
    if "exceed" in str(message) and "context" in str(message):
        return MeshError(visible(str(message)), hint="/clear begins a new conversation")
    return MeshError(visible(str(message)), hint="mesh-llm status shows what the node is doing")


def _api(home: Home, status: Status, key: str | None) -> ChatApi:
    if status.api.url is None:
        raise MeshError(f"the node on {home.path} has no API yet", hint="it is starting: try again")
    if key is None and status.api.key_needed:
        # The owner's own node: what starts it with a key lets its owner in as well.
        with suppress(UsageError):
            key = config_file.read(home.config_file).get("api-key")
    return ChatApi(status.api.url, secret.read("--api-key", key))


# -- the conversation ------------------------------------------------------------------------------


class Conversation:
    """What was said so far, and the next answer."""

    def __init__(
        self,
        api: ChatApi,
        *,
        model: str | None = None,
        system: str | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`tell`: of a node that was lost during an answer."""
        self._api = api
        self._tell = tell
        self.model = model
        self._system = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = []
        self.figures = ""
        """Of the last answer, for people."""

    def clear(self) -> None:
        self.messages = []

    def answer(self, text: str) -> Generator[tuple[str, bool], None, None]:
        """Pieces of the answer, each with whether it is only thought. What was said stays said."""
        self.messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"messages": [*self._system, *self.messages], "stream": True}
        if self.model:
            body["model"] = self.model
        said, self.figures = "", ""
        began = time.monotonic()
        try:
            for event in self._api.events(body):
                if (error := event.get("error")) is not None:
                    raise MeshError(f"the answer was cut off: {visible(str(_message(error)))}")
                if (news := event.get("resumed")) is not None:
                    self._tell(visible(str(news)))
                self.figures = _figures(event, time.monotonic() - began) or self.figures
                for piece, thought in _pieces(event):
                    said += "" if thought else piece
                    yield piece, thought
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said})
            else:
                # As if it had not been asked: two questions in a row confuse some models.
                self.messages.pop()


def _message(error: Any) -> Any:
    return error.get("message", error) if isinstance(error, dict) else error


def _pieces(event: dict[str, Any]) -> Iterator[tuple[str, bool]]:
    choices = event.get("choices")
    delta = choices[0].get("delta") if isinstance(choices, list) and choices else None
    if not isinstance(delta, dict):
        return
    for name, thought in (("reasoning_content", True), ("content", False)):
        if isinstance(piece := delta.get(name), str) and piece:
            yield piece, thought


def _figures(event: dict[str, Any], seconds: float) -> str:
    timings = event.get("timings")
    if not isinstance(timings, dict):
        return ""
    tokens, rate = timings.get("predicted_n"), timings.get("predicted_per_second")
    if not isinstance(tokens, int) or not isinstance(rate, int | float):
        return ""
    return f"{tokens} tokens in {seconds:.1f} s, {rate:.1f} tok/s"


def visible(text: str) -> str:
    """A model's words, without what would move the cursor or change the terminal."""
    return "".join(sign for sign in text if sign.isprintable() or sign in "\n\t")


# -- the terminal ----------------------------------------------------------------------------------


def _answer(conversation: Conversation, text: str) -> None:
    """One answer on standard output; its figures on standard error, where somebody looks on."""
    thinking, ends = False, True
    for piece, thought in conversation.answer(text):
        if thought and not is_terminal(sys.stdout):
            continue
        if thinking and not thought:
            click.echo("\n")
        thinking = thought
        shown = visible(piece)
        click.echo(_dim(shown) if thought else shown, nl=False)
        ends = shown.endswith("\n") if shown else ends
    if not ends:
        click.echo()
    if conversation.figures and is_terminal(sys.stdout) and is_terminal(sys.stderr):
        click.echo(_dim(conversation.figures), err=True)


def _remark(text: str) -> None:
    """In the middle of an answer, on a line of its own."""
    click.echo(f"\n{_dim(f'({text})')}" if is_terminal(sys.stdout) else f"({text})", err=True)


def _dim(text: str) -> str:
    return click.style(text, dim=True)


def _talk(conversation: Conversation, names: Sequence[str]) -> None:
    with suppress(ImportError):
        # Lines can be edited, and found again by the arrow keys.
        import readline  # noqa: F401
    click.echo(_dim("/help lists commands; Ctrl-C ends an answer, and then the chat"), err=True)
    while True:
        try:
            text = _typed()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if text.strip() in ("/bye", "/exit", "/quit"):
            return
        if text.startswith("/") and "\n" not in text:
            _obey(conversation, names, *text.split(maxsplit=1))
        elif text.strip():
            _answer_or_stop(conversation, text)


def _answer_or_stop(conversation: Conversation, text: str) -> None:
    try:
        _answer(conversation, text)
    except KeyboardInterrupt:
        click.echo(_dim(" (stopped)"))
    except MeshError as error:
        click.echo()
        print_error(error)


def _obey(conversation: Conversation, names: Sequence[str], word: str, rest: str = "") -> None:
    if word == "/clear":
        conversation.clear()
        said = "The conversation begins anew"
    elif word == "/model":
        try:
            conversation.model = served(rest.strip() or None, names)
            said = f"Asking {conversation.model or names[0]}"
        except MeshError as error:
            said = f"{error.message}; {error.hint}"
    else:
        said = _HELP
    click.echo(_dim(said), err=True)


def _typed() -> str:
    """One message: a line, lines that end with a backslash, or all between two lines of three quotes."""
    line = input("> ")
    if line.lstrip().startswith(_BLOCK):
        return _block(line.lstrip().removeprefix(_BLOCK))
    lines = [line]
    while lines[-1].endswith("\\"):
        lines[-1] = lines[-1][:-1]
        lines.append(input(". "))
    return "\n".join(lines)


def _block(first: str) -> str:
    lines = [first]
    while not lines[-1].rstrip().endswith(_BLOCK):
        lines.append(input(". "))
    lines[-1] = lines[-1].rstrip().removesuffix(_BLOCK)
    return "\n".join(lines).strip("\n")
