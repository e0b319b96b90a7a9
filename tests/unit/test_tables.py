"""Words and numbers of the tables that people read."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from mesh_llm.cli import tables
from mesh_llm.cli.demo import parse_latency
from mesh_llm.cli.output import print_table
from mesh_llm.errors import UsageError
from mesh_llm.lab.cluster import ClusterSpec
from mesh_llm.status_schema import FirstTokenStatus, PlanStatus, ServedModelStatus, from_document


def test_names_that_two_nodes_have_get_the_beginning_of_their_ids() -> None:
    nodes = [("aa11" * 16, "laptop"), ("bb22" * 16, "laptop"), ("cc33" * 16, "desk")]

    names = tables.names_of(nodes)

    assert list(names.values()) == ["laptop (aa11aa)", "laptop (bb22bb)", "desk"]
    assert tables.name(names, "dd44" * 16) == "dd44dd44"
    assert tables.name(names, None) == "nobody"


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"mode": "waiting", "host": None, "stages": []}, "waiting"),
        ({"mode": "solo", "host": "a", "stages": [{"node": "a"}]}, "solo on desk"),
        (
            {"mode": "split", "host": "a", "stages": [{"node": "b"}]},
            "split over 2 nodes, hosted by desk",
        ),
    ],
)
def test_a_plan_in_words(plan: dict[str, Any], words: str) -> None:
    assert tables.how_planned(from_document(PlanStatus, plan), {"a": "desk", "b": "laptop"}) == words


def test_sizes_and_times_keep_what_matters() -> None:
    assert [tables.size(count) for count in (0, 66_000_000, 1_500_000_000)] == ["0 MB", "66 MB", "1.5 GB"]
    assert [tables.milliseconds(ms) for ms in (0.25, 41.7, None)] == ["0.2 ms", "42 ms", "?"]
    rates = [tables.throughput(rate) for rate in (0, 999, 12_345, 999_499, 999_500, 3.41e6, 2e9)]
    assert rates == ["0 B/s", "999 B/s", "12 kB/s", "999 kB/s", "1.0 MB/s", "3.4 MB/s", "2.0 GB/s"]
    assert [tables.rate(tok_s) for tok_s in (12.34, 0.0, None)] == ["12.3 tok/s", "not known", "not known"]


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ((0.214, 33, 0.18, 0.14, 0.23), "0.21 s for a prompt of 33 tokens, predicted 0.18 s (0.14-0.23)"),
        ((0.214, 33, 0.18), "0.21 s for a prompt of 33 tokens, predicted 0.18 s"),
        ((12.34, 1, None), "12.3 s for a prompt of 1 token"),
        ((0.214, None, None), "0.21 s"),
        ((None, 512, 0.81), "not measured yet, predicted 0.81 s for a prompt of 512 tokens"),
        ((None, 512, None), "not measured yet"),
    ],
)
def test_a_first_token_is_told_with_the_length_of_its_prompt(figures: Any, words: str) -> None:
    names = ("measured_s", "prompt_tokens", "predicted_s", "predicted_low_s", "predicted_high_s")

    assert tables.first_token(FirstTokenStatus(**dict(zip(names, figures, strict=False)))) == words


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (18.2, 26.4, "22.3 tok/s (18-26)"),
        (2.25, 3.75, "22.3 tok/s (2.2-3.8)"),
        (0.12, 0.2, "22.3 tok/s (0.12-0.20)"),
        (None, None, "22.3 tok/s"),
        (22.3, 22.3, "22.3 tok/s"),
    ],
)
def test_a_prediction_is_told_with_its_range(low: float | None, high: float | None, words: str) -> None:
    told = {"predicted_tok_s": 22.3, "predicted_tok_s_low": low, "predicted_tok_s_high": high}

    assert tables.predicted_rate(from_document(PlanStatus, told)) == words
    assert tables.predicted_rate(from_document(PlanStatus, {})) == tables.predicted_rate(None) == "not known"


def test_latencies_are_one_for_all_or_one_for_each(tmp_path: Any) -> None:
    assert parse_latency(None) == ()
    assert parse_latency("10") == (0.01,)
    assert parse_latency("5,20") == (0.005, 0.02)
    one = ClusterSpec(home=tmp_path, nodes=3, latency_s=(0.01,))
    each = ClusterSpec(home=tmp_path, nodes=3, latency_s=(0.005, 0.02))

    assert one.distances_s() == [0.0, 0.01, 0.01]
    assert each.distances_s() == [0.0, 0.005, 0.02]


@pytest.mark.parametrize("text", ["fast", "-1", "1,", "nan", "10001"])
def test_what_is_no_latency(text: str) -> None:
    with pytest.raises(UsageError, match="milliseconds between 0 and 10,000"):
        parse_latency(text)


def test_latencies_for_other_nodes_than_there_are(tmp_path: Any) -> None:
    with pytest.raises(UsageError, match="--latency has 3 values for 2 nodes after the first"):
        ClusterSpec(home=tmp_path, nodes=3, latency_s=(0.1, 0.1, 0.1))


def served(**told: Any) -> ServedModelStatus:
    return from_document(ServedModelStatus, {"name": "coder", "state": "serving", **told})


def test_priorities_are_shown_where_owners_have_set_any() -> None:
    rows, headers = tables.served_models([served(), served(priority=0)], {})
    assert (headers[:2], rows[0][:2]) == (("model", "state"), ("coder", "serving"))
    rows, headers = tables.served_models([served(), served(priority=-3)], {})
    assert headers[:3] == ("model", "priority", "state")
    assert [row[:3] for row in rows] == [("coder", "0", "serving"), ("coder", "-3", "serving")]


def test_every_replica_is_shown_with_its_lanes() -> None:
    replicas = [{"host": "a", "nodes": ["a", "b"], "lanes": 2}, {"host": "b", "nodes": ["b"], "lanes": 1}]
    rows, headers = tables.served_models([served(host="a", replicas=replicas)], {"a": "ann", "b": "ben"})
    assert dict(zip(headers, rows[0], strict=True))["host"] == "ann (2 lanes), ben"
    rows, _ = tables.served_models([served(host="a"), served()], {"a": "ann"})
    assert [row[2] for row in rows] == ["ann", "–"]


@pytest.mark.parametrize(("told", "read"), [(-100, -100), (100, 100), (101, 0), (True, 0), ("9", 0)])
def test_a_priority_of_another_node_is_one_that_owners_can_set(told: object, read: int) -> None:
    assert served(priority=told).priority == read


def test_a_name_in_brackets_is_no_markup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others choose their names: `[/b]` would end the table, `[red]` would be a colour."""

    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdout", screen := Screen())
    monkeypatch.setenv("NO_COLOR", "1")
    print_table([("[/b] [red]mini[/red] :smile:", "worker")], headers=("node", "role"))

    assert "[/b] [red]mini[/red] :smile:  worker" in screen.getvalue()
