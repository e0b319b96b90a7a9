"""What a run says of itself, as lines for people."""

from __future__ import annotations

from mesh_llm.types import ModelFacts


def of_model(facts: ModelFacts) -> str:
    return (
        f"Model {facts.name}: {facts.quantisation}, {facts.weight_bytes / 1e9:.1f} GB, "
        f"{len(facts.layers)} layers, context {facts.context_trained}"
    )


def of_api(model: str, url: str) -> dict[str, str]:
    """By the kind of event."""
    url = url.replace("//127.0.0.1:", "//localhost:")
    return {
        "api": f"API ready at {url}",
        "agent": f"pi:    pi --provider mesh --model {model}",
        "agent-goose": f"goose: GOOSE_PROVIDER=openai OPENAI_HOST={url} OPENAI_API_KEY=mesh "
        f"GOOSE_MODEL={model} goose session",
    }
