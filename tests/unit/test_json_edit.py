"""Changes to JSON files of other people: what is not ours stays as it was, byte for byte."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mesh_llm.agents import json_edit
from mesh_llm.errors import AgentConfigRefused

BY_HAND = """{
\t"theme" : "dark",   "n": 1.50,
\t"providers": {
\t\t"ollama": { "baseUrl":"http://localhost:11434/v1", "models": [ {"id": "a"}, {"id": "b"} ] }
\t},
\t"last": [1,2,
\t\t3]
}
"""


def test_what_is_added_stands_at_the_end_in_the_files_own_indentation() -> None:
    changed = json_edit.merge(BY_HAND, {"providers": {"mesh": {"api": "x", "deep": {"er": True}}}})
    addition = (
        ',\n\t\t"mesh": {\n\t\t\t"api": "x"'  # each leaf comes after the one before
        ',\n\t\t\t"deep": {\n\t\t\t\t"er": true\n\t\t\t}\n\t\t}'
    )
    before, after = BY_HAND.split("\n\t},")
    assert changed == f"{before}{addition}\n\t}},{after}"


def test_a_value_that_changes_is_the_only_thing_that_changes() -> None:
    changed = json_edit.merge(BY_HAND, {"providers": {"ollama": {"baseUrl": "http://elsewhere"}}})
    assert changed == BY_HAND.replace("http://localhost:11434/v1", "http://elsewhere")


def test_what_is_there_already_changes_nothing() -> None:
    same = {"n": 1.5, "providers": {"ollama": {"models": [{"id": "a"}, {"id": "b"}]}}, "last": [1, 2, 3]}
    assert json_edit.merge(BY_HAND, same) == BY_HAND


def test_what_is_to_be_kept_is_kept_and_added_where_it_is_missing() -> None:
    changes = {"theme": "light", "mine": 1}
    changed = json_edit.merge(BY_HAND, changes, keep={("theme",), ("mine",)})
    assert json.loads(changed) == {**json.loads(BY_HAND), "mine": 1}


def test_on_one_line_it_stays_on_one_line() -> None:
    assert json_edit.merge('{"a": {"b": 1}}', {"a": {"c": [1, {"d": "ü"}]}}) == (
        '{"a": {"b": 1, "c": [1, {"d": "ü"}]}}'
    )


@pytest.mark.parametrize("text", ["", "  \n", "{}\n", "{\n}\n", "{ }\n"])
def test_an_empty_file_becomes_a_whole_one(text: str) -> None:
    assert json_edit.merge(text, {"a": {"b": ["text"]}}) == '{\n  "a": {\n    "b": ["text"]\n  }\n}\n'


def test_a_file_without_a_newline_at_its_end_keeps_it_so() -> None:
    assert json_edit.merge('{\n    "a": 1\n}', {"b": 2}) == '{\n    "a": 1,\n    "b": 2\n}'


def test_newlines_of_windows_stay() -> None:
    changed = json_edit.merge('{\r\n  "a": 1\r\n}\r\n', {"b": {"c": 2}})
    assert changed == '{\r\n  "a": 1,\r\n  "b": {\r\n    "c": 2\r\n  }\r\n}\r\n'


def test_braces_and_quotes_in_strings_mislead_nobody() -> None:
    text = '{\n  "}\\"{": "]}, \\"b\\": 1 //",\n  "é\\u0041": [ "{" ]\n}\n'
    changed = json_edit.merge(text, {"éA": ["}"], "b": 2})
    assert json.loads(changed) == {'}"{': ']}, "b": 1 //', "éA": ["}"], "b": 2}
    assert changed.startswith('{\n  "}\\"{": "]}, \\"b\\": 1 //",\n  "é\\u0041": ["}"]')


def test_of_a_name_that_stands_there_twice_the_last_counts_as_it_does_for_readers() -> None:
    changed = json_edit.merge('{"a": 1, "a": 2}', {"a": 3})
    assert changed == '{"a": 1, "a": 3}'


def test_an_item_is_merged_into_the_one_with_its_name() -> None:
    changed = json_edit.merge_item(BY_HAND, ("providers", "ollama", "models"), {"id": "b", "x": 1}, by="id")
    assert changed == BY_HAND.replace('{"id": "b"}', '{"id": "b", "x": 1}')


def test_an_item_of_a_new_name_is_appended() -> None:
    changed = json_edit.merge_item(BY_HAND, ("providers", "ollama", "models"), {"id": "c"}, by="id")
    assert changed == BY_HAND.replace('{"id": "b"}', '{"id": "b"}, {"id": "c"}')


def test_an_item_brings_its_list_and_the_way_to_it() -> None:
    changed = json_edit.merge_item("", ("models",), {"id": "c"}, by="id")
    assert json.loads(changed) == {"models": [{"id": "c"}]}
    assert json_edit.merge_item(changed, ("models",), {"id": "c"}, by="id") == changed


def test_items_that_are_no_objects_are_somebody_elses() -> None:
    changed = json_edit.merge_item('{"m": [null, "id", 3]}', ("m",), {"id": "c"}, by="id")
    assert changed == '{"m": [null, "id", 3, {"id": "c"}]}'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{\n  // mine\n  "a": 1\n}', "it is not plain JSON (it has comments, which would be lost)"),
        ('{"a": 1 /* mine */}', "it is not plain JSON (it has comments, which would be lost)"),
        ('{"a": 1,}', "it is not plain JSON (line 1: Illegal trailing comma before end of object)"),
        ('{"a": "http://x"', "it is not plain JSON (line 1: Expecting ',' delimiter)"),
        ("\ufeff{}", "it is not plain JSON (line 1: Unexpected UTF-8 BOM (decode using utf-8-sig))"),
        ("[1]", "it is not a JSON object"),
        ('"a"', "it is not a JSON object"),
        ('{"a": 3}', "a is not an object there"),
        ('{"a": {"b": "x"}}', "a.b is not an object there"),
    ],
)
def test_what_cannot_be_changed_safely_is_refused(text: str, said: str) -> None:
    with pytest.raises(AgentConfigRefused) as refused:
        json_edit.merge(text, {"a": {"b": {"c": 1}}})
    # Python 3.13 has words of its own for the comma.
    assert (
        refused.value.message.replace(
            "Expecting property name enclosed in double quotes", "Illegal trailing comma before end of object"
        )
        == said
    )
    assert refused.value.hint == "paste the snippet by hand"


def test_a_list_that_is_none_is_refused() -> None:
    with pytest.raises(AgentConfigRefused, match=r"^m is not a list there$"):
        json_edit.merge_item('{"m": {}}', ("m",), {"id": "c"}, by="id")


def test_what_is_nested_beyond_measure_is_refused() -> None:
    with pytest.raises(AgentConfigRefused, match="it is not plain JSON"):
        json_edit.merge("[" * 100_000, {"a": 1})


def _documents() -> list[Any]:
    inner: list[Any] = [None, True, -1.5e3, "", 'a\\"b\n//', [], {}, [[], {}], {"x": {"y": []}}]
    return [{"k": value, "é": [value, value]} for value in inner]


@pytest.mark.parametrize("document", _documents())
@pytest.mark.parametrize("layout", [{"indent": 4}, {"indent": "\t"}, {}, {"separators": (",", ":")}])
def test_in_any_layout_the_result_is_what_a_parser_would_have_made(
    document: dict[str, Any], layout: dict[str, Any]
) -> None:
    text = json.dumps(document, **layout)
    changed = json_edit.merge(text, {"new": {"deep": [1]}, "é": "other"})
    assert json.loads(changed) == {**document, "new": {"deep": [1]}, "é": "other"}
    assert json_edit.merge(changed, {"new": {"deep": [1]}, "é": "other"}) == changed
    assert list(json.loads(changed)) == ["k", "é", "new"]
