"""Models that an owner has served beside the default one, and options that are given for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mesh_llm.config import NodeConfig
from mesh_llm.errors import UsageError
from mesh_llm.local import model_names
from mesh_llm.local.own_settings import version_after
from mesh_llm.mesh_settings import MeshSettings, ModelExtras, ModelSettings
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

    async def _resolve(self, name: str, home: Any) -> Here:
        return Here(path=Path("coder.gguf"))

    async def read(self, path: Path) -> Any:
        return CODER

    async def choose(self, *of: Any) -> ModelExtras:
        return ModelExtras()

    def facts(self, fingerprint: Fingerprint) -> Any:
        return CODER if fingerprint == CODER.fingerprint else None

    def settings(self) -> MeshSettings:
        return self.now

    def change(self, settings: MeshSettings) -> None:
        self.now = version_after(self.now, settings)

    def claim(self) -> None: ...

    def tell(self, event: Any) -> None: ...

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
