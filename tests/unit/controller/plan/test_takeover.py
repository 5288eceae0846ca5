"""The key of a step that a plan computes before its Workflow exists is the one under which the step is recorded.

| an input of the step | the plan |
|---|---|
| a value, a default, a workflow parameter, an item or a part of one | knows it |
| an output of a finished step | knows it; an artifact by its content |
| an output of a step that runs | takes nothing over: it may be another |
| made by Argo at run time: an expression, `{{workflow.name}}`, a file of a ConfigMap | takes nothing over |
"""

from typing import Any

import pytest
from support.builders.compiled_workflows import gated, pipeline_of, ungated
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore
from support.fakes.submitted_workflow import SubmittedWorkflow
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import fork_run, plan_run, resume_run, start_run
from tiphys_controller.submit.planner import plan_stored_run

from tiphys.errors import StoreError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.protocol.step_spec import StepKind
from tiphys.recording.step_key import StepInputs, compute_step_key
from tiphys.records import AttemptClaim, AttemptEnd, AttemptEndOutcome
from tiphys.store import RunLayout, claim_record


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def given(*values: Any) -> Manifest:
    """Arguments ``a``, ``b``, … with these values."""
    return {"parameters": [{"name": name, "value": value} for name, value in zip("abc", values, strict=False)]}


def takes(*names: str, **fields: Any) -> Manifest:
    """A template with these input parameters."""
    return {"inputs": {"parameters": [{"name": name} for name in names]}, **fields}


def run_first(store: MemoryStore, submitter: FakeSubmitter, manifest: Manifest, *tasks: str) -> None:
    """Run these tasks of a run ``a``."""
    start_run(store, submitter, manifest, "a")
    flow = SubmittedWorkflow.of(store, submitter, "a")
    for task in tasks:
        flow.run_task(task)
    submitter.end("a")


def tasks_of_fork(store: MemoryStore, submitter: FakeSubmitter) -> list[str]:
    fork_run(store, submitter, "a", "b")
    return list(SubmittedWorkflow.of(store, submitter, "b").tasks)


STEPS: dict[str, Manifest] = {
    "no input": ungated("fit"),
    "a text": ungated("fit", program=takes("a"), arguments=given("x")),
    "a number": ungated("fit", program=takes("a", "b", "c"), arguments=given(3, 1.0, 0.00001)),
    "a truth value": ungated("fit", program=takes("a"), arguments=given(True)),
    "an empty text": ungated("fit", program=takes("a"), arguments=given("")),
    "a default": ungated("fit", program={"inputs": {"parameters": [{"name": "a", "default": 2}]}}),
    "a value of the template": ungated("fit", program={"inputs": {"parameters": [{"name": "a", "value": False}]}}),
    "an argument before a default": ungated(
        "fit", program={"inputs": {"parameters": [{"name": "a", "default": 2}]}}, arguments=given("3")
    ),
    "a workflow parameter": ungated("fit", program=takes("a"), arguments=given("{{workflow.parameters.lr}} / 2")),
    "a workflow parameter of the program": ungated(
        "fit", program={"container": {"image": "x", "args": ["{{workflow.parameters.lr}}"]}}
    ),
    "a workflow parameter as a default": ungated(
        "fit", program={"inputs": {"parameters": [{"name": "a", "default": "{{workflow.parameters.lr}}"}]}}
    ),
    "items": ungated("fit", program=takes("a"), withItems=["x", 2, 0.1], arguments=given("{{item}}")),
    "items that no argument has": ungated("fit", withItems=["x", "y"]),
    "items that are maps": ungated(
        "fit",
        program=takes("a", "b"),
        withItems=[{"lr": 0.1, "n": {"w": [1, 2]}}],
        arguments=given("{{item.lr}}", "{{item.n}}"),
    ),
    "items in a parameter": ungated(
        "fit", program=takes("a"), withParam="{{workflow.parameters.all}}", arguments=given("{{item.lr}}")
    ),
    "numbers in a sequence": ungated("fit", program=takes("a"), withSequence={"count": 3}, arguments=given("{{item}}")),
    "data of others": ungated(
        "fit", program={"inputs": {"artifacts": [{"name": "d", "path": "/d", "raw": {"data": "1,2"}}]}}
    ),
    "data of others under a parameter": ungated(
        "fit",
        program={
            "inputs": {
                "artifacts": [
                    {"name": "d", "path": "/d", "s3": {"bucket": "data", "key": "{{workflow.parameters.lr}}.csv"}}
                ]
            }
        },
    ),
}


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
def test_a_step_whose_inputs_are_the_same_is_taken_over(
    store: MemoryStore, submitter: FakeSubmitter, step: Manifest
) -> None:
    parameters = {"lr": "0.1", "all": '[{"lr": 1e-3}, {"lr": 0.10}]'}
    run_first(store, submitter, pipeline_of(step, ungated("after", depends="fit"), parameters=parameters), "fit")

    assert tasks_of_fork(store, submitter) == ["after"]


UNKNOWN: dict[str, Manifest] = {
    "an expression": ungated("fit", program=takes("a"), arguments=given("{{=1 + 1}}")),
    "the name of the Workflow": ungated("fit", program=takes("a"), arguments=given("{{workflow.name}}")),
    "a ConfigMap": ungated(
        "fit",
        program={
            "inputs": {"parameters": [{"name": "a", "valueFrom": {"configMapKeyRef": {"name": "x", "key": "y"}}}]}
        },
    ),
    "an artifact by an expression": ungated(
        "fit",
        program={"inputs": {"artifacts": [{"name": "d", "path": "/d"}]}},
        arguments={"artifacts": [{"name": "d", "fromExpression": "x"}]},
    ),
}


@pytest.mark.parametrize("step", UNKNOWN.values(), ids=UNKNOWN)
def test_a_step_with_an_input_that_is_made_at_run_time_runs(
    store: MemoryStore, submitter: FakeSubmitter, step: Manifest
) -> None:
    run_first(store, submitter, pipeline_of(step, ungated("after", depends="fit")), "fit")

    assert tasks_of_fork(store, submitter) == ["fit", "after"]


def chain(**reader: Any) -> Manifest:
    prep = ungated("prep", parameters=("n",), artifacts=("data",))
    return pipeline_of(prep, ungated("fit", depends="prep", **reader), ungated("after", depends="fit"))


def run_chain(store: MemoryStore, submitter: FakeSubmitter, manifest: Manifest) -> None:
    start_run(store, submitter, manifest, "a")
    flow = SubmittedWorkflow.of(store, submitter, "a")
    flow.run_task("prep", {"n": "5"}, {"data": b"1,2,3"})
    flow.run_task("fit")
    submitter.end("a")


READERS: dict[str, Manifest] = {
    "a value": {"program": takes("a"), "arguments": given("{{tasks.prep.outputs.parameters.n}}")},
    "an artifact": {
        "program": {"inputs": {"artifacts": [{"name": "d", "path": "/d"}]}},
        "arguments": {"artifacts": [{"name": "d", "from": "{{tasks.prep.outputs.artifacts.data}}"}]},
    },
    "nothing of it": {},
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_step_behind_one_that_is_taken_over_is_taken_over_too(
    store: MemoryStore, submitter: FakeSubmitter, reader: Manifest
) -> None:
    run_chain(store, submitter, chain(**reader))

    assert tasks_of_fork(store, submitter) == ["after"]


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_a_step_behind_one_that_runs_is_not_looked_for(
    store: MemoryStore, submitter: FakeSubmitter, reader: Manifest
) -> None:
    run_chain(store, submitter, chain(**reader))

    fork_run(store, submitter, "a", "b", rerun=["prep"])

    assert list(SubmittedWorkflow.of(store, submitter, "b").tasks) == ["prep", "fit", "after"]


def test_the_key_of_a_gated_step_is_that_of_its_admit(store: MemoryStore, submitter: FakeSubmitter) -> None:
    step = gated("fit", kind=StepKind.TRAIN, arguments=given("{{workflow.parameters.lr}}"))
    manifest = pipeline_of(step, ungated("after", depends="fit"), parameters={"lr": "0.1", "seed": "7"})
    for template in manifest["spec"]["templates"]:
        if template["name"] == "fit":
            template["inputs"] = {"parameters": [{"name": "a"}, {"name": "tiphys-item", "default": ""}]}
        if template["name"] == "fit-admit":
            template["plugin"]["tiphys"]["inputs"] = {
                "a": "{{inputs.parameters.a}}",
                "workflow.parameters.seed": "{{workflow.parameters.seed}}",
            }
    start_run(store, submitter, manifest, "a")
    inputs = StepInputs({"a": "0.1", "workflow.parameters.seed": "7"}, [])
    key = compute_step_key(store, CompiledPipeline.from_manifest(manifest).steps["fit"], inputs).key
    fields: dict[str, Any] = {"run": "a", "step": "fit", "attempt": 1, "submission": 1, "step_key": key}
    claim = AttemptClaim(**fields, uid="uid-of-a", node="a.fit.admit", instance="a.fit")
    claim_record(store, RunLayout("a").attempt("fit", 1), claim)
    end = AttemptEnd(**fields, outcome=AttemptEndOutcome.DONE)
    claim_record(store, RunLayout("a").attempt_end("fit", 1), end)
    submitter.end("a")

    assert tasks_of_fork(store, submitter) == ["after"]


def test_steps_of_which_no_result_can_exist_cost_no_request(store: MemoryStore, submitter: FakeSubmitter) -> None:
    tasks = [ungated(f"s{number}", withItems=list(range(50))) for number in range(4)]
    start_run(store, submitter, pipeline_of(*tasks), "a")
    without, searched = CountingStore(store), CountingStore(store)

    plan_stored_run(without, "a")
    plan_run(searched, "a")

    assert searched.requests == without.requests


def test_results_of_a_run_that_nothing_can_be_read_of_are_left_alone(
    store: MemoryStore, submitter: FakeSubmitter
) -> None:
    """A record of the parent's that is damaged makes its step run, and no other."""
    manifest = pipeline_of(ungated("prep"), ungated("fit"), ungated("after"))
    run_first(store, submitter, manifest, "prep", "fit")
    store.objects[RunLayout("a").attempt_end("fit", 1)] = b"{"

    assert tasks_of_fork(store, submitter) == ["fit", "after"]


def test_a_store_that_does_not_answer_ends_the_search(store: MemoryStore, submitter: FakeSubmitter) -> None:
    run_first(store, submitter, pipeline_of(ungated("prep"), ungated("after")), "prep")
    searched = RunLayout("a").step_attempts("prep")
    store.refuses = lambda operation, key: (operation, key) == ("list", searched)

    with pytest.raises(StoreError):
        fork_run(store, submitter, "a", "b")

    assert submitter.names() == ["a"]
    store.refuses = lambda operation, key: False
    resume_run(store, submitter, "b")
    assert list(SubmittedWorkflow.of(store, submitter, "b").tasks) == ["after"]
