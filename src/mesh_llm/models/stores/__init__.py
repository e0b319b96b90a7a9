"""The model files that are on this disk already, whichever program brought them here.

    found = search(Places.from_environment())
    found.models     what can be named to --model; no header has been read yet
    found.skipped    what looked like a model and is none, with the reason

`find_all` is the first of these alone. Every store is read as anybody's: names,
manifests and links may have been made to mislead, so that nothing is opened but
regular files, no walk goes on forever, and of a manifest only a digest is
believed that is made of 64 hexadecimal digits.
"""

from mesh_llm.models.stores.local import Found, LocalModel, Skipped, Store
from mesh_llm.models.stores.ollama import blob_title
from mesh_llm.models.stores.places import Places
from mesh_llm.models.stores.search import find_all, search

__all__ = ["Found", "LocalModel", "Places", "Skipped", "Store", "blob_title", "find_all", "search"]
