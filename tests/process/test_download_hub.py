"""`mesh-llm download` from a hub: what is fetched, how it goes on after a cut, and the list."""

from __future__ import annotations

import hashlib
import json
import signal
from pathlib import Path

import pytest

from tests.support import tiny_gguf
from tests.support.command import start
from tests.support.downloads import FILE, NAME, PAIR, REPO, TOKEN, Person, assert_is_here, some_bytes
from tests.support.hub import Stored
from tests.support.node import SMALL, NodeProcess, temporary_home
from tests.support.sampling import first, sampled

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


@pytest.mark.parametrize("whole", sampled([True, False], True))
def test_what_another_program_has_is_not_fetched_again(
    person: Person, tmp_path: Path, libraries: dict[str, Path], whole: bool
) -> None:
    data = tiny_gguf.write(tmp_path / "tiny.gguf", "llama").read_bytes()
    person.hub.put(REPO, FILE, data)
    other = person.folder / "hf" / "hub" / f"models--{REPO.replace('/', '--')}" / "snapshots" / "abc" / FILE
    other.parent.mkdir(parents=True)
    other.write_bytes(data if whole else data[:-1])

    ended = person.downloads(NAME)

    assert ended.status == 0
    assert ended.stdout == f"{other if whole else person.models / FILE}\n"
    assert ("is on this machine already" in ended.stderr) == whole
    assert (person.hub.got("storage") == []) == whole
    checked = person.downloads(NAME, "--check")
    assert checked.status == 0, checked.stderr
    assert checked.stdout.startswith(f"{ended.stdout.strip()} is intact")


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


@pytest.mark.parametrize("redirects", sampled([True, False], True))
def test_a_password_for_other_programs_stays_out_of_it(
    person: Person, stored: Stored, redirects: bool
) -> None:
    person.hub.token, person.hub.redirects = TOKEN, redirects
    netrc = person.folder / "netrc"
    netrc.write_text("default login somebody password secret\n")
    netrc.chmod(0o600)

    ended = person.downloads(NAME, HF_TOKEN=TOKEN, NETRC=str(netrc))

    assert ended.status == 0
    assert_is_here(person, stored.data)
    assert all("Authorization" not in seen.headers for seen in person.hub.got("storage"))


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


@pytest.mark.full
def test_a_model_of_several_files(person: Person) -> None:
    shards = {f"big/m-Q8_0-{n:05}-of-00006.gguf": some_bytes(400_000 + n, n) for n in range(1, 7)}
    for name, data in shards.items():
        person.hub.put(REPO, name, data)
    person.hub.put(REPO, "m-Q4_K_M.gguf", b"another one")
    # None of them comes to its end before others have begun.
    person.hub.faults.holds = [0] * len(shards)

    with start("download", f"hf:{REPO}:q8_0", env=person.env) as running:
        running.until(lambda: person.hub.most_at_once >= 2, what="several are on their way at once")
        person.hub.release()
        ended = running.wait()

    assert ended.status == 0
    assert ended.stdout == f"{person.models / 'm-Q8_0-00001-of-00006.gguf'}\n"
    for name, data in shards.items():
        assert_is_here(person, data, Path(name).name)
    assert person.hub.most_at_once <= 4
    assert len(person.left()) == 12


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
    assert (ended.status, ended.stderr.splitlines()[0]) == (
        1,
        "Error: the catalog has no draft model for small",
    )


@pytest.mark.parametrize(
    ("given", "file"),
    first(
        1,
        [
            ("", "m-Q4_K_M.gguf"),
            (":Q8_0", "m-Q8_0.gguf"),
            (":q6_k", "m-Q6_K.gguf"),
            (":m-Q8_0.gguf", "m-Q8_0.gguf"),
        ],
    ),
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
    first(
        1,
        [
            (
                ("m-Q6_K.gguf", "m-Q8_0.gguf"),
                ":Q4_K_M",
                f"Error: {REPO} has no Q4_K_M\nHint: it has Q6_K, Q8_0\n",
            ),
            (("a-Q8_0.gguf", "b-Q8_0.gguf"), ":Q8_0", "Hint: name one: a-Q8_0.gguf, b-Q8_0.gguf\n"),
            (("model.safetensors",), "", f"Error: {REPO} has no GGUF file\n"),
            (
                ("m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"),
                "",
                f"Error: {REPO} has 2 of the 3 files of m-Q8_0\n",
            ),
            (("a\x1b[2J.gguf", "../b.gguf"), "", f"Error: {REPO} has no GGUF file\n"),
        ],
    ),
)
def test_a_name_that_does_not_mean_one_model(
    person: Person, files: tuple[str, ...], given: str, words: str
) -> None:
    for file in files:
        person.hub.put(REPO, file, b"bytes")

    ended = person.downloads(f"hf:{REPO}{given}")

    assert ended.status == 1
    assert words in ended.stderr


def test_a_name_as_model_takes_it(person: Person, stored: Stored) -> None:
    person.catalog(PAIR)
    other = person.hub.put(REPO, "model-3b-q8_0.gguf", some_bytes(1000))

    assert person.downloads("Model-3B").status == 0
    assert person.downloads("Model-3B-Q8_0").status == 0

    assert_is_here(person, stored.data)
    assert_is_here(person, other.data, "model-3b-q8_0.gguf")


@pytest.mark.parametrize(
    ("name", "words"),
    first(
        2,
        [
            (REPO, f"there is no file {REPO}\nHint: on Hugging Face it is hf:{REPO}\n"),
            ("./model.gguf", "./model.gguf is a file path, not a model to download\n"),
            ("ollama:qwen3", "ollama:qwen3 is not in Ollama's store on this machine\n"),
            ("GLM-4.8-Flash", "knows by name\nHint: did you mean GLM-4.7-Flash?\n"),
        ],
    ),
)
def test_what_cannot_be_downloaded(person: Person, name: str, words: str) -> None:
    ended = person.downloads(name)

    assert ended.status == 1
    assert words in ended.stderr


def test_a_plain_url(person: Person) -> None:
    data = some_bytes(500_000)
    person.hub.plain["my model.gguf"] = Stored.of(data)

    ended = person.downloads(f"{person.hub.storage_url}/plain/my%20model.gguf?key=secret-signature")

    assert ended.status == 0
    assert_is_here(person, data, "my model.gguf")


def test_a_proxy_is_found_as_other_programs_find_it(person: Person) -> None:
    data = some_bytes(500_000)
    person.hub.plain["model.gguf"] = Stored.of(data)
    # The storage answers for any host, as a proxy does.
    proxy = person.hub.storage_url.removeprefix("http://")

    ended = person.downloads("http://models.example/plain/model.gguf", ALL_PROXY=proxy, NO_PROXY="")

    assert ended.status == 0
    assert_is_here(person, data, "model.gguf")


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


@pytest.mark.full
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
    ("number", "status"), first(1, [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)])
)
def test_an_interrupted_download_goes_on(
    person: Person, stored: Stored, number: signal.Signals, status: int
) -> None:
    person.hub.faults.stalls = [2_000_000]
    with start("download", NAME, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        running.signal(number)
        ended = running.wait()
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
        f"Error: {FILE} could not be downloaded: the connection to {host} was lost, and 5 more tries failed",
        "Hint: what has arrived is kept; run it again later to continue",
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
        running.wait()
    changed = person.hub.put(REPO, FILE, some_bytes(3_000_000, 2))
    person.hub.seen.clear()

    ended = person.downloads(NAME)

    assert ended.status == 0
    assert [seen.start for seen in person.hub.got("storage")] == [0]
    assert_is_here(person, changed.data)


def test_a_file_that_changes_while_it_comes_begins_anew(person: Person, stored: Stored) -> None:
    person.catalog(PAIR)
    person.hub.faults.holds = [2_000_000]
    person.hub.faults.cuts = [2_500_000]
    with start("download", "target", env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        changed = person.hub.put(REPO, FILE, some_bytes(2_800_000, 2))
        person.hub.release()
        ended = running.wait()

    assert ended.status == 0
    assert [seen.start for seen in person.hub.got("storage")] == [0, 0]
    assert_is_here(person, changed.data)


def test_a_plain_file_that_changed_meanwhile_begins_anew(person: Person) -> None:
    person.hub.plain[FILE] = Stored.of(some_bytes(3_000_000))
    person.hub.faults.stalls = [2_000_000]
    url = f"{person.hub.storage_url}/plain/{FILE}"
    with start("download", url, env=person.env) as running:
        running.until(lambda: person.part_bytes() >= 1 << 20, what="a part has come")
        running.signal(signal.SIGINT)
        running.wait()
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
        running.wait()
    person.hub.seen.clear()

    assert person.downloads(url).status == 0
    assert all(seen.start == 0 for seen in person.hub.got("storage"))
    assert_is_here(person, data)


@pytest.mark.full
def test_two_at_once_fetch_it_once(person: Person, stored: Stored) -> None:
    person.hub.faults.holds = [2_000_000]
    # The first one is to wait for the second, however long that takes to start.
    env = {**person.env, "HF_HUB_DOWNLOAD_TIMEOUT": "200"}
    with start("download", NAME, env=env) as first:
        first.until(lambda: person.part_bytes() > 0, what="a part has come")
        with start("download", NAME, env=person.env) as second:
            second.until_said("is being downloaded by another process on this machine; waiting for it")
            person.hub.release()
            ended = second.wait()
        assert first.wait().status == 0

    assert (ended.status, ended.stdout) == (0, f"{person.models / FILE}\n")
    assert len(person.hub.got("storage")) == 1
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


@pytest.mark.parametrize("flag", sampled(["--draft", "--check"], "--draft"))
def test_a_flag_that_needs_a_name(person: Person, flag: str) -> None:
    ended = person.downloads(flag)

    assert (ended.status, ended.stderr) == (2, f"Error: {flag} needs the name of a model\n")


# -- nodes ------------------------------------------------------------------------------------------


def test_a_node_downloads_the_model_that_it_is_to_serve(person: Person, tiny_model: Path) -> None:
    person.hub.put(REPO, "tiny-Q8_0.gguf", tiny_model.read_bytes())
    with (
        temporary_home() as home,
        NodeProcess(*SMALL, home=home, model=f"hf:{REPO}", env=person.env) as node,
    ):
        status = node.until_ready().status()
        ended = person.downloads("--home", str(home), "--json")

    assert status["model"]["name"] == "tiny-Q8_0"
    assert_is_here(person, tiny_model.read_bytes(), "tiny-Q8_0.gguf")
    listed = {entry["name"]: entry for entry in json.loads(ended.stdout)}
    assert listed["smollm2"]["fits_mesh"] is True


def test_a_node_without_its_hub_says_so(person: Person) -> None:
    with (
        temporary_home() as home,
        NodeProcess(*SMALL, home=home, model=f"hf:{REPO}", env=person.env) as node,
    ):
        ended = node.wait()

    host = person.hub.url.removeprefix("http://")
    assert ended.status == 1
    assert f"Error: there is no {REPO} on {host}\n" in ended.stderr
