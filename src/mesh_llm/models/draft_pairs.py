"""Which small model guesses ahead for a large one: as the catalog pairs them.

Nothing here reads a file. That the two share their vocabulary is the catalog's word, and is checked
against the files themselves before they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mesh_llm.models.catalog import Catalog, CatalogEntry, stem_of
from mesh_llm.models.names import copy_of, is_kin, same_model
from mesh_llm.models.stores import LocalModel


def paired(model_path: Path, catalog: Catalog, found: Sequence[LocalModel]) -> LocalModel | None:
    """The draft that belongs to the model in this file, if it is on this disk, in whichever store.

    The model is known by its file's name, or by what its store calls it, and a file of another
    quantisation is the same model. Of the draft the catalog's own file comes first, else the
    smallest of its other quantisations.
    """
    model = next((each for each in found if model_path in each.files), None)
    entry = _entry_of(model_path, model, catalog)
    draft = wanted_draft(entry, catalog) if entry is not None else None
    if draft is None:
        return None
    small = [each for each in found if not each.missing and _is_smaller(each, model)]
    kin = sorted((each for each in small if is_kin(each, draft)), key=lambda each: each.size_bytes)
    return copy_of(draft, small) or next(iter(kin), None)


def wanted_draft(entry: CatalogEntry, catalog: Catalog) -> CatalogEntry | None:
    """What `mesh-llm download --draft` brings beside the entry's own files."""
    return catalog.get(entry.draft) if entry.draft is not None else None


def _entry_of(path: Path, model: LocalModel | None, catalog: Catalog) -> CatalogEntry | None:
    names = [stem_of(path.name)]
    if model is not None:
        # Ollama has NAME:TAG, where the tag is mostly the size: qwen2.5:32b.
        names += [*model.names, model.title.replace(":", "-")]
    for name in names:
        if (entry := catalog.get(name)) is not None:
            return entry
    return next((entry for entry in catalog for name in names if same_model(name, entry.stem)), None)


def _is_smaller(draft: LocalModel, model: LocalModel | None) -> bool:
    return model is None or (draft.path != model.path and draft.size_bytes < model.size_bytes)
