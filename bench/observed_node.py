"""Program: `mesh-llm` as people run it, which also tells where its engine listens.

Its one addition is a JSON line on stdout when it serves: the address of the API,
of the engine behind it, and the engine's specification, so that a bench can
drive the same engine directly, or start its twin.
"""

from __future__ import annotations

import dataclasses
import json

from mesh_llm.cli import serve
from mesh_llm.cli.main import main
from mesh_llm.config import NodeConfig
from mesh_llm.node import Node
from mesh_llm.types import Event, EventSink, ProgressSink

MARK = "observed "


class ObservedNode(Node):
    def __init__(self, config: NodeConfig, *, tell: EventSink, progress: ProgressSink) -> None:
        def tell_and_show(event: Event) -> None:
            tell(event)
            if event.kind == "api":
                self._show()

        super().__init__(config, tell=tell_and_show, progress=progress)

    def _show(self) -> None:
        run = self.models.default.hosting.serving
        assert run is not None
        assert run.supervisor is not None
        engine_url, engine_key = run.engine_address()
        document = {
            "url": self.view.api_url(),
            "engine_url": engine_url,
            "engine_key": engine_key,
            "engine_pid": run.supervisor.report.pid,
            "spec": dataclasses.asdict(run.supervisor.spec),
        }
        print(MARK + json.dumps(document), flush=True)


if __name__ == "__main__":
    # The command line builds its node by this name; everything else stays as it is installed.
    vars(serve)["Node"] = ObservedNode
    main()
