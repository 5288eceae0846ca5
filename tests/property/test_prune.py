"""For any DAG and any part of it that is done, the pruned Workflow means what the whole one meant.

The oracle interprets both. In the pruned one every task that is left must end
as it did in the whole one, with the same inputs, and no task may be missing
that is needed, nor left that is not. Of a fan-out without a gate only the items
run that are not done, and what reads it gets the outputs of all items.
"""

import itertools
import json
from typing import NamedTuple

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from support.builders.compiled_workflows import History, gated, pipeline_of, plain, ungated
from support.checks.pruned_workflow import RESULTS, Ended, condition_holds, interpret, waits_for
from support.fakes.memory_store import MemoryStore
from tiphys_controller.plan.prune import SubmissionIdentity, prune_workflow
from tiphys_controller.submit.planner import plan_stored_run

from tiphys.errors import UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline, Manifest
from tiphys.records import RunRecord, item_step_id
from tiphys.store import RunLayout

RUN = "digits-1"
SUFFIXES = ("", ".Succeeded", ".Failed", ".Skipped", ".Omitted", ".Errored")


class Case(NamedTuple):
    """A DAG, how its tasks end, and the gated tasks whose results storage lost."""

    tasks: tuple[Manifest, ...]
    failing: frozenset[str]
    lost: frozenset[str]


def artifact_keys(tasks: tuple[Manifest, ...]) -> dict[str, str]:
    return {task["name"]: f"{RunLayout(RUN).outputs(task['name'], 1)}artifacts/m" for task in tasks}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    listed = draw(st.booleans())
    tasks: list[Manifest] = []
    failing: set[str] = set()
    for index in range(draw(st.integers(1, 7))):
        name = f"t{index}"
        body = draw(bodies(name, tuple(tasks), frozenset(failing), listed))
        tasks.append(body)
        if draw(st.integers(0, 4)) == 0:
            failing.add(name)
    fan_outs = [task["name"] for task in tasks if "withItems" in task]
    lost = draw(st.frozensets(st.sampled_from([*(task["name"] for task in tasks), *fan_outs]), max_size=3))
    order = draw(st.permutations(tasks))
    return Case(tuple(order), frozenset(failing), lost)


@st.composite
def bodies(draw: st.DrawFn, name: str, before: tuple[Manifest, ...], failing: frozenset[str], listed: bool) -> Manifest:
    kind = draw(st.sampled_from([gated, gated, ungated, ungated, plain]))
    names = [task["name"] for task in before]
    body = kind(name)
    parents = draw(st.lists(st.sampled_from(names), unique=True, max_size=3)) if names else []
    if parents and listed:
        body["dependencies"] = parents
    elif parents:
        body["depends"] = draw(conditions(parents))
    ended = interpret(list(before), failing, artifact_keys(before))
    above = ancestors({name: waits_for(task) for name, task in zip(names, before, strict=True)}, parents)
    readable = [task for task in before if task["name"] in above and ended[task["name"]].status == "Succeeded"]
    sources = draw(st.lists(st.sampled_from(readable), max_size=2, unique_by=id)) if readable else []
    body["arguments"] = arguments(sources)
    if draw(st.integers(0, 3)) < {gated: 1, ungated: 2, plain: 0}[kind]:
        body["withItems"] = draw(st.lists(st.sampled_from(["x", "y"]), min_size=2, max_size=3))
    return body


@st.composite
def conditions(draw: st.DrawFn, parents: list[str]) -> str:
    text = parents[0] + draw(st.sampled_from(SUFFIXES))
    for parent in parents[1:]:
        operator = draw(st.sampled_from(["&&", "||"]))
        text = f"({text}) {operator} {draw(st.sampled_from(['', '!']))}{parent}{draw(st.sampled_from(SUFFIXES))}"
    return text


def ancestors(needs: dict[str, set[str]], parents: list[str]) -> set[str]:
    """Tasks that Argo lets a task read: those that it waits for, if only by way of others."""
    return {name for parent in parents for name in {parent} | ancestors(needs, sorted(needs[parent]))}


def arguments(sources: list[Manifest]) -> Manifest:
    names = [task["name"] for task in sources]
    single = [task["name"] for task in sources if "withItems" not in task]
    return {
        "parameters": [{"name": f"p{name}", "value": f"<{{{{tasks.{name}.outputs.parameters.n}}}}>"} for name in names],
        "artifacts": [{"name": f"a{name}", "from": f"{{{{tasks.{name}.outputs.artifacts.m}}}}"} for name in single],
    }


def recorded(case: Case, ended: dict[str, Ended]) -> MemoryStore:
    """Storage after a run in which everything ran, and then something was lost."""
    store = MemoryStore()
    record = RunRecord(run=RUN, pipeline="digits", workflow=pipeline_of(*case.tasks), digest="d")
    store.create(RunLayout(RUN).run_record, record.to_bytes())
    history = History(store, RUN)
    for task in case.tasks:
        end = ended[task["name"]]
        if task["_plain"] or end.status == "Omitted":
            continue
        steps = step_ids(task)
        if end.status == "Failed":
            history.failed(steps[0])
            continue
        kept = steps[:-1] if task["name"] in case.lost else steps
        for step, value in zip(kept, end.values, strict=False):
            history.done(step, parameters={"n": value}, artifacts={"m": b"model"})
    return store


def step_ids(task: Manifest) -> list[str]:
    items = task.get("withItems")
    if items is None:
        return [task["name"]]
    return [item_step_id(task["name"], item, items[:index].count(item)) for index, item in enumerate(items)]


def needed(case: Case, ended: dict[str, Ended], asked: frozenset[str] = frozenset()) -> set[str]:
    """The tasks that a resume must run, found without the controller: a least fixed point.

    ``asked`` are those that a person wants to run again.
    """
    bodies = {task["name"]: task for task in case.tasks}
    needs = {name: waits_for(body) for name, body in bodies.items()}
    read = {name for other in needs.values() for name in other}
    on_record = {name for name, end in ended.items() if end.status == "Succeeded" and name not in case.lost}
    # A plain task proves nothing by itself, but one that others read has been there for them.
    alone = {name for name, body in bodies.items() if name not in (read if body["_plain"] else on_record)}
    alone |= asked
    omitted = {name for name in bodies if false_for_good(bodies, name, ended)}
    readable = {name for name in read - omitted if bodies[name]["_plain"]}
    found = alone - omitted
    while True:
        more = {name for name in needs if needs[name] & found}
        more |= {name for name in readable if any(name in needs[reader] for reader in found)}
        if more <= found:
            return found
        found |= more


def false_for_good(bodies: dict[str, Manifest], name: str, ended: dict[str, Ended]) -> bool:
    """Whether a task is omitted however the plain tasks before it ended, which is not on record."""
    plain_ones = [other for other in sorted(waits_for(bodies[name])) if bodies[other]["_plain"]]
    unknown = [other for other in plain_ones if not false_for_good(bodies, other, ended)]
    worlds = itertools.product(RESULTS.split("|"), repeat=len(unknown))
    guesses = ({other: Ended(status) for other, status in zip(unknown, world, strict=True)} for world in worlds)
    return not any(condition_holds(bodies[name], {**ended, **guess}) for guess in guesses)


@settings(max_examples=60)
@given(cases())
def test_a_pruned_workflow_means_what_the_whole_one_meant(case: Case) -> None:
    keys = artifact_keys(case.tasks)
    bodies = pipeline_of(*case.tasks)["spec"]["templates"][0]["dag"]["tasks"]
    whole = interpret(bodies, case.failing, keys)
    found = plan_stored_run(recorded(case, whole), RUN)

    if not found.decisions.running_tasks:
        assert all(whole[name].status in ("Succeeded", "Omitted") for name in found.pipeline.steps)
        return
    manifest = prune_workflow(
        found.pipeline, found.decisions, lambda key: key, SubmissionIdentity(RUN, 2, "digits-1-2", "default")
    )

    left = CompiledPipeline.from_manifest(manifest).tasks()
    event(f"{len(left)} of {len(bodies)} tasks left")
    pruned = interpret(left, case.failing, keys)
    expected = {name: whole[name] for name in pruned}
    for task in found.decisions.tasks:
        if task.kept_items is not None:
            event("a part of a fan-out runs")
            kept = tuple(whole[task.name].values[position] for position in task.kept_items)
            expected[task.name] = whole[task.name]._replace(values=kept)
    assert expected == pruned
    assert [task["name"] for task in left] == [task["name"] for task in bodies if task["name"] in pruned]
    assert_no_template_is_missing_or_unused(manifest)


@settings(max_examples=60)
@given(cases())
def test_exactly_the_needed_tasks_run(case: Case) -> None:
    whole = interpret(list(case.tasks), case.failing, artifact_keys(case.tasks))

    found = plan_stored_run(recorded(case, whole), RUN)

    assert set(found.decisions.running_tasks) == needed(case, whole)


@settings(max_examples=75)
@given(cases(), st.data())
def test_a_task_that_is_asked_for_runs_again_with_all_behind_it(case: Case, data: st.DataObject) -> None:
    whole = interpret(list(case.tasks), case.failing, artifact_keys(case.tasks))
    asked = data.draw(st.sampled_from(sorted(whole)))
    expected = needed(case, whole, frozenset({asked}))

    if asked not in expected:
        with pytest.raises(UsageError, match=f"{asked} is to run again and would not: its condition"):
            plan_stored_run(recorded(case, whole), RUN, [asked])
        return
    found = plan_stored_run(recorded(case, whole), RUN, [asked])
    assert set(found.decisions.running_tasks) == expected
    assert asked in found.rerun_steps


def assert_no_template_is_missing_or_unused(manifest: Manifest) -> None:
    templates = {one["name"] for one in manifest["spec"]["templates"]}
    named = {"main", "tiphys-finalize"}
    for text in (json.dumps(one) for one in manifest["spec"]["templates"]):
        named |= {part.split('"')[1] for part in text.split('"template": ')[1:]}
    assert templates == named
