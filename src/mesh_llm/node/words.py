"""What a run says of itself, as lines for people."""

from __future__ import annotations


def of_api(model: str, url: str) -> dict[str, str]:
    """By the kind of event."""
    url = url.replace("//127.0.0.1:", "//localhost:")
    return {
        "api": f"API ready at {url}",
        "agent": f"pi:    pi --provider mesh --model {model}",
        "agent-goose": f"goose: GOOSE_PROVIDER=openai OPENAI_HOST={url} OPENAI_API_KEY=mesh "
        f"GOOSE_MODEL={model} goose session",
    }
