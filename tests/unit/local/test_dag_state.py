"""Which tasks run and what a DAG comes to.

| depends | states | runs |
|---|---|---|
| (none) | | yes |
| a | a Succeeded or Skipped | yes |
| a | a Failed | no, unless a has continueOn failed |
| a.Failed | a Failed | yes |
| a.AnySucceeded | one item Succeeded | yes |
| a.AllFailed | every item Failed | yes |
"""

from typing import Any

import pytest

from hera_pipelines.local.composites.dag_state import TaskState, TemplateDag
from hera_pipelines.local.nodes import NodePhase
from tiphys.errors import UsageError

SUCCEEDED, FAILED, ERROR = NodePhase.SUCCEEDED, NodePhase.FAILED, NodePhase.ERROR
SKIPPED, OMITTED = NodePhase.SKIPPED, NodePhase.OMITTED


def graph(*tasks: dict[str, Any], target: str = "", fail_fast: bool = True) -> TemplateDag:
    return TemplateDag(tasks, target, fail_fast)


def states(**phases: NodePhase) -> dict[str, TaskState]:
    return {name.replace("_", "-"): TaskState(phase) for name, phase in phases.items()}


@pytest.mark.parametrize(
    ("depends", "a", "b", "runs"),
    [
        ("a", SUCCEEDED, SUCCEEDED, True),
        ("a", SKIPPED, SUCCEEDED, True),
        ("a", FAILED, SUCCEEDED, False),
        ("a", ERROR, SUCCEEDED, False),
        ("a", OMITTED, SUCCEEDED, False),
        ("a.Failed", FAILED, SUCCEEDED, True),
        ("a.Errored", ERROR, SUCCEEDED, True),
        ("a.Omitted", OMITTED, SUCCEEDED, True),
        ("a.Skipped", SKIPPED, SUCCEEDED, True),
        ("a.Daemoned", SUCCEEDED, SUCCEEDED, False),
        ("a && (b.Succeeded || b.Failed)", SUCCEEDED, FAILED, True),
        ("a && (b.Succeeded || b.Failed)", SUCCEEDED, ERROR, False),
        ("!a.Failed", SUCCEEDED, SUCCEEDED, True),
        ("a || b", FAILED, SUCCEEDED, True),
    ],
)
def test_depends(depends: str, a: NodePhase, b: NodePhase, runs: bool) -> None:
    tasks = graph({"name": "a"}, {"name": "b"}, {"name": "c", "depends": depends})
    assert tasks.should_run("c", states(a=a, b=b)) is runs


@pytest.mark.parametrize(
    ("go_on", "phase", "runs"),
    [
        ({"failed": True}, FAILED, True),
        ({"failed": True}, ERROR, False),
        ({"error": True}, ERROR, True),
        ({"failed": True, "error": True}, OMITTED, False),
    ],
)
def test_a_tolerated_failure_counts_as_success_for_a_bare_name(
    go_on: dict[str, bool], phase: NodePhase, runs: bool
) -> None:
    tasks = graph({"name": "a-1", "continueOn": go_on}, {"name": "b", "dependencies": ["a-1"]})
    assert tasks.should_run("b", states(a_1=phase)) is runs
    assert not tasks.should_run("b", states(a_1=OMITTED))


@pytest.mark.parametrize(
    ("items", "any_succeeded", "all_failed"),
    [
        ((SUCCEEDED, FAILED), True, False),
        ((FAILED, FAILED), False, True),
        ((FAILED, ERROR), False, False),
        ((), False, False),
    ],
)
def test_results_of_a_fan_out(items: tuple[NodePhase, ...], any_succeeded: bool, all_failed: bool) -> None:
    tasks = graph({"name": "a"}, {"name": "x", "depends": "a.AnySucceeded"}, {"name": "y", "depends": "a.AllFailed"})
    seen = {"a": TaskState(FAILED, items)}
    assert (tasks.should_run("x", seen), tasks.should_run("y", seen)) == (any_succeeded, all_failed)


CHAIN = graph({"name": "a"}, {"name": "b", "depends": "a"}, {"name": "c", "depends": "b"})


@pytest.mark.parametrize(
    ("phases", "result"),
    [
        ({"a": SUCCEEDED, "b": SUCCEEDED, "c": SUCCEEDED}, SUCCEEDED),
        ({"a": FAILED, "b": OMITTED, "c": OMITTED}, FAILED),
        ({"a": ERROR, "b": OMITTED, "c": OMITTED}, ERROR),
        ({"a": FAILED, "b": OMITTED, "c": SUCCEEDED}, SUCCEEDED),
        ({"a": SUCCEEDED, "b": SKIPPED, "c": SKIPPED}, SUCCEEDED),
    ],
)
def test_a_failure_reaches_the_end_of_its_branch(phases: dict[str, NodePhase], result: NodePhase) -> None:
    assert CHAIN.phase(states(**phases)) is result


def test_the_phase_of_branches_that_meet_again_and_again_is_found_at_once() -> None:
    """Thirty layers of two tasks that both wait for both before: a billion ways from the end to the beginning."""
    layers: list[dict[str, Any]] = [{"name": "a0"}, {"name": "b0"}]
    for number in range(1, 30):
        before = [f"a{number - 1}", f"b{number - 1}"]
        layers += [{"name": f"{side}{number}", "dependencies": before} for side in "ab"]
    seen = {task["name"]: TaskState(OMITTED) for task in layers} | {"a0": TaskState(FAILED), "b0": TaskState(SUCCEEDED)}
    assert graph(*layers).phase(seen) is FAILED


def test_a_long_chain_of_passed_over_tasks_has_a_phase() -> None:
    tasks = [{"name": "t0"}, *({"name": f"t{n}", "depends": f"t{n - 1}"} for n in range(1, 3000))]
    seen = {task["name"]: TaskState(OMITTED) for task in tasks} | {"t0": TaskState(ERROR)}
    assert graph(*tasks).phase(seen) is ERROR


def test_a_tolerated_failure_at_the_end_does_not_fail_the_dag() -> None:
    tasks = graph({"name": "a", "continueOn": {"failed": True}})
    assert tasks.phase(states(a=FAILED)) is SUCCEEDED
    assert tasks.phase(states(a=ERROR)) is ERROR


@pytest.mark.parametrize(("fail_fast", "phase"), [(True, ERROR), (False, FAILED)])
def test_the_first_or_the_last_leaf_by_name_decides_between_failed_and_error(fail_fast: bool, phase: NodePhase) -> None:
    tasks = graph({"name": "b"}, {"name": "a"}, {"name": "c"}, fail_fast=fail_fast)
    assert tasks.phase(states(a=ERROR, b=FAILED, c=SUCCEEDED)) is phase


@pytest.mark.parametrize(
    ("phases", "result"),
    [
        ({"admit": SUCCEEDED, "run": SUCCEEDED, "conclude": SUCCEEDED}, SUCCEEDED),
        ({"admit": SUCCEEDED, "run": FAILED, "conclude": SUCCEEDED}, SUCCEEDED),
        ({"admit": SUCCEEDED, "run": FAILED, "conclude": FAILED}, FAILED),
        ({"admit": SUCCEEDED, "run": SUCCEEDED, "conclude": FAILED}, FAILED),
        ({"admit": SUCCEEDED, "run": FAILED, "conclude": ERROR}, ERROR),
        ({"admit": SUCCEEDED, "run": ERROR, "conclude": FAILED, "wake": SUCCEEDED}, FAILED),
        ({"admit": SUCCEEDED, "run": ERROR, "conclude": SUCCEEDED}, SUCCEEDED),
        ({"admit": FAILED, "run": OMITTED, "conclude": OMITTED}, FAILED),
        ({"admit": ERROR, "run": OMITTED, "conclude": OMITTED, "wake": SUCCEEDED}, ERROR),
        ({"admit": SUCCEEDED, "run": FAILED, "conclude": SUCCEEDED, "wake": FAILED}, FAILED),
        ({"admit": SUCCEEDED, "run": SKIPPED, "conclude": SUCCEEDED, "wake": SUCCEEDED}, SUCCEEDED),
    ],
)
def test_the_leaves_decide_the_phase_of_an_attempt(phases: dict[str, NodePhase], result: NodePhase) -> None:
    ends = "run.Succeeded || run.Failed || run.Errored || run.Skipped"
    attempt = [{"name": "admit"}, {"name": "run", "depends": "admit"}, {"name": "conclude", "depends": ends}]
    wake = [{"name": "wake"}] if "wake" in phases else []
    assert graph(*attempt, *wake).phase(states(**phases)) is result


def test_a_target_needs_only_what_leads_to_it() -> None:
    tasks = graph({"name": "a"}, {"name": "b", "depends": "a"}, {"name": "c"}, target="b")
    assert tasks.needed_tasks == ("a", "b")
    assert tasks.targets == ("b",)


def test_ancestors_come_in_the_order_written() -> None:
    tasks = graph({"name": "c", "depends": "b"}, {"name": "a"}, {"name": "b", "depends": "a"})
    assert tasks.ancestors("c") == ("a", "b")


@pytest.mark.parametrize(
    ("tasks", "words"),
    [
        ([{"name": "a", "depends": "gone"}], "'gone', which is no task"),
        ([{"name": "a", "dependencies": ["gone"]}], "'gone', which is no task"),
        (
            [{"name": "a"}, {"name": "b", "depends": "a.Done"}],
            "task b: depends 'a.Done' cannot be read: 'Done' is no result",
        ),
        ([{"name": "a", "depends": "b"}, {"name": "b", "depends": "a"}], "depends on itself"),
        (
            [{"name": "a"}, {"name": "b", "depends": "a &&"}],
            "task b: depends .* cannot be read: a task is missing at the end",
        ),
    ],
)
def test_a_graph_that_cannot_run_is_refused(tasks: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        graph(*tasks).check()


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="target 'gone'"):
        graph({"name": "a"}, target="gone").check()
