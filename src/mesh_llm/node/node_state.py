"""What this node is doing: derived in one place, from the state of its default model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_llm.node.model_state import ModelState
from mesh_llm.peers.mesh import Mesh
from mesh_llm.sanitise import SENTENCE_CHARS, line
from mesh_llm.types import State


class NodeState:
    def __init__(
        self, mesh: Mesh, *, models: Callable[[], Sequence[ModelState]], announce_api: Callable[[], None]
    ) -> None:
        """`models`: the default one first."""
        self.value = State.STARTING
        self.reason = "starting"
        self.takes_part = False
        """It is equipped, or a lite client: before, it is busy with itself, and says so."""
        self._mesh = mesh
        self._models = models
        self._announce_api = announce_api

    def take_part(self) -> None:
        """From now on the mesh decides what this node does."""
        self.takes_part = True
        self.reflect()

    def start(self, what: str) -> None:
        """What it is busy with; once it takes part, its state is that of its default model."""
        if not self.takes_part:
            self.change(State.STARTING, what)

    def reflect(self) -> None:
        """Derive the state anew."""
        models = self._models()
        for model in models:
            model.reflect()
        if models[0].value is State.SERVING:
            self.change(State.SERVING, "")
            self._announce_api()
        elif self.takes_part:
            self.change(models[0].value, models[0].reason)

    def change(self, state: State, reason: str) -> None:
        # One that is still starting may serve what others compute.
        if self.value is State.DRAINING or (state is State.STARTING and self.value is State.SERVING):
            return
        self.value, self.reason = state, line(reason)
        if self.takes_part:
            self._mesh.publish(state=state, reason=reason[:SENTENCE_CHARS])
