"""`mesh-llm doctor` beside a mesh that runs: what the node knows of its peers."""

from __future__ import annotations

from tests.support.command import mesh_llm
from tests.support.joining import Lab, said


def test_doctor_asks_the_running_node(nodes: Lab) -> None:
    one = nodes.create("one")
    nodes.join("two", one)
    one.until_nodes("one", "two")

    document = said(
        mesh_llm("doctor", "--json", "--home", one.home, env={"MESH_LLM_MODELS": str(nodes.folder)})
    )

    found = {each["check"]: each for each in document["findings"]}
    assert [each for each in document["findings"] if each["level"] == "broken"] == []
    assert found["node"]["what"] == "the node is serving"
    assert found["ports"]["what"] == f"the running node has its ports: {one.url}"
    assert found["peers"]["what"].startswith("two: ")
    assert found["peers"]["what"].endswith("packets both ways")
    assert found["relay"]["what"] == "no relay is used (--no-relay)"
    assert found["versions"]["what"].endswith("on all 2 nodes")
    assert found["clocks"]["level"] == "ok"
