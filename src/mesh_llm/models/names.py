"""Any text that a person gives as a model, as a file here or as something to download.

`resolve` asks in this order, and the first that knows the text decides:

1.  `hf:OWNER/REPO[@REVISION][:FILE|QUANT]`, an https:// address of a .gguf file (or of a repository
    on Hugging Face) and `ollama:NAME[:TAG]` mean what they say. Where such a file is here already,
    it is that file.
2.  A path: whatever has a slash or begins with ~, and a file of that name in the current folder.
    It is taken as it is; whoever opens it says what is wrong with it.
3.  The full name of a model on this disk, in whichever store: its file's name, or Ollama's NAME:TAG.
    One in the models folder goes before the same name elsewhere.
4.  A name of the catalog: an entry's own, an alias, its file's, and all of these as Ollama's users
    write them: llama3.2:3b is Llama-3.2-3B. It means the entry's file, if that is here in any store;
    else, unless the text named a quantisation, the same model in the one other quantisation that is
    here; else what is to be downloaded. The name of an entry's file in another quantisation is one
    more: the entry's repository has it.
5.  The beginning of a name, up to a hyphen, a dot or the like, if only one model begins so:
    among those on this disk, and where none does, among those of the catalog. Parts of a name, such
    as 32b or coder-32b, likewise.

Names are compared whatever their case, with or without .gguf and the number of a shard. A model of
which files are missing is not here. A name that means several models is refused with all of them, one
that means none with the nearest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from urllib.parse import SplitResult, unquote, urlsplit

from mesh_llm.errors import ModelError, UsageError
from mesh_llm.frozen import frozen
from mesh_llm.models.catalog import (
    Catalog,
    CatalogEntry,
    HubName,
    HubSource,
    UrlSource,
    either,
    is_address,
    is_model_file,
    key_of,
    quantisation_of,
    stem_of,
    unlisted,
)
from mesh_llm.models.stores import LocalModel, Store

_HUB_HOSTS = frozenset({"huggingface.co", "www.huggingface.co", "hf.co"})
_HUB_NAME = re.compile(
    r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?(?::(?P<wanted>[^:\s][^:]*))?", re.ASCII
)
_FILE_SLASH = re.compile(r"^([\w.-]+/[\w.-]+)/", re.ASCII)
_SHARDS = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_SHARD_LIMIT = 1000
_PUBLISHER = re.compile(r"(?:[a-z0-9.-]+_|meta-)")
"""Before the names of files that say whose model it is: google_gemma-3-27b-it-Q4_K_M.gguf."""
_HYPHENS = "[-_: ]"
"""Between the parts of a name; Ollama's are written family:size."""
_SEPARATORS = ("-", ".", "_", ":", "@", " ")
_SHOWN = 6
_FAMILY_CHARS = 4
"""Of the beginning of a family's name, such as qwen."""
_OLLAMA = "ollama:"
_LATEST = ":latest"


@frozen
class Here:
    """A file on this disk; of a path that a person gave it is not known whether there is one."""

    path: Path


Named = Here | CatalogEntry | HubName
"""A file, something to download, or something that the hub has to be asked about first."""

Find = Callable[[], Sequence[LocalModel]]
"""The models on this disk, the models folder's first."""


def resolve(text: str, *, catalog: Catalog, find: Find) -> Named:
    """What `text` names. Raises ModelError where it names nothing, or too much."""
    if not text.strip() or "\0" in text:
        raise UsageError("the name of the model is empty")
    names = _Names(catalog=catalog, find=find)
    scheme = text.lower()
    if scheme.startswith("hf:"):
        return names.on_hub(parse_hub(text))
    if scheme.startswith(("https://", "http://")):
        return names.at_url(text)
    if scheme.startswith(_OLLAMA):
        return names.of_ollama(text)
    if (path := _path(text)) is not None:
        _check_path(path, text)
        return Here(path=path)
    return names.by_name(text)


def tagged(text: str, catalog: Catalog) -> CatalogEntry | None:
    """The entry that Ollama's users call so: llama3.2:3b, gemma3:4b-it-q4_K_M, phi4."""
    key = key_of(text).removesuffix(_LATEST)
    names = ((entry, name) for entry in catalog for name in _names_of(entry))
    return next((entry for entry, name in names if _rest(key, name) == ""), None)


def means(named: CatalogEntry | HubName, stem: str) -> bool:
    """Whether a file of that name may be what was asked for, be it in another quantisation."""
    if isinstance(named, CatalogEntry):
        return same_model(named.stem, stem)
    return same_model(_repo_stem(named), stem)


def parse_hub(text: str) -> HubName:
    """hf:OWNER/REPO[@REVISION][:FILE|QUANT], or with a slash before the file, as in an address."""
    found = _HUB_NAME.fullmatch(_FILE_SLASH.sub(r"\1:", text[len("hf:") :]))
    if found is None or (found["wanted"] and ".." in PurePosixPath(found["wanted"]).parts):
        raise UsageError(
            f"{text} is not of the form hf:OWNER/REPO[:FILE|QUANT]",
            hint="such as hf:unsloth/GLM-4.7-Flash-GGUF:Q4_K_M",
        )
    return HubName(repo=found["repo"], wanted=found["wanted"], revision=found["revision"] or "main")


def parse_url(url: str) -> CatalogEntry | HubName:
    """An address of a .gguf file; those of Hugging Face as what the hub calls them."""
    parts = urlsplit(url) if is_address(url) else SplitResult("", "", "", "", "")
    if parts.hostname in _HUB_HOSTS and (named := _hub_address(parts)) is not None:
        return named
    if not parts.hostname or not is_model_file(unquote(parts.path)):
        raise UsageError(
            f"{url} is not the URL of a .gguf file",
            hint="models on Hugging Face can be named as hf:OWNER/REPO[:FILE|QUANT], too",
        )
    if _SHARDS.search(unquote(parts.path)):
        raise UsageError(
            f"{url} is one file of several",
            hint="a multi-file model can be named as hf:OWNER/REPO:FILE, or by an entry in "
            "~/.mesh-llm/catalog.toml",
        )
    return unlisted(UrlSource(url=url))


def _hub_address(parts: SplitResult) -> HubName | None:
    """owner/repo, or owner/repo/(resolve|blob)/revision/file"""
    match unquote(parts.path).strip("/").split("/"):
        case [owner, repo]:
            return HubName(repo=f"{owner}/{repo}")
        case [owner, repo, "resolve" | "blob" | "raw", revision, *file] if file:
            return HubName(repo=f"{owner}/{repo}", revision=revision, wanted="/".join(file))
        case _:
            return None


def _exact(named: HubName) -> CatalogEntry | None:
    """Where the files are named, nobody has to be asked for them."""
    if named.wanted is None or not named.wanted.lower().endswith(".gguf"):
        return None
    return unlisted(HubSource(repo=named.repo, files=_shards(named.wanted), revision=named.revision))


def _shards(file: str) -> tuple[str, ...]:
    """All files of the model that `file` is one of."""
    found = _SHARDS.search(file)
    if found is None or not 1 <= int(found[1]) <= int(found[2]) <= _SHARD_LIMIT:
        return (file,)
    stem, count = file[: found.start()], found[2]
    return tuple(f"{stem}-{index:05d}-of-{count}.gguf" for index in range(1, int(count) + 1))


def _path(text: str) -> Path | None:
    path = Path(text)
    with suppress(RuntimeError):  # ~NAME, and nobody is called so
        path = path.expanduser()
    if "/" in text or text.startswith("~"):
        return path
    try:
        return path if path.exists() and not path.is_dir() else None
    except OSError:
        return None  # longer than names of files may be


def _check_path(path: Path, text: str) -> None:
    """What looks like a repository and is no file was meant as one."""
    if _HUB_NAME.fullmatch(text) and not text.lower().endswith(".gguf") and not text.startswith("."):
        with suppress(OSError):
            if not path.exists():
                raise ModelError(f"there is no file {text}", hint=f"on Hugging Face it is hf:{text}")


# -- names ----------------------------------------------------------------------------------------


@frozen
class _Names:
    catalog: Catalog
    find: Find

    def on_hub(self, named: HubName) -> Named:
        listed = [entry for entry in self.catalog if _is_of(entry, named)]
        if len(listed) == 1:
            return self._entry(listed[0], exactly=named.wanted is not None)
        if named.revision == "main":
            local = [model for model in self._whole() if _is_copy(model, named)]
            if found := _one(str(named), local):
                return found
        return _exact(named) or named

    def at_url(self, url: str) -> Named:
        named = parse_url(url)
        return self.on_hub(named) if isinstance(named, HubName) else self._copy(named) or named

    def of_ollama(self, text: str) -> Here:
        models = [model for model in self._whole() if any(_is_ollama(name) for name in model.names)]
        key = key_of(text)
        for model in models:
            if key in {key_of(name) for name in _spellings(model)}:
                return _here(model)
        names = [name for model in models for name in model.names if _is_ollama(name)]
        wanted = text[len(_OLLAMA) :]
        raise ModelError(
            f"{text} is not in Ollama's store on this machine",
            hint=Catalog(()).nearest(text, names) or f"ollama pull {wanted} downloads it",
        )

    def by_name(self, text: str) -> Named:
        key = key_of(stem_of(text))
        whole = self._whole()
        exact = [model for model in whole if key in {key_of(name) for name in _spellings(model)}]
        if found := _one(text, exact):
            return found
        key = key.removesuffix(_LATEST)
        if (entry := self.catalog.get(text) or self.catalog.get(stem_of(text))) is not None:
            return self._entry(entry, exactly=key == key_of(entry.stem))
        if (entry := tagged(key, self.catalog)) is not None:
            return self._entry(entry, exactly=bool(quantisation_of(key)))
        if (other := self._other_quantisation(text)) is not None:
            return other
        begun = [model for model in whole if _begins(key, _spellings(model))]
        parted = [model for model in whole if any(_has_parts(key, name) for name in _spellings(model))]
        if found := _one(text, begun) or _one(text, parted):
            return found
        for entries in self._likely(key):
            if len(entries) > 1:
                raise _ambiguous(text, [entry.name for entry in entries])
            if entries:
                return self._entry(entries[0], exactly=False)
        raise self._unknown(text, key)

    def _likely(self, key: str) -> Iterator[list[CatalogEntry]]:
        """Entries that begin so, where 3 is not 3.5; those with all its parts, as 32b; whole families."""
        begun = [entry for entry in self.catalog if _begins(key, (entry.name, *entry.aliases, entry.stem))]
        yield [entry for entry in begun if not re.match(r"\.\d", _rest(key, entry.name) or "")]
        yield begun
        yield [entry for entry in self.catalog if _has_parts(key, entry.name)]
        family = [entry for entry in self.catalog if key_of(entry.name).startswith(key)]
        yield family if len(family) > 1 and len(key) >= _FAMILY_CHARS else []

    def _other_quantisation(self, text: str) -> HubName | None:
        """An entry's model, of which the text names a file that the catalog does not."""
        quantisation, bare = quantisation_of(stem_of(text)), _bare(stem_of(text))
        for entry in self.catalog if quantisation else ():
            called = any(_rest(bare, _bare(name)) == "" for name in _names_of(entry))
            if called and isinstance(entry.source, HubSource):
                return HubName(repo=entry.source.repo, wanted=quantisation, revision=entry.source.revision)
        return None

    def _entry(self, entry: CatalogEntry, *, exactly: bool) -> Named:
        """The entry's file where it is here; unless `exactly` that is meant, another quantisation of it."""
        if found := self._copy(entry):
            return found
        kin = [model for model in self._whole() if is_kin(model, entry)] if not exactly else []
        return _one(entry.name, kin) or entry

    def _copy(self, entry: CatalogEntry) -> Here | None:
        copy = copy_of(entry, self._whole())
        return _here(copy) if copy is not None else None

    def _whole(self) -> list[LocalModel]:
        return [model for model in self.find() if not model.missing]

    def _unknown(self, text: str, key: str) -> ModelError:
        found = self.find()
        for model in found:
            if model.missing and key in {key_of(name) for name in model.names}:
                return ModelError(
                    f"{model.name} in {model.path.parent} lacks {len(model.missing)} of its files: "
                    f"{_listed(model.missing)}",
                    hint="put them beside it, or download it again",
                )
        return self.catalog.unknown(text, [name for model in found for name in model.names])


# -- models on this disk --------------------------------------------------------------------------


def copy_of(entry: CatalogEntry, found: Iterable[LocalModel]) -> LocalModel | None:
    """The entry's own file, in whichever store it is."""
    key = key_of(entry.stem)
    return next((model for model in found if not model.missing and key in map(key_of, model.names)), None)


def is_kin(model: LocalModel, entry: CatalogEntry) -> bool:
    """Whether it is the entry's model, be it in another quantisation."""
    return any(same_model(name, entry.stem) for name in model.names)


def same_model(stem: str, other: str) -> bool:
    """Whether files of these names differ in no more than quantisation and publisher."""
    one, two = _bare(stem), _bare(other)
    return one == two or _unpublished(one) == two or one == _unpublished(two)


def _unpublished(bare: str) -> str:
    found = _PUBLISHER.match(bare)
    return bare[found.end() :] if found else bare


def _bare(stem: str) -> str:
    """A name without its quantisation."""
    quantisation = quantisation_of(stem)
    return key_of(stem[: -len(quantisation)].rstrip("-._") if quantisation else stem)


def _is_of(entry: CatalogEntry, named: HubName) -> bool:
    source = entry.source
    if not isinstance(source, HubSource) or source.revision != named.revision:
        return False
    if source.repo.casefold() != named.repo.casefold():
        return False
    wanted = (named.wanted or entry.quantisation).casefold()
    return wanted in {entry.quantisation.casefold(), *(file.casefold() for file in source.files)}


def _is_copy(model: LocalModel, named: HubName) -> bool:
    """Whether it came from there; in the models folder it has its name alone to say so."""
    same = model.repo.casefold() == named.repo.casefold()
    if not same and model.store is not Store.MODELS:
        return False
    if named.wanted is not None and named.wanted.lower().endswith(".gguf"):
        return key_of(model.name) == key_of(stem_of(PurePosixPath(named.wanted).name))
    if named.wanted is not None and quantisation_of(model.name).casefold() != named.wanted.casefold():
        return False
    return same or _bare(model.name) == key_of(_repo_stem(named))


def _repo_stem(named: HubName) -> str:
    """Repositories of GGUF files are called as the model is, their files as it and its quantisation."""
    return re.sub(r"[-_.]?gguf$", "", named.repo.split("/")[1], flags=re.IGNORECASE)


def _is_ollama(name: str) -> bool:
    return name.startswith(_OLLAMA)


def _spellings(model: LocalModel) -> list[str]:
    """Every way in which its names may be written."""
    spelt = list(model.names)
    for name in model.names:
        if _is_ollama(name):
            spelt += [name.removeprefix(_OLLAMA), name.removesuffix(_LATEST)]
    return spelt


def _has_parts(key: str, name: str) -> bool:
    """Whether all parts of it are parts of the name: 32b, coder-32b."""
    return len(key) > 1 and _parts(key) <= _parts(name)


def _parts(name: str) -> set[str]:
    return set(re.split(r"[-_: ]", key_of(name)))


def _begins(key: str, names: Iterable[str]) -> bool:
    return any((_rest(key, name) or "").startswith(_SEPARATORS) for name in names)


def _rest(key: str, name: str) -> str | None:
    """What follows the key in a name, wherever its hyphens are; None where that does not begin so."""
    signs = re.sub(_HYPHENS, "", key)
    found = re.match(f"{_HYPHENS}*".join(map(re.escape, signs)), key_of(name))
    return key_of(name)[found.end() :] if found and signs else None


def _names_of(entry: CatalogEntry) -> tuple[str, ...]:
    unpublished = f"{_unpublished(_bare(entry.stem))}-{quantisation_of(entry.stem)}"
    return (entry.name, *entry.aliases, entry.stem, unpublished)


def _here(model: LocalModel) -> Here:
    return Here(path=model.path)


def _one(text: str, models: Sequence[LocalModel]) -> Here | None:
    """The only one of these models, the models folder's before others of that name."""
    named: dict[str, list[LocalModel]] = {}
    for model in models:
        named.setdefault(key_of(model.name), []).append(model)
    left = [each for copies in named.values() for each in _preferred(copies)]
    if len(left) > 1:
        raise _ambiguous(text, [_described(model, twice=len(named) < len(left)) for model in left])
    return _here(left[0]) if left else None


def _preferred(copies: Sequence[LocalModel]) -> Sequence[LocalModel]:
    """Of files with one name: those in the models folder, and one of those that are alike."""
    chosen = [model for model in copies if model.store is Store.MODELS] or copies
    return [*{model.size_bytes: model for model in reversed(chosen)}.values()][::-1]


def _described(model: LocalModel, *, twice: bool) -> str:
    about = [str(model.store)]
    if quantisation := quantisation_of(model.name):
        about.append(quantisation)
    return f"{model.path if twice else model.name} ({', '.join(about)})"


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    return f"{', '.join(names[:_SHOWN])} and {more} more" if more > 0 else ", ".join(names)


def _ambiguous(text: str, candidates: Sequence[str]) -> ModelError:
    more = len(candidates) - _SHOWN
    shown = f"{_listed(candidates)}" if more > 0 else either(list(candidates))
    return ModelError(f"{text} could be {shown}", hint="name one of them in full, or by its path")
