"""Runs in LiteLLM's own environment: one call per line of JSON, one answer per line.

A call is `{"function": NAME, "arguments": {…}}`; what it gives comes back as `{"result": …}`, a
stream as the list of its pieces, and what it raises as `{"error": CLASS, "status": CODE}`.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from typing import Any

# Prices come with the package; the newest ones would be asked for at every start.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm  # type: ignore[import-not-found]  # it is not in the environment of the tests

litellm.telemetry = False


async def call(function: str, arguments: dict[str, Any]) -> Any:
    given = getattr(litellm, function)(**arguments)
    stream = bool(arguments.get("stream"))
    if inspect.isawaitable(given):
        given = await given
        return [piece.model_dump() async for piece in given] if stream else given.model_dump()
    return [piece.model_dump() for piece in given] if stream else given.model_dump()


async def answer(line: str) -> dict[str, Any]:
    asked = json.loads(line)
    try:
        return {"result": await call(asked["function"], asked["arguments"])}
    except Exception as error:  # all of them are an answer: the test knows which one it wants
        return {
            "error": type(error).__name__,
            "status": getattr(error, "status_code", None),
            "text": str(error),
        }


async def main() -> None:
    # What the package itself prints must not look like an answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    while line := await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await answer(line), default=str), file=answers, flush=True)


asyncio.run(main())
