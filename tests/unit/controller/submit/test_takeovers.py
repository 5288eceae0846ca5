"""Results that a submission takes over because a step key is that of a finished attempt.

| the step, at | its key is that of | outcome |
|---|---|---|
| a start | a shared result of another run | not in the Workflow; recorded before it exists |
| a start | a shared result that is damaged, or `cache=False` | runs |
| a fork | a result of the parent, or of a run that was forked | not in the Workflow |
| a fork, asked to run again | the same | runs, and all behind it |
| a resume | an older result of the run itself | not in the Workflow |
| an item of a fan-out | the same as of a step | the other items alone run |
| a start that died after it recorded this | – | its resume takes over the same |
"""

import copy
from collections.abc import Mapping
from typing import Any

import pytest
from support.builders.compiled_workflows import pipeline_of, plain, ungated
from support.fakes.submitted_workflow import SubmittedWorkflow
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import StartResult, WorkflowChange, fork_run, plan_run, resume_run, start_run

from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.operations import NOTHING_LEFT
from tiphys.records import AttemptEndOutcome, ReuseRecord, item_step_id
from tiphys.store import (
    RunLayout,
    Store,
    find_attempt_end,
    find_record,
    read_events,
    read_submissions,
)
from tiphys.store.outputs import outputs_prefix

READS_LR: Manifest = {"parameters": [{"name": "lr", "value": "{{workflow.parameters.lr}}"}]}
READS_PREP: Manifest = {
    "parameters": [{"name": "rows", "value": "{{tasks.prep.outputs.parameters.rows}}"}],
    "artifacts": [{"name": "data", "from": "{{tasks.prep.outputs.artifacts.data}}"}],
}
READS_SWEEP: Manifest = {"parameters": [{"name": "losses", "value": "{{tasks.sweep.outputs.parameters.loss}}"}]}


def pipeline(lr: str = "0.1", **settings: Any) -> Manifest:
    """A preparation, a check of what it has made, and a sweep with a report. ``settings`` are of all steps."""
    return pipeline_of(
        ungated(
            "prep",
            parameters=("rows",),
            artifacts=("data",),
            program={"inputs": {"parameters": [{"name": "lr"}]}},
            spec=settings,
            arguments=READS_LR,
        ),
        ungated(
            "sweep",
            parameters=("loss",),
            program={"inputs": {"parameters": [{"name": "width"}]}},
            spec=settings,
            withItems=[1, 2, {"a": 3}],
            arguments={"parameters": [{"name": "width", "value": "{{item}}"}]},
        ),
        ungated(
            "check",
            parameters=("score",),
            program={
                "inputs": {
                    "parameters": [{"name": "rows"}, {"name": "mode", "value": "full"}],
                    "artifacts": [{"name": "data", "path": "/in/data"}],
                }
            },
            spec=settings,
            depends="prep",
            arguments=READS_PREP,
        ),
        ungated(
            "report",
            program={"inputs": {"parameters": [{"name": "losses"}]}},
            depends="sweep && check",
            arguments=READS_SWEEP,
        ),
        parameters={"lr": lr},
    )


PREP, CHECK = {"rows": "3"}, {"score": "0.5"}


@pytest.fixture
def runs(store: Store, submitter: FakeSubmitter) -> "Runs":
    return Runs(store, submitter)


class Runs:
    """Runs of one store, whose Workflows a test runs."""

    def __init__(self, store: Store, submitter: FakeSubmitter) -> None:
        self.store = store
        self.submitter = submitter

    def start(self, run: str, manifest: Manifest) -> StartResult:
        return start_run(self.store, self.submitter, manifest, run)

    def workflow(self, name: str) -> SubmittedWorkflow:
        return SubmittedWorkflow.of(self.store, self.submitter, name)

    def tasks(self, name: str) -> list[str]:
        return list(self.workflow(name).tasks)

    def run_all(self, name: str) -> SubmittedWorkflow:
        """Run all tasks of a Workflow but the report, which fails, and end it."""
        flow = self.workflow(name)
        made: Mapping[str, Any] = {
            "prep": {"parameters": PREP, "artifacts": {"data": b"1,2,3"}},
            "check": {"parameters": CHECK},
            "sweep": {"parameters": {"loss": "0.25"}},
        }
        for task in flow.tasks:
            if task in made:
                flow.run_task(task, **made[task])
        self.submitter.end(name)
        return flow

    def reuse(self, run: str, step: str, submission: int = 1) -> tuple[str, str, int] | None:
        """Which attempt a submission took over for a step."""
        record = find_record(self.store, RunLayout(run).reused(submission, step), ReuseRecord)
        return (record.source_run, record.source_step, record.source_attempt) if record else None

    def reused(self, run: str, submission: int = 1) -> list[str]:
        steps = ("prep", "check", *ITEMS)
        return [step for step in steps if self.reuse(run, step, submission) is not None]

    def damage(self, run: str, step: str = "prep") -> None:
        """Write other bytes in the place of an artifact."""
        end = find_attempt_end(self.store, run, step, 1)
        assert end is not None
        [key] = [info.key for info in self.store.list(outputs_prefix(end))]
        self.store.delete(key)
        self.store.create(key, b"9,9,9")


ITEMS = [item_step_id("sweep", text, 0) for text in ("1", "2", '{"a": 3}')]


def test_a_start_takes_over_what_others_share(runs: Runs, store: Store) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")

    started = runs.start("b", pipeline(share=True))

    assert runs.tasks("b") == ["report"]
    assert runs.reused("b") == ["prep", "check", *ITEMS]
    assert started.taken_over == (
        "prep (run a, attempt 1)",
        *(f"sweep[{index}] (run a, attempt 1)" for index in range(3)),
        "check (run a, attempt 1)",
    )
    [losses] = runs.workflow("b").tasks["report"]["arguments"]["parameters"]
    assert losses["value"] == '["0.25","0.25","0.25"]'
    events = [event for event in read_events(store, "b") if event.name == "step.adopted"]
    assert events[0].message.startswith("check was not run: adopted from run a, step check, attempt 1")
    assert {event.step for event in events} == {"prep", "check", *ITEMS}


def test_a_reused_result_is_recorded_before_the_workflow_exists(
    runs: Runs, submitter: FakeSubmitter, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")
    recorded = []
    create = submitter.create
    monkeypatch.setattr(submitter, "create", lambda manifest: recorded.append(runs.reused("b")) or create(manifest))

    runs.start("b", pipeline(share=True))

    assert recorded == [["prep", "check", *ITEMS]]


def test_a_start_of_which_nothing_is_left_runs_a_task_that_does_nothing(runs: Runs) -> None:
    alone = pipeline_of(ungated("prep", parameters=("rows",), spec={"share": True}))
    alone["spec"]["templates"].append({"name": "tiphys-wake", "suspend": {"duration": "0"}})
    runs.start("a", alone)
    runs.workflow("a").run_task("prep", PREP)

    runs.start("b", alone)

    assert runs.tasks("b") == [NOTHING_LEFT]
    runs.submitter.end("b", "Succeeded")
    assert resume_run(runs.store, runs.submitter, "b").submission is None


def test_only_steps_that_share_take_over_the_result_of_another_run(runs: Runs) -> None:
    sharing, own = pipeline(share=True), pipeline()
    runs.start("a", sharing)
    runs.run_all("a")

    runs.start("b", own)

    assert runs.tasks("b") == ["prep", "sweep", "check", "report"]
    assert runs.reused("b") == []


def test_a_result_that_was_not_shared_is_not_taken_over(runs: Runs) -> None:
    runs.start("a", pipeline())
    runs.run_all("a")

    runs.start("b", pipeline(share=True))

    assert runs.reused("b") == []


def test_a_changed_parameter_makes_another_result(runs: Runs) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")

    runs.start("b", pipeline("0.5", share=True))

    assert runs.tasks("b") == ["prep", "check", "report"]
    assert runs.reused("b") == ITEMS


def test_a_step_is_known_by_the_content_of_what_it_takes_from_others(runs: Runs) -> None:
    """The data is made again under another parameter with the same bytes, so the check has its result already."""
    runs.start("a", pipeline(share=True))
    runs.run_all("a")
    runs.start("b", pipeline("0.5", share=True))
    runs.workflow("b").run_task("prep", PREP, {"data": b"1,2,3"})
    runs.submitter.end("b")

    assert resume_run(runs.store, runs.submitter, "b").plan.running == ("report",)
    assert runs.reuse("b", "check", submission=2) == ("a", "check", 1)


@pytest.mark.parametrize("how", ["written again", "deleted", "record damaged"])
def test_a_damaged_result_is_not_taken_over(runs: Runs, how: str) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")
    end = find_attempt_end(runs.store, "a", "prep", 1)
    assert end is not None
    if how == "written again":
        runs.damage("a")
    elif how == "deleted":
        [data] = [info.key for info in runs.store.list(outputs_prefix(end))]
        runs.store.delete(data)
    else:
        key = RunLayout("a").attempt_end("prep", 1)
        runs.store.delete(key)
        runs.store.create(key, b"{")

    runs.start("b", pipeline(share=True))

    assert runs.tasks("b") == ["prep", "check", "report"], "the check needs what prep makes"
    assert runs.reused("b") == ITEMS


def test_a_step_without_cache_takes_nothing_over(runs: Runs) -> None:
    runs.start("a", pipeline(share=True, cache=False))
    runs.run_all("a")

    runs.start("b", pipeline(share=True, cache=False))

    assert runs.tasks("b") == ["prep", "sweep", "check", "report"]
    assert fork_run(runs.store, runs.submitter, "a", "c").started is not None
    assert runs.tasks("c") == ["prep", "sweep", "check", "report"]


def test_a_start_with_nothing_to_take_over_has_the_workflow_as_it_was_given(runs: Runs) -> None:
    started = runs.start("a", pipeline(share=True))

    assert started.taken_over == ()
    assert runs.workflow("a").tasks == {task["name"]: task for task in entry_tasks(pipeline())}


def entry_tasks(manifest: Manifest) -> list[Manifest]:
    tasks: list[Manifest] = manifest["spec"]["templates"][0]["dag"]["tasks"]
    return tasks


@pytest.mark.parametrize("point", ["takeover.after_record", "start.after_takeover"])
def test_a_start_that_died_once_it_had_recorded_what_it_takes_over_goes_on_with_it(
    runs: Runs, store: Store, submitter: FakeSubmitter, point: str
) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")
    with dying_at(point):
        runs.start("b", pipeline(share=True))
    before = runs.reused("b")
    assert before
    assert submitter.names() == ["a"]

    resumed = resume_run(store, submitter, "b")

    assert (resumed.submission, resumed.workflow_name) == (1, "b")
    assert runs.tasks("b") == ["report"]
    assert set(before) <= set(runs.reused("b")) == {"prep", "check", *ITEMS}
    assert len(read_submissions(store, "b")) == 1


def test_a_result_recorded_at_the_start_holds_although_another_could_be_reused(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")
    with dying_at("start.after_takeover"):
        runs.start("b", pipeline(share=True))
    for info in list(store.list("control/memo/")):
        store.delete(info.key)

    resume_run(store, submitter, "b")

    assert runs.tasks("b") == ["report"]
    assert runs.reuse("b", "prep") == ("a", "prep", 1)


def test_a_start_under_a_key_that_died_takes_over_the_same_when_it_is_repeated(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")
    given = (store, submitter, pipeline(share=True), "b")
    with dying_at("start.after_takeover"):
        start_run(*given, key="key-1")

    started = start_run(*given, key="key-1")

    assert (started.run, started.created, len(started.taken_over)) == ("b", True, 5)
    assert runs.tasks("b") == ["report"]


def test_a_fork_takes_over_what_its_parent_has_finished(runs: Runs, store: Store, submitter: FakeSubmitter) -> None:
    runs.start("a", pipeline())
    runs.run_all("a")

    forked = fork_run(store, submitter, "a", "b")

    assert forked.started is not None
    assert len(forked.started.taken_over) == 5
    assert runs.tasks("b") == ["report"]
    assert runs.reuse("b", "prep") == ("a", "prep", 1)


def test_a_fork_of_a_fork_takes_over_what_the_first_run_has_finished(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    runs.start("a", pipeline())
    runs.run_all("a")
    fork_run(store, submitter, "a", "b")
    submitter.end("b")

    fork_run(store, submitter, "b", "c")

    assert runs.tasks("c") == ["report"]
    assert runs.reuse("c", "check") == ("a", "check", 1)


def test_a_fork_with_another_parameter_runs_what_the_parameter_decides(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    runs.start("a", pipeline())
    runs.run_all("a")

    fork_run(store, submitter, "a", "b", change=WorkflowChange(pipeline("0.5")))

    assert runs.tasks("b") == ["prep", "check", "report"]
    assert runs.reused("b") == ITEMS


def test_a_fork_runs_again_what_it_is_asked_to_and_all_behind_it(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")

    fork_run(store, submitter, "a", "b", rerun=["prep"])

    assert runs.tasks("b") == ["prep", "check", "report"]
    assert runs.reused("b") == ITEMS


def test_a_rerun_holds_for_a_fork_of_the_fork_as_well(runs: Runs, store: Store, submitter: FakeSubmitter) -> None:
    runs.start("a", pipeline())
    runs.run_all("a")
    fork_run(store, submitter, "a", "b", rerun=["prep"])
    runs.submitter.end("b")

    fork_run(store, submitter, "b", "c")

    assert runs.tasks("c") == ["prep", "check", "report"]


def test_a_fork_does_not_take_over_a_damaged_result(runs: Runs, store: Store, submitter: FakeSubmitter) -> None:
    runs.start("a", pipeline())
    runs.run_all("a")
    runs.damage("a")

    fork_run(store, submitter, "a", "b")

    assert runs.tasks("b") == ["prep", "check", "report"]


def test_the_items_that_a_fork_lacks_run_alone_and_its_reader_gets_all(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    runs.start("a", pipeline())
    flow = runs.workflow("a")
    flow.run_item("sweep", 0, {"loss": "0.1"})
    flow.run_item("sweep", 2, {"loss": "0.3"})
    submitter.end("a")

    fork_run(store, submitter, "a", "b")

    sweep, report = (runs.workflow("b").tasks[name] for name in ("sweep", "report"))
    assert sweep["withParam"] == "[2]"
    assert "withItems" not in sweep
    [losses] = report["arguments"]["parameters"]
    assert losses["value"].startswith("{{=")
    assert runs.reused("b") == [ITEMS[0], ITEMS[2]]
    runs.workflow("b").run_item("sweep", 0, {"loss": "0.2"})
    end = find_attempt_end(store, "b", ITEMS[1], 1)
    assert end is not None
    assert end.outcome is AttemptEndOutcome.DONE
    submitter.end("b")
    assert resume_run(store, submitter, "b").plan.running == ("prep", "check", "report")


ALLOWED = {"parameters": "allow"}


def test_a_resume_takes_over_what_the_run_has_finished_under_the_same_parameters_before(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    runs.start("a", pipeline("0.1"))
    runs.run_all("a")
    change = WorkflowChange(pipeline("0.5"), drift_actions=ALLOWED)
    assert resume_run(store, submitter, "a", change=change).plan.running == ("prep", "check", "report")
    flow = runs.workflow("a-2")
    flow.run_task("prep", {"rows": "4"}, {"data": b"4"})
    flow.run_task("check", {"score": "0.6"})
    submitter.end("a-2")

    back = WorkflowChange(pipeline("0.1"), drift_actions=ALLOWED)
    planned = plan_run(store, "a", change=back)
    resumed = resume_run(store, submitter, "a", change=back)

    assert resumed.plan.running == planned.running == ("report",)
    assert runs.reuse("a", "prep", submission=3) == ("a", "prep", 1)
    assert runs.reuse("a", "check", submission=3) == ("a", "check", 1)
    submitter.end("a-3")
    assert resume_run(store, submitter, "a").plan.running == ("report",), "a plain resume goes on with the same"


def behind(lr: str) -> Manifest:
    """A preparation with a fan-out and a plain task behind it, whose outputs nothing reads."""
    reads: Manifest = {"parameters": [{"name": "rows", "value": "{{tasks.prep.outputs.parameters.rows}}"}]}
    takes_rows = {"inputs": {"parameters": [{"name": "rows"}]}}
    return pipeline_of(
        ungated(
            "prep",
            parameters=("rows",),
            program={"inputs": {"parameters": [{"name": "lr"}]}},
            arguments=READS_LR,
        ),
        ungated("sweep", program=takes_rows, withItems=["a", "b"], depends="prep", arguments=reads),
        plain("notify", depends="prep", arguments=reads),
        parameters={"lr": lr},
    )


def test_a_step_that_rests_on_another_result_than_the_reused_one_runs_again(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    """The newest results behind the preparation are those of other rows."""
    runs.start("a", behind("0.1"))
    flow = runs.workflow("a")
    flow.run_task("prep", {"rows": "1"})
    flow.run_item("sweep", 0)
    submitter.end("a")
    resume_run(store, submitter, "a", change=WorkflowChange(behind("0.5"), drift_actions=ALLOWED))
    flow = runs.workflow("a-2")
    flow.run_task("prep", {"rows": "2"})
    flow.run_task("sweep")
    submitter.end("a-2")

    back = WorkflowChange(behind("0.1"), drift_actions=ALLOWED)
    resumed = resume_run(store, submitter, "a", change=back)

    assert resumed.plan.running == ("sweep", "notify")
    assert runs.workflow("a-3").tasks["sweep"]["withParam"] == '["b"]'
    assert runs.reuse("a", item_step_id("sweep", "a", 0), submission=3) == ("a", item_step_id("sweep", "a", 0), 1)
    [fan_out] = [step for step in resumed.plan.steps if step.name == "sweep"]
    assert [item.reason for item in fan_out.items if not item.done] == [
        "depends on prep, which takes over another result"
    ]


def test_a_step_that_rests_on_the_reused_result_stays(runs: Runs, store: Store, submitter: FakeSubmitter) -> None:
    """The image of the preparation was named anew, and its program is the same."""
    runs.start("a", pipeline())
    runs.run_all("a")
    renamed = pipeline()
    for template in renamed["spec"]["templates"]:
        if template["name"] == "prep":
            template["container"]["image"] = "python:3.12.0"

    planned = plan_run(store, "a", change=WorkflowChange(renamed))

    assert planned.running == ("report",)
    assert all("another result" not in step.reason for step in planned.steps)


def test_a_plan_records_nothing(runs: Runs, store: Store) -> None:
    runs.start("a", pipeline("0.1"))
    runs.run_all("a")
    before = [info.key for info in store.list("")]

    assert plan_run(store, "a").running == ("report",)

    assert [info.key for info in store.list("")] == before


def test_a_resume_records_first_what_the_last_workflow_shows(
    runs: Runs, store: Store, submitter: FakeSubmitter
) -> None:
    runs.start("a", pipeline())
    flow = runs.workflow("a")
    flow.finish(flow.start_task("prep"), PREP, {"data": b"1,2,3"})
    flow.start_task("sweep", 1)
    submitter.end("a")
    submitter.show(flow.manifest)
    assert find_attempt_end(store, "a", "prep", 1) is None

    resumed = resume_run(store, submitter, "a")

    assert resumed.plan.running == ("sweep", "check", "report")
    assert resumed.fenced == (f"{ITEMS[1]}/1",)
    assert [one.decision for one in resumed.plan.steps if one.name == "prep"] == ["skip"]


def test_a_dry_run_records_nothing_of_the_last_workflow(runs: Runs, store: Store, submitter: FakeSubmitter) -> None:
    runs.start("a", pipeline())
    flow = runs.workflow("a")
    flow.finish(flow.start_task("prep"), PREP, {"data": b"1,2,3"})
    submitter.end("a")
    submitter.show(flow.manifest)
    before = [info.key for info in store.list("control/")]

    assert resume_run(store, submitter, "a", dry_run=True).plan.running == ("prep", "sweep", "check", "report")

    assert [info.key for info in store.list("control/")] == before


@pytest.mark.parametrize("foreign", ["another uid", "another cluster", "nodes in a database"])
def test_a_resume_records_nothing_of_another_workflow_under_the_same_name(
    runs: Runs, store: Store, submitter: FakeSubmitter, foreign: str
) -> None:
    runs.start("a", pipeline())
    flow = runs.workflow("a")
    flow.finish(flow.start_task("prep"), PREP, {"data": b"1,2,3"})
    submitter.end("a")
    shown = copy.deepcopy(flow.manifest)
    if foreign == "another uid":
        shown["metadata"]["uid"] = "uid-of-another"
    elif foreign == "nodes in a database":
        shown["status"]["offloadNodeStatusVersion"] = "fnv:1"
    submitter.show(shown)
    there = FakeSubmitter(submitter.folder, "east") if foreign == "another cluster" else submitter

    resumed = resume_run(store, there, "a", force=True)

    assert resumed.plan.running == ("prep", "sweep", "check", "report")
    assert find_attempt_end(store, "a", "prep", 1) is None


def test_an_item_that_is_asked_to_run_again_runs_alone(runs: Runs, store: Store, submitter: FakeSubmitter) -> None:
    runs.start("a", pipeline(share=True))
    runs.run_all("a")

    fork_run(store, submitter, "a", "b", rerun=["sweep[1]"])

    assert runs.workflow("b").tasks["sweep"]["withParam"] == "[2]"
    assert runs.reused("b") == ["prep", "check", ITEMS[0], ITEMS[2]]


@pytest.mark.parametrize("missing", [None, 2], ids=["all", "two"])
def test_items_that_run_although_they_could_be_taken_over_are_not_recorded_as_such(
    runs: Runs, store: Store, submitter: FakeSubmitter, missing: int | None
) -> None:
    """An expression reads the fan-out, which only a Workflow with all items can answer."""
    manifest = pipeline(share=True)
    report = next(task for task in entry_tasks(manifest) if task["name"] == "report")
    report["arguments"] = {"parameters": [{"name": "losses", "value": "{{=tasks.sweep.outputs.parameters.loss}}"}]}
    runs.start("a", manifest)
    for index in range(3):
        if index != missing:
            runs.workflow("a").run_item("sweep", index, {"loss": "0.1"})
    submitter.end("a")

    started = runs.start("b", manifest)

    assert runs.workflow("b").tasks["sweep"]["withItems"] == [1, 2, {"a": 3}]
    assert (runs.reused("b"), started.taken_over) == ([], ())
