"""Models that an owner has served beside the default one, and options that are given for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.defaults import DRAFT_MAX
from mesh_llm.errors import ModelError, UsageError
from mesh_llm.local import draft_model, model_names
from mesh_llm.local.own_settings import version_after
from mesh_llm.mesh_settings import Adapter, MeshSettings, ModelExtras, ModelSettings, SideFile
from mesh_llm.models.names import Here
from mesh_llm.node.model_control import ModelControl
from mesh_llm.types import Fingerprint
from tests.support import planning

CODER = planning.model(files=(Path("coder.gguf"),), fingerprint=Fingerprint("c" * 64))


class Owner:
    """All that changing settings needs of a node that has the coder's file."""

    is_owner = True

    def __init__(self, home: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = planning.settings(context=4096)
        parts: Any = self
        self.offers = self.side_files = self
        self.drafts: dict[Fingerprint, Path | None] = {}
        self.has_file = True
        self.control = ModelControl(
            config=NodeConfig(home=home, no_draft=True, **options),
            joining=parts,
            mesh=parts,
            model_files=parts,
            offers=parts,
            announcements=parts,
            progress=parts,
            on_change=lambda: None,
            service=lambda fingerprint: None,
        )
        monkeypatch.setattr(model_names, "resolve", self._resolve)
        monkeypatch.setattr(draft_model, "vocabularies_differ", self._vocabularies_differ)

    async def _resolve(self, name: str, home: Any) -> Here:
        return Here(path=Path(name))

    async def _vocabularies_differ(self, model: Path, draft: Path) -> str | None:
        return "it has 512 tokens" if draft.stem == "other" else None

    async def read(self, path: Path) -> Any:
        return CODER

    async def look(self, path: Path) -> Any:
        return planning.model(files=(path,), fingerprint=Fingerprint(path.stem))

    def files(self, fingerprint: Fingerprint) -> Any:
        return CODER.files if self.has_file and fingerprint == CODER.fingerprint else None

    async def choose(self, model: Any, config: NodeConfig) -> ModelExtras:
        named = (
            (SideFile(name=path.stem, size_bytes=1, digest=path.stem), scale) for path, scale in config.lora
        )
        return ModelExtras(adapters=tuple(Adapter(file=file, scale=scale) for file, scale in named))

    def facts(self, fingerprint: Fingerprint) -> Any:
        return CODER if fingerprint == CODER.fingerprint else None

    def settings(self) -> MeshSettings:
        return self.now

    def change(self, settings: MeshSettings) -> None:
        self.now = version_after(self.now, settings)

    def claim(self) -> None: ...

    def tell(self, event: Any = None) -> None: ...

    @property
    def coder(self) -> ModelSettings:
        return self.now.others[0]


async def test_options_of_the_command_line_hold_for_every_model_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"more_models": ("coder.gguf",), "alias": "ours", "lora": ()}
    owner = Owner(tmp_path, monkeypatch, context=512, slots=2, temp=0.5, **more)
    await owner.control.load_named()
    assert (owner.coder.alias, owner.coder.context, owner.coder.slots, owner.coder.temp) == (
        "coder",
        512,
        2,
        0.5,
    )


@pytest.mark.parametrize("name", ["coder", "coder.gguf"])
async def test_a_model_that_is_served_gets_the_options_that_are_given(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were it named by its name or by its file; the others are left as they are."""
    owner = Owner(tmp_path, monkeypatch)
    await owner.control.load({"name": "coder.gguf", "options": {"context": 512, "slots": 2}})
    await owner.control.load({"name": name})
    assert (owner.coder.context, owner.coder.slots, owner.now.version) == (512, 2, 2)
    await owner.control.load({"name": name, "options": {"slots": 3}})
    assert (owner.coder.context, owner.coder.slots, owner.now.version) == (512, 3, 3)


async def test_layers_have_to_be_those_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(tmp_path, monkeypatch)
    layers = {"layers": (("one", 0, 30),)}
    with pytest.raises(UsageError, match="--layers gives 30 layers, the model has 40"):
        await owner.control.load({"name": "coder.gguf", "options": layers})
    await owner.control.load({"name": "coder.gguf"})
    with pytest.raises(UsageError, match="the model has 40"):
        await owner.control.load({"name": "coder", "options": layers})
    assert owner.coder.layers is None


def drafting(model: ModelSettings) -> tuple[bool, str | None, int]:
    return model.guess, model.draft.name if model.draft is not None else None, model.draft_max


async def test_a_model_is_loaded_with_a_draft_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--no-draft of the command line is for those that are given none."""
    owner = Owner(tmp_path, monkeypatch)
    await owner.control.load({"name": "coder.gguf", "draft": "small.gguf", "draft_max": 5})
    assert drafting(owner.coder) == (True, "small", 5)
    assert owner.drafts == {"small": Path("small.gguf")}
    assert drafting(owner.now) == drafting(planning.settings())


async def test_a_served_model_gets_another_draft_and_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(tmp_path, monkeypatch)
    await owner.control.load({"name": "coder.gguf"})
    assert drafting(owner.coder) == (False, None, DRAFT_MAX)
    seen = []
    for asked in (
        {"draft": "small.gguf"},
        {"draft_max": 3},
        {"options": {"context": 512}},
        {"draft": "smaller.gguf"},
        {"no_draft": True},
    ):
        await owner.control.load({"name": "coder", **asked})
        seen.append(drafting(owner.coder))
    assert seen == [
        (True, "small", DRAFT_MAX),
        (True, "small", 3),
        (True, "small", 3),
        (True, "smaller", 3),
        (False, None, DRAFT_MAX),
    ]
    assert owner.coder.context == 512


async def test_what_a_draft_takes_follows_the_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(tmp_path, monkeypatch)
    await owner.control.load({"name": "coder.gguf", "draft": "small.gguf", "options": {"slots": 1}})
    one = owner.coder.draft
    await owner.control.load({"name": "coder", "options": {"slots": 8}})
    assert one is not None
    assert owner.coder.draft is not None
    assert (owner.coder.draft.name, owner.coder.slots) == ("small", 8)
    assert owner.coder.draft.compute_bytes > one.compute_bytes


async def test_a_draft_that_does_not_fit_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(tmp_path, monkeypatch)
    await owner.control.load({"name": "coder.gguf", "draft": "small.gguf"})
    before = owner.now
    with pytest.raises(ModelError, match="other cannot draft for coder: it has 512 tokens"):
        await owner.control.load({"name": "coder", "draft": "other.gguf", "options": {"context": 512}})
    owner.has_file = False
    with pytest.raises(ModelError, match="coder is not on this machine"):
        await owner.control.load({"name": "coder", "draft": "smaller.gguf"})
    assert owner.now == before
    await owner.control.load({"name": "coder", "options": {"slots": 3}})
    assert (owner.coder.slots, owner.coder.draft) == (3, before.others[0].draft)


async def test_a_model_has_adapters_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Owner(tmp_path, monkeypatch)
    style, tone = (tmp_path / name for name in ("style.gguf", "tone.gguf"))
    style.touch()
    tone.touch()
    await owner.control.load({"name": "coder.gguf", "lora": [{"path": str(style)}]})
    assert [(each.file.name, each.scale) for each in owner.coder.adapters] == [("style", 1.0)]
    await owner.control.load({"name": "coder", "options": {"context": 512}, "lora": []})
    assert [each.file.name for each in owner.coder.adapters] == ["style"]
    await owner.control.load({"name": "coder", "lora": [{"path": str(tone), "scale": 0.5}]})
    assert [(each.file.name, each.scale) for each in owner.coder.adapters] == [("tone", 0.5)]
    assert owner.now.adapters == ()


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"draft": ""}, "--draft is empty"),
        ({"draft": 7}, "load.draft: not a text"),
        ({"draft": "small.gguf", "no_draft": True}, "--no-draft disables speculative decoding"),
        ({"draft_max": 0}, "--draft-max 0 is not between 1 and"),
        ({"draft_max": "3"}, "load.draft_max: not a whole number"),
        ({"lora": "style.gguf"}, "load.lora: not a list"),
        ({"lora": [{"path": "nowhere.gguf"}]}, "--lora nowhere.gguf: there is no such file"),
        ({"lora": [{"path": "nowhere.gguf", "scale": "1"}]}, "load.lora.scale: not a number"),
    ],
)
async def test_drafts_and_adapters_that_make_no_sense(
    asked: dict[str, Any], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = Owner(tmp_path, monkeypatch)
    with pytest.raises(UsageError, match=sentence):
        await owner.control.load({"name": "coder.gguf", **asked})
    assert owner.now.others == ()
