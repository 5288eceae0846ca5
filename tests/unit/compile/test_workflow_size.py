"""Nodes of a Workflow, and the warning before it outgrows what Argo stores in one object.

| part of the Workflow | nodes |
|---|---|
| DAG | 1 |
| `Step`; that repeats nothing | 2; 1 |
| `Step` with a gate; as an item | 9; 5 |
| `Train` with one attempt; as an item | 9; 5 |
| plain task | 1 |
| fan-out | 1 and those of its items |
| exit handler | 4 |
"""

import json

import pytest
from support.builders.authored_workflows import STORE, gated, plain, step, task, train, workflow

from hera_pipelines.compile import CompileOptions, compile_workflow, cron_workflow
from hera_pipelines.compile.workflow_size import MAX_WORKFLOW_BYTES, estimate_size, size_warning
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import RetryPolicy

ENTRY_AND_EXIT = 1 + 4


def compiled(*templates: Manifest, tasks: list[Manifest] | None = None, **spec: object) -> Manifest:
    return compile_workflow(workflow(*templates, tasks=tasks, **spec), CompileOptions(store=STORE))  # type: ignore[arg-type]


def nodes(manifest: Manifest) -> int:
    return estimate_size(manifest).nodes - ENTRY_AND_EXIT


def test_nodes_of_each_kind_of_step() -> None:
    once = {"retry": RetryPolicy(preemption=0, infrastructure=0, out_of_memory=0, unknown=0)}
    assert nodes(compiled(step("prep"))) == 2
    assert nodes(compiled(step("prep", asked=once))) == 1
    assert nodes(compiled(step("prep"), tasks=[task("a", "prep"), task("b", "prep")])) == 4
    assert nodes(compiled(gated("prep"))) == 9
    assert nodes(compiled(train("fit"))) == 9
    assert nodes(compiled(step("prep"), plain("hello"))) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"withItems": [1, 2, 3]},
        {"withSequence": {"count": "3"}},
        {"withSequence": {"count": "{{workflow.parameters.n}}"}},
        {"withParam": "[1, 2, 3]"},
        {"withParam": "{{workflow.parameters.items}}"},
    ],
)
def test_items_that_are_known_are_counted(fields: Manifest) -> None:
    given = [{"name": "items", "value": '["a", "b", "c"]'}, {"name": "n", "value": 3}]
    manifest = compiled(step("prep"), tasks=[task("prep", **fields)], arguments={"parameters": given})

    assert nodes(manifest) == 1 + 3 * 2


def test_items_of_gated_steps_have_no_timers() -> None:
    assert nodes(compiled(gated("prep"), tasks=[task("prep", withItems=[1, 2])])) == 1 + 2 * 5
    assert nodes(compiled(train("fit"), tasks=[task("fit", withItems=[1, 2])])) == 1 + 2 * 5


def test_items_that_only_the_run_produces_count_as_one() -> None:
    manifest = compiled(step("prep"), tasks=[task("prep", withParam="{{tasks.prep.outputs.parameters.x}}")])

    assert nodes(manifest) == 1 + 2


def test_groups_of_steps_and_templates_that_call_themselves_end() -> None:
    manifest = compiled(step("prep"))
    manifest["spec"]["templates"] += [
        {"name": "grouped", "steps": [[{"name": "a", "template": "grouped"}], [{"name": "b", "template": "absent"}]]}
    ]
    manifest["spec"]["onExit"] = "grouped"

    assert estimate_size(manifest).nodes == 1 + 2 + (1 + 2 + 1 + 1)


def test_a_pipeline_that_passes_the_limit_is_warned_of() -> None:
    warning = size_warning(compiled(step("prep"), tasks=[task("prep", withSequence={"count": "9500"})]))

    assert warning is not None
    assert "19,006 nodes" in warning
    assert "node status offloading" in warning
    assert f"{MAX_WORKFLOW_BYTES:,}" in warning


def test_the_schedule_of_such_a_pipeline_is_warned_of() -> None:
    manifest = compiled(step("prep"), tasks=[task("prep", withSequence={"count": "9500"})])

    assert size_warning(cron_workflow(manifest, "nightly", {"schedules": ["0 2 * * *"]})) is not None


def test_a_pipeline_that_fits_is_not() -> None:
    assert size_warning(compiled(step("prep"), tasks=[task("prep", withSequence={"count": "4900"})])) is None
    many_plain = [task("prep"), task("hello", withSequence={"count": "9500"})]
    assert size_warning(compiled(step("prep"), plain("hello"), tasks=many_plain)) is None


@pytest.mark.parametrize(("text", "is_warned"), [("a", False), ("a" * 300, True)])
@pytest.mark.parametrize("field", ["withItems", "withParam"])
def test_nodes_of_an_item_hold_its_text(field: str, text: str, is_warned: bool) -> None:
    items = [f"{number}{text}" for number in range(1900)]
    given = items if field == "withItems" else json.dumps(items)
    manifest = compiled(step("prep"), tasks=[task("prep", **{field: given})])

    assert (size_warning(manifest) is not None) == is_warned


@pytest.mark.parametrize(("count", "expected"), [("1000000000000", 2_000_000_000_001), ("1" + "0" * 30, 3), ("x", 3)])
def test_a_sequence_is_counted_without_its_items(count: str, expected: int) -> None:
    assert nodes(compiled(step("prep"), tasks=[task("prep", withSequence={"count": count})])) == expected


@pytest.mark.parametrize(("steps", "is_warned"), [(48, False), (50, True)])
def test_more_templates_than_the_full_crds_of_argo_accept_are_warned_of(steps: int, is_warned: bool) -> None:
    names = [f"s{number}" for number in range(steps)]
    manifest = compiled(*map(gated, names), tasks=[task(name) for name in names])

    templates = len(manifest["spec"]["templates"])
    warning = size_warning(manifest) or ""
    assert (f"spec.templates has {templates} entries" in warning) == (templates > 200) == is_warned


def test_more_tasks_in_a_dag_than_the_full_crds_of_argo_accept_are_warned_of() -> None:
    calls = [task(f"h{number}", template="hello") for number in range(200)]
    manifest = compiled(step("prep"), plain("hello"), tasks=[task("prep"), *calls])

    assert "the tasks of template 'main' has 201 entries" in (size_warning(manifest) or "")


def test_the_size_of_the_document_counts() -> None:
    large = [{"name": "blob", "value": "x" * MAX_WORKFLOW_BYTES}]
    manifest = compiled(step("prep"), arguments={"parameters": large})

    assert estimate_size(manifest).bytes > len(json.dumps(manifest))
    assert size_warning(manifest) is not None
