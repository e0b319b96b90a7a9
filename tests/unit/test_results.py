"""Results as files: the page stands alone, pictures are the same each time, noise is no difference."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from mesh_llm.cli.results import show
from mesh_llm.errors import MeshError
from mesh_llm.results import plots
from mesh_llm.results.compare import Outcome, compare
from mesh_llm.results.document import Document, Figure, Plot, ResultTable, Series, from_json
from mesh_llm.results.page import page
from mesh_llm.results.write import read, write

CURVE = Series(
    label="ours <2>", x=(1.0, 2.0, 4.0), y=(10.0, 9.0, 7.0), low=(9.0, 8.0, 6.0), high=(11.0, 10.0, 8.0)
)
PLOT = Plot(
    title="decode & streams",
    x_label="streams",
    y_label="tok/s",
    series=(CURVE, Series(label="stock", x=(1.0, 4.0), y=(5.0, 3.0))),
    x_log=True,
)
TABLE = ResultTable(title="Decode", columns=("nodes", "tok/s"), rows=(("3", "10 | 11"),), note="a note")
with_matplotlib = pytest.mark.skipif(not plots.available(), reason="matplotlib is not installed")


def document(*figures: Figure, **facts: str) -> Document:
    return Document(
        name="grid",
        title="A <grid>",
        command="mesh-llm bench grid",
        facts={"hardware": "two cores", **facts},
        tables=(
            ResultTable(title="Decode", columns=("nodes", "tok/s"), rows=(("3", "10 | 11"),), note="a note"),
        ),
        plots=(PLOT, PLOT),
        figures=figures,
        notes=("quick & dirty",),
    )


def figure(*values: float, name: str = "decode", higher: bool = True) -> Figure:
    return Figure(name=name, unit="tok/s", values=values, higher_is_better=higher)


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.ids: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id" and value]


def test_the_page_is_whole_without_pictures() -> None:
    text = page(document())
    for part in (
        "A &lt;grid&gt;",
        "mesh-llm bench grid",
        "two cores",
        "10 | 11",
        "a note",
        "quick &amp; dirty",
    ):
        assert part in text
    assert "script" not in Tags(text).names
    assert "prefers-color-scheme: dark" in text


@with_matplotlib
def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    write(document(), tmp_path)
    tags = Tags((tmp_path / "grid.html").read_text("utf-8"))
    assert tags.names.count("svg") == 2
    links = [value for name, value in tags.attributes if name in ("src", "href", "xlink:href") and value]
    assert [link for link in links if not link.startswith("#")] == []
    assert len(set(tags.ids)) == len(tags.ids), "two pictures share an id"


@with_matplotlib
def test_a_picture_is_the_same_each_time_and_takes_the_readers_colour() -> None:
    first, second = plots.svg(PLOT, 1), plots.svg(PLOT, 1)
    assert first == second
    assert "currentColor" in first
    assert "#404142" not in first.replace("svg{color:#404142}", "")
    assert "prefers-color-scheme: dark" in first
    root = ElementTree.fromstring(first)
    assert root.attrib["aria-label"] == "decode & streams"
    assert not re.search(r"\d{4}-\d\d-\d\dT", first), "a date"


@with_matplotlib
def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    wanted = document(figure(1.0, 2.0))
    names = [file.name for file in write(wanted, tmp_path / "new")]
    assert names == [
        *("grid.json", "grid.md", "grid.html"),
        *("grid-1.svg", "grid-1.png", "grid-2.svg", "grid-2.png"),
    ]
    assert read(tmp_path / "new" / "grid.json") == wanted
    assert (tmp_path / "new" / "grid-1.png").read_bytes().startswith(b"\x89PNG")
    assert "![decode & streams](grid-1.svg)" in (tmp_path / "new" / "grid.md").read_text("utf-8")
    assert "| 3 | 10 \\| 11 |" in (tmp_path / "new" / "grid.md").read_text("utf-8")


def test_without_matplotlib_a_sentence_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    show(document(), folder=tmp_path, as_json=False)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["grid.html", "grid.json", "grid.md"]
    assert "svg" not in Tags((tmp_path / "grid.html").read_text("utf-8")).names
    out, err = capsys.readouterr()
    assert "pip install 'mesh-llm[plots]'" in err
    assert "10 | 11" in out


def test_json_alone_goes_to_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    show(document(), folder=None, as_json=True)
    out, err = capsys.readouterr()
    assert from_json(out) == document()
    assert err == ""


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(MeshError, match="could not be written"):
        write(document(), tmp_path / "file" / "below")


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"format": 1}'])
def test_what_is_no_result_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(MeshError):
        read(tmp_path / "x.json")


@pytest.mark.parametrize(
    ("before", "after", "outcome"),
    [
        (figure(10, 11, 12), figure(20, 21, 22), Outcome.BETTER),
        (figure(20, 21, 22), figure(10, 11, 12), Outcome.WORSE),
        (figure(20, 21, 22, higher=False), figure(10, 11, 12, higher=False), Outcome.BETTER),
        (figure(10, 11, 15), figure(14, 16, 20), Outcome.SAME),
        (figure(10.0, 10.01, 10.02), figure(10.1, 10.11, 10.12), Outcome.SAME),
        (figure(10, 11), figure(20, 21, 22), Outcome.UNKNOWN),
        (figure(0, 0, 0), figure(1, 1, 1), Outcome.BETTER),
        (figure(0, 0, 0), figure(0, 0, 0), Outcome.SAME),
    ],
)
def test_only_what_is_beyond_noise_differs(before: Figure, after: Figure, outcome: Outcome) -> None:
    found = compare(document(before), document(after))
    assert [each.outcome for each in found.changes] == [outcome]
    assert bool(found.beyond_noise) is (outcome in (Outcome.BETTER, Outcome.WORSE))


def test_figures_of_one_side_and_other_facts_are_named() -> None:
    before = document(figure(1, 2, 3), figure(1, 2, 3, name="gone"), commit="a")
    after = document(figure(1, 2, 3), figure(1, 2, 3, name="new"), commit="b")
    found = compare(before, after)
    assert found.only_before == ("gone",)
    assert found.only_after == ("new",)
    assert found.facts == (("commit", "a", "b"),)
