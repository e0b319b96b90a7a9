"""Options of the whole mesh: declared once, written as before, and checked whoever sends them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from mesh_llm.cli.options import node_options, planned
from mesh_llm.config import NodeConfig
from mesh_llm.engine.children.external import arguments
from mesh_llm.engine.spec import EngineSpec
from mesh_llm.errors import MalformedMessage, UsageError
from mesh_llm.local.own_settings import version_after
from mesh_llm.membership.settings_documents import settings_from_document, settings_to_document
from mesh_llm.mesh_settings import (
    ENGINE_OPTIONS,
    MESH_OPTIONS,
    Draft,
    MeshSettings,
    ModelSettings,
    given_options,
)
from mesh_llm.types import Fingerprint

PLAIN = MeshSettings(version=3, model="smollm2", fingerprint=Fingerprint("ff"), alias="größe")
DRAFT = Draft(name="small", fingerprint=Fingerprint("dd"), weight_bytes=1, cache_bytes=2, compute_bytes=3)
HEAD = '{"version":3,"model":"smollm2","fingerprint":"ff","alias":"gr\\u00f6\\u00dfe",'
WRITTEN: list[tuple[dict[str, Any], str]] = [
    ({}, '"context":null,"slots":4,"cache_type_k":"f16","cache_type_v":"f16","split":false}'),
    (
        {
            "context": 2048,
            "slots": 2,
            "cache_type_k": "q8_0",
            "cache_type_v": "q4_0",
            "split": True,
            "tensor_split": (3.0, 0.0, 1.5),
            "digest": "0f" * 32,
            "refined": 2,
            "guess": False,
        },
        '"context":2048,"slots":2,"cache_type_k":"q8_0","cache_type_v":"q4_0","split":true,'
        f'"tensor_split":[3.0,0.0,1.5],"digest":"{"0f" * 32}","refined":2,"guess":false}}',
    ),
    (
        {"layers": (("ann", 0, 10), ("ben", 10, 40)), "draft": DRAFT, "draft_max": 6},
        '"context":null,"slots":4,"cache_type_k":"f16","cache_type_v":"f16","split":false,'
        '"layers":[["ann",0,10],["ben",10,40]],"draft":{"name":"small","fingerprint":"dd",'
        '"weight_bytes":1,"cache_bytes":2,"compute_bytes":3},"draft_max":6}',
    ),
    (
        {"draft": replace(DRAFT, layers=(2, 20, 37))},
        '"context":null,"slots":4,"cache_type_k":"f16","cache_type_v":"f16","split":false,'
        '"draft":{"name":"small","fingerprint":"dd",'
        '"weight_bytes":1,"cache_bytes":2,"compute_bytes":3,"layers":[2,20,37]},"draft_max":8}',
    ),
]
"""As 0.2 wrote them: a home's settings are signed, so that these bytes stay what they are."""


@pytest.mark.parametrize(("options", "text"), WRITTEN, ids=["plain", "options", "draft", "EAGLE3"])
def test_settings_are_written_as_before(options: dict[str, Any], text: str) -> None:
    settings = MeshSettings(
        version=3, model="smollm2", fingerprint=Fingerprint("ff"), alias="größe", **options
    )
    assert json.dumps(settings_to_document(settings), separators=(",", ":")) == HEAD + text
    assert settings_from_document(json.loads(HEAD + text)) == settings


WRONG: dict[str, list[Any]] = {
    "context": [-1, 1 << 41, True, 1.0, "1", [1]],
    "slots": [-1, 1 << 17, None, True, "4"],
    "predict": [0, -1, 1 << 40, False],
    "temp": [-0.1, 101, float("nan"), "1", True],
    "top_k": [-1, 1 << 30, 0.5],
    "top_p": [-0.1, 1.1, [1]],
    "min_p": [-0.1, 1.1, "0"],
    "seed": [-1, (1 << 32) - 1, True, 7.0, "7"],
    "chat_template_kwargs": [
        *("", "{", "[]", "null", '"text"', "7", {}, {"a": 1}, True),
        *('{"a": NaN}', '{"a": 1e999}', '{"a": -Infinity}', '{"a": %s}' % ("9" * 400), '{"a": "\\ud800"}'),
        *('{"a":\n1}', '{"ü": 1}', '{"a": "%s"}' % ("x" * 1000), '{"a": %s' % ("[" * 900)),
    ],
    "reasoning_format": ["x" * 129, "none\n", 7, True, {}],
    "reasoning_budget": [-2, 1 << 40, 0.5, "0", True],
    "priority": [-101, 101, True, 1.0, "1"],
    "cache_type_k": ["f" * 129, "f16\n", None, 7, ["f16"], {}],
    "lanes": [-1, 257, True, "2"],
    "split": [0, "yes", None],
    "tensor_split": [[True], [float("inf")], ["1"], {"a": 1}, 1, [1] * 257],
    "replicas": [[0, 1], [2, 1], [1, 17], [1], 2, "1-2", [True, True], [1.0, 2.0]],
    "layers": [[["a", 0, 1 << 17]], [["a\n", 0, 1]], [["a" * 129, 0, 1]], [{}]],
}


@pytest.mark.parametrize("name", WRONG)
def test_values_beyond_their_bounds_are_refused(name: str) -> None:
    assert WRONG.keys() | {"cache_type_v"} == MESH_OPTIONS.keys()
    for value in WRONG[name]:
        with pytest.raises(MalformedMessage):
            settings_from_document({**settings_to_document(PLAIN), name: value})


def test_a_person_is_held_to_what_this_version_knows() -> None:
    with pytest.raises(UsageError, match=r"^--predict 0 is not between 1 and 134,217,728$"):
        NodeConfig(home=Path(), predict=0)
    with pytest.raises(UsageError, match=r"^--lanes 9 is not between 0 and 8$"):
        NodeConfig(home=Path(), lanes=9)
    with pytest.raises(UsageError, match=r"^--seed -1 is not between 0 and 4,294,967,294$"):
        NodeConfig(home=Path(), seed=-1)
    with pytest.raises(
        UsageError, match=r'^--chat-template-kwargs {"a" is not a JSON object, as in {"enable_'
    ):
        NodeConfig(home=Path(), chat_template_kwargs='{"a"')
    with pytest.raises(UsageError, match=r"^--reasoning-format loud is not one of none, auto, deepseek, "):
        NodeConfig(home=Path(), reasoning_format="loud")
    with pytest.raises(UsageError, match=r"^--cache-type-k f17 is not one of f32, f16"):
        NodeConfig(home=Path(), cache_type_k="f17")
    with pytest.raises(UsageError, match=r"^--layers is not a printable text"):
        NodeConfig(home=Path(), layers=(("a\n", 0, 1),))


def test_an_option_that_is_new_is_not_written_where_nobody_set_it() -> None:
    """Else settings that an older version signed would lack it, and a node that returns would change them."""
    old = {"cache_type_k", "cache_type_v", "slots", "split"}
    defaults = {each.name: each.default for each in fields(MeshSettings) if each.name in MESH_OPTIONS}
    assert {name for name, default in defaults.items() if default is not None} == old


def options_of_a_node() -> dict[str, list[str]]:
    def command() -> None:
        """Gets a node's options."""

    return {each.name: each.opts for each in node_options(command).__click_params__}  # type: ignore[attr-defined]


BLANK = dict.fromkeys(options_of_a_node())


def test_every_option_is_on_the_command_line() -> None:
    options = options_of_a_node()
    assert {each.argument: [each.flag] for each in MESH_OPTIONS.values()}.items() <= options.items()
    assert planned({**BLANK, "layers": ""}).keys().isdisjoint(MESH_OPTIONS)
    typed = planned({**BLANK, "parallel": 0, "lanes": "auto", "tensor_split": "3,1", "layers": "a=0-4"})
    wanted = {"slots": 0, "lanes": 0, "tensor_split": (3.0, 1.0), "layers": (("a", 0, 5),)}
    assert wanted.items() <= typed.items()


def test_a_llama_server_gets_the_engine_options() -> None:
    spec = EngineSpec(
        model="m",
        alias="a",
        context=1,
        slots=1,
        threads=1,
        key="k",
        cache_type_k="q8_0",
        predict=9,
        temp=0.0,
        seed=0,
        chat_template_kwargs='{"tone":"warm"}',
        reasoning_format="none",
        reasoning_budget=-1,
    )
    argv = " ".join(arguments(spec))
    assert "--seed 0 " in argv
    assert '--chat-template-kwargs {"tone":"warm"} ' in argv
    assert "--reasoning-format none --reasoning-budget -1 " in argv
    assert "--cache-type-k q8_0" in argv
    assert "--predict 9" in argv
    assert "--temp 0.0" in argv
    assert "--cache-type-v" not in argv


def test_what_was_given() -> None:
    config = NodeConfig(home=Path(), slots=1, split=False)
    assert given_options(config) == {"slots": 1}
    assert NodeConfig(home=Path(), client=True, split=False).client
    assert given_options(PLAIN, ENGINE_OPTIONS) == {"cache_type_k": "f16", "cache_type_v": "f16"}


def test_a_change_of_any_engine_option_restarts_the_engine() -> None:
    values: dict[str, Any] = {"cache_type_k": "q8_0", "cache_type_v": "q8_0", "predict": 9}
    values |= {"temp": 0.5, "top_k": 20, "top_p": 0.5, "min_p": 0.5, "seed": 0, "reasoning_budget": -1}
    values |= {"reasoning_format": "none", "chat_template_kwargs": "{}"}
    keys = {MeshSettings(**base(), **{name: value}).engine_key for name, value in values.items()}
    assert values.keys() == ENGINE_OPTIONS.keys()
    assert len(keys | {PLAIN.engine_key}) == len(values) + 1


def base() -> dict[str, Any]:
    return {"version": 3, "model": "smollm2", "fingerprint": Fingerprint("ff"), "alias": "größe"}


OTHER = ModelSettings(model="coder", fingerprint=Fingerprint("cc"), alias="coder", changed=3)
SEVERAL = replace(PLAIN, others=(OTHER, replace(OTHER, fingerprint=Fingerprint("ee"), alias="embeddings")))


def test_settings_of_several_models_are_read_as_written() -> None:
    assert settings_from_document(settings_to_document(SEVERAL)) == SEVERAL
    assert [model.alias for model in SEVERAL.models] == ["größe", "coder", "embeddings"]


def test_nodes_of_older_versions_read_the_default_model() -> None:
    document = settings_to_document(SEVERAL)
    del document["others"]
    assert settings_from_document(document) == PLAIN


def test_a_model_is_not_served_twice() -> None:
    twice = replace(PLAIN, others=(replace(OTHER, fingerprint=PLAIN.fingerprint),))
    with pytest.raises(MalformedMessage, match="twice"):
        settings_from_document(settings_to_document(twice))


def test_a_change_of_one_model_leaves_the_plans_of_others() -> None:
    slower = replace(OTHER, slots=1)
    new = version_after(SEVERAL, replace(SEVERAL, others=(slower, SEVERAL.others[1])))
    assert new.version == 4
    assert [model.plan_version for model in new.models] == [3, 4, 3]


def test_another_default_model_leaves_all_plans() -> None:
    coder = replace(PLAIN, model="coder", fingerprint=OTHER.fingerprint, alias="coder")
    old = ModelSettings(model=PLAIN.model, fingerprint=PLAIN.fingerprint, alias=PLAIN.alias)
    first = replace(SEVERAL, version=9, refined=4)
    new = version_after(first, replace(coder, others=(old, SEVERAL.others[1])))
    assert new.version == 10
    assert {model.alias: model.plan_version for model in new.models} == {
        "coder": 3,
        "größe": 5,
        "embeddings": 3,
    }


def test_another_priority_leaves_all_plans() -> None:
    first = replace(OTHER, priority=5)
    new = version_after(SEVERAL, replace(SEVERAL, priority=-1, others=(first, SEVERAL.others[1])))
    assert new.version == 4
    assert [model.plan_version for model in new.models] == [3, 3, 3]
    assert [model.engine_key for model in new.models] == [model.engine_key for model in SEVERAL.models]
    assert settings_from_document(settings_to_document(new)) == new


def test_models_are_planned_by_priority_and_equals_in_their_order() -> None:
    assert SEVERAL.by_priority == SEVERAL.models
    coder, embeddings = SEVERAL.others
    ranked = replace(SEVERAL, priority=-1, others=(coder, replace(embeddings, priority=5)))
    assert [model.alias for model in ranked.by_priority] == ["embeddings", "coder", "größe"]


def test_a_model_gives_way_to_a_higher_priority_where_both_are_always_loaded() -> None:
    coder, embeddings = (replace(OTHER, priority=1), replace(SEVERAL.others[1], on_demand=True, priority=9))
    ranked = replace(SEVERAL, on_demand=True, others=(coder, embeddings))
    # The default model is always loaded, whatever is said.
    assert ranked.gives_way(ranked, coder)
    assert not ranked.gives_way(coder, ranked)
    assert not ranked.gives_way(coder, embeddings)
    assert not ranked.gives_way(embeddings, replace(coder, priority=50))
    assert not SEVERAL.gives_way(*SEVERAL.others)


def test_template_arguments_are_signed_in_one_form() -> None:
    typed = planned({**BLANK, "chat_template_kwargs": ' {"tone": "wärmer",\n"deep": [1, {}]} '})
    assert typed["chat_template_kwargs"] == '{"tone":"w\\u00e4rmer","deep":[1,{}]}'
    assert NodeConfig(**typed).chat_template_kwargs == typed["chat_template_kwargs"]


def test_settings_in_which_nothing_changes_keep_their_version() -> None:
    assert version_after(SEVERAL, replace(SEVERAL, version=1)) is SEVERAL
