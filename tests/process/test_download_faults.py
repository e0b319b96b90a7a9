"""`mesh-llm download` where hubs, networks and disks fail: one sentence, in seconds, nothing corrupted."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from mesh_llm.download.http import RemoteFile, waits_s
from mesh_llm.download.versioned_part import DOWNLOAD_BATCH_BYTES, VersionedPart
from mesh_llm.models.part_file import PartFile
from tests.support.command import MESH_LLM, Ended, Running, start
from tests.support.downloads import FILE, NAME, PAIR, REPO, TOKEN, Person, assert_is_here, some_bytes
from tests.support.hub import Stored
from tests.support.sampling import first, sampled
from tests.support.waiting import until

AS_ROOT = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("unshare") or sys.platform != "linux",
    reason="a small disk can be mounted by root on Linux only",
)

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


@pytest.mark.parametrize("said", sampled([2_999_999, 3_000_001], 2_999_999))
def test_a_wrong_size(person: Person, stored: Stored, said: int) -> None:
    stored.said_size = said

    ended = person.downloads(NAME)

    assert ended.status == 1
    host = person.hub.storage_url.removeprefix("http://")
    assert (
        f"Error: {FILE} cannot be downloaded: {host} has 3000000 bytes of it; there should be {said}\n"
    ) in ended.stderr


@pytest.mark.parametrize(
    ("answer", "words"),
    first(
        2,
        [
            ((206, {"Content-Range": f"bytes 0-0/{'9' * 5000}"}), "answers 206 to the request for http://"),
            ((206, {"Content-Range": f"bytes 0-0/{'9' * 18}"}), "gives model.gguf an impossible size\n"),
            ((206, {"Content-Range": f"bytes {'9' * 5000}-0/1"}), "answers 206 to the request for http://"),
            ((429, {"Retry-After": "9" * 5000}), "asks for inf s before the next try\n"),
        ],
    ),
)
def test_impossible_numbers(person: Person, answer: tuple[int, dict[str, str]], words: str) -> None:
    person.hub.faults.storage = [answer]

    ended = person.downloads(f"{person.hub.storage_url}/plain/model.gguf")

    assert ended.status == 1
    assert words in ended.stderr


def test_a_time_that_is_no_number_is_not_waited_for() -> None:
    assert waits_s({"Retry-After": "\u00b2"}) is None


def test_another_file_of_that_name_stays(person: Person, stored: Stored) -> None:
    person.models.mkdir()
    (person.models / FILE).write_bytes(b"mine")

    ended = person.downloads(NAME)

    assert ended.status == 1
    assert f"Error: {person.models / FILE} exists already and is another file than {NAME}\n" in ended.stderr
    assert (person.models / FILE).read_bytes() == b"mine"


def test_a_file_that_takes_the_name_meanwhile_gets_no_note(person: Person, stored: Stored) -> None:
    person.hub.faults.holds = [1_400_000]
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        (person.models / FILE).write_bytes(bytes(len(stored.data)))
        person.hub.release()
        ended = running.wait()

    assert ended.status == 1
    assert f"{person.models / FILE} was created by another program in the meantime" in ended.stderr
    assert not (person.models / f"{FILE}.sha256").exists()


def test_a_note_that_outlived_its_file_is_not_believed(person: Person, stored: Stored) -> None:
    person.downloads(NAME)
    (person.models / FILE).unlink()
    (person.models / FILE).write_bytes(b"mine")

    ended = person.downloads(NAME)

    assert ended.status == 1
    assert f"Error: {person.models / FILE} exists already and is another file than {NAME}\n" in ended.stderr


@pytest.mark.parametrize("gated", sampled([True, False], True))
def test_a_model_that_is_not_for_everybody(person: Person, stored: Stored, gated: bool) -> None:
    person.hub.token = "hf_somebody_elses"
    person.hub.gated = gated
    page = f"{person.hub.url}/{REPO}"
    host = person.hub.url.removeprefix("http://")

    ended = person.downloads(NAME)
    what = (
        "is only for accounts that have accepted its licence"
        if gated
        else "is private, gated, or does not exist"
    )
    assert ended.status == 1
    assert ended.stderr.splitlines() == [
        f"Error: {REPO} on {host} {what} (401)",
        f"Hint: accept the licence at {page}, and set HF_TOKEN to a token of that account",
    ]

    ended = person.downloads(NAME, HF_TOKEN=TOKEN)
    assert ended.status == 1
    assert ended.stderr.splitlines() == [
        f"Error: {host} does not give the account of this HF_TOKEN access to {REPO} (403)",
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
    first(
        1,
        [
            (
                [(429, {"Retry-After": "3600"})],
                "has had too many requests (429) and asks for 3600 s before the next try\n",
            ),
            ([(503, {})] * 50, "has an internal problem (503), and 5 more tries failed\n"),
            ([(418, {})], "answers 418 to the question about maker/Model-3B-GGUF\n"),
        ],
    ),
)
def test_a_hub_that_will_not(
    person: Person, stored: Stored, answers: list[tuple[int, dict[str, str]]], words: str
) -> None:
    person.hub.faults.hub = answers
    person.catalog(PAIR)

    ended = person.downloads("target")

    assert ended.status == 1
    assert words in ended.stderr
    assert person.left() in ([], [path.name for path in person.models.glob(".incoming-fetch-*")])


def test_an_address_of_the_storage_that_has_aged(person: Person, stored: Stored) -> None:
    person.hub.faults.holds = [1_400_000]
    person.hub.faults.cuts = [1_500_000]
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        person.hub.faults.storage = [(403, {})]
        person.hub.release()
        ended = running.wait()

    assert ended.status == 0
    assert [seen.start for seen in person.hub.got("storage")] == [0, 1_500_000, 1_500_000]
    assert_is_here(person, stored.data)


@pytest.mark.full
def test_a_server_that_falls_silent(person: Person, stored: Stored) -> None:
    person.hub.faults.stalls = [1_000_000] + [0] * 50
    started = time.monotonic()

    ended = person.downloads(NAME, HF_HUB_DOWNLOAD_TIMEOUT="1")

    assert ended.status == 1
    host = person.hub.storage_url.removeprefix("http://")
    assert f"Error: {FILE} could not be downloaded: {host} sent nothing for 1 s, " in ended.stderr
    assert time.monotonic() - started < 50
    # As far as it came, which is less than a million bytes where this machine itself fell silent.
    assert 0 < person.part_bytes() == person.hub.got("storage")[-1].start <= 1_000_000


@pytest.mark.full
def test_a_server_that_drips(person: Person) -> None:
    """Each byte comes in time, and the file never would."""
    person.hub.put(REPO, FILE, some_bytes(30_000))
    person.hub.faults.chunk_bytes = 100
    person.hub.faults.pause_s = 0.3

    host = person.hub.storage_url.removeprefix("http://")
    words = f"Error: {FILE} could not be downloaded: {host} sends almost nothing, "

    for _ in range(3):
        ended = person.downloads(NAME, HF_HUB_DOWNLOAD_TIMEOUT="1")
        assert ended.status == 1
        # Where this machine stands still in the last try, nothing at all comes for a second.
        if words in ended.stderr:
            break
    assert words in ended.stderr


def test_a_hub_that_does_not_answer(person: Person, stored: Stored) -> None:
    person.hub.faults.hub_stalls = True
    person.catalog(PAIR)
    host = person.hub.url.removeprefix("http://")

    ended = person.downloads("target", HF_HUB_ETAG_TIMEOUT="1")

    assert ended.status == 1
    assert f"Error: {FILE} cannot be downloaded: {host} does not answer\n" in ended.stderr


def test_ctrl_c_does_not_wait_for_a_hub_that_does_not_answer(person: Person, stored: Stored) -> None:
    person.hub.faults.hub_stalls = True
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.hub.seen, what="the hub is asked")
        running.signal(signal.SIGINT)
        # The hub is given 15 s for an answer, several times over.
        ended = running.wait(within_s=12)

    assert ended.status == 130
    assert "Traceback" not in ended.stderr


@pytest.mark.full
def test_a_slow_server_is_waited_for(person: Person) -> None:
    stored = person.hub.put(REPO, FILE, some_bytes(30_000))
    person.hub.faults.chunk_bytes = 3_000
    person.hub.faults.pause_s = 0.3

    ended = person.downloads(NAME, HF_HUB_DOWNLOAD_TIMEOUT="2")

    assert ended.status == 0
    assert_is_here(person, stored.data)


def test_nobody_there(person: Person, stored: Stored) -> None:
    started = time.monotonic()

    with socket.socket() as closed:
        # Its own, so that nobody else begins to listen there.
        closed.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{closed.getsockname()[1]}"
        url = f"http://{host}"
        for name in ("qwen3-0.6b", NAME, f"{url}/plain/model.gguf"):
            ended = person.downloads(name, HF_ENDPOINT=url)
            assert ended.status == 1
            assert f"{host} refuses the connection\n" in ended.stderr
            assert len(ended.stderr.splitlines()) == 2
    assert time.monotonic() - started < 60


@pytest.mark.parametrize(
    ("env", "words"),
    first(
        1,
        [
            ({"HF_ENDPOINT": "mirror"}, "HF_ENDPOINT is mirror, which is not a URL"),
            ({"HF_ENDPOINT": "http://[x"}, "HF_ENDPOINT is http://[x, which is not a URL"),
            ({"HF_ENDPOINT": ""}, "HF_ENDPOINT is empty, which is not a URL"),
            (
                {"HF_HUB_DOWNLOAD_TIMEOUT": "1.5"},
                "a variable of huggingface_hub has a value that it does not take",
            ),
            ({"HF_TOKEN": "hf_\u00e4"}, "HF_TOKEN has characters that no token has"),
            ({"ALL_PROXY": "socks5://127.0.0.1:9"}, "the environment sets a socks proxy, but models can"),
            ({"ALL_PROXY": "http://p:port", "NO_PROXY": ""}, "the environment sets a malformed proxy, but"),
            (
                {"ALL_PROXY": "127.0.0.1:9", "NO_PROXY": ""},
                "cannot be reached: the proxy 127.0.0.1:9 refuses the connection",
            ),
        ],
    ),
)
def test_settings_with_which_it_cannot_work(
    person: Person, stored: Stored, env: dict[str, str], words: str
) -> None:
    ended = person.downloads(NAME, within_s=60, **env)

    assert ended.status == 1
    assert words in ended.stderr
    assert len(ended.stderr.splitlines()) == 2


@pytest.mark.parametrize("port", sampled(["port", "99999", "0"], "port"))
def test_an_address_with_a_port_that_is_none(person: Person, port: str) -> None:
    ended = person.downloads(f"http://127.0.0.1:{port}/model.gguf")

    assert ended.status == 2
    assert "is not the URL of a .gguf file" in ended.stderr


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
        ended = person.downloads(name, within_s=60, **env)
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


def test_a_lite_client_is_told_what_it_lacks(person: Person) -> None:
    packages = person.folder / "packages"
    packages.mkdir()
    (packages / "sitecustomize.py").write_text(
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "def found(name, *rest):\n"
        "    return None if name == 'huggingface_hub' else find(name, *rest)\n"
        "importlib.util.find_spec = found\n"
    )

    for name in ("qwen3-0.6b", NAME, "http://127.0.0.1:1/model.gguf"):
        ended = person.downloads(name, PYTHONPATH=str(packages))
        assert ended.status == 1
        assert ended.stderr.splitlines() == [
            "Error: downloading models needs huggingface_hub, which is not installed",
            "Hint: pip install 'mesh-llm[engine]'",
        ]


# -- disks ------------------------------------------------------------------------------------------


async def test_nothing_is_written_behind_a_batch_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches wait for the disk: there may be room again for those behind the one that had none."""
    remote = RemoteFile(url="http://127.0.0.1/model.gguf", identity="one", size_bytes=100 << 20)
    data = some_bytes(3 * DOWNLOAD_BATCH_BYTES)
    full_once, waiting, put = threading.Event(), threading.Event(), PartFile.put

    def put_on_a_full_disk(part: PartFile, start: int, data: bytes, *, lasting: bool = False) -> None:
        assert waiting.wait(60)
        if start and not full_once.is_set():
            full_once.set()
            put(part, start, data[:1000])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(part, start, data, lasting=lasting)

    monkeypatch.setattr(PartFile, "put", put_on_a_full_disk)
    with closing(VersionedPart(tmp_path, "model.gguf")) as part:
        await part.open(remote, lambda done: None)
        for start in range(0, len(data), DOWNLOAD_BATCH_BYTES):
            await part.write(data[start : start + DOWNLOAD_BATCH_BYTES])
        waiting.set()
        for _ in range(3):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                await part.settle()

    assert part.path.read_bytes() == data[:DOWNLOAD_BATCH_BYTES]


def on_a_small_disk(person: Person, megabytes: int, *arguments: str, prepare: str = ":") -> Ended:
    person.models.mkdir(exist_ok=True)
    script = (
        f'mount -t tmpfs -o "size=$1m" none "$2" || exit 77; folder=$2; shift 2; {prepare}; '
        '"$@"; status=$?; wait; find "$folder" -type f -printf "left %f %s\\n"; exit $status'
    )
    shell = ("unshare", "--mount", "sh", "-c", script, "sh", str(megabytes), person.models)
    with Running([*shell, *MESH_LLM, *arguments], env=person.env) as running:
        ended = running.wait(within_s=120)
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


@pytest.mark.full
@AS_ROOT
def test_a_disk_that_fills_up_keeps_what_has_come(person: Person) -> None:
    person.hub.put(REPO, FILE, some_bytes(20_000_000))
    # Somebody else takes the room while it comes.
    person.hub.faults.pause_s = 0.1
    came = '[ -n "$(find "$folder" -name "*.part" -size +0)" ]'
    fill = f'(until {came}; do sleep 0.1; done; head -c 300M /dev/zero > "$folder/fill" 2>/dev/null) & true'

    ended = on_a_small_disk(person, 290, "download", NAME, prepare=fill)

    assert ended.status == 1
    assert f"Error: the disk filled up while downloading {FILE.removesuffix('.gguf')}" in ended.stderr
    assert "what has arrived is kept, and the next run continues from there" in ended.stderr
    assert f"left {FILE}.part " in ended.stdout


@AS_ROOT
def test_what_does_not_say_how_long_it_is_leaves_some_room(person: Person) -> None:
    person.hub.faults.chunked = person.hub.faults.ignore_ranges = True
    person.hub.plain[FILE] = Stored.of(some_bytes(20_000_000))

    ended = on_a_small_disk(person, 261, "download", f"{person.hub.storage_url}/plain/{FILE}")

    assert ended.status == 1
    assert f"Error: the disk filled up while downloading {FILE.removesuffix('.gguf')}" in ended.stderr
    assert len(person.hub.seen) == 2


def test_a_folder_that_cannot_be_written_to(person: Person, stored: Stored) -> None:
    person.models.write_text("a file")

    ended = person.downloads(NAME)

    assert ended.status == 1
    assert f"Error: cannot write to {person.models}: File exists\n" in ended.stderr


@pytest.mark.full
def test_a_part_that_fell_short_is_found_out(person: Person, stored: Stored) -> None:
    """As a machine that lost its power may leave it: the right length, and not the right bytes."""
    person.hub.faults.stalls = [2_000_000]
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        running.signal(signal.SIGKILL)
        running.wait()
    part = person.part
    assert part is not None
    until(lambda: part.stat().st_size >= 1 << 20, within_s=30, what="the part is there")
    with part.open("r+b") as file:
        file.write(bytes(1000))

    ended = person.downloads(NAME)
    assert ended.status == 1
    assert "arrived damaged and was thrown away" in ended.stderr

    assert person.downloads(NAME).status == 0
    assert_is_here(person, stored.data)
