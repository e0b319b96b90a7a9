"""`mesh-llm download` against a hub that has everything, and goes wrong in every way."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.command import MESH_LLM, Ended, Running, mesh_llm, start
from tests.support.hub import Hub, Stored
from tests.support.waiting import until

REPO = "maker/Model-3B-GGUF"
FILE = "model-3b-q4_k_m.gguf"
NAME = f"hf:{REPO}:{FILE}"
TOKEN = "hf_never_to_be_seen"
AS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or sys.platform != "linux",
    reason="a small disk can be mounted by root on Linux only",
)


def some_bytes(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


@dataclass(kw_only=True)
class Person:
    """Somebody with a models folder, a home and a hub."""

    hub: Hub
    folder: Path

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def env(self) -> dict[str, str]:
        return {
            **self.hub.env,
            "HF_HOME": str(self.folder / "hf"),
            "MESH_LLM_MODELS": str(self.models),
            "MESH_LLM_HOME": str(self.folder / "home"),
        }

    def downloads(self, *arguments: str, within_s: float = 60.0, **env: str) -> Ended:
        ended = mesh_llm("download", *arguments, env={**self.env, **env}, within_s=within_s)
        assert "Traceback" not in ended.stderr
        assert TOKEN not in ended.stdout + ended.stderr
        assert "secret-signature" not in ended.stdout + ended.stderr
        return ended

    def catalog(self, text: str) -> None:
        (self.folder / "home").mkdir(exist_ok=True)
        (self.folder / "home" / "catalog.toml").write_text(text)

    def left(self) -> list[str]:
        """What lies in the models folder, parts included."""
        return sorted(path.name for path in self.models.iterdir()) if self.models.exists() else []

    @property
    def part(self) -> Path | None:
        return next(self.models.glob(f".incoming-fetch-*/{FILE}.part"), None)

    def part_bytes(self) -> int:
        part = self.part
        return part.stat().st_size if part is not None else 0


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as hub:
        yield hub


@pytest.fixture
def person(hub: Hub, tmp_path: Path) -> Person:
    return Person(hub=hub, folder=tmp_path)


@pytest.fixture
def stored(hub: Hub) -> Stored:
    return hub.put(REPO, FILE, some_bytes(3_000_000))


def assert_is_here(person: Person, data: bytes, file: str = FILE) -> None:
    path = person.models / file
    assert path.read_bytes() == data
    assert path.stat().st_mode & 0o777 == 0o644 & ~_umask()
    digest = hashlib.sha256(data).hexdigest()
    assert path.with_name(f"{file}.sha256").read_text() == f"{digest}  {file}\n"


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


# -- what is fetched --------------------------------------------------------------------------------


def test_a_file_comes_by_way_of_the_hubs_storage(person: Person, stored: Stored) -> None:
    ended = person.downloads(NAME)

    assert ended.status == 0
    assert ended.stdout == f"{person.models / FILE}\n"
    assert f"Downloading {FILE} 100 % of 3 MB" in ended.stderr
    assert_is_here(person, stored.data)
    assert person.left() == [FILE, f"{FILE}.sha256"]
    [fetched] = person.hub.got("storage")
    assert fetched.headers["Range"] == "bytes=0-2999999"
    # Nothing but what it takes: no telemetry, no registries.
    assert [each.path for each in person.hub.got("hub")] == [f"/api/models/{REPO}/revision/main"]


def test_a_hub_that_sends_the_bytes_itself(person: Person, stored: Stored) -> None:
    person.hub.redirects = False
    person.hub.token = TOKEN

    ended = person.downloads(NAME, HF_TOKEN=TOKEN)

    assert ended.status == 0
    assert_is_here(person, stored.data)
    assert person.hub.got("storage") == []


def test_the_token_is_for_the_hub_alone(person: Person, stored: Stored) -> None:
    person.hub.token = TOKEN

    ended = person.downloads(NAME, "--debug", HF_TOKEN=TOKEN)

    assert ended.status == 0
    assert all(seen.headers["Authorization"] == f"Bearer {TOKEN}" for seen in person.hub.got("hub"))
    assert [seen.headers.get("Authorization") for seen in person.hub.got("storage")] == [None]


def test_what_is_here_is_not_fetched_again(person: Person, stored: Stored) -> None:
    person.downloads(NAME)
    person.hub.seen.clear()

    ended = person.downloads(NAME, "--json")

    assert ended.status == 0
    assert json.loads(ended.stdout) == {
        "name": FILE.removesuffix(".gguf"),
        "path": str(person.models / FILE),
        "files": [str(person.models / FILE)],
        "size_bytes": 3_000_000,
    }
    assert person.hub.got("storage") == []


def test_a_model_of_several_files(person: Person) -> None:
    shards = {f"big/m-Q8_0-{n:05}-of-00006.gguf": some_bytes(400_000 + n, n) for n in range(1, 7)}
    for name, data in shards.items():
        person.hub.put(REPO, name, data)
    person.hub.put(REPO, "m-Q4_K_M.gguf", b"another one")
    person.hub.faults.pause_s = 0.02

    ended = person.downloads(f"hf:{REPO}:q8_0")

    assert ended.status == 0
    assert ended.stdout == f"{person.models / 'm-Q8_0-00001-of-00006.gguf'}\n"
    for name, data in shards.items():
        assert_is_here(person, data, Path(name).name)
    assert 2 <= person.hub.most_at_once <= 4
    assert len(person.left()) == 12


PAIR = """
[target]
repo = "maker/Model-3B-GGUF"
files = ["model-3b-q4_k_m.gguf"]
size_bytes = 3000000
draft = "small"

[small]
repo = "maker/small"
files = ["small.gguf"]
"""


def test_a_model_and_its_draft(person: Person, stored: Stored) -> None:
    small = person.hub.put("maker/small", "small.gguf", some_bytes(100_000, 2))
    person.catalog(PAIR)

    ended = person.downloads("target", "--draft", "--json")

    assert ended.status == 0
    document = json.loads(ended.stdout)
    assert document["path"] == str(person.models / FILE)
    assert document["draft"]["path"] == str(person.models / "small.gguf")
    assert_is_here(person, stored.data)
    assert_is_here(person, small.data, "small.gguf")

    ended = person.downloads("small", "--draft")
    assert (ended.status, ended.stderr.splitlines()[0]) == (1, "Error: the catalog names no draft for small")


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("", "m-Q4_K_M.gguf"),
        (":Q8_0", "m-Q8_0.gguf"),
        (":q6_k", "m-Q6_K.gguf"),
        (":m-Q8_0.gguf", "m-Q8_0.gguf"),
    ],
)
def test_a_quantisation_of_a_repository(person: Person, given: str, file: str) -> None:
    for kind in ("Q6_K", "Q4_K_M", "Q8_0"):
        person.hub.put(REPO, f"m-{kind}.gguf", kind.encode())
    person.hub.put(REPO, "mmproj-m-Q8_0.gguf", b"a projector")
    person.hub.put(REPO, "README.md", b"text")

    ended = person.downloads(f"hf:{REPO}{given}")

    assert (ended.status, ended.stdout) == (0, f"{person.models / file}\n")
    assert (person.models / file).read_bytes() == file[2:-5].encode()


@pytest.mark.parametrize(
    ("files", "given", "words"),
    [
        (
            ("m-Q6_K.gguf", "m-Q8_0.gguf"),
            ":Q4_K_M",
            f"Error: {REPO} has no Q4_K_M\nHint: it has Q6_K, Q8_0\n",
        ),
        (("a-Q8_0.gguf", "b-Q8_0.gguf"), ":Q8_0", "Hint: name one: a-Q8_0.gguf, b-Q8_0.gguf\n"),
        (("model.safetensors",), "", f"Error: {REPO} has no GGUF file\n"),
    ],
)
def test_a_name_that_does_not_mean_one_model(
    person: Person, files: tuple[str, ...], given: str, words: str
) -> None:
    for file in files:
        person.hub.put(REPO, file, b"bytes")

    ended = person.downloads(f"hf:{REPO}{given}")

    assert ended.status == 1
    assert words in ended.stderr


def test_a_plain_url(person: Person) -> None:
    data = some_bytes(500_000)
    person.hub.plain["my model.gguf"] = Stored.of(data)

    ended = person.downloads(f"{person.hub.storage_url}/plain/my%20model.gguf?key=secret-signature")

    assert ended.status == 0
    assert_is_here(person, data, "my model.gguf")


def test_a_link_from_the_hubs_pages_is_checked_like_its_name(person: Person, stored: Stored) -> None:
    stored.sent = stored.data[:-1] + b"?"

    ended = person.downloads(f"{person.hub.url}/{REPO}/resolve/main/{FILE}?download=true")

    assert ended.status == 1
    assert f"Error: {FILE} arrived damaged and was thrown away" in ended.stderr


def test_a_server_that_does_not_say_how_long_it_is(person: Person) -> None:
    data = some_bytes(500_000)
    person.hub.plain[FILE] = Stored.of(data)
    person.hub.faults.chunked = person.hub.faults.ignore_ranges = True

    ended = person.downloads(f"{person.hub.storage_url}/plain/{FILE}")

    assert ended.status == 0
    assert_is_here(person, data)


def test_check_compares_every_byte(person: Person, stored: Stored) -> None:
    person.downloads(NAME)
    digest = hashlib.sha256(stored.data).hexdigest()
    path = person.models / FILE

    ended = person.downloads(NAME, "--check")
    assert (ended.status, ended.stdout) == (0, f"{path} is intact (sha256 {digest})\n")

    with path.open("r+b") as file:
        file.seek(1_234_567)
        file.write(b"X")
    ended = person.downloads(NAME, "--check")
    assert ended.status == 1
    assert f"Error: {path} is damaged: its sha256 is " in ended.stderr


# -- cut off, and taken up again --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_an_interrupted_download_goes_on(
    person: Person, stored: Stored, number: signal.Signals, status: int
) -> None:
    person.hub.faults.stalls = [2_000_000]
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        running.signal(number)
        ended = running.wait(within_s=10)
    assert ended.status == status
    assert "Traceback" not in ended.stderr
    had = person.part_bytes()
    person.hub.seen.clear()

    ended = person.downloads(NAME)

    assert ended.status == 0
    [fetched] = person.hub.got("storage")
    assert fetched.start == had >= 1 << 20
    assert_is_here(person, stored.data)
    assert person.left() == [FILE, f"{FILE}.sha256"]


def test_a_connection_that_is_cut_goes_on_where_it_was(person: Person, stored: Stored) -> None:
    person.hub.faults.cuts = [1_000_000, 500_000, 0]

    ended = person.downloads(NAME)

    assert ended.status == 0
    assert_is_here(person, stored.data)
    assert [seen.start for seen in person.hub.got("storage")] == [0, 1_000_000, 1_500_000, 1_500_000]


def test_one_that_is_always_cut_ends(person: Person, stored: Stored) -> None:
    person.hub.faults.cuts = [10_000] * 100

    ended = person.downloads(NAME)

    assert ended.status == 1
    host = person.hub.storage_url.removeprefix("http://")
    assert ended.stderr.splitlines()[-2:] == [
        f"Error: {FILE} could not be downloaded: the connection to {host} broke off, "
        "and 5 more tries changed nothing",
        "Hint: what has arrived is kept: run it again later, and it goes on from there",
    ]
    assert person.part_bytes() == 60_000


def test_a_server_that_knows_no_ranges(person: Person, stored: Stored) -> None:
    person.hub.faults.ignore_ranges = True
    person.hub.faults.cuts = [1_000_000]

    ended = person.downloads(NAME)

    assert ended.status == 0
    assert_is_here(person, stored.data)


def test_a_file_that_changed_meanwhile_begins_anew(person: Person, stored: Stored) -> None:
    person.hub.faults.stalls = [2_000_000]
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        running.signal(signal.SIGINT)
        running.wait(within_s=10)
    changed = person.hub.put(REPO, FILE, some_bytes(3_000_000, 2))
    person.hub.seen.clear()

    ended = person.downloads(NAME)

    assert ended.status == 0
    assert [seen.start for seen in person.hub.got("storage")] == [0]
    assert_is_here(person, changed.data)


def test_a_plain_file_that_changed_meanwhile_begins_anew(person: Person) -> None:
    person.hub.plain[FILE] = Stored.of(some_bytes(3_000_000))
    person.hub.faults.stalls = [2_000_000]
    url = f"{person.hub.storage_url}/plain/{FILE}"
    with start("download", url, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        running.signal(signal.SIGINT)
        running.wait(within_s=10)
    changed = person.hub.plain[FILE] = Stored.of(some_bytes(3_000_000, 2))

    assert person.downloads(url).status == 0
    assert_is_here(person, changed.data)


def test_a_plain_file_that_nothing_tells_apart_is_not_taken_up(person: Person) -> None:
    data = some_bytes(3_000_000)
    person.hub.plain[FILE] = Stored.of(data)
    person.hub.faults.no_marks = True
    person.hub.faults.stalls = [2_000_000]
    url = f"{person.hub.storage_url}/plain/{FILE}"
    with start("download", url, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        running.signal(signal.SIGINT)
        running.wait(within_s=10)
    person.hub.seen.clear()

    assert person.downloads(url).status == 0
    assert all(seen.start == 0 for seen in person.hub.got("storage"))
    assert_is_here(person, data)


def test_two_at_once_fetch_it_once(person: Person, stored: Stored) -> None:
    person.hub.faults.holds = [2_000_000]
    with start("download", NAME, env=person.env) as first:
        first.until(lambda: person.part_bytes() > 0, what="a part has come")
        with start("download", NAME, env=person.env) as second:
            second.until_said("is being downloaded by another process of this machine: waiting for it")
            person.hub.release()
            ended = second.wait(within_s=60)
        assert first.wait(within_s=60).status == 0

    assert (ended.status, ended.stdout) == (0, f"{person.models / FILE}\n")
    assert len(person.hub.got("storage")) == 1
    assert_is_here(person, stored.data)


# -- what goes wrong --------------------------------------------------------------------------------


def test_wrong_bytes_are_thrown_away(person: Person, stored: Stored) -> None:
    stored.sent = some_bytes(3_000_000, 3)

    ended = person.downloads(NAME)

    assert ended.status == 1
    found, should = hashlib.sha256(stored.sent).hexdigest(), hashlib.sha256(stored.data).hexdigest()
    assert (
        f"Error: {FILE} arrived damaged and was thrown away: its sha256 is {found[:12]}…, "
        f"it should be {should[:12]}…\n"
    ) in ended.stderr
    assert person.part is None
    assert not (person.models / FILE).exists()

    stored.sent = None
    assert person.downloads(NAME).status == 0
    assert_is_here(person, stored.data)


def test_a_catalog_that_means_other_bytes(person: Person, stored: Stored) -> None:
    digest = hashlib.sha256(b"what was meant").hexdigest()
    person.catalog(
        PAIR.replace("size_bytes = 3000000", f'sha256 = ["{digest}"]').replace('draft = "small"', "")
    )

    ended = person.downloads("target")

    assert ended.status == 1
    assert f"Error: {FILE} is not the file that the catalog means: " in ended.stderr
    assert person.hub.got("storage") == []


@pytest.mark.parametrize("said", [2_999_999, 3_000_001])
def test_a_wrong_size(person: Person, stored: Stored, said: int) -> None:
    stored.said_size = said

    ended = person.downloads(NAME)

    assert ended.status == 1
    host = person.hub.storage_url.removeprefix("http://")
    assert (
        f"Error: {FILE} cannot be downloaded: {host} has 3000000 bytes of it; there should be {said}\n"
    ) in ended.stderr


def test_another_file_of_that_name_stays(person: Person, stored: Stored) -> None:
    person.models.mkdir()
    (person.models / FILE).write_bytes(b"mine")

    ended = person.downloads(NAME)

    assert ended.status == 1
    assert (
        f"Error: {person.models / FILE} is there already, and is another file than {NAME}\n" in ended.stderr
    )
    assert (person.models / FILE).read_bytes() == b"mine"


@pytest.mark.parametrize("gated", [True, False])
def test_a_model_that_is_not_for_everybody(person: Person, stored: Stored, gated: bool) -> None:
    person.hub.token = "hf_somebody_elses"
    person.hub.gated = gated
    page = f"{person.hub.url}/{REPO}"
    host = person.hub.url.removeprefix("http://")

    ended = person.downloads(NAME)
    what = "is given to those who accept its licence" if gated else "is private, gated, or does not exist"
    assert ended.status == 1
    assert ended.stderr.splitlines() == [
        f"Error: {REPO} on {host} {what} (401)",
        f"Hint: accept the licence at {page}, and set HF_TOKEN to a token of that account",
    ]

    ended = person.downloads(NAME, HF_TOKEN=TOKEN)
    assert ended.status == 1
    assert ended.stderr.splitlines() == [
        f"Error: {host} does not give {REPO} to the account of this HF_TOKEN (403)",
        f"Hint: accept its licence at {page} with that account, or set another HF_TOKEN",
    ]


def test_what_is_not_there(person: Person, stored: Stored) -> None:
    host = person.hub.url.removeprefix("http://")
    person.catalog(PAIR.replace('["small.gguf"]', '["gone.gguf"]'))
    person.hub.repos["maker/small"] = {}

    ended = person.downloads("hf:maker/nothing")
    assert (ended.status, ended.stderr.splitlines()[0]) == (1, f"Error: there is no maker/nothing on {host}")

    ended = person.downloads("small")
    assert (ended.status, ended.stderr.splitlines()[0]) == (
        1,
        f"Error: maker/small on {host} has no file gone.gguf",
    )

    url = f"{person.hub.storage_url}/plain/gone.gguf"
    ended = person.downloads(url)
    assert (ended.status, ended.stderr.splitlines()[0]) == (1, f"Error: there is no gone.gguf at {url} (404)")


def test_a_busy_hub_gets_the_time_that_it_asks_for(person: Person, stored: Stored) -> None:
    person.hub.faults.hub = [(429, {"Retry-After": "1"}), (503, {})]
    person.hub.faults.storage = [(429, {"Retry-After": "0"}), (502, {})]
    person.catalog(PAIR)
    started = time.monotonic()

    ended = person.downloads("target")

    assert ended.status == 0
    assert time.monotonic() - started >= 1.0
    assert_is_here(person, stored.data)
    assert len(person.hub.got("hub", method="HEAD")) == 5


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        (
            [(429, {"Retry-After": "3600"})],
            "has had too many requests (429) and asks for 3600 s of patience\n",
        ),
        ([(503, {})] * 50, "is in trouble (503), and 5 more tries changed nothing\n"),
        ([(418, {})], "answers 418 to the question about maker/Model-3B-GGUF\n"),
    ],
)
def test_a_hub_that_will_not(
    person: Person, stored: Stored, answers: list[tuple[int, dict[str, str]]], words: str
) -> None:
    person.hub.faults.hub = answers
    person.catalog(PAIR)

    ended = person.downloads("target", within_s=30)

    assert ended.status == 1
    assert words in ended.stderr
    assert person.left() in ([], [path.name for path in person.models.glob(".incoming-fetch-*")])


def test_an_address_of_the_storage_that_has_aged(person: Person, stored: Stored) -> None:
    person.hub.faults.cuts = [1_500_000]
    person.hub.faults.storage = []
    with start("download", NAME, env={**person.env, "MESH_LLM_DOWNLOAD_PAUSE_S": "0.5"}) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        person.hub.faults.storage = [(403, {})]
        ended = running.wait(within_s=30)

    assert ended.status == 0
    assert [seen.start for seen in person.hub.got("storage")] == [0, 1_500_000, 1_500_000]
    assert_is_here(person, stored.data)


def test_a_server_that_falls_silent(person: Person, stored: Stored) -> None:
    person.hub.faults.stalls = [1_000_000] + [0] * 50
    started = time.monotonic()

    ended = person.downloads(NAME, HF_HUB_DOWNLOAD_TIMEOUT="1")

    assert ended.status == 1
    host = person.hub.storage_url.removeprefix("http://")
    assert f"Error: {FILE} could not be downloaded: {host} sent nothing for 1 s, " in ended.stderr
    assert time.monotonic() - started < 40
    assert person.part_bytes() == 1_000_000


def test_a_hub_that_does_not_answer(person: Person, stored: Stored) -> None:
    person.hub.faults.hub_stalls = True
    person.catalog(PAIR)
    host = person.hub.url.removeprefix("http://")

    ended = person.downloads("target", HF_HUB_ETAG_TIMEOUT="1", within_s=20)

    assert ended.status == 1
    assert f"Error: {FILE} cannot be downloaded: {host} does not answer\n" in ended.stderr


def test_ctrl_c_does_not_wait_for_a_hub_that_does_not_answer(person: Person, stored: Stored) -> None:
    person.hub.faults.hub_stalls = True
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.hub.seen, what="the hub is asked")
        running.signal(signal.SIGINT)
        ended = running.wait(within_s=5)

    assert ended.status == 130
    assert "Traceback" not in ended.stderr


def test_a_slow_server_is_waited_for(person: Person) -> None:
    stored = person.hub.put(REPO, FILE, some_bytes(30_000))
    person.hub.faults.chunk_bytes = 3_000
    person.hub.faults.pause_s = 0.3

    ended = person.downloads(NAME, HF_HUB_DOWNLOAD_TIMEOUT="2")

    assert ended.status == 0
    assert_is_here(person, stored.data)


def test_nobody_there(person: Person, stored: Stored) -> None:
    with Hub() as gone:
        url = gone.url
    host = url.removeprefix("http://")
    started = time.monotonic()

    for name in ("smollm2-360m", NAME, f"{url}/plain/model.gguf"):
        ended = person.downloads(name, HF_ENDPOINT=url)
        assert ended.status == 1
        assert f"{host} refuses the connection\n" in ended.stderr
        assert len(ended.stderr.splitlines()) == 2
    assert time.monotonic() - started < 30


def test_no_network(person: Person) -> None:
    """Names are not resolved: what a machine without a network says, and no packet leaves this one."""
    packages = person.folder / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(
        "import socket\n"
        "def nobody(*arguments, **options):\n"
        "    raise socket.gaierror(socket.EAI_AGAIN, 'Temporary failure in name resolution')\n"
        "socket.getaddrinfo = nobody\n"
    )
    env = {"HF_ENDPOINT": "https://hub.invalid", "PYTHONPATH": str(packages)}

    for name in (NAME, "https://files.invalid/model.gguf"):
        ended = person.downloads(name, within_s=20, **env)
        assert ended.status == 1
        assert re.search(
            r"(hub|files)\.invalid cannot be found: there is no network, or no such host\n", ended.stderr
        )


def test_offline_mode_is_respected(person: Person, stored: Stored) -> None:
    host = person.hub.url.removeprefix("http://")

    ended = person.downloads(NAME, HF_HUB_OFFLINE="1")

    assert ended.status == 1
    assert ended.stderr.splitlines() == [
        f"Error: {REPO} is not downloaded: HF_HUB_OFFLINE is set, which keeps this machine away from {host}",
        "Hint: unset HF_HUB_OFFLINE, or name a model that is here (mesh-llm models)",
    ]
    assert person.hub.seen == []


# -- disks ------------------------------------------------------------------------------------------


def on_a_small_disk(person: Person, megabytes: int, *arguments: str, prepare: str = ":") -> Ended:
    person.models.mkdir(exist_ok=True)
    script = (
        f'mount -t tmpfs -o "size=$1m" none "$2" || exit 77; folder=$2; shift 2; {prepare}; '
        '"$@"; status=$?; find "$folder" -type f -printf "left %f %s\\n"; exit $status'
    )
    shell = ("unshare", "--mount", "sh", "-c", script, "sh", str(megabytes), person.models)
    with Running([*shell, *MESH_LLM, *arguments], env=person.env) as running:
        ended = running.wait(within_s=60)
    if ended.status == 77:
        pytest.skip("no disk can be mounted here")
    return ended


@AS_ROOT
def test_too_little_room_is_said_before_a_byte_comes(person: Person) -> None:
    for number in (1, 2):
        person.hub.put(REPO, f"m-Q8_0-0000{number}-of-00002.gguf", some_bytes(3_000_000, number))

    ended = on_a_small_disk(person, 261, "download", f"hf:{REPO}")

    assert ended.status == 1
    assert ended.stderr.startswith(
        f"Error: m-Q8_0 needs 0.0 GB of disk in {person.models}; 0.3 GB are free, and 0.3 GB stay so\n"
    )
    assert person.hub.got("storage") == []


@AS_ROOT
def test_a_disk_that_fills_up_keeps_what_has_come(person: Person) -> None:
    person.hub.put(REPO, FILE, some_bytes(20_000_000))
    # Somebody else takes the room while it comes.
    person.hub.faults.pause_s = 0.02
    came = '[ -n "$(find "$folder" -name "*.part" -size +0)" ]'
    fill = f'(until {came}; do sleep 0.1; done; head -c 300M /dev/zero > "$folder/fill" 2>/dev/null) & true'

    ended = on_a_small_disk(person, 290, "download", NAME, prepare=fill)

    assert ended.status == 1
    assert f"Error: the disk filled up while downloading {FILE.removesuffix('.gguf')}" in ended.stderr
    assert "what has arrived is kept, and the next run goes on from there" in ended.stderr
    assert f"left {FILE}.part " in ended.stdout


def test_a_folder_that_cannot_be_written_to(person: Person, stored: Stored) -> None:
    person.models.write_text("a file")

    ended = person.downloads(NAME)

    assert ended.status == 1
    assert f"Error: cannot write to {person.models}: File exists\n" in ended.stderr


def test_a_part_that_fell_short_is_found_out(person: Person, stored: Stored) -> None:
    """As a machine that lost its power may leave it: the right length, and not the right bytes."""
    person.hub.faults.stalls = [2_000_000]
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        running.signal(signal.SIGKILL)
        running.wait(within_s=10)
    part = person.part
    assert part is not None
    until(lambda: part.stat().st_size >= 1 << 20, within_s=5, what="the part is there")
    with part.open("r+b") as file:
        file.write(bytes(1000))

    ended = person.downloads(NAME)
    assert ended.status == 1
    assert "arrived damaged and was thrown away" in ended.stderr

    assert person.downloads(NAME).status == 0
    assert_is_here(person, stored.data)


# -- the list ---------------------------------------------------------------------------------------


def test_the_list_reads_well(person: Person, stored: Stored) -> None:
    person.catalog(PAIR)
    person.downloads("target")

    ended = person.downloads()

    assert ended.status == 0
    lines = ended.stdout.splitlines()
    assert lines[0].split() == ["name", "size", "quant", "machine", "mesh", "here", "draft"]
    assert lines[1].split() == ["target", "3", "MB", "Q4_K_M", "fits", "-", "yes", "small"]
    assert lines[2].split() == ["small", "-", "-", "-", "-", "-", "-"]
    assert max(map(len, lines)) <= 80
    assert len(lines) > 30


def test_the_list_for_programs(person: Person) -> None:
    person.catalog(PAIR.replace("size_bytes = 3000000", "memory_bytes = 900_000_000_000_000"))

    ended = person.downloads("--json")

    document = json.loads(ended.stdout)
    assert ended.status == 0
    assert {
        key: document[0][key] for key in ("name", "source", "fits_machine", "fits_mesh", "here", "draft")
    } == {
        "name": "target",
        "source": NAME,
        "fits_machine": False,
        "fits_mesh": None,
        "here": False,
        "draft": "small",
    }


@pytest.mark.parametrize("flag", ["--draft", "--check"])
def test_a_flag_that_needs_a_name(person: Person, flag: str) -> None:
    ended = person.downloads(flag)

    assert (ended.status, ended.stderr) == (2, f"Error: {flag} needs the name of a model\n")
