"""Any text that a person gives as a model: what it means, and what is said where it means nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from mesh_llm.errors import MeshError, ModelError, UsageError
from mesh_llm.models import catalog, names
from mesh_llm.models.catalog import CatalogEntry, HubName, HubSource, UrlSource
from mesh_llm.models.names import Here, Named
from mesh_llm.models.stores import LocalModel, Store

CATALOG = catalog.load()
MODELS, HUB, LMSTUDIO, OLLAMA = Store.MODELS, Store.HUB, Store.LMSTUDIO, Store.OLLAMA


def local(
    name: str, store: Store = MODELS, *, size_bytes: int = 1000, repo: str = "", missing: tuple[str, ...] = ()
) -> LocalModel:
    file = f"{name}.gguf" if store is not OLLAMA else f"sha256-{abs(hash(name)):064x}"
    path = Path("/stores") / store / repo / file
    return LocalModel(
        name=name, path=path, files=(path,), size_bytes=size_bytes, store=store, repo=repo, missing=missing
    )


def resolve(text: str, *found: LocalModel) -> Named:
    return names.resolve(text, catalog=CATALOG, find=lambda: found)


def is_here(text: str, *found: LocalModel) -> Path:
    named = resolve(text, *found)
    assert isinstance(named, Here), named
    return named.path


def refused(text: str, *found: LocalModel) -> MeshError:
    with pytest.raises(MeshError) as caught:
        resolve(text, *found)
    assert "\n" not in caught.value.message
    return caught.value


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, in which there is nothing."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- paths ----------------------------------------------------------------------------------------


def test_paths_are_taken_as_they_are(elsewhere: Path) -> None:
    (elsewhere / "plain").touch()
    (elsewhere / "glm.gguf").touch()
    here = local("plain")

    assert is_here("/data/none.gguf") == Path("/data/none.gguf")
    assert is_here("./x.gguf", local("x")) == Path("x.gguf")
    assert is_here("~/x.gguf") == Path.home() / "x.gguf"
    assert is_here("~no-such-person/x.gguf") == Path("~no-such-person/x.gguf")
    assert is_here("plain", here) == Path("plain")
    assert is_here("glm.gguf") == Path("glm.gguf")


def test_a_folder_does_not_hide_a_name(elsewhere: Path) -> None:
    (elsewhere / "glm-flash").mkdir()

    assert resolve("glm-flash") == CATALOG.find("GLM-4.7-Flash")


def test_a_repository_without_its_prefix(elsewhere: Path) -> None:
    error = refused("unsloth/GLM-4.7-Flash-GGUF:Q4_K_M")

    assert error.message == "there is no file unsloth/GLM-4.7-Flash-GGUF:Q4_K_M"
    assert error.hint == "on Hugging Face it is hf:unsloth/GLM-4.7-Flash-GGUF:Q4_K_M"
    (elsewhere / "unsloth").mkdir()
    (elsewhere / "unsloth" / "GLM").touch()
    assert is_here("unsloth/GLM") == Path("unsloth/GLM")


@pytest.mark.parametrize("text", ["x" * 300, "x" * 300 + ".gguf", "mistaken", "missing.gguf"])
def test_what_is_no_name_is_said(text: str) -> None:
    error = refused(text)

    assert isinstance(error, ModelError)
    assert error.message == f"{text} is neither a file nor a model that mesh-llm knows by name"


@pytest.mark.parametrize("text", ["", "  ", "a\0b"])
def test_what_is_nothing_is_refused(text: str) -> None:
    assert isinstance(refused(text), UsageError)


# -- names of models here -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["Mine-Q4_0", "mine-q4_0", "MINE-Q4_0.GGUF", "Mine-Q4_0-00002-of-00003.gguf"]
)
@pytest.mark.parametrize("store", [MODELS, HUB, LMSTUDIO])
def test_a_file_in_any_store(text: str, store: Store) -> None:
    mine = local("Mine-Q4_0", store)

    assert is_here(text, local("Other"), mine) == mine.path


def test_a_name_of_ollamas() -> None:
    tagged, latest = local("ollama:qwen3:8b", OLLAMA), local("ollama:glm-flash:latest", OLLAMA)

    for text in ("ollama:qwen3:8b", "qwen3:8b", "Ollama:Qwen3:8B"):
        assert resolve(text, tagged, latest) == Here(path=tagged.path)
    for text in ("ollama:glm-flash", "ollama:glm-flash:latest", "glm-flash:latest"):
        assert resolve(text, tagged, latest) == Here(path=latest.path)
    # A bare name is the catalog's.
    assert resolve("glm-flash", tagged, latest) == CATALOG.find("glm-flash")


def test_what_ollama_has_not() -> None:
    missing = refused("ollama:qwen3:9b", local("ollama:qwen3:8b", OLLAMA))
    unlike = refused("ollama:mistral", local("ollama:qwen3:8b", OLLAMA))

    assert missing.message == "ollama:qwen3:9b is not in Ollama's store on this machine"
    assert missing.hint == "did you mean ollama:qwen3:8b?"
    assert unlike.hint == "ollama pull mistral downloads it"


def test_the_beginning_of_a_name() -> None:
    mine, other = local("Mine-7B-Chat-Q4_0"), local("Minette-7B-Q4_0", LMSTUDIO)

    assert is_here("mine", mine, other) == mine.path
    assert is_here("mine-7b", mine, other) == mine.path
    assert is_here("minette", mine, other) == other.path
    assert resolve("mistral-small-3.2") == CATALOG.find("Mistral-Small-3.2-24B")
    assert is_here("llama3.2", local("ollama:llama3.2:3b", OLLAMA)).name.startswith("sha256-")
    assert (
        refused("min", mine, other).hint
        == "mesh-llm models lists the models on this disk, mesh-llm download those to download"
    )


def test_one_name_in_several_stores() -> None:
    ours, theirs = local("Mine-Q4_0", size_bytes=1), local("Mine-Q4_0", LMSTUDIO, size_bytes=2)
    same = local("Mine-Q4_0", HUB, size_bytes=2)

    assert is_here("mine-q4_0", ours, theirs) == ours.path
    assert is_here("mine-q4_0", same, theirs) == same.path


def test_an_ambiguous_name_lists_what_it_may_be() -> None:
    error = refused(
        "mine",
        local("Mine-Q4_0"),
        local("Mine-Q8_0", LMSTUDIO),
        local("ollama:mine:latest", OLLAMA),
        local("Other"),
    )

    assert isinstance(error, ModelError)
    assert error.exit_code == 1
    assert error.message == (
        "mine could be Mine-Q4_0 (models, Q4_0), Mine-Q8_0 (lmstudio, Q8_0) or ollama:mine:latest (ollama)"
    )
    assert error.hint == "name one of them in full, or by its path"


def test_ambiguous_files_of_one_name_are_told_by_their_paths() -> None:
    error = refused(
        "mine-q4_0", local("Mine-Q4_0", HUB, size_bytes=1), local("Mine-Q4_0", LMSTUDIO, size_bytes=2)
    )

    assert error.message == (
        "mine-q4_0 could be /stores/huggingface/Mine-Q4_0.gguf (huggingface, Q4_0) "
        "or /stores/lmstudio/Mine-Q4_0.gguf (lmstudio, Q4_0)"
    )


def test_too_many_candidates_are_counted() -> None:
    error = refused("mine", *(local(f"mine-{index}") for index in range(9)))

    assert error.message.endswith("mine-5 (models) and 3 more")


def test_an_ambiguous_name_of_the_catalog() -> None:
    assert refused("Qwen2.5-Coder").message == (
        "Qwen2.5-Coder could be Qwen2.5-Coder-1.5B, Qwen2.5-Coder-7B or Qwen2.5-Coder-32B"
    )


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("32b", "Qwen3-32B, Qwen2.5-32B or Qwen2.5-Coder-32B"),
        ("gpt-oss", "gpt-oss-20b or gpt-oss-120b"),
        ("qwen3-coder", "Qwen3-Coder-30B-A3B or Qwen3-Coder-Next"),
        ("35b-a3b", "Qwen3.5-35B-A3B or Qwen3.6-35B-A3B"),
        ("glm", "GLM-4.7-Flash, GLM-4.5-Air, GLM-4.7 or GLM-5"),
    ],
)
def test_a_size_or_a_family_lists_what_it_may_mean(text: str, names: str) -> None:
    assert refused(text).message == f"{text} could be {names}"


@pytest.mark.parametrize(
    ("text", "entry"),
    [
        ("qwen3:8b", "Qwen3-8B"),
        ("qwen3:4b", "Qwen3-4B"),
        ("qwen3:30b", "Qwen3-30B-A3B"),
        ("qwen3:30b-a3b", "Qwen3-30B-A3B"),
        ("qwen3-coder:30b", "Qwen3-Coder-30B-A3B"),
        ("qwen3-vl:8b", "Qwen3-VL-8B"),
        ("qwen3-embedding:0.6b", "Qwen3-Embedding-0.6B"),
        ("qwen2.5-coder:7b", "Qwen2.5-Coder-7B"),
        ("qwen3.5:35b", "Qwen3.5-35B-A3B"),
        ("llama3.2:3b", "Llama-3.2-3B"),
        ("LLAMA3.1:8B", "Llama-3.1-8B"),
        ("llama3.3", "Llama-3.3-70B"),
        ("llama3.1:8b-instruct-q4_K_M", "Llama-3.1-8B"),
        ("llama4:scout", "Llama-4-Scout"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("gemma3:4b", "Gemma-3-4B"),
        ("gemma4:e4b", "Gemma-4-E4B"),
        ("gemma4:26b", "Gemma-4-26B-A4B"),
        ("mistral-small3.2:24b", "Mistral-Small-3.2-24B"),
        ("devstral:latest", "Devstral-Small-2-24B"),
        ("granite4:tiny-h", "Granite-4.0-H-Tiny"),
        ("phi4", "Phi-4"),
        ("bge-m3:latest", "BGE-M3"),
        ("smollm2:135m", "smollm2"),
    ],
)
def test_names_as_ollamas_users_write_them(text: str, entry: str) -> None:
    assert resolve(text) == CATALOG.find(entry)
    here = local(CATALOG.find(entry).stem, LMSTUDIO)
    assert is_here(text, here) == here.path


@pytest.mark.parametrize(
    ("text", "error", "hint"),
    [
        ("gpt-oss:latest", "could be gpt-oss-20b or gpt-oss-120b", "name one of them"),
        ("llama3.2", "could be Llama-3.2-1B or Llama-3.2-3B", "name one of them"),
        ("deepseek-r1:8b", "is neither a file nor", "did you mean DeepSeek-V3.2?"),
        ("mixtral:8x7b", "is neither a file nor", "did you mean Ministral-3-8B?"),
        ("llama3.2:4b", "is neither a file nor", "did you mean Llama-3.2-3B, Llama-3.2-1B or"),
        ("nosuch:1b", "is neither a file nor", "mesh-llm models lists"),
    ],
)
def test_tags_of_ollamas_that_the_catalog_has_not(text: str, error: str, hint: str) -> None:
    refusal = refused(text)
    assert refusal.message.startswith(f"{text} {error}")
    assert str(refusal.hint).startswith(hint)


def test_a_tag_of_ollamas_that_names_a_quantisation() -> None:
    listed = CATALOG.find("Llama-3.2-3B")
    assert isinstance(listed.source, HubSource)
    assert resolve("llama3.2:3b-instruct-q8_0") == HubName(repo=listed.source.repo, wanted="Q8_0")
    # One in another quantisation that is here is another one.
    assert resolve("llama3.2:3b-instruct-q4_K_M", local("Llama-3.2-3B-Instruct-Q8_0")) == listed


def test_a_family_is_not_its_next_version() -> None:
    message = refused("qwen3").message

    assert message.startswith("qwen3 could be Qwen3-0.6B, Qwen3-1.7B, Qwen3-4B, ")
    assert "Qwen3.5" not in message
    assert refused("qwen").message.startswith("qwen could be Qwen3.5-0.8B, ")
    assert resolve("coder-32b") == CATALOG.find("Qwen2.5-Coder-32B")
    assert resolve("mistral-small-3") == CATALOG.find("Mistral-Small-3.2-24B")


def test_a_size_means_the_one_model_of_it_that_is_here() -> None:
    here = local("Qwen2.5-32B-Instruct-Q8_0", LMSTUDIO)

    assert is_here("32b", local("Other-7B"), here) == here.path
    assert "could be" in refused("32b", here, local("Mine-32B-Q4_0")).message


def test_the_nearest_is_suggested_from_all_that_there_is() -> None:
    assert refused("mime-q4", local("Mine-Q4")).hint == "did you mean Mine-Q4?"
    assert refused("smolm2", local("Mine-Q4")).hint == "did you mean smollm2?"


def test_a_model_in_part_is_not_here() -> None:
    part = local("Mine-Q4_0", missing=("Mine-Q4_0-00002-of-00002.gguf",))
    known = local("gpt-oss-120b-mxfp4", missing=("gpt-oss-120b-mxfp4-00003-of-00003.gguf",))

    assert refused("mine-q4_0", part).message == (
        "Mine-Q4_0 in /stores/models lacks 1 of its files: Mine-Q4_0-00002-of-00002.gguf"
    )
    assert resolve("gpt-oss-120b", known) == CATALOG.find("gpt-oss-120b")


# -- names of the catalog -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["Qwen2.5-32B", "qwen2.5-32b", "Qwen2.5-32B-Instruct-Q4_K_M", "Qwen2.5-32B-Instruct-Q4_K_M.gguf"],
)
def test_a_model_of_the_catalog_is_downloaded_unless_it_is_here(text: str) -> None:
    entry = CATALOG.find("Qwen2.5-32B")

    assert resolve(text, local("Qwen2.5-3B-Instruct-Q4_K_M")) == entry
    for store in (MODELS, HUB, LMSTUDIO):
        here = local("qwen2.5-32b-instruct-q4_k_m", store)
        assert is_here(text, local("Other"), here) == here.path


def test_another_quantisation_that_is_here_will_do_unless_one_was_named() -> None:
    finer = local("Qwen2.5-32B-Instruct-Q8_0", LMSTUDIO)
    coarser = local("Qwen2.5-32B-Instruct-IQ3_XS")
    published = local("google_gemma-3-27b-it-Q5_K_M")

    assert is_here("qwen2.5-32b", finer) == finer.path
    assert is_here("gemma-3-27b", published) == published.path
    assert resolve("Qwen2.5-32B-Instruct-Q4_K_M", finer) == CATALOG.find("Qwen2.5-32B")
    assert refused("Qwen2.5-32B", finer, coarser).message == (
        "Qwen2.5-32B could be Qwen2.5-32B-Instruct-Q8_0 (lmstudio, Q8_0) "
        "or Qwen2.5-32B-Instruct-IQ3_XS (models, IQ3_XS)"
    )
    base = local("Qwen2.5-32B-Q8_0")
    assert resolve("Qwen2.5-32B-Instruct-Q4_K_M", base) == CATALOG.find("Qwen2.5-32B")


def test_another_quantisation_that_is_not_here_is_in_the_repository() -> None:
    assert resolve("Qwen2.5-32B-Instruct-Q8_0.gguf") == HubName(
        repo="bartowski/Qwen2.5-32B-Instruct-GGUF", wanted="Q8_0"
    )


def test_a_persons_own_name(tmp_path: Path) -> None:
    own = tmp_path / "catalog.toml"
    own.write_text('[mine]\naliases = ["32b"]\nrepo = "me/Mine-GGUF"\nfiles = ["Mine-Q8_0.gguf"]\n')
    mine = catalog.load(own)
    here = local("Mine-Q8_0", HUB)

    assert names.resolve("32B", catalog=mine, find=lambda: []) == mine.find("mine")
    assert names.resolve("mine", catalog=mine, find=lambda: [here]) == Here(path=here.path)


# -- the hub and the web --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("hf:me/Mine-GGUF", HubName(repo="me/Mine-GGUF")),
        ("hf:me/Mine-GGUF:Q8_0", HubName(repo="me/Mine-GGUF", wanted="Q8_0")),
        ("HF:me/Mine-GGUF@v1:Q8_0", HubName(repo="me/Mine-GGUF", wanted="Q8_0", revision="v1")),
        ("https://huggingface.co/me/Mine-GGUF", HubName(repo="me/Mine-GGUF")),
        ("https://hf.co/me/Mine-GGUF/", HubName(repo="me/Mine-GGUF")),
    ],
)
def test_names_that_the_hub_has_to_be_asked_about(text: str, named: HubName) -> None:
    assert resolve(text) == named


@pytest.mark.parametrize(
    ("text", "files"),
    [
        ("hf:me/Mine:mine-Q8_0.gguf", ("mine-Q8_0.gguf",)),
        ("hf:me/Mine/mine-Q8_0.gguf", ("mine-Q8_0.gguf",)),
        ("hf:me/Mine/Q8_0/mine.gguf", ("Q8_0/mine.gguf",)),
        ("hf:me/Mine:Q8_0/mine.gguf", ("Q8_0/mine.gguf",)),
        (
            "hf:me/Mine:Q8_0/mine-00002-of-00003.gguf",
            tuple(f"Q8_0/mine-0000{index}-of-00003.gguf" for index in (1, 2, 3)),
        ),
        ("https://huggingface.co/me/Mine/resolve/main/mine-Q8_0.gguf?download=true", ("mine-Q8_0.gguf",)),
        ("https://huggingface.co/me/Mine/blob/main/Q8_0/mine.gguf", ("Q8_0/mine.gguf",)),
    ],
)
def test_files_of_a_repository(text: str, files: tuple[str, ...]) -> None:
    named = resolve(text)

    assert isinstance(named, CatalogEntry)
    assert named.source == HubSource(repo="me/Mine", files=files)
    assert named.name == catalog.stem_of(files[0].split("/")[-1])


def test_a_revision_is_kept() -> None:
    named = resolve("https://huggingface.co/unsloth/GLM-4.7-Flash-GGUF/resolve/abc/GLM-4.7-Flash-Q4_K_M.gguf")

    assert isinstance(named, CatalogEntry)
    assert isinstance(named.source, HubSource)
    assert named.source.revision == "abc"


@pytest.mark.parametrize(
    "text",
    [
        "hf:unsloth/GLM-4.7-Flash-GGUF",
        "hf:Unsloth/glm-4.7-flash-gguf:q4_k_m",
        "hf:unsloth/GLM-4.7-Flash-GGUF:GLM-4.7-Flash-Q4_K_M.gguf",
        "https://huggingface.co/unsloth/GLM-4.7-Flash-GGUF/resolve/main/GLM-4.7-Flash-Q4_K_M.gguf",
    ],
)
def test_what_the_catalog_lists_too(text: str) -> None:
    here = local("GLM-4.7-Flash-Q4_K_M", HUB)

    assert resolve(text) == CATALOG.find("GLM-4.7-Flash")
    assert is_here(text, here) == here.path


def test_what_came_from_the_hub_before() -> None:
    cached = local("mine-q8_0", HUB, repo="me/Mine-GGUF")
    fetched = local("Mine-Q8_0")
    other = local("Mine-Q8_0", LMSTUDIO, repo="you/Mine-GGUF")

    for text in ("hf:me/Mine-GGUF", "hf:me/Mine-GGUF:Q8_0", "hf:me/Mine-GGUF:mine-Q8_0.gguf"):
        assert is_here(text, cached) == cached.path
        assert is_here(text, fetched) == fetched.path
        assert not isinstance(resolve(text, other), Here)
    assert not isinstance(resolve("hf:me/Mine-GGUF:Q4_0", cached, fetched), Here)
    assert not isinstance(resolve("hf:me/Mine-GGUF@v1:Q8_0", cached, fetched), Here)


def test_an_address_of_a_file() -> None:
    named = resolve("https://example.org/files/mine%20Q8_0.gguf?key=1")
    here = local("mine Q8_0")

    assert isinstance(named, CatalogEntry)
    assert named.source == UrlSource(url="https://example.org/files/mine%20Q8_0.gguf?key=1")
    assert (named.name, named.files) == ("mine Q8_0", ("mine Q8_0.gguf",))
    assert is_here("http://example.org/mine%20Q8_0.gguf", here) == here.path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hf:", "hf: is not of the form hf:OWNER/REPO[:FILE|QUANT]"),
        ("hf:qwen", "hf:qwen is not of the form hf:OWNER/REPO[:FILE|QUANT]"),
        ("hf:a/b:../../x.gguf", "hf:a/b:../../x.gguf is not of the form hf:OWNER/REPO[:FILE|QUANT]"),
        ("hf:a/b:c:d", "hf:a/b:c:d is not of the form hf:OWNER/REPO[:FILE|QUANT]"),
        ("https://", "https:// is not the URL of a .gguf file"),
        ("https://[x/y.gguf", "https://[x/y.gguf is not the URL of a .gguf file"),
        ("https://example.org/model.bin", "https://example.org/model.bin is not the URL of a .gguf file"),
        ("https://a/x-00001-of-00002.gguf", "https://a/x-00001-of-00002.gguf is one file of several"),
    ],
)
def test_forms_that_are_none(text: str, message: str) -> None:
    error = refused(text)

    assert error.message == message
    assert error.hint
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("text", "stem", "is_meant"),
    [
        ("glm-flash", "GLM-4.7-Flash-Q4_K_M", True),
        ("glm-flash", "GLM-4.7-Flash-Q8_0", True),
        ("glm-flash", "Qwen3-8B-Q4_K_M", False),
        ("hf:me/Mine-GGUF:Q8_0", "Mine-Q8_0", True),
        ("hf:me/Mine-GGUF:Q8_0", "Yours-Q8_0", False),
        ("https://example.org/Mine-Q8_0.gguf", "mine-q8_0", True),
    ],
)
def test_whether_a_file_is_what_was_asked_for(text: str, stem: str, is_meant: bool) -> None:
    named = resolve(text)

    assert not isinstance(named, Here)
    assert names.means(named, stem) is is_meant
