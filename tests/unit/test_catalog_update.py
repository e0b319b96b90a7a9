"""A catalog that somebody else signs: what is taken, and what is refused."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from mesh_llm.errors import MeshError, ModelError, UsageError
from mesh_llm.home import Home
from mesh_llm.local import catalog_update
from mesh_llm.models import catalog
from mesh_llm.transport.identity import Identity

MAKER, OTHER = Identity.from_secret(b"m" * 32), Identity.from_secret(b"o" * 32)
LIST = b"""
[tomorrow]
aliases = ["next"]
repo = "maker/Tomorrow-GGUF"
files = ["Tomorrow-Q4_K_M.gguf"]
size_bytes = 5_000_000_000
layers = 32

[gpt-oss-20b]
repo = "maker/better-gpt-oss"
files = ["better-Q8_0.gguf"]
draft = "tomorrow"
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def signed(folder: Path, data: bytes = LIST, maker: Identity = MAKER) -> str:
    path = folder / "signed.toml"
    path.write_bytes(catalog_update.sign(data, maker))
    return str(path)


async def test_what_the_key_has_signed_stands_before_ours(home: Home, tmp_path: Path) -> None:
    source, entries = await catalog_update.update(home, signed(tmp_path), MAKER.id)

    assert [entry.name for entry in entries] == ["tomorrow", "gpt-oss-20b"]
    assert catalog_update.source(home) == source
    listing = catalog.load(*home.catalog_files)
    assert listing.find("next").name == "tomorrow"
    assert str(listing.find("gpt-oss-20b").source) == "hf:maker/better-gpt-oss:better-Q8_0.gguf"
    assert len(listing) == len(catalog.load()) + 1
    # A person's own comes before both.
    home.catalog_file.write_text('[tomorrow]\nrepo = "me/mine"\nfiles = ["mine.gguf"]\n')
    assert str(catalog.load(*home.catalog_files).find("tomorrow").source) == "hf:me/mine:mine.gguf"
    assert catalog_update.reset(home)
    assert not catalog_update.reset(home)
    assert catalog.load(home.catalog_update_file).get("next") is None
    assert catalog_update.source(home) is None


async def test_the_next_time_the_same_place_and_key_are_meant(home: Home, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        await catalog_update.update(home, None, None)
    await catalog_update.update(home, f"file://{signed(tmp_path)}", MAKER.id)
    signed(tmp_path, LIST.replace(b"next", b"later"))

    await catalog_update.update(home, None, None)

    assert catalog.load(*home.catalog_files).get("later") is not None
    signed(tmp_path, LIST, OTHER)
    with pytest.raises(ModelError):
        await catalog_update.update(home, None, None)
    assert catalog.load(*home.catalog_files).get("later") is not None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda data: data.replace(b"Tomorrow-GGUF", b"Tomorrow-GGUG"), "was not signed with the key"),
        (lambda data: data + b"\n", "was not signed with the key"),
        (lambda data: data.replace(b"signed: ", b"signed: A", 1), "is not a signed catalog"),
        (lambda data: data.split(b"\n", 1)[1], "is not a signed catalog"),
        (lambda data: b"", "is not a signed catalog"),
        (lambda data: data + b" " * (1 << 20), "is larger than 1 MB"),
    ],
)
async def test_what_was_altered_is_refused(home: Home, tmp_path: Path, change: object, words: str) -> None:
    path = Path(signed(tmp_path))
    assert callable(change)
    path.write_bytes(change(path.read_bytes()))

    with pytest.raises(ModelError, match=words):
        await catalog_update.update(home, str(path), MAKER.id)

    assert not home.catalog_update_file.exists()


async def test_another_key_is_refused(home: Home, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="was not signed with the key"):
        await catalog_update.update(home, signed(tmp_path, maker=OTHER), MAKER.id)
    for key in ("", "abc", "z" * 64, MAKER.id[:-1]):
        with pytest.raises(MeshError):
            await catalog_update.update(home, signed(tmp_path), key)


@pytest.mark.parametrize(
    "text",
    [
        b"[x",
        b"[x]\nrepo = 1\n",
        LIST.replace(b"tomorrow", b"nobody", 1),
        b"\xff",
        b'["a\\u001b[2J"]\nrepo = "a/b"\nfiles = ["x.gguf"]\n',
        b'[a]\nrepo = "a/b"\nfiles = ["x.gguf"]\nquantisations = ["\\u001b[2J"]\n',
    ],
)
async def test_a_signature_over_nonsense_does_not_help(home: Home, tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ModelError):
        catalog_update.sign(text, MAKER)
    signature = base64.urlsafe_b64encode(MAKER.sign(b"mesh-llm catalog 1\0" + text)).rstrip(b"=")
    path = tmp_path / "signed.toml"
    path.write_bytes(b"# mesh-llm catalog, signed: " + signature + b"\n" + text)

    with pytest.raises(ModelError):
        await catalog_update.update(home, str(path), MAKER.id)

    assert not home.catalog_update_file.exists()


@pytest.mark.parametrize("url", ["http://localhost/catalog.toml", "ftp://localhost/c", "https://", "data:,x"])
async def test_only_https_and_files(home: Home, url: str) -> None:
    with pytest.raises(UsageError, match="is neither an https:// address nor a file"):
        await catalog_update.update(home, url, MAKER.id)


async def test_a_file_that_is_not_there(home: Home, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read"):
        await catalog_update.update(home, str(tmp_path / "none"), MAKER.id)
