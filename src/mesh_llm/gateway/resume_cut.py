"""Where to cut an answer, so that another engine can go on from the very tokens of the first.

The next engine gets a text, and cuts it into tokens again. Behind a blank line that goes wrong with
many vocabularies: a model writes two line ends, since a word follows, and a text that ends with them
ends with one token for both. What follows from that is another answer: a list that begins anew. There
the cut is made earlier, the next engine says the little that is missing once more, and that is left out.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from mesh_llm.frozen import frozen
from mesh_llm.gateway.dialects.base import Dialect, Document, Said
from mesh_llm.gateway.text_request import TextRequest

GATEWAY_CUT_BACK = 4
"""Events by which an answer is cut earlier than it broke off, to be cut between its own tokens. Each is a
question to the next engine; two are enough behind a blank line."""


@frozen
class Cut:
    events: int
    """Those before it."""
    said: Said
    """By them."""
    body: Document
    """Asks for what follows."""
    tokens: int
    """Of what was said, as the next engine counts them."""


async def cut_back(
    cut: Cut,
    told: Sequence[bytes],
    generation: TextRequest,
    count: Callable[[Document], Awaitable[int]],
) -> Cut:
    """The last place up to `cut` where the text before it ends with a token of its own.

    Each event brought a token at least. One that adds none to the count has become part of the token
    before it. Where no such place is near, `cut` itself has to do.
    """
    at = cut
    for _ in range(GATEWAY_CUT_BACK):
        events, said = _before(at, told, generation.dialect)
        body = generation.continued(said)
        if body is None:
            # Nothing is left that could be continued: that the first piece is a token is taken on trust.
            return at
        shorter = Cut(events=events, said=said, body=body, tokens=await count(body))
        if shorter.tokens < at.tokens:
            return at
        at = shorter
    return cut


def _before(cut: Cut, told: Sequence[bytes], dialect: Dialect) -> tuple[int, Said]:
    """Without the last event that said something."""
    events, said = cut.events, cut.said
    while events and (said.content, said.reasoning) == (cut.said.content, cut.said.reasoning):
        events -= 1
        said = dialect.said(told[:events])
    return events, said
