"""Models that other programs brought to this disk: found, named, and counted once; hostile stores, too."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

import pytest

from mesh_llm import defaults
from mesh_llm.models.stores import Found, Places, Store, blob_title, find_all, search
from mesh_llm.models.stores import reading as reading_of_stores
from tests.support.stores import KIND, STUB, Home, layer, put

NOBODY = 65534
OTHER = b"GGUF of another file"
NEWER = b"GGUF of a newer revision"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


def names(found: Found) -> list[str]:
    return [model.name for model in found.models]


def reasons(found: Found) -> dict[str, str]:
    return {skipped.path.name: skipped.reason for skipped in found.skipped}


# -- each store -----------------------------------------------------------------------------------


def test_without_any_store_there_is_nothing(home: Home) -> None:
    assert search(home.places) == Found(models=(), skipped=())


def test_the_models_folder(home: Home) -> None:
    path = home.add("Qwen3-8B-Q4_K_M.gguf")
    home.add("deeper/down/tiny.GGUF", OTHER)
    home.add("readme.txt", b"GGUF is what they are")
    home.add("half.gguf.part", STUB)
    home.add(".layers/hidden.gguf")

    large, tiny = find_all(home.places)

    assert (large.name, large.path, large.files, large.size_bytes) == (
        "Qwen3-8B-Q4_K_M",
        path,
        (path,),
        len(STUB),
    )
    assert (large.store, large.repo, large.missing, large.title) == (
        Store.MODELS,
        "",
        (),
        "Qwen3-8B-Q4_K_M",
    )
    assert tiny.name == "tiny"


def test_the_hub_cache_names_the_repository(home: Home) -> None:
    link = home.add_hub("unsloth/GLM-4.7-Flash-GGUF", "Q4/GLM-4.7-Flash-Q4_K_M.gguf")
    put(home.hub / "datasets--a--b" / "snapshots" / "x" / "data.gguf", STUB)
    put(home.hub / "version.txt", b"1")

    (model,) = find_all(home.places)

    assert (model.name, model.repo) == ("GLM-4.7-Flash-Q4_K_M", "unsloth/GLM-4.7-Flash-GGUF")
    assert (model.path, model.store, model.size_bytes) == (link, Store.HUB, len(STUB))


def test_of_several_revisions_mains_counts(home: Home) -> None:
    old, new = "0" * 40, "1" * 40
    home.add_hub("a/b", "x.gguf", STUB, revision=old)
    home.add_hub("a/b", "only-old.gguf", OTHER, revision=old)
    home.add_hub("a/b", "x.gguf", NEWER, revision=new)
    snapshots = home.hub / "models--a--b" / "snapshots"
    os.utime(snapshots / old, (1, 1))

    newest = {model.name: model.path for model in find_all(home.places)}
    assert newest == {"only-old": snapshots / old / "only-old.gguf", "x": snapshots / new / "x.gguf"}

    put(home.hub / "models--a--b" / "refs" / "main", old.encode())
    chosen = {model.name: model.path for model in find_all(home.places)}
    assert chosen["x"] == snapshots / old / "x.gguf"


def test_a_revision_that_is_complete_wins_over_mains(home: Home) -> None:
    old, new = "0" * 40, "1" * 40
    for index in (1, 2):
        home.add_hub("a/b", f"x-0000{index}-of-00002.gguf", b"GGUF %d" % index, revision=old)
    home.add_hub("a/b", "x-00001-of-00002.gguf", NEWER, revision=new, main=True)

    (model,) = find_all(home.places)

    assert model.missing == ()
    assert {path.parent.name for path in model.files} == {old}


def test_a_link_whose_blob_is_gone_is_said(home: Home) -> None:
    link = home.add_hub("a/b", "x.gguf")
    link.resolve().unlink()

    found = search(home.places)

    assert names(found) == []
    assert reasons(found) == {"x.gguf": "is a link to a file that is gone"}


def test_lm_studio(home: Home) -> None:
    home.add_lmstudio("lmstudio-community/Qwen3-8B-GGUF", "Qwen3-8B-Q4_K_M.gguf")
    put(home.path / ".cache/lm-studio/models/old/repo/older.gguf", OTHER)

    models = find_all(home.places)

    assert [(model.name, model.repo, model.store) for model in models] == [
        ("Qwen3-8B-Q4_K_M", "lmstudio-community/Qwen3-8B-GGUF", Store.LMSTUDIO),
        ("older", "old/repo", Store.LMSTUDIO),
    ]


def test_ollama_names_are_those_that_ollama_shows(home: Home) -> None:
    blob = home.add_ollama("library/qwen3/30b", license=b"MIT", template=b"{{ .Prompt }}", projector=OTHER)
    home.add_ollama("someone/tuned/latest", OTHER)
    home.add_ollama("bartowski/Llama-GGUF/Q4_K_M", NEWER, registry="hf.co")

    found = search(home.places)

    assert {model.name: model.title for model in found.models} == {
        "ollama:hf.co/bartowski/Llama-GGUF:Q4_K_M": "hf.co/bartowski/Llama-GGUF:Q4_K_M",
        "ollama:qwen3:30b": "qwen3:30b",
        "ollama:someone/tuned:latest": "someone/tuned",
    }
    qwen = next(model for model in found.models if model.name == "ollama:qwen3:30b")
    assert (qwen.path, qwen.files, qwen.store, qwen.size_bytes) == (blob, (blob,), Store.OLLAMA, len(STUB))
    assert found.skipped == ()


def test_a_blob_of_an_earlier_ollama_has_a_colon(home: Home) -> None:
    blob = home.add_ollama("library/old/latest")
    blob = blob.rename(blob.with_name(blob.name.replace("-", ":")))

    (model,) = find_all(home.places)

    assert model.path == blob
    assert blob_title(blob) == "old"


def test_the_title_of_a_blob_is_its_shortest_name(home: Home) -> None:
    blob = home.add_ollama("library/qwen3/30b-a3b-q4_K_M")
    home.add_ollama("library/qwen3/30b")
    home.add_ollama("library/other/latest", OTHER)

    assert blob_title(blob) == "qwen3:30b"
    assert blob_title(home.add("sha256-1.gguf")) is None
    assert blob_title(home.ollama / "blobs" / f"sha256-{'0' * 64}") is None


# -- several files, several names -----------------------------------------------------------------


def test_shards_are_one_model(home: Home) -> None:
    paths = [home.add(f"big-0000{index}-of-00003.gguf", b"GGUF %d" % index) for index in (3, 1, 2)]

    (model,) = find_all(home.places)

    assert (model.name, model.size_bytes, model.missing) == ("big", 18, ())
    assert model.files == (paths[1], paths[2], paths[0])
    assert model.path == paths[1]


def test_missing_shards_are_said(home: Home) -> None:
    second = home.add("big-00002-of-00003.gguf")
    home.add("big-00003-of-00003.gguf", b"not GGUF")
    home.add("big-00001-of-00002.gguf", OTHER)

    two, three = find_all(home.places)

    assert (two.name, two.missing) == ("big", ("big-00002-of-00002.gguf",))
    assert (three.path, three.files) == (second, (second,))
    assert three.missing == ("big-00001-of-00003.gguf", "big-00003-of-00003.gguf")


@pytest.mark.parametrize("name", ["x-00000-of-00002", "x-00003-of-00002", "x-00001-of-99999"])
def test_a_shard_that_cannot_be_is_left_out(home: Home, name: str) -> None:
    home.add(f"{name}.gguf")

    found = search(home.places)

    assert names(found) == []
    assert reasons(found)[f"{name}.gguf"].startswith("claims to be file ")


def test_projectors_are_no_models(home: Home) -> None:
    home.add("mmproj-F16.gguf")
    home.add("llava-MMPROJ-f16.gguf", OTHER)

    assert search(home.places) == Found(models=(), skipped=())


def test_links_to_one_file_are_listed_once(home: Home) -> None:
    blob = home.add_ollama("library/tiny/latest")
    home.add_ollama("library/tiny/1b")
    lmstudio = home.lmstudio / "who" / "repo" / "tiny.gguf"
    lmstudio.parent.mkdir(parents=True)
    lmstudio.hardlink_to(blob)
    home.models.mkdir()
    (home.models / "mine.gguf").symlink_to(blob)

    (model,) = find_all(home.places)

    assert (model.name, model.store) == ("mine", Store.MODELS)
    assert model.names == ("mine", "tiny", "ollama:tiny:1b", "ollama:tiny:latest")


def test_copies_are_files_of_their_own(home: Home) -> None:
    home.add("one.gguf")
    home.add_lmstudio("who/repo", "one.gguf")

    assert [(model.name, model.store) for model in find_all(home.places)] == [
        ("one", Store.MODELS),
        ("one", Store.LMSTUDIO),
    ]


# -- what is none ---------------------------------------------------------------------------------


def test_what_is_no_gguf_has_a_reason(home: Home) -> None:
    home.add("text.gguf", b"hello")
    home.add("empty.gguf", b"")
    home.add("good.gguf")
    os.mkfifo(home.models / "pipe.gguf")
    (home.models / "loop.gguf").symlink_to("loop.gguf")
    put(home.models / "folder.gguf" / "inside.gguf", OTHER)

    found = search(home.places)

    assert names(found) == ["good", "inside"]
    assert reasons(found) == {
        "text.gguf": "is not GGUF",
        "empty.gguf": "is empty",
        "pipe.gguf": "cannot be read: it is not a regular file",
        "loop.gguf": "cannot be read: Too many levels of symbolic links",
    }


def reasons_for_somebody_else(places: Places) -> dict[str, str]:
    """In a process that may read nothing but what it is let."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            os.write(write, json.dumps(reasons(search(places))).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    found: dict[str, str] = json.loads(text)
    return found


def test_what_may_not_be_read_has_a_reason() -> None:
    # Not pytest's own folder: nobody else may enter that.
    with tempfile.TemporaryDirectory(prefix="stores-", dir="/tmp") as folder:
        home = Home(Path(folder))
        home.add("secret.gguf").chmod(0)
        closed = put(home.models / "closed" / "x.gguf", STUB).parent
        closed.chmod(0)
        home.path.chmod(0o755)
        try:
            found = reasons_for_somebody_else(home.places)
        finally:
            closed.chmod(0o700)

    assert found == {
        "secret.gguf": "cannot be read: Permission denied",
        "closed": "cannot be opened: Permission denied",
    }


def test_folders_that_contain_themselves_are_read_once(home: Home) -> None:
    home.add("a/x.gguf")
    (home.models / "a" / "again").symlink_to(home.models)
    (home.models / "b").symlink_to(home.models / "a")

    found = search(home.places)

    assert len(found.models) == 1


def test_a_store_behind_a_link_is_followed(home: Home) -> None:
    put(home.path / "disk" / "x.gguf", STUB)
    home.models.symlink_to(home.path / "disk")

    assert [model.path for model in find_all(home.places)] == [home.models / "x.gguf"]


def test_a_folder_without_end_is_left_half_read(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_of_stores, "STORE_ENTRIES", 10)
    for index in range(30):
        home.add(f"{index}.gguf", b"GGUF %d" % index)

    found = search(home.places)

    assert len(found.models) == 10
    assert reasons(found) == {".models": "not searched further: more than 10 files and folders"}


def test_deep_folders_end_somewhere(home: Home) -> None:
    path = home.models
    for _ in range(defaults.STORE_DEPTH):
        path /= "d"
    put(path / "reached.gguf", STUB)
    put(path / "d" / "beyond.gguf", OTHER)

    assert [model.name for model in find_all(home.places)] == ["reached"]


def test_reasons_are_bounded(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_of_stores, "STORE_SKIPPED", 5)
    for index in range(20):
        home.add(f"{index}.gguf", b"no")

    assert len(search(home.places).skipped) == 5


def test_names_can_be_shown(home: Home) -> None:
    evil = home.models / os.fsdecode(b"\x1b[2J\xff\nx.gguf")
    put(evil, STUB)

    (model,) = find_all(home.places)

    assert (model.name, model.path) == ("?[2J??x", evil)


# -- manifests ------------------------------------------------------------------------------------

DIGEST = f"sha256:{'a' * 64}"


@pytest.mark.parametrize(
    ("manifest", "reason"),
    [
        (b"", "is a manifest that is not JSON"),
        (b"{", "is a manifest that is not JSON"),
        (b"\xff\xfe", "is a manifest that is not JSON"),
        (b"[" * 100_000, "is a manifest that is not JSON"),
        (b"9" * 10_000, "is a manifest that is not JSON"),
        (b"[]", "is a manifest without a list of layers"),
        ({"layers": {}}, "is a manifest without a list of layers"),
        ({"layers": [0] * 5000}, "is a manifest without a list of layers"),
        ({"layers": []}, "has no weights in GGUF"),
        ({"layers": [1, None, "x", {}]}, "has no weights in GGUF"),
        ({"layers": [{"mediaType": KIND + "tensor", "digest": DIGEST}]}, "has no weights in GGUF"),
        ({"layers": [{"mediaType": [KIND + "model"], "digest": DIGEST}]}, "has no weights in GGUF"),
        (
            {"layers": [{"mediaType": KIND + "model", "digest": DIGEST}] * 2},
            "has its weights in 2 files, which only Ollama puts together",
        ),
        (
            {
                "layers": [
                    {"mediaType": KIND + "model", "digest": DIGEST},
                    {"mediaType": KIND + "adapter", "digest": DIGEST},
                ]
            },
            "is a base model with an adapter, which only Ollama puts together",
        ),
    ],
)
def test_a_manifest_that_is_none(home: Home, manifest: object, reason: str) -> None:
    home.manifest("registry.ollama.ai/library/bad/latest", manifest)
    home.add_ollama("library/good/latest")

    found = search(home.places)

    assert names(found) == ["ollama:good:latest"]
    assert reasons(found) == {"latest": reason}


@pytest.mark.parametrize(
    "digest",
    [
        "../../../../secret.gguf",
        "sha256-../../../secret.gguf",
        f"sha256:{'a' * 63}/",
        f"sha256:{'a' * 65}",
        f"sha256:{'A' * 64}",
        f"sha256:{'a' * 64}\n",
        f"sha256:{'٣' * 64}",
        f"/sha256:{'a' * 64}",
        "",
        None,
        7,
        ["sha256", "a" * 64],
    ],
)
def test_only_a_digest_becomes_a_path(home: Home, digest: object) -> None:
    put(home.path / "secret.gguf", STUB)
    home.manifest(
        "registry.ollama.ai/library/bad/latest",
        {"layers": [{"mediaType": KIND + "model", "digest": digest}]},
    )

    found = search(home.places)

    assert names(found) == []
    assert reasons(found) == {"latest": "names its weights by something that is not a sha256 digest"}


def test_a_manifest_of_a_gigabyte_is_not_read(home: Home) -> None:
    path = home.manifest("registry.ollama.ai/library/huge/latest", b"")
    os.truncate(path, 1 << 30)
    before = time.process_time()

    found = search(home.places)

    assert reasons(found) == {"latest": "is a manifest of more than 1,048,576 bytes"}
    assert time.process_time() - before < 1


def test_a_manifest_that_is_a_pipe_is_not_waited_for(home: Home) -> None:
    folder = home.ollama / "manifests" / "registry.ollama.ai" / "library" / "pipe"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "latest")

    assert reasons(search(home.places)) == {"latest": "cannot be read: it is not a regular file"}


def test_a_blob_that_is_not_there_is_said(home: Home) -> None:
    blob = home.add_ollama("library/gone/latest")
    blob.unlink()

    assert reasons(search(home.places)) == {blob.name: "is not there"}


def test_manifests_elsewhere_are_none(home: Home) -> None:
    blob = home.blob(STUB)
    home.manifest("registry.ollama.ai/library/notes", {"layers": [layer("model", blob)]})
    home.manifest("a/b/c/d/e", {"layers": [layer("model", blob)]})

    assert search(home.places) == Found(models=(), skipped=())


# -- places ---------------------------------------------------------------------------------------

VARIABLES = (
    "HF_HUB_CACHE",
    "HUGGINGFACE_HUB_CACHE",
    "HF_HOME",
    "XDG_CACHE_HOME",
    "OLLAMA_MODELS",
    "MESH_LLM_MODELS",
)


@pytest.fixture
def person(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_usual_places(person: Path) -> None:
    assert Places.from_environment() == Places(
        models=person / ".models",
        hub=person / ".cache/huggingface/hub",
        lmstudio=(person / ".lmstudio/models", person / ".cache/lm-studio/models"),
        ollama=(person / ".ollama/models", Path("/usr/share/ollama/.ollama/models")),
    )


@pytest.mark.parametrize(
    ("variables", "hub"),
    [
        ({"HF_HUB_CACHE": "/hub", "HF_HOME": "/home"}, "/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "/earlier"}, "/earlier"),
        ({"HF_HOME": "/home"}, "/home/hub"),
        ({"XDG_CACHE_HOME": "/cache"}, "/cache/huggingface/hub"),
        ({"HF_HUB_CACHE": "", "HF_HOME": "/home"}, "/home/hub"),
    ],
)
def test_where_the_hub_cache_is(
    person: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], hub: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert Places.from_environment().hub == Path(hub)


def test_places_that_were_moved(person: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLLAMA_MODELS", "~/disk/ollama")
    (person / ".lmstudio-home-pointer").write_text("/disk/lmstudio\n")

    places = Places.from_environment()

    assert places.ollama[0] == person / "disk/ollama"
    assert places.lmstudio[0] == Path("/disk/lmstudio/models")


@pytest.mark.parametrize("pointer", [b"", b"relative/path", b"/nul\0byte"])
def test_a_pointer_that_points_nowhere(person: Path, pointer: bytes) -> None:
    (person / ".lmstudio-home-pointer").write_bytes(pointer)

    places = Places.from_environment()

    find_all(places)
    assert places.lmstudio[-2:] == (person / ".lmstudio/models", person / ".cache/lm-studio/models")


def test_what_is_found_can_be_told(home: Home) -> None:
    put(home.models / os.fsdecode(b"\xff.gguf"), STUB)

    json.dumps([str(model.path) for model in find_all(home.places)])
