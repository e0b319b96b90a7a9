"""Keys and signatures: what a wrong one costs."""

from __future__ import annotations

import os
import subprocess
import sys

COST = """
import time
from mesh_llm.transport.identity import Identity, verify
identity = Identity.from_secret(bytes(32))
signature = identity.sign(b"right")
def cost_s(message, expected):
    started = time.process_time()
    assert all(verify(identity.id, message, signature) is expected for _ in range(20))
    return time.process_time() - started
cost_s(b"right", True)
print(cost_s(b"wrong", False) / cost_s(b"right", True))
"""


def test_a_wrong_signature_costs_hardly_more_than_a_right_one() -> None:
    """Strangers send as many as they like; with Rust's stack written down, one costs as much as 500."""
    environment = {name: value for name, value in os.environ.items() if name != "RUST_LIB_BACKTRACE"}
    asked = subprocess.run(
        [sys.executable, "-c", COST],
        env={**environment, "RUST_BACKTRACE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert float(asked.stdout) < 50
