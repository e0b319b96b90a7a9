"""What a run says of itself, as lines for people."""

from __future__ import annotations

from mesh_llm.agents import snippets
from mesh_llm.agents.config_files import Endpoint, as_typed


def of_api(model: str, url: str, *, key_needed: bool = False) -> dict[str, str]:
    """By the kind of event."""
    endpoint = Endpoint(url=as_typed(url), model=model, key_needed=key_needed)
    pi, goose = snippets.lines_at_start(endpoint)
    return {"api": f"API ready at {endpoint.url}", "agent": pi, "agent-goose": goose}
