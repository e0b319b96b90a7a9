"""`/metrics` of real nodes, as Prometheus reads it."""

from __future__ import annotations

import json
import re
import signal
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tests.support.joining import PLAN, TEXT, JoiningNode, Lab
from tests.support.node import ENDLESS, WAIT_S, NodeProcess, ask
from tests.support.series import Scrape
from tests.support.waiting import until

MONITORING = Path(__file__).parents[2] / "packaging" / "monitoring"
HEAL_S = 60.0
CPU_LIMIT_S = 0.05
LONG_PLAN = ("--ctx-size", "32768", "--parallel", "1")
"""Room for an endless answer that no pause of this machine outlasts."""
ENGINES_OWN = "llamacpp:tokens_predicted_total"
"""One of the series that are left out of a scrape where the engine takes its time."""


def scrape(node: NodeProcess) -> Scrape:
    reply = node.ask("/metrics")
    assert reply.status == 200, reply.body
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    return Scrape(reply.body)


def split(nodes: Lab) -> tuple[JoiningNode, JoiningNode]:
    """A host with ten of the thirty layers, and a worker with the rest."""
    layers = ("--layers", "one=0-9,two=10-29", "--hosting", "prefer")
    one = nodes.start("one", "--model", nodes.model, *PLAN, *layers)
    one.until_said("Invite token: ")
    two = nodes.join("two", one)
    for node in (one, two):
        node.until_plan(("one", 0, 10), ("two", 10, 30), host="one")
    return one, two


def answer(node: NodeProcess, times: int = 3) -> None:
    for _ in range(times):
        assert node.ask("/v1/completions", {**TEXT, "cache_prompt": False}).status == 200


def unknown_series(seen: Scrape) -> set[str]:
    """What the dashboard and the alert rules read, and nodes do not tell: names, and the labels of sums."""
    texts = [path.read_text("utf-8").replace('\\"', '"') for path in sorted(MONITORING.iterdir())]
    missing = {name for text in texts for name in re.findall(r"\bmesh_llm_\w+", text)} - seen.names()
    for text in texts:
        for labels, name in re.findall(r" by \(([\w, ]+)\) \((?:rate\(|increase\()?(mesh_llm_\w+)", text):
            wanted = set(labels.split(", ")) - {"instance", "job", "le"}
            missing |= {f"{name}{{{label}}}" for label in wanted - seen.labels(name)}
    return missing


def cpu_of_a_scrape_s(node: NodeProcess) -> float:
    """What the node does besides is in it; the least of several rounds has little of that."""
    process = psutil.Process(node.process.pid)
    costs = []
    for _ in range(5):
        began = sum(process.cpu_times()[:2])
        with closing(node.connect()) as connection:
            for _ in range(20):
                assert ask(connection, "/metrics").status == 200
        costs.append((sum(process.cpu_times()[:2]) - began) / 20)
    return min(costs)


def test_a_split_mesh_and_the_loss_of_its_engine(nodes: Lab) -> None:
    one, two = split(nodes)
    answer(one)
    until(
        lambda: scrape(one).of("mesh_llm_stage_runs_total", "node").get("two", 0) > 20,
        within_s=WAIT_S,
        what="the worker's runs are counted",
    )
    # The first pings do not count, and connections are metered every few seconds.
    seen = until(
        lambda: (
            s
            if (s := scrape(one)).of("mesh_llm_link_round_trip_seconds", "peer")
            and s.value("mesh_llm_link_sent_bytes_total", peer="two") > 0
            and ENGINES_OWN in s.names()
            and s.value("mesh_llm_engine_decode_tokens_per_second") > 0
            and s.value("mesh_llm_members_present", role="node", state="serving") == 2
            else None
        ),
        within_s=WAIT_S,
        what="the link and the engine were measured, and both have said that they serve",
    )
    ids = {member["name"]: member["id"][:16] for member in one.status()["mesh"]["nodes"]}
    status = one.status()

    assert seen.state("mesh_llm_node_state") == "serving"
    assert seen.state("mesh_llm_node_role") == "host"
    assert seen.state("mesh_llm_plan_mode") == "split"
    assert seen.value("mesh_llm_plan_epoch") == status["plan"]["epoch"]
    assert seen.value("mesh_llm_node_info", name="one", id=ids["one"]) == 1
    assert seen.value("mesh_llm_members", standing="alive") == 2
    assert seen.value("mesh_llm_members_present", role="node", state="serving") == 2
    assert seen.of("mesh_llm_stage_layers", "node") == {"one": 10, "two": 20}
    assert seen.value("mesh_llm_stage_first_layer", stage="1", node="two", id=ids["two"]) == 10
    for stage in status["plan"]["stages"]:
        id = stage["node"][:16]
        assert seen.value("mesh_llm_stage_weight_bytes", id=id) == stage["weight_bytes"] > 0
        assert seen.value("mesh_llm_stage_share_ratio", id=id) == pytest.approx(stage["share"], abs=1e-4)
    assert seen.value("mesh_llm_plan_predicted_tokens_per_second") > 0
    assert seen.value("mesh_llm_engine_decode_tokens_per_second") > 0
    assert 0 < seen.value("mesh_llm_stage_token_compute_seconds", node="two") < 10
    assert 0 < seen.value("mesh_llm_stage_compute_seconds_total", node="two") < 60
    assert seen.value("mesh_llm_stage_token_bytes", node="two") >= 64 * 4
    assert seen.value("mesh_llm_stage_sent_bytes_total", node="two") > 20 * 64 * 4
    assert 0 < seen.value("mesh_llm_link_round_trip_seconds", peer="two") < 10
    assert seen.of("mesh_llm_link_info", "kind") == {"local": 1}
    assert seen.value("mesh_llm_weights_sent_bytes_total") == 0
    assert seen.value("mesh_llm_weights_resident_bytes", process="engine") > 0
    assert seen.value("mesh_llm_weights_resident_bytes", process="worker") == 0
    assert seen.of("mesh_llm_process_starts_total", "process")["engine"] >= 1
    assert sorted(unknown_series(seen)) == []
    assert seen.of("mesh_llm_process_deaths_total", "process") == {"engine": 0, "worker": 0}
    assert seen.value("mesh_llm_plans_failed_total") == 0
    assert seen.value("mesh_llm_peer_connections_total", member="new") == 1
    assert seen.value("mesh_llm_gateway_in_flight") == 1
    assert seen.value(ENGINES_OWN) >= 24
    engine = psutil.Process(status["engine"]["pid"])
    resident = seen.value("mesh_llm_process_resident_memory_bytes", process="engine")
    assert resident == pytest.approx(engine.memory_info().rss, rel=0.5)

    there = scrape(two)
    assert there.state("mesh_llm_node_role") == "worker"
    assert there.of("mesh_llm_stage_layers", "node") == {"one": 10, "two": 20}
    assert there.value("mesh_llm_weights_resident_bytes", process="worker") >= seen.value(
        "mesh_llm_stage_weight_bytes", node="two"
    )
    assert there.value("mesh_llm_memory_lent_bytes") == status["plan"]["stages"][1]["need_bytes"]
    assert there.value("mesh_llm_process_starts_total", process="worker") == 1
    assert there.value("mesh_llm_process_resident_memory_bytes", process="worker") > 10 << 20
    assert there.value("mesh_llm_process_resident_memory_bytes", process="engine") == 0
    assert "mesh_llm_stage_runs_total" not in there.names()

    before = seen.value("mesh_llm_stage_sent_bytes_total", node="two")
    answer(two)
    until(
        lambda: scrape(one).value("mesh_llm_stage_sent_bytes_total", node="two") > before,
        within_s=WAIT_S,
        what="bytes grow",
    )

    assert cpu_of_a_scrape_s(one) < CPU_LIMIT_S

    engine.kill()
    one.until_status(
        lambda s: s["node"]["state"] == "serving" and s["plan"]["epoch"] > status["plan"]["epoch"],
        what="it serves again",
        within_s=HEAL_S,
    )
    after = scrape(one)
    assert after.value("mesh_llm_process_deaths_total", process="engine") == 1
    starts = [s.value("mesh_llm_process_starts_total", process="engine") for s in (seen, after)]
    assert starts[1] > starts[0]
    assert after.value("mesh_llm_plans_failed_total") >= 1
    assert after.value("mesh_llm_plans_served_total") > seen.value("mesh_llm_plans_served_total")
    assert after.value("mesh_llm_plan_epoch") > seen.value("mesh_llm_plan_epoch")


@pytest.mark.full
def test_a_worker_that_dies_and_a_peer_that_leaves_are_counted(nodes: Lab) -> None:
    one, two = split(nodes)
    (worker,) = [p for p in two.descendants() if "mesh_llm.engine.children.worker" in p.cmdline()]

    worker.kill()
    until(
        lambda: scrape(two).value("mesh_llm_process_starts_total", process="worker") >= 2,
        within_s=HEAL_S,
        what="another worker child was started",
    )
    assert scrape(two).value("mesh_llm_process_deaths_total", process="worker") >= 1
    # The host finds out by itself, by its link.
    until(
        lambda: (
            (s := scrape(one)).value("mesh_llm_workers_lost_total") >= 1
            and s.value("mesh_llm_plans_failed_total") >= 1
        ),
        within_s=HEAL_S,
        what="the host has counted the loss",
    )

    two.stop()
    # It says that it leaves, and then closes its connection.
    seen = until(
        lambda: (
            s
            if (s := scrape(one)).value("mesh_llm_members", standing="left") == 1
            and s.value("mesh_llm_peer_disconnections_total", reason="left") == 1
            else None
        ),
        within_s=WAIT_S,
        what="it is known to have left",
    )
    assert seen.of("mesh_llm_peers", "role") == {"node": 0, "client": 0}
    assert "mesh_llm_link_round_trip_seconds" not in seen.names()


@pytest.mark.full
def test_a_lite_client_has_series_of_its_own(nodes: Lab) -> None:
    one = nodes.create("one")
    client = nodes.start("guest", "--client", "--join", one.token(role="client")).until_ready()
    answer(client, times=1)

    seen = until(
        lambda: s if ENGINES_OWN in (s := scrape(client)).names() else None,
        within_s=WAIT_S,
        what="the engine's own series",
    )

    assert seen.state("mesh_llm_node_role") == "client"
    assert seen.state("mesh_llm_node_state") == "serving"
    assert seen.state("mesh_llm_plan_mode") == "solo"
    assert seen.of("mesh_llm_stage_layers", "node") == {"one": 30}
    assert seen.state("mesh_llm_engine_state") == "none"
    assert seen.value("mesh_llm_memory_offered_bytes") == 0
    assert seen.of("mesh_llm_process_starts_total", "process") == {"engine": 0, "worker": 0}
    assert seen.value(ENGINES_OWN) >= 8
    assert seen.of("mesh_llm_link_sent_bytes_total", "peer").keys() == {"one"}


@pytest.mark.full
def test_every_stage_of_a_nodes_life_can_be_scraped(nodes: Lab) -> None:
    """From the opening of its port, through waiting and serving, to the end of its drain."""
    # Several tries: it is quick, and may serve before this process has its next turn.
    for name in ("one", "two", "three"):
        node = nodes.start(name, "--model", nodes.model, *LONG_PLAN)
        states = states_until_it_serves(node)
        if len(states) > 1:
            break
        node.stop()
    assert len(states) > 1
    assert set(states[:-1]) <= {"starting", "waiting", "loading"}
    with closing(node.connect()) as kept, node.stream("/v1/completions", ENDLESS) as stream:
        stream.next()
        # Beside the answer that is not finished, on a connection that is open.
        assert ask(kept, "/health").status == 200
        node.signal(signal.SIGTERM)
        seen = until(
            lambda: (
                s
                if (s := Scrape(ask(kept, "/metrics").body)).state("mesh_llm_node_state") == "draining"
                else None
            ),
            within_s=WAIT_S,
            what="it drains",
        )
        assert seen.value("mesh_llm_gateway_in_flight") == 2


def states_until_it_serves(node: JoiningNode) -> list[str]:
    """As its scrapes tell them; the last one is `serving`."""
    until(
        lambda: (node.status_or_none() or {"api": {"url": None}})["api"]["url"],
        within_s=WAIT_S,
        what="a port",
    )
    states: list[str] = []

    def serves() -> bool:
        states.append(scrape(node).state("mesh_llm_node_state"))
        return states[-1] == "serving"

    until(serves, within_s=WAIT_S, what="it serves")
    return states


def test_a_node_that_waits_for_memory_can_be_scraped(nodes: Lab) -> None:
    node = nodes.start(
        "one", "--model", nodes.model, "--ctx-size", "512", "--parallel", "1", "--max-memory", "1MB"
    )
    node.until_state("waiting")
    until(lambda: node.status()["plan"], within_s=WAIT_S, what="a plan")

    seen = scrape(node)

    assert seen.state("mesh_llm_node_state") == "waiting"
    assert seen.state("mesh_llm_plan_mode") == "waiting"
    assert seen.value("mesh_llm_plan_need_bytes") > seen.value("mesh_llm_plan_have_bytes")
    assert seen.value("mesh_llm_memory_offered_bytes") == 1_000_000


def test_requests_have_a_log_of_their_own(nodes: Lab) -> None:
    one = nodes.create("one", "--log-format", "json")
    secret = {"prompt": "s3cret words", "max_tokens": 2}
    headers = {"X-Request-Id": "order-66", "Authorization": "Bearer s3cret"}
    assert one.ask("/v1/completions?key=s3cret", secret, headers=headers).status == 200

    file = one.home / "logs" / "access.log"
    until(lambda: "order-66" in file.read_text(), within_s=WAIT_S, what="it is written down")
    (line,) = [
        each for each in map(json.loads, file.read_text().splitlines()) if each["request_id"] == "order-66"
    ]

    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", "200")
    assert line["bytes"] > 50
    assert 0 < line["first_byte_seconds"] <= line["seconds"] < WAIT_S
    assert "s3cret" not in one.logs()
    assert "/v1/completions" not in (one.home / "logs" / "node.log").read_text()
