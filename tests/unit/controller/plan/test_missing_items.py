"""Which items of a fan-out without gates the next Workflow has.

| the fan-out | items that run |
|---|---|
| is read by nothing, or as a list of outputs | those that are not done, in their order |
| has equal items, of which one is not done | all of these |
| is read by an expression, or what it printed is | all |
| has a finished item with `{{` in an output that another task reads | all |
| is behind a task that runs, has `cache=False`, or is asked to run again | all |
| has a gate | all: each admit takes its result over |
| has items that a finished step made | those that are not done |
| is finished, whatever reads it as a list | none |
"""

import json
from typing import Any

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of, ungated
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import describe_run, plan_run, resume_run, start_run

from hera_pipelines.local.expressions.expr import evaluate_expression, nest_variables
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.fan_out import aggregate_outputs, assign_item_ids
from tiphys.records import SubmissionKind, item_step_id
from tiphys.store import RunLayout, Store, read_submissions

RUN = "digits-1"
LIST = "{{tasks.sweep.outputs.parameters.loss}}"


def reader(value: str, **task: Any) -> Manifest:
    """A task behind the fan-out that is given ``value``."""
    arguments = {"parameters": [{"name": "x", "value": value}]}
    return ungated("report", depends="sweep", arguments=arguments, **task)


def sweep(*items: Any, **task: Any) -> Manifest:
    return ungated("sweep", parameters=("loss",), **({"withItems": list(items)} if items else {}), **task)


class Case:
    """A run of these tasks, in which some items of the fan-out are done."""

    def __init__(self, store: Store, submitter: FakeSubmitter, *tasks: Manifest, **fields: Any) -> None:
        self.store, self.submitter = store, submitter
        start_run(store, submitter, pipeline_of(*tasks, **fields), RUN)
        self.history = History(store, RUN)

    def done(self, *items: Any, loss: str = "0.1", ordinal: int = 0) -> None:
        for item in items:
            self.history.done(step_of(item, ordinal), parameters={"loss": loss})

    def resumed(self, number: int = 2, **options: Any) -> dict[str, Manifest]:
        """The tasks of the next Workflow, by name."""
        self.submitter.end(RUN if number == 2 else f"{RUN}-{number - 1}")
        resume_run(self.store, self.submitter, RUN, **options)
        manifest = self.submitter.manifest(f"{RUN}-{number}")
        return {task["name"]: task for task in manifest["spec"]["templates"][0]["dag"]["tasks"]}


def step_of(item: Any, ordinal: int = 0) -> str:
    return item_step_id("sweep", item if isinstance(item, str) else json.dumps(item), ordinal)


def test_the_items_that_are_not_done_run_in_their_order(store: Store, submitter: FakeSubmitter) -> None:
    case = Case(store, submitter, sweep("a", "b", "c", "d"))
    case.done("b", "d")

    tasks = case.resumed()

    assert tasks["sweep"]["withParam"] == '["a","c"]'
    assert "withItems" not in tasks["sweep"]


@pytest.mark.parametrize(
    ("source", "missing", "expected"),
    [
        ({"withParam": '[ 1e-3, 0.10, {"b": 1.0, "a": "<"}]'}, 2, r'[{"b":1.0,"a":"\u003c"}]'),
        ({"withParam": '[ 1e-3, 0.10, {"b": 1.0, "a": "<"}]'}, 0, "[1e-3]"),
        ({"withParam": "{{workflow.parameters.items}}"}, 1, "[0.20]"),
        ({"withSequence": {"start": "1", "end": "3", "format": "host-%02d"}}, 1, '["host-02"]'),
        ({"withItems": [1, True, {"lr": 0.5}]}, 2, '[{"lr":0.5}]'),
        ({"withItems": [1, True, {"lr": 0.5}]}, 1, "[true]"),
    ],
)
def test_a_missing_item_is_spelled_as_it_was(
    store: Store, submitter: FakeSubmitter, source: Manifest, missing: int, expected: str
) -> None:
    case = Case(store, submitter, sweep(**source), parameters={"items": "[0.10, 0.20, 0.30]"})
    plan = plan_run(store, RUN)
    for index, item in enumerate(plan.steps[0].items):
        if index != missing:
            case.history.done(item.step, parameters={"loss": "1"})

    assert case.resumed()["sweep"]["withParam"] == expected


def test_a_reader_gets_a_list_in_the_order_of_all_items(store: Store, submitter: FakeSubmitter) -> None:
    case = Case(store, submitter, sweep("a", "b", "c"), reader(f"losses: {LIST}"))
    case.done("a", loss="0.10")
    case.done("c", loss='"}}"')

    [given] = case.resumed()["report"]["arguments"]["parameters"]

    before, _, expression = given["value"].partition("{{=")
    assert (before, expression[-2:], expression.count("}}")) == ("losses: ", "}}", 1)
    made = aggregate_outputs([{"loss": "0.2"}])
    scope = {f"tasks.sweep.{path}": value for path, value in made.items()}
    assert evaluate_expression(expression[:-2], nest_variables(scope)) == r'["0.10","0.2","\"}}\""]'


@pytest.mark.parametrize("value", ["{{tasks.sweep.status}}", LIST, "{{tasks.sweep.outputs.parameters}}"])
def test_a_fan_out_that_is_read_as_a_list_runs_partly(store: Store, submitter: FakeSubmitter, value: str) -> None:
    case = Case(store, submitter, sweep("a", "b"), reader(value))
    case.done("a")

    assert case.resumed()["sweep"]["withParam"] == '["b"]'


@pytest.mark.parametrize(
    "value",
    [
        "{{=tasks.sweep.outputs.parameters.loss}}",
        "{{=tasks['sweep'].outputs.parameters['loss']}}",
        "{{=toJson(fromJSON(tasks['sweep'].outputs.parameters)[0])}}",
        "{{tasks.sweep.outputs.result}}",
        "{{tasks.sweep.id}}",
    ],
)
def test_every_item_runs_where_a_task_reads_the_fan_out_otherwise(
    store: Store, submitter: FakeSubmitter, value: str
) -> None:
    case = Case(store, submitter, sweep("a", "b"), reader(value))
    case.done("a")

    tasks = case.resumed()

    assert tasks["sweep"]["withItems"] == ["a", "b"]
    assert tasks["report"]["arguments"]["parameters"][0]["value"] == value


def test_a_finished_item_with_braces_in_its_output_makes_all_items_run(store: Store, submitter: FakeSubmitter) -> None:
    case = Case(store, submitter, sweep("a", "b"), reader(LIST))
    case.done("a", loss="{{loss}}")

    assert case.resumed()["sweep"]["withItems"] == ["a", "b"]


def test_braces_in_an_output_that_nothing_reads_do_no_harm(store: Store, submitter: FakeSubmitter) -> None:
    case = Case(store, submitter, sweep("a", "b"))
    case.done("a", loss="{{loss}}")

    assert case.resumed()["sweep"]["withParam"] == '["b"]'


def test_equal_items_run_together(store: Store, submitter: FakeSubmitter) -> None:
    """Nothing tells the nodes of equal items apart, so one that is done could not be left out."""
    case = Case(store, submitter, sweep("a", "b", "a", "c"), reader(LIST))
    case.done("a", "b")

    tasks = case.resumed()

    assert tasks["sweep"]["withParam"] == '["a","a","c"]'
    assert plan_run(store, RUN).steps[0].items[1].done


def test_equal_items_that_are_all_done_are_left_out(store: Store, submitter: FakeSubmitter) -> None:
    case = Case(store, submitter, sweep("a", "a", "b"))
    case.done("a")
    case.done("a", ordinal=1)

    assert case.resumed()["sweep"]["withParam"] == '["b"]'


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{{tasks.sweep.outputs.result}}", r'[1.50,{"a":"\u003c"}]'),
        ("{{tasks.sweep.outputs.parameters.loss}}", '["0.1","0.2"]'),
        ("{{tasks.sweep.outputs.parameters}}", '[{"loss":"0.1"},{"loss":"0.2"}]'),
    ],
)
def test_the_lists_of_a_finished_fan_out_are_those_of_argo(
    store: Store, submitter: FakeSubmitter, value: str, expected: str
) -> None:
    case = Case(store, submitter, sweep("a", "b"), reader(value))
    for item, loss, printed in (("a", "0.1", "1.50"), ("b", "0.2", '{ "a": "<" }')):
        case.history.done(step_of(item), parameters={"loss": loss, "result": printed})

    tasks = case.resumed()

    assert list(tasks) == ["report"]
    assert tasks["report"]["arguments"]["parameters"] == [{"name": "x", "value": expected}]


def test_text_that_an_item_printed_does_not_reach_the_readers_of_its_parameters(
    store: Store, submitter: FakeSubmitter
) -> None:
    """Where anything reads what some step printed, the local engine keeps it of all steps."""
    case = Case(store, submitter, sweep("a", "b"), reader("{{tasks.sweep.outputs.parameters}}"))
    case.history.done(step_of("a"), parameters={"loss": "0.1", "result": "printed"})

    [given] = case.resumed()["report"]["arguments"]["parameters"]

    scope = {"tasks.sweep.outputs.parameters.loss": '["0.2"]'}
    expression = given["value"].removeprefix("{{=").removesuffix("}}")
    assert json.loads(evaluate_expression(expression, nest_variables(scope))) == [{"loss": "0.1"}, {"loss": "0.2"}]


def test_items_that_a_finished_step_made_are_those_that_are_not_done(store: Store, submitter: FakeSubmitter) -> None:
    make = ungated("make", parameters=("all",))
    case = Case(store, submitter, make, sweep(withParam="{{tasks.make.outputs.parameters.all}}", depends="make"))
    case.history.done("make", parameters={"all": '["a", "b"]'})
    case.done("a")

    tasks = case.resumed()

    assert list(tasks) == ["sweep"]
    assert tasks["sweep"]["withParam"] == '["b"]'
    assert "depends" not in tasks["sweep"]


def test_every_item_runs_behind_a_step_that_runs(store: Store, submitter: FakeSubmitter) -> None:
    case = Case(store, submitter, ungated("make"), sweep("a", "b", depends="make"))
    case.done("a")

    assert case.resumed()["sweep"]["withItems"] == ["a", "b"]


def test_every_item_runs_where_no_result_may_be_reused(store: Store, submitter: FakeSubmitter) -> None:
    case = Case(store, submitter, sweep("a", "b", spec={"cache": False}))
    case.done("a")

    assert case.resumed()["sweep"]["withItems"] == ["a", "b"]


@pytest.mark.parametrize(
    ("tasks", "ending"),
    [
        ([sweep("a", "b", "c")], "; 2 done are taken over"),
        ([gated("sweep", withItems=["a", "b", "c"])], "; 2 done are taken over"),
        (
            [ungated("make"), gated("sweep", withItems=["a", "b", "c"], depends="make")],
            "; 2 done are taken over if the inputs stay the same",
        ),
        ([ungated("make"), sweep("a", "b", "c", depends="make")], "; 2 done run again"),
        ([sweep("a", "b", "c"), reader("{{tasks.sweep.outputs.artifacts.all}}")], "; 2 done run again"),
        ([sweep("a", "b", "c", spec={"cache": False})], "; 2 done run again"),
    ],
    ids=["partial", "gated", "gated behind a step", "behind a step", "read otherwise", "cache=False"],
)
def test_reason_says_what_becomes_of_finished_items_where_the_records_do_not(
    store: Store, submitter: FakeSubmitter, tasks: list[Manifest], ending: str
) -> None:
    case = Case(store, submitter, *tasks)
    case.done("a", "b")

    recorded = next(step.reason for step in describe_run(RunHistory.for_display(store, RUN)).steps if step.items)
    planned = next(step.reason for step in plan_run(store, RUN).steps if step.items)

    assert recorded == "sweep[2] c of 3 not done (never started)"
    assert planned == recorded + ending


def test_items_of_a_gated_fan_out_run_and_reuse_their_results(store: Store, submitter: FakeSubmitter) -> None:
    case = Case(store, submitter, gated("sweep", withItems=["a", "b"]))
    case.done("a")

    assert case.resumed()["sweep"]["withItems"] == ["a", "b"]


@pytest.mark.parametrize(
    ("rerun", "expected"), [("sweep", ["a", "b", "c"]), ("sweep[0]", '["a","b"]'), ("sweep[1]", '["b"]')]
)
def test_a_requested_item_runs_again_with_the_missing_items(
    store: Store, submitter: FakeSubmitter, rerun: str, expected: Any
) -> None:
    case = Case(store, submitter, sweep("a", "b", "c"))
    case.done("a", "c")

    task = case.resumed(rerun=[rerun])["sweep"]

    assert task.get("withParam", task.get("withItems")) == expected


def test_a_fan_out_of_which_a_part_was_submitted_is_planned_by_all_of_its_items(
    store: Store, submitter: FakeSubmitter
) -> None:
    case = Case(store, submitter, sweep("a", "b", "c"), reader(LIST))
    case.done("a")
    case.resumed()
    [_, second] = read_submissions(store, RUN)
    assert (second.claim.kind, second.claim.steps) == (SubmissionKind.RESUME, (step_of("b"), step_of("c"), "report"))
    case.history.done(step_of("c"), parameters={"loss": "0.3"}, submission=2)

    tasks = case.resumed(3)

    assert tasks["sweep"]["withParam"] == '["b"]'
    assert [info.key for info in store.list(RunLayout(RUN).all_reused)] == [], "what is left out needs no record"


def test_the_ids_of_items_do_not_depend_on_which_of_them_run() -> None:
    assert [item.step_id for item in assign_item_ids("sweep", ["b"])] == [step_of("b")]
