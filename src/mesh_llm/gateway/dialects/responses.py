"""OpenAI's `/v1/responses`.

Each item is told three times, in pieces, as a whole and in the end with all others: a
continuation would have to be woven into all of them. Such an answer is made again and
matched to what was told instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from mesh_llm.gateway.dialects.base import Dialect, Document, Said, Seam, documents
from mesh_llm.gateway.events import make
from mesh_llm.gateway.failures import Failure


class Responses(Dialect):
    # It would be told in events that look like those at the beginning of an answer.
    reports_progress = False

    def is_plain(self, body: Document) -> bool:
        return False

    def continued(self, body: Document, said: Said) -> Document | None:
        return None

    def counting(self, body: Document) -> tuple[str, Document] | None:
        return None

    def said(self, events: Sequence[bytes]) -> Said:
        told = documents(events)
        return Said(
            content="".join(
                data.get("delta", "") for data in told if data.get("type") == "response.output_text.delta"
            ),
            calls=any(data.get("type") == "response.function_call_arguments.delta" for data in told),
            ended=any(data.get("type") == "response.completed" for data in told),
        )

    def is_last(self, event: bytes) -> bool:
        return event.startswith(b"event: response.completed")

    def joined(self, data: Document, seam: Seam) -> Document | None:
        return data

    def assembled(self, events: Sequence[bytes], body: Document) -> Document:
        response: Document = documents(events)[-1]["response"]
        return {"completed_at": response["created_at"], **response}

    def failed(self, failure: Failure, events: Sequence[bytes]) -> bytes:
        error = {"type": "error", "code": failure.code, "message": failure.message, "param": None}
        return make({**error, **failure.document()}, "error")
