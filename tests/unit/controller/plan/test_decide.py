"""What would run, and why.

| storage says | decision |
|---|---|
| done, listing agrees with its projection | skip; its record is not even read |
| done, projection missing or other | the end record decides |
| failed, fenced, no end, never started | run |
| done, but an object is gone, or has another size or other bytes | run, and everything behind it |
| done, behind a step that runs | run: its admit takes the result over if its inputs stay the same |
| done, cache=False | run, unless the run succeeded |
| plain | run, unless everything that needs it is finished |
| condition false for good | skip |
| done, but read in a way that no binding reaches | run |
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of, plain
from tiphys_controller import PlanReport, plan_run
from tiphys_controller.submit.planner import plan_stored_run

from tiphys.errors import NotFoundError, UsageError
from tiphys.protocol.step_spec import StepKind
from tiphys.records import Cause, ReuseRecord, RunRecord, SubmissionClaim, SubmissionEnd, SubmissionKind, item_step_id
from tiphys.store import RunLayout, Store

RUN = "digits-1"


def recorded(store: Store, *tasks: dict[str, Any], **fields: Any) -> History:
    """A run of these tasks that has been submitted, and nothing more."""
    record = RunRecord(run=RUN, pipeline="digits", workflow=pipeline_of(*tasks, **fields), digest="d")
    store.create(RunLayout(RUN).run_record, record.to_bytes())
    return History(store, RUN)


def edited(store: Store, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the recorded Workflow."""
    record = RunRecord.model_validate_json(store.read(RunLayout(RUN).run_record))
    edit(record.workflow)
    store.delete(RunLayout(RUN).run_record)
    store.create(RunLayout(RUN).run_record, record.to_bytes())


def reads(task: str, output: str = "n") -> dict[str, Any]:
    """Arguments that read one output parameter of a task."""
    return {"parameters": [{"name": output, "value": f"{{{{tasks.{task}.outputs.parameters.{output}}}}}"}]}


def decisions(report: PlanReport) -> dict[str, str]:
    return {step.name: step.decision for step in report.steps}


def reason(report: PlanReport, name: str) -> str:
    return next(step.reason for step in report.steps if step.name == name)


def chain() -> tuple[dict[str, Any], ...]:
    return gated("prep"), gated("fit", kind=StepKind.TRAIN, depends="prep"), gated("register", depends="fit")


def test_verified_steps_are_skipped_and_the_rest_runs(store: Store) -> None:
    history = recorded(store, *chain())
    history.done("prep", parameters={"n": "5"}, artifacts={"data": b"xyz"})
    history.failed("fit", message="node went away")

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "skip", "fit": "run", "register": "run"}
    assert reason(report, "prep") == "done in attempt 1, 2 objects verified"
    assert reason(report, "fit") == "never finished: attempt 1 ended by preemption: node went away"
    assert reason(report, "register") == "never started"
    assert [step.kind for step in report.steps] == ["step", "train", "step"]


def test_a_finished_run_leaves_no_step_to_run(store: Store) -> None:
    history = recorded(store, *chain())
    for step in ("prep", "fit", "register"):
        history.done(step)

    assert plan_run(store, RUN).running == ()


def test_only_the_last_attempt_counts(store: Store) -> None:
    history = recorded(store, gated("prep"))
    history.done("prep", attempt=1)
    history.failed("prep", attempt=2, cause=Cause.OUT_OF_MEMORY)

    assert reason(plan_run(store, RUN), "prep") == "never finished: attempt 2 ended by out of memory"


def test_an_attempt_without_an_end_is_not_finished(store: Store) -> None:
    recorded(store, gated("prep")).opened("prep", attempt=3)

    assert reason(plan_run(store, RUN), "prep") == "never finished: attempt 3 runs, or was lost"


def test_without_a_projection_the_end_record_decides(store: Store) -> None:
    recorded(store, gated("prep")).done("prep", parameters={"n": "5"}, projection=False)

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "skip"}
    assert reason(report, "prep") == "done in attempt 1, 1 object verified"


def test_a_projection_without_an_end_record_proves_nothing(store: Store) -> None:
    history = recorded(store, gated("prep"))
    history.done("prep", parameters={"n": "5"})
    store.delete(history.layout.attempt_end("prep", 1))

    assert decisions(plan_run(store, RUN)) == {"prep": "run"}


def test_objects_that_the_record_does_not_name_do_no_harm(store: Store) -> None:
    history = recorded(store, gated("prep"))
    history.done("prep", parameters={"n": "5"})
    store.create(f"{history.layout.outputs('prep', 1)}late", b"by a pod that lived on")

    assert decisions(plan_run(store, RUN)) == {"prep": "skip"}


def test_a_deleted_output_runs_its_step_and_everything_behind_it_again(store: Store) -> None:
    history = recorded(store, *chain(), gated("other"))
    for step in ("prep", "fit", "register", "other"):
        history.done(step, parameters={"n": "5"})
    key = f"{history.layout.outputs('fit', 1)}parameters/n"
    store.delete(key)

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "skip", "fit": "run", "register": "run", "other": "skip"}
    assert reason(report, "fit") == f"damaged: {key} is missing"
    assert reason(report, "register") == "depends on fit, which runs again; taken over if its inputs stay the same"


@pytest.mark.parametrize(
    ("written_again", "expected"),
    [
        (b"0123456789", "done in attempt 1, 1 object verified"),
        (b"9876543210", "damaged: {key} was written again with other bytes after it was verified"),
        (b"01234", "damaged: {key} has 5 bytes, its record says 10"),
    ],
)
def test_an_output_that_was_written_again_is_intact_with_the_same_bytes_alone(
    store: Store, written_again: bytes, expected: str
) -> None:
    history = recorded(store, gated("prep"), gated("other"))
    for step in ("prep", "other"):
        history.done(step, artifacts={"gewichte ä.bin": b"0123456789"})
    key = f"{history.layout.outputs('prep', 1)}artifacts/gewichte ä.bin"
    store.delete(key)
    store.create(key, written_again)

    report = plan_run(store, RUN)

    assert reason(report, "prep") == expected.format(key=key)
    assert reason(report, "other") == "done in attempt 1, 1 object verified"


def test_an_output_that_is_deleted_while_a_plan_reads_it_is_missing(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = recorded(store, gated("prep"))
    history.done("prep", artifacts={"größe": b"0123456789", "model": b"0123456789"})
    key = f"{history.layout.outputs('prep', 1)}artifacts/model"
    store.delete(key)
    store.create(key, b"0123456789")
    chunks = store.chunks

    def vanish(wanted: str, *size: int) -> Iterator[bytes]:
        store.delete(wanted)
        return chunks(wanted, *size)

    monkeypatch.setattr(store, "chunks", vanish)
    assert reason(plan_run(store, RUN), "prep") == f"damaged: {key} is missing"


@pytest.mark.parametrize("projection", [True, False])
def test_an_output_in_a_store_without_checksums_is_not_called_verified(
    store: Store, monkeypatch: pytest.MonkeyPatch, projection: bool
) -> None:
    history, listing = recorded(store, gated("prep")), store.list
    monkeypatch.setattr(
        store, "list", lambda prefix: (info._replace(version="") for info in listing(prefix)), raising=True
    )
    history.done("prep", artifacts={"model": b"0123456789"}, projection=projection)

    assert reason(plan_run(store, RUN), "prep") == "done in attempt 1, 1 object of the recorded size"


def test_a_damaged_end_record_is_named(store: Store) -> None:
    history = recorded(store, gated("prep"))
    history.opened("prep")
    key = history.layout.attempt_end("prep", 1)
    store.create(key, b"{garbage")

    assert f"{key} is not a valid AttemptEnd" in reason(plan_run(store, RUN), "prep")


def test_an_unknown_run_is_named(store: Store) -> None:
    recorded(store, gated("prep"))

    with pytest.raises(NotFoundError, match="digits-2"):
        plan_run(store, "digits-2")


def test_a_workflow_that_was_not_compiled_is_refused(store: Store) -> None:
    workflow = {"metadata": {"name": "x"}, "spec": {"entrypoint": "main", "templates": []}}
    record = RunRecord(run=RUN, pipeline="x", workflow=workflow, digest="d")
    store.create(RunLayout(RUN).run_record, record.to_bytes())

    with pytest.raises(UsageError, match=r"run digits-1 cannot be planned: .* Tiphys did not compile it"):
        plan_run(store, RUN)


def test_a_step_without_cache_runs_again_and_with_it_what_hangs_on_it(store: Store) -> None:
    history = recorded(store, gated("prep", cache=False), gated("fit", depends="prep"))
    history.done("prep")
    history.done("fit")

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "run", "fit": "run"}
    assert reason(report, "prep") == "cache=False: it runs in every submission"


def sealed(store: Store, status: str) -> None:
    layout = RunLayout(RUN)
    claim = SubmissionClaim(run=RUN, submission=1, kind=SubmissionKind.ORIGINAL, workflow_name=RUN, namespace="default")
    store.create(layout.submission(1), claim.to_bytes())
    store.create(layout.submission_end(1), SubmissionEnd(run=RUN, submission=1, status=status).to_bytes())


def test_a_run_that_succeeded_is_not_repeated_for_what_keeps_no_result(store: Store) -> None:
    history = recorded(store, gated("prep", cache=False), gated("skipped", when="false"), plain("notify"))
    history.done("prep")
    sealed(store, "Succeeded")

    report = plan_run(store, RUN)

    assert report.running == ()
    assert reason(report, "skipped") == "it never ran here; the last submission succeeded without it"


def test_a_run_that_failed_is_repeated_for_them(store: Store) -> None:
    history = recorded(store, gated("prep", cache=False), gated("skipped", when="false"), plain("notify"))
    history.done("prep")
    sealed(store, "Failed")

    assert plan_run(store, RUN).running == ("prep", "skipped", "notify")


def test_once_a_run_goes_on_steps_without_cache_run_too(store: Store) -> None:
    history = recorded(store, gated("stamp", cache=False), gated("fit"))
    history.done("stamp")
    history.done("fit", parameters={"n": "5"})
    store.delete(f"{history.layout.outputs('fit', 1)}parameters/n")
    sealed(store, "Succeeded")

    assert plan_run(store, RUN).running == ("stamp", "fit")


def test_a_plain_step_runs_again_where_nothing_proves_that_it_ran(store: Store) -> None:
    history = recorded(store, gated("prep"), plain("notify", depends="prep"))
    history.done("prep")

    assert reason(plan_run(store, RUN), "notify") == "plain step keeps no record"


def test_a_plain_step_is_left_out_once_everything_that_needs_it_is_finished(store: Store) -> None:
    history = recorded(store, plain("download"), gated("prep", depends="download"), gated("fit", depends="prep"))
    history.done("prep")

    report = plan_run(store, RUN)

    assert decisions(report) == {"download": "skip", "prep": "skip", "fit": "run"}
    assert reason(report, "download") == "plain step keeps no record, and everything that needs it is finished"


def test_a_plain_step_that_something_missing_needs_runs_with_all_that_it_feeds(store: Store) -> None:
    tasks = (plain("a"), plain("b", depends="a"), gated("done", depends="a"), gated("fit", depends="b"))
    recorded(store, *tasks).done("done")

    report = plan_run(store, RUN)

    assert decisions(report) == {"a": "run", "b": "run", "done": "run", "fit": "run"}
    assert reason(report, "b") == "plain step keeps no record, and fit needs it"


def test_a_step_whose_condition_is_false_for_good_is_left_out(store: Store) -> None:
    tasks = (gated("fit"), gated("cleanup", depends="fit.Failed"), gated("next", depends="cleanup.Omitted && fit"))
    recorded(store, *tasks).done("fit")

    report = plan_run(store, RUN)

    assert decisions(report) == {"fit": "skip", "cleanup": "skip", "next": "run"}
    assert reason(report, "cleanup") == "its condition 'fit.Failed' is false"


def test_a_condition_over_a_step_that_runs_is_left_to_the_workflow(store: Store) -> None:
    recorded(store, gated("fit"), gated("cleanup", depends="fit.Failed"))

    assert decisions(plan_run(store, RUN)) == {"fit": "run", "cleanup": "run"}


@pytest.mark.parametrize(
    "value",
    [
        "{{tasks.prep.id}}",
        "{{=tasks.prep.outputs.parameters.n}}",
        "{{=tasks['prep'].outputs.parameters.n}}",
        "{{tasks.prep.outputs.parameters.odd}}",
    ],
)
def test_a_done_step_stays_where_only_a_workflow_can_answer(store: Store, value: str) -> None:
    arguments = {"parameters": [{"name": "x", "value": value}]}
    history = recorded(store, gated("prep"), gated("fit", depends="prep", arguments=arguments), gated("more"))
    history.done("prep", parameters={"n": "5", "odd": "has {{braces}}"})
    history.done("more")

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "run", "fit": "run", "more": "skip"}
    assert reason(report, "prep").startswith("done, but fit reads ")


def test_a_done_step_stays_where_the_workflows_outputs_read_it(store: Store) -> None:
    history = recorded(store, gated("prep"), gated("fit", depends="prep"))
    outputs = {"parameters": [{"name": "n", "valueFrom": {"parameter": "{{tasks.prep.outputs.parameters.n}}"}}]}
    edited(store, lambda workflow: workflow["spec"]["templates"][0].update(outputs=outputs))
    history.done("prep", parameters={"n": "5"})

    assert reason(plan_run(store, RUN), "prep") == "done, but the workflow's own outputs read it"


def items(*values: Any) -> list[str]:
    return [item_step_id("sweep", value if isinstance(value, str) else json.dumps(value), 0) for value in values]


def test_a_fan_out_is_done_when_all_of_its_items_are(store: Store) -> None:
    history = recorded(store, gated("sweep", withItems=[{"lr": 0.1}, {"lr": 1.0}]), gated("pick", depends="sweep"))
    for step in items({"lr": 0.1}, {"lr": 1}):
        history.done(step, parameters={"acc": "0.9"})

    report = plan_run(store, RUN)

    assert decisions(report) == {"sweep": "skip", "pick": "run"}
    assert reason(report, "sweep") == "all 2 items done, 2 objects verified"


def test_a_fan_out_with_an_item_missing_is_kept_whole_and_says_which(store: Store) -> None:
    history = recorded(store, gated("sweep", withItems=["a", "b", "c"]))
    done, failed, _ = items("a", "b", "c")
    history.done(done)
    history.failed(failed)

    [step] = plan_run(store, RUN).steps

    assert step.decision == "run"
    assert step.reason == (
        "sweep[1] b and 1 more of 3 not done (never finished: attempt 1 ended by preemption); 1 done is taken over"
    )
    assert [(item.name, item.item, item.done) for item in step.items] == [
        ("sweep[0]", "a", True),
        ("sweep[1]", "b", False),
        ("sweep[2]", "c", False),
    ]


def test_equal_items_are_counted(store: Store) -> None:
    history = recorded(store, gated("sweep", withItems=["a", "a"]))
    history.done(item_step_id("sweep", "a", 0))
    assert decisions(plan_run(store, RUN)) == {"sweep": "run"}

    history.done(item_step_id("sweep", "a", 1))
    assert decisions(plan_run(store, RUN)) == {"sweep": "skip"}


@pytest.mark.parametrize(
    ("source", "values"),
    [
        ({"withSequence": {"start": "2", "end": "4"}}, ["2", "3", "4"]),
        ({"withSequence": {"count": 2, "format": "part-%02d"}}, ["part-00", "part-01"]),
        ({"withSequence": {"start": "2", "end": "1"}}, ["2", "1"]),
        ({"withParam": '["a", {"b": 1}]'}, ["a", '{"b":1}']),
        ({"withParam": "{{workflow.parameters.lrs}}"}, ["0.1", "0.2"]),
        ({"withItems": ["{{workflow.parameters.one}}"]}, ["x"]),
    ],
)
def test_items_are_known_from_the_manifest_and_its_parameters(
    store: Store, source: dict[str, Any], values: list[str]
) -> None:
    history = recorded(store, gated("sweep", **source), parameters={"lrs": "[0.1, 0.2]", "one": "x"})
    for value in values:
        history.done(item_step_id("sweep", value, 0))

    report = plan_run(store, RUN)

    assert decisions(report) == {"sweep": "skip"}
    assert [item.done for item in report.steps[0].items] == [True] * len(values)


def test_items_made_by_a_finished_step_are_known_from_its_record(store: Store) -> None:
    history = recorded(store, gated("make"), gated("sweep", withParam="{{tasks.make.outputs.parameters.n}}"))
    history.done("make", parameters={"n": '["a"]'})
    history.done(item_step_id("sweep", "a", 0))

    assert plan_run(store, RUN).running == ()


def test_items_made_by_a_step_that_runs_are_not_guessed(store: Store) -> None:
    history = recorded(store, gated("make"), gated("sweep", withParam="{{tasks.make.outputs.parameters.n}}"))
    history.done(item_step_id("sweep", "a", 0))

    report = plan_run(store, RUN)

    assert decisions(report) == {"make": "run", "sweep": "run"}
    assert reason(report, "sweep") == (
        "its items are made by a step before it; 1 done is taken over if the inputs stay the same"
    )


def test_targets_limit_the_plan(store: Store) -> None:
    recorded(store, gated("a"), gated("b", depends="a"), gated("c"))
    edited(store, lambda workflow: workflow["spec"]["templates"][0]["dag"].update(target="b"))

    assert decisions(plan_run(store, RUN)) == {"a": "run", "b": "run"}


@pytest.mark.parametrize(
    ("tasks", "what"),
    [
        ((gated("a", depends="ghost"),), "task a names ghost, which its DAG does not have"),
        ((gated("a", arguments=reads("ghost")),), "task a names ghost"),
        ((gated("a", depends="b"), gated("b", depends="a")), "wait for each other"),
        ((gated("a", depends="b &&"), gated("b")), "depends 'b &&' cannot be read"),
    ],
)
def test_a_dag_that_does_not_fit_together_is_refused(store: Store, tasks: Any, what: str) -> None:
    recorded(store, *tasks)

    with pytest.raises(UsageError, match="run digits-1 cannot be planned") as caught:
        plan_run(store, RUN)

    assert what in str(caught.value)


def test_the_document_is_stable(store: Store) -> None:
    recorded(store, gated("prep")).done("prep")

    document = json.loads(plan_run(store, RUN).model_dump_json())

    assert document.pop("seconds") >= 0
    assert document == {
        "apiVersion": "tiphys.dev/v1beta1",
        "kind": "Plan",
        "run": RUN,
        "pipeline": "digits",
        "store": store.url,
        "submissions": 0,
        "steps": [
            {"name": "prep", "kind": "step", "decision": "skip", "reason": "done in attempt 1", "items": []},
        ],
    }


def took_over(store: Store, step: str, submission: int = 2, source: str = "digits-0", attempt: int = 1) -> None:
    """Submission took over a result instead of running the step."""
    record = ReuseRecord(
        run=RUN,
        submission=submission,
        step=step,
        step_key="k",
        source_run=source,
        source_step=step if source == RUN else "elsewhere",
        source_attempt=attempt,
    )
    store.create(RunLayout(RUN).reused(submission, step), record.to_bytes())


def test_a_result_of_another_run_is_as_good_as_an_own_one(store: Store) -> None:
    recorded(store, gated("prep"), gated("fit", depends="prep", arguments=reads("prep")))
    History(store, "digits-0").done("elsewhere", parameters={"n": "7"}, artifacts={"data": b"xyz"})
    took_over(store, "prep", submission=1)

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "skip", "fit": "run"}
    assert reason(report, "prep") == "taken over from run digits-0, step elsewhere, attempt 1, 2 objects verified"
    bound = plan_stored_run(store, RUN).decisions.finished_outputs["fit"]["prep"]
    assert bound.values["outputs.parameters.n"] == "7"
    assert bound.artifacts["data"].startswith("data/runs/digits-0/outputs/elsewhere/")


def test_a_result_of_another_run_that_lost_an_output_runs(store: Store) -> None:
    recorded(store, gated("prep"))
    History(store, "digits-0").done("elsewhere", artifacts={"data": b"xyz"})
    took_over(store, "prep")
    gone = next(info.key for info in store.list("data/runs/digits-0/outputs/"))
    store.delete(gone)

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "run"}
    assert reason(report, "prep") == (
        f"damaged: {gone} is missing, taken over from run digits-0, step elsewhere, attempt 1"
    )


def test_a_result_whose_record_was_removed_runs_even_where_the_run_succeeded(store: Store) -> None:
    recorded(store, gated("prep"))
    took_over(store, "prep")
    sealed(store, "Succeeded")

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "run"}
    assert "run digits-0, step elsewhere, attempt 1, whose record is gone" in reason(report, "prep")


def test_an_older_result_that_was_taken_over_outweighs_a_later_failure(store: Store) -> None:
    history = recorded(store, gated("prep"), gated("fit", depends="prep", arguments=reads("prep")))
    history.done("prep", 1, parameters={"n": "5"})
    history.failed("prep", 2, submission=2)
    took_over(store, "prep", submission=3, source=RUN, attempt=1)

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "skip", "fit": "run"}
    assert reason(report, "prep") == "taken over from attempt 1, 1 object verified"


def test_values_come_from_the_result_that_was_taken_over_and_not_from_the_last_attempt(store: Store) -> None:
    history = recorded(store, gated("prep"), gated("fit", depends="prep", arguments=reads("prep")))
    history.done("prep", 1, parameters={"n": "5"})
    history.done("prep", 2, parameters={"n": "6"}, submission=2)
    took_over(store, "prep", submission=3, source=RUN, attempt=1)

    assert plan_stored_run(store, RUN).decisions.finished_outputs["fit"]["prep"].values["outputs.parameters.n"] == "5"


def test_an_attempt_of_a_later_submission_outweighs_what_was_taken_over_before(store: Store) -> None:
    history = recorded(store, gated("prep"))
    history.done("prep", 1, parameters={"n": "5"})
    took_over(store, "prep", submission=2)
    history.failed("prep", 2, submission=3, message="node went away")

    assert reason(plan_run(store, RUN), "prep") == "never finished: attempt 2 ended by preemption: node went away"


def test_items_that_were_taken_over_are_done(store: Store) -> None:
    items = [item_step_id("sweep", text, 0) for text in ("a", "b")]
    history = recorded(store, gated("sweep", withItems=["a", "b"]))
    history.done(items[0])
    History(store, "digits-0").done("elsewhere")
    took_over(store, items[1], submission=1)

    report = plan_run(store, RUN)

    assert decisions(report) == {"sweep": "skip"}
    assert reason(report, "sweep") == "all 2 items done"


def test_a_step_that_the_run_did_without_runs_once_something_behind_it_does(store: Store) -> None:
    history = recorded(store, gated("prep"), gated("fit", depends="prep"))
    history.done("fit", parameters={"n": "5"})
    store.delete(f"{history.layout.outputs('fit', 1)}parameters/n")
    sealed(store, "Succeeded")

    assert reason(plan_run(store, RUN), "prep") == "never started, and fit needs it"


def test_a_step_that_sets_outputs_of_the_workflow_stays_where_something_reads_them(store: Store) -> None:
    def export(workflow: dict[str, Any]) -> None:
        conclude = next(one for one in workflow["spec"]["templates"] if one["name"] == "prep-conclude")
        conclude["outputs"] = {"parameters": [{"name": "n", "globalName": "total"}]}

    arguments = {"parameters": [{"name": "n", "value": "{{workflow.outputs.parameters.total}}"}]}
    history = recorded(store, gated("prep"), gated("other"), gated("fit", depends="prep && other", arguments=arguments))
    edited(store, export)
    history.done("prep")
    history.done("other")

    report = plan_run(store, RUN)

    assert decisions(report) == {"prep": "run", "other": "skip", "fit": "run"}
    assert reason(report, "prep") == "done, but it sets outputs of the workflow"


def test_an_entry_point_that_is_no_dag_is_refused(store: Store) -> None:
    recorded(store, gated("prep"))
    edited(store, lambda workflow: workflow["spec"].update(entrypoint="prep-run"))

    with pytest.raises(UsageError, match="the entry point prep-run is not a DAG"):
        plan_run(store, RUN)


def test_targets_made_at_run_time_are_refused(store: Store) -> None:
    recorded(store, gated("prep"))
    edited(store, lambda workflow: workflow["spec"]["templates"][0]["dag"].update(target="{{workflow.parameters.t}}"))

    with pytest.raises(UsageError, match="made at run time"):
        plan_run(store, RUN)


@pytest.mark.parametrize("source", ["[]", "no JSON"])
def test_a_fan_out_without_items_is_left_to_the_workflow(store: Store, source: str) -> None:
    recorded(store, gated("sweep", withParam=source))

    assert decisions(plan_run(store, RUN)) == {"sweep": "run"}
