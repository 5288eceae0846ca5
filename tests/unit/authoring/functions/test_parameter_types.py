"""What a text means by the annotation of its parameter, at compile and in the script that the container runs.

| the annotation | its texts |
|---|---|
| `str` | each, as it is |
| `str | None` | each, as it is; `<none>` is None |
| `int | None` and the like | `null` is None |
| `bool`, `int`, `float`, dates, `Decimal`, `Path`, `UUID` | those of such a value, and no others |
| `Literal` | its choices |
| `list[int]`, `dict[str, date]`, … | JSON, and each part by its own type |
| none, or `Any` | JSON where it is valid, else the text, as Hera has it |
"""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, NewType, Optional, TypedDict, Union
from uuid import UUID

import pytest
from hera.workflows import Parameter, RunnerScriptConstructor
from pydantic import BaseModel

from hera_pipelines import Pipeline, step
from hera_pipelines.authoring.functions.parameter_types import find_parameter_type
from hera_pipelines.authoring.functions.script_functions import function_sources
from tiphys.errors import UsageError

Batch = NewType("Batch", int)
ID = UUID("12345678-1234-5678-1234-567812345678")


class Row(TypedDict):
    lr: float


class Model(BaseModel):
    lr: float


@dataclass
class Options:
    lr: float


READ = [
    (str, "12e5678", "12e5678"),
    (str, "null", "null"),
    (Optional[str], "12e5678", "12e5678"),  # noqa: UP045  what people write
    (str | None, "null", "null"),
    (str | None, "", ""),
    (str | None, "<none>", None),
    (int | None, "null", None),
    (Annotated[int | None, Parameter(name="n")], "7", 7),
    (bool, "False", False),
    (bool, "false", False),
    (bool, "no", False),
    (bool, "0", False),
    (bool, "True", True),
    (bool, "on", True),
    (int, "0012", 12),
    (int, "1e3", 1000),
    (int, "-3.0", -3),
    (Batch, "64", 64),
    (float, "1", 1.0),
    (float, "1e-4", 1e-4),
    (Literal["1", "2"], "2", "2"),
    (Literal[1, 2], "2", 2),
    (Literal[True, "auto"], "true", True),
    (Literal["adam", None], "null", None),
    (int | str, "7", 7),
    (int | str, "seven", "seven"),
    (Union[str, int], "7", "7"),  # noqa: UP007  what people write
    (bool | int, "1", 1),
    (bool | int, "true", True),
    (float | int, "5", 5),
    (int | float, "2.0", 2.0),
    (float | str, "1e-3", 0.001),
    (dict[str, bool | int | float | str], '{"a": 1, "b": 1.0, "c": "1.10"}', {"a": 1, "b": 1.0, "c": "1.10"}),
    (list[int | str | None], '["5", 5, null]', ["5", 5, None]),
    (dict[str, Any | None], '{"a": "1", "b": null}', {"a": "1", "b": None}),
    (Any, "<none>", None),
    (list[int], "[1, 2.0]", [1, 2]),
    (list[str], '["1", "ü"]', ["1", "ü"]),
    (list[str | None], '[null, "null"]', [None, "null"]),
    (Sequence[float], "[1]", [1.0]),
    (tuple[int, str], '[1, "a"]', (1, "a")),
    (tuple[int, ...], "[1, 2]", (1, 2)),
    (set[int], "[1, 1]", {1}),
    (list, '[1, "1"]', [1, "1"]),
    (dict, '{"a": [1]}', {"a": [1]}),
    (dict[str, Any], '{"a": "1"}', {"a": "1"}),
    (dict[str, date], '{"a": "2026-01-02"}', {"a": date(2026, 1, 2)}),
    (Row, '{"lr": 0.1}', {"lr": 0.1}),
    (date, "2026-01-02", date(2026, 1, 2)),
    (datetime, "2026-01-02T03:04:05+00:00", datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)),
    (Decimal, "1.10", Decimal("1.10")),
    (Path, "my data/ü", Path("my data/ü")),
    (UUID, str(ID), ID),
    (Any, "[1]", [1]),
    (Any, "text", "text"),
]


@pytest.mark.parametrize(("annotation", "text", "value"), READ, ids=str)
def test_a_text_is_read_as_the_annotation_says(annotation: Any, text: str, value: Any) -> None:
    found = find_parameter_type(annotation).read(text)

    assert (found, type(found)) == (value, type(value))


def test_scripts_read_the_same(tmp_path: Path) -> None:
    kinds = [find_parameter_type(annotation) for annotation, _, _ in READ]
    source = function_sources({name for kind in kinds for name in kind.functions})
    reads = [kind.code and f"_read('p', {kind.code}, {text!r})" for kind, (_, text, _) in zip(kinds, READ, strict=True)]
    script = f"import json\n{source}\nprint(repr([{', '.join(read for read in reads if read)}]))"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)

    assert done.stdout.strip() == repr([value for read, (_, _, value) in zip(reads, READ, strict=True) if read])


@pytest.mark.parametrize(
    ("annotation", "text", "reason"),
    [
        (bool, "maybe", "'maybe' is neither true nor false"),
        (bool, "", "'' is neither true nor false"),
        (int, "1.5", "'1.5' is no whole number"),
        (int, "null", "'null' is no whole number"),
        (int, "inf", "'inf' is no whole number"),
        (float, "0,1", "'0,1' is no number"),
        (Literal["1", "2"], "3", "'3' is none of '1', '2'"),
        (list[int], "1, 2", "'1, 2' is no JSON list"),
        (list[int], '{"a": 1}', "is no JSON list"),
        (list[str], "[1]", "1 is no text"),
        (dict[str, int], "[1]", r"'\[1\]' is no JSON object"),
        (tuple[int, str], "[1]", "has 1 values in place of 2"),
        (date, "2026-13-01", "'2026-13-01' is no date"),
        (Decimal, "1,5", "'1,5' is no Decimal"),
        (int | bool, "x", "'x' is no whole number; 'x' is neither true nor false"),
    ],
)
def test_a_text_outside_the_type_is_refused_with_the_reason(annotation: Any, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        find_parameter_type(annotation).read(text)


@pytest.mark.parametrize(
    "annotation", [Model, Options, list[Model], dict[str, Options], Options | None, bytes, complex]
)
def test_a_type_that_a_script_cannot_make_is_refused_at_the_decorator(annotation: Any) -> None:
    def fit(options: annotation) -> None: ...

    with pytest.raises(UsageError, match=r"step 'fit': input 'options': its script cannot make a .*annotate what JSON"):
        step(image="x:1")(fit)


@pytest.mark.parametrize(
    ("annotation", "value", "text"),
    [
        (str, "null", "null"),
        (str | None, None, "<none>"),
        (int | None, None, "null"),
        (bool, False, "false"),
        (float, 0.1, "0.1"),
        (date, date(2026, 1, 2), "2026-01-02"),
        (list[date], [date(2026, 1, 2)], '["2026-01-02"]'),
        (Decimal, Decimal("1.10"), "1.10"),
        (Path, Path("a b"), "a b"),
        (set[int], {1}, "[1]"),
    ],
)
def test_a_value_becomes_the_text_that_is_read_as_it(annotation: Any, value: Any, text: str) -> None:
    kind = find_parameter_type(annotation)

    assert kind.write(value) == text
    assert kind.read(text) == value


@step(image="x:1")
def fit(
    lr: float,
    label: str | None = None,
    optimizer: Literal["adam", "sgd"] = "adam",
    seed: int = None,  # noqa: RUF013  what people write
) -> None: ...  # type: ignore[assignment]


def arguments_of(**values: Any) -> dict[str, str]:
    with Pipeline("digits") as pipeline:
        fit(**values)
    compiled = pipeline.compile(store="s3://bucket/runs")
    [task] = next(t for t in compiled["spec"]["templates"] if t["name"] == "main")["dag"]["tasks"]
    return {parameter["name"]: parameter["value"] for parameter in task["arguments"]["parameters"]}


def test_compile_writes_values_and_defaults_as_they_are_read() -> None:
    with Pipeline("digits") as pipeline:
        fit(0.1)
    compiled = pipeline.compile(store="s3://bucket/runs")
    template = next(t for t in compiled["spec"]["templates"] if t["name"] == "fit")

    defaults = {p["name"]: p.get("default") for p in template["inputs"]["parameters"]}
    assert defaults == {"lr": None, "label": "<none>", "optimizer": "adam", "seed": "null"}
    assert arguments_of(lr=1, label=None, seed=None) == {"lr": "1", "label": "<none>", "seed": "null"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lr": "fast"}, "step 'fit': input 'lr': 'fast' is no number"),
        ({"lr": None}, r"step 'fit': input 'lr': it is None; annotate it with `\| None`"),
        ({"lr": 0.1, "optimizer": "lion"}, "input 'optimizer': 'lion' is none of 'adam', 'sgd'"),
        ({"lr": 0.1, "seed": object()}, "input 'seed': a value of the type object cannot be handed on"),
        ({"with_items": [{"lr": 0.1}, {"lr": "fast"}]}, "input 'lr': 'fast' is no number"),
    ],
)
def test_compile_refuses_a_value_that_the_program_could_not_read(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        arguments_of(**values)


def test_choices_of_a_literal_are_texts() -> None:
    def search(depth: Literal[1, 2] = 1, mode: Literal["fast", 3, None] = None, on: Literal[True] = True) -> None:
        _ = depth, mode, on

    template = step(image="x:1")(search).script._build_template()

    assert template.inputs
    found = {parameter.name: (parameter.default, parameter.enum) for parameter in template.inputs.parameters or ()}
    assert found == {"depth": ("1", ["1", "2"]), "mode": ("null", ["fast", "3", "null"]), "on": ("true", ["true"])}


def test_a_default_beside_none_is_a_default() -> None:
    def late(
        seed: int | None = 42, tags: list[str] | None = None, name: str | None = "ü", on: bool | None = True
    ) -> None:
        _ = seed, tags, name, on

    template = step(image="x:1")(late).script._build_template()

    assert template.inputs
    assert {p.name: p.default for p in template.inputs.parameters or []} == {
        "seed": "42",
        "tags": "null",
        "name": "ü",
        "on": "true",
    }


def test_items_stay_as_their_author_has_them() -> None:
    items = [{"lr": 0.1, "label": None}]
    with Pipeline("digits"):
        fit(with_items=items)

    assert items == [{"lr": 0.1, "label": None}]


def test_a_task_stands_for_its_output_in_with_param_too() -> None:
    @step(image="x:1")
    def rates() -> Annotated[list[float], Parameter(name="rates")]:
        return [0.1]

    with Pipeline("digits") as pipeline:
        fit("{{item}}", with_param=rates())
    tasks = next(t for t in pipeline.compile(store="s3://b/r")["spec"]["templates"] if t["name"] == "main")["dag"][
        "tasks"
    ]

    [fanned] = [task for task in tasks if task["name"] == "fit"]
    assert fanned["withParam"] == "{{tasks.rates.outputs.parameters.rates}}"


def test_items_without_a_value_are_none_and_not_the_text_null() -> None:
    items = [{"lr": 0.1, "label": None}, {"lr": 0.2, "label": "null"}]
    with Pipeline("digits") as pipeline:
        fit(with_items=items)
    compiled = pipeline.compile(store="s3://bucket/runs")
    [task] = next(t for t in compiled["spec"]["templates"] if t["name"] == "main")["dag"]["tasks"]

    assert task["withItems"] == [{"lr": 0.1, "label": "<none>"}, {"lr": 0.2, "label": "null"}]


def test_a_value_of_a_workflow_parameter_is_refused_where_a_step_gets_it_as_it_is() -> None:
    with Pipeline("digits", arguments=[Parameter(name="rate", value="0.1"), Parameter(name="who")]) as pipeline:
        fit(pipeline.get_parameter("rate"), pipeline.get_parameter("who"))

    pipeline.check_parameters({"rate": "0.2", "who": "fast"})
    with pytest.raises(UsageError, match="step 'fit': input 'lr': 'fast' is no number"):
        pipeline.check_parameters({"rate": "fast", "who": "ü"})


def test_a_default_that_the_program_could_not_read_is_refused() -> None:
    def late(day: date = "tomorrow") -> None: ...  # type: ignore[assignment]

    with pytest.raises(UsageError, match="step 'late': the default of 'day': 'tomorrow' is no date"):
        step(image="x:1")(late)


def test_a_function_that_hera_runs_is_left_to_hera() -> None:
    def load(model: Model | None = None) -> None: ...

    loaded = step(image="x:1", constructor=RunnerScriptConstructor())(load)
    with Pipeline("digits") as pipeline:
        loaded(model=None)

    [task] = next(t for t in pipeline.compile()["spec"]["templates"] if t["name"] == "main")["dag"]["tasks"]
    assert task["arguments"]["parameters"] == [{"name": "model", "value": "null"}]
