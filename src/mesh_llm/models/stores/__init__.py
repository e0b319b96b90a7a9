"""The model files that are on this disk already, whichever program brought them here.

    found = search(Places.from_environment())
    found.models     what can be named to --model; no header has been read yet
    found.skipped    what looked like a model and is none, with the reason

Every store is read as hostile input: names, manifests and links may be made to mislead. So nothing is
opened but regular files, every walk is bounded, and of a manifest only a digest of 64 hexadecimal
digits is believed.

    search   every store in turn; what several of them hold is listed once
    places   where each store lies
    reading  one store being read: folders, files, what is left out and why
    files    GGUF files in a folder: shards put together, projectors left out
    hub      the Hugging Face cache
    ollama   Ollama's store
    local    a model on this disk
"""

from mesh_llm.models.stores.local import Found, LocalModel, Skipped, Store
from mesh_llm.models.stores.ollama import blob_title
from mesh_llm.models.stores.places import Places
from mesh_llm.models.stores.search import find_all, search

__all__ = ["Found", "LocalModel", "Places", "Skipped", "Store", "blob_title", "find_all", "search"]
