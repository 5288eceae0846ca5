"""Running steps again that are done: ``--from``, and what it leaves for later resumes.

| the step | outcome |
|---|---|
| asked for, done | runs, with everything that hangs on it |
| asked for, in a succeeded run | the same |
| item of a fan-out asked for, under any of its names | that item runs, and what hangs on the fan-out |
| asked for before, not finished since | a plain resume runs it |
| asked for before, and finished since | skipped |
| claimed and never sent | sent as it was claimed; something else is refused |
| unknown, or never to run | refused, nothing written |
"""

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of, plain
from support.builders.lineage import write_run
from support.fakes.submitter import FakeSubmitter
from support.processes.failpoints import dying_at
from tiphys_controller import fork_run, plan_run, resume_run, start_run
from tiphys_controller.submit.planner import plan_stored_run

from tiphys.errors import ConflictError, NotFoundError, UsageError
from tiphys.protocol.step_spec import StepKind
from tiphys.records import SubmissionClaim, SubmissionEnd, item_step_id
from tiphys.store import RunLayout, Store, read_events, read_run, read_submissions

RUN = "digits-1"
LAYOUT = RunLayout(RUN)
PIPELINE = pipeline_of(
    gated("prep"),
    gated("fit", kind=StepKind.TRAIN, depends="prep"),
    gated("report", depends="fit"),
    gated("aside", depends="prep"),
)


@pytest.fixture
def history(store: Store, submitter: FakeSubmitter) -> History:
    """A run that has succeeded."""
    start_run(store, submitter, PIPELINE, RUN)
    history = History(store, RUN)
    for step in ("prep", "fit", "report", "aside"):
        history.done(step)
    store.create(LAYOUT.submission_end(1), SubmissionEnd(run=RUN, submission=1, status="Succeeded").to_bytes())
    submitter.end(RUN, "Succeeded")
    return history


def last_claim(store: Store) -> SubmissionClaim:
    return read_submissions(store, RUN)[-1].claim


def keys(store: Store) -> list[str]:
    return [info.key for info in store.list("")]


def test_steps_of_a_succeeded_run_run_again_with_all_that_hang_on_them(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    resumed = resume_run(store, submitter, RUN, rerun=["fit"])

    assert resumed.plan.running == ("fit", "report")
    assert [step.reason for step in resumed.plan.steps if step.decision == "run"] == [
        "it is asked to run again",
        "depends on fit, which is asked to run again",
    ]
    claim = last_claim(store)
    assert (claim.rerun_roots, claim.rerun_since) == (("fit",), {"fit": 2, "report": 2})
    assert read_events(store, RUN)[-1].message.endswith("rerun on request: fit")


def test_only_the_steps_that_were_asked_for_are_called_that(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    plan = resume_run(store, submitter, RUN, rerun=["prep"]).plan
    assert {step.name: step.reason for step in plan.steps} == {
        "prep": "it is asked to run again",
        "fit": "depends on prep, which is asked to run again",
        "aside": "depends on prep, which is asked to run again",
        "report": "depends on fit, which runs again",
    }


def test_several_steps_are_asked_for_at_once(store: Store, submitter: FakeSubmitter, history: History) -> None:
    assert resume_run(store, submitter, RUN, rerun=["aside", "report"]).plan.running == ("aside", "report")


def test_a_plain_resume_knows_what_was_asked_and_not_finished(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    resume_run(store, submitter, RUN, rerun=["fit"])
    history.done("fit", attempt=2, submission=2)
    submitter.end(f"{RUN}-2")

    resumed = resume_run(store, submitter, RUN)

    assert resumed.plan.running == ("report",)
    assert last_claim(store).rerun_roots == ()
    assert last_claim(store).rerun_since == {"fit": 2, "report": 2}


def test_a_step_finished_since_is_skipped(store: Store, submitter: FakeSubmitter, history: History) -> None:
    resume_run(store, submitter, RUN, rerun=["fit"])
    for step in ("fit", "report"):
        history.done(step, attempt=2, submission=2)

    assert plan_run(store, RUN).running == ()


def test_asking_twice_asks_anew(store: Store, submitter: FakeSubmitter, history: History) -> None:
    for number, attempt in ((2, 2), (3, 3)):
        resume_run(store, submitter, RUN, rerun=["report"])
        assert last_claim(store).rerun_since == {"report": number}
        history.done("report", attempt=attempt, submission=number)
        submitter.end(f"{RUN}-{number}", "Succeeded")


@pytest.mark.parametrize("point", ["after_fence", "after_claim", "after_create"])
def test_a_crash_loses_nothing_of_what_was_asked(
    store: Store, submitter: FakeSubmitter, history: History, point: str
) -> None:
    with dying_at(f"resume.{point}"):
        resume_run(store, submitter, RUN, rerun=["fit"])

    resumed = resume_run(store, submitter, RUN, rerun=["fit"] if point == "after_fence" else [])

    assert (resumed.submission, resumed.plan.running) == (2, ("fit", "report"))
    assert last_claim(store).rerun_since == {"fit": 2, "report": 2}
    assert submitter.names() == [RUN, f"{RUN}-2"]


def test_a_plan_names_the_reruns_of_a_claim_that_was_never_sent(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    with dying_at("resume.after_claim"):
        resume_run(store, submitter, RUN, rerun=["fit"])

    plan = plan_stored_run(store, RUN)
    assert (plan.rerun_roots, plan.rerun_steps) == (("fit",), ("fit", "report"))


def test_a_number_that_was_claimed_for_something_else_is_not_sent_for_this(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    with dying_at("resume.after_claim"):
        resume_run(store, submitter, RUN, rerun=["aside"])

    with pytest.raises(ConflictError, match=r"submission 2 .* never sent; it runs aside, .*--force"):
        resume_run(store, submitter, RUN, rerun=["fit"])

    assert resume_run(store, submitter, RUN, rerun=["fit"], force=True).submission == 3
    assert plan_run(store, RUN).running == ("fit", "aside", "report")


def test_every_item_of_a_fan_out_runs_again(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("sweep", withItems=["a", "b"])), RUN)
    history = History(store, RUN)
    for item in plan_run(store, RUN).steps[0].items:
        history.done(item.step)
    submitter.end(RUN)
    assert plan_run(store, RUN).running == ()

    [sweep] = resume_run(store, submitter, RUN, rerun=["sweep"]).plan.steps

    assert [item.done for item in sweep.items] == [False, False]


SWEEP = pipeline_of(gated("sweep", withItems=["a", "b", "c"]), gated("best", depends="sweep"))


@pytest.fixture
def sweep(store: Store, submitter: FakeSubmitter) -> History:
    """A run whose sweep and what follows are done."""
    start_run(store, submitter, SWEEP, RUN)
    history = History(store, RUN)
    for item in plan_run(store, RUN).steps[0].items:
        history.done(item.step)
    history.done("best")
    store.create(LAYOUT.submission_end(1), SubmissionEnd(run=RUN, submission=1, status="Succeeded").to_bytes())
    submitter.end(RUN, "Succeeded")
    return history


@pytest.mark.parametrize("name", ["sweep[1]", "sweep[b]", "sweep(1:b)", item_step_id("sweep", "b", 0)])
def test_a_requested_item_of_a_fan_out_runs_again(
    store: Store, submitter: FakeSubmitter, sweep: History, name: str
) -> None:
    resumed = resume_run(store, submitter, RUN, rerun=[name])

    [items, best] = resumed.plan.steps
    assert [(item.name, item.done) for item in items.items] == [
        ("sweep[0]", True),
        ("sweep[1]", False),
        ("sweep[2]", True),
    ]
    assert best.reason == "depends on sweep, which runs again"
    item = item_step_id("sweep", "b", 0)
    assert (last_claim(store).rerun_roots, last_claim(store).rerun_since) == ((item,), {item: 2, "best": 2})
    assert read_events(store, RUN)[-1].message.endswith("rerun on request: sweep[1]")


def test_an_item_that_hangs_on_another_rerun_runs_with_all_others(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("prep"), gated("sweep", withItems=["a", "b"], depends="prep")), RUN)
    history = History(store, RUN)
    history.done("prep")
    for item in plan_run(store, RUN).steps[1].items:
        history.done(item.step)
    submitter.end(RUN)

    [_, sweep] = plan_run(store, RUN, ["sweep[0]", "prep"]).steps

    assert [item.done for item in sweep.items] == [False, False]


@pytest.mark.parametrize("name", ["sweep[3]", "sweep[d]", item_step_id("sweep", "d", 0), "best[0]"])
def test_an_unknown_item_is_refused(store: Store, submitter: FakeSubmitter, sweep: History, name: str) -> None:
    before = keys(store)

    with pytest.raises((NotFoundError, UsageError), match=r"no item|not fanned out"):
        resume_run(store, submitter, RUN, rerun=[name])

    assert keys(store) == before


def test_a_fork_runs_an_item_again_and_reuses_the_others(
    store: Store, submitter: FakeSubmitter, sweep: History
) -> None:
    fork_run(store, submitter, RUN, "again", rerun=["sweep[1]"])

    assert read_run(store, "again").rerun_steps == (item_step_id("sweep", "b", 0), "best")


def test_a_plain_step_can_be_asked_for(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("prep"), plain("notify", depends="prep"), gated("report")), RUN)
    history = History(store, RUN)
    for step in ("prep", "report"):
        history.done(step)
    store.create(LAYOUT.submission_end(1), SubmissionEnd(run=RUN, submission=1, status="Succeeded").to_bytes())
    submitter.end(RUN, "Succeeded")

    with dying_at("resume.after_claim"):
        resume_run(store, submitter, RUN, rerun=["notify"])

    assert resume_run(store, submitter, RUN).plan.running == ("notify",)


def test_an_unknown_step_is_named_with_those_there_are(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    before = keys(store)

    with pytest.raises(NotFoundError, match=r"no step '\.\./fit'; did you mean 'fit'\? It has: prep, .*"):
        resume_run(store, submitter, RUN, rerun=["../fit"])

    assert keys(store) == before


def test_a_training_with_its_checkpoints_on_a_volume_is_refused(store: Store, submitter: FakeSubmitter) -> None:
    """Its program would go on from the newest checkpoint there."""
    write_run(store, run=RUN, checkpoint_store="file:///volume")
    History(store, RUN).done("fit")
    before = keys(store)

    with pytest.raises(UsageError, match="its checkpoints lie on the volume file:///volume"):
        resume_run(store, submitter, RUN, rerun=["fit"])

    assert keys(store) == before


def test_a_step_whose_condition_stays_false_is_refused(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("fit"), gated("cleanup", depends="fit.Failed")), RUN)
    History(store, RUN).done("fit")
    submitter.end(RUN)

    with pytest.raises(UsageError, match=r"cleanup is to run again and would not: its condition 'fit\.Failed'"):
        resume_run(store, submitter, RUN, rerun=["cleanup"])


def test_a_result_behind_a_step_that_ran_again_is_checked_even_if_a_workflow_died_in_between(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    """Fit was made from what prep made first. Prep was made anew, and then the Workflow died before fit was asked."""
    store.delete(LAYOUT.attempt_end("prep", 1))
    assert resume_run(store, submitter, RUN).plan.running == ("prep", "fit", "aside", "report")
    history.done("prep", attempt=2, submission=2)
    submitter.end(f"{RUN}-2")

    report = plan_run(store, RUN)

    assert report.running == ("fit", "aside", "report")
    assert report.steps[1].reason == (
        "its result is older than submission 2, which was to run it or to check it against its inputs"
    )


def test_a_step_omitted_by_a_successful_submission_is_not_missing(
    store: Store, submitter: FakeSubmitter, history: History
) -> None:
    """The condition of aside was false when prep had run again."""
    resume_run(store, submitter, RUN, rerun=["prep"])
    for step in ("prep", "fit", "report"):
        history.done(step, attempt=2, submission=2)
    submitter.end(f"{RUN}-2", "Succeeded")
    assert plan_run(store, RUN).running == ("aside",)

    store.create(LAYOUT.submission_end(2), SubmissionEnd(run=RUN, submission=2, status="Succeeded").to_bytes())

    assert plan_run(store, RUN).running == ()


def test_a_key_makes_one_submission(store: Store, submitter: FakeSubmitter, history: History) -> None:
    first = resume_run(store, submitter, RUN, rerun=["fit"], key="alert-7")
    running = resume_run(store, submitter, RUN, rerun=["fit"], key="alert-7")
    submitter.end(f"{RUN}-2")
    ended = resume_run(store, submitter, RUN, rerun=["fit"], key="alert-7")
    other = resume_run(store, submitter, RUN, rerun=["fit"], key="alert-8")

    assert [one.submission for one in (first, running, ended, other)] == [2, 2, 2, 3]
    assert [one.created for one in (first, running, ended, other)] == [True, False, False, True]
    assert ended.uid == first.uid
    assert submitter.names() == [RUN, f"{RUN}-2", f"{RUN}-3"]


@pytest.mark.parametrize("point", ["after_claim", "after_create", "after_bind"])
def test_a_key_whose_call_died_is_carried_out_once(
    store: Store, submitter: FakeSubmitter, history: History, point: str
) -> None:
    with dying_at(f"resume.{point}"):
        resume_run(store, submitter, RUN, rerun=["fit"], key="alert-7")

    assert resume_run(store, submitter, RUN, rerun=["fit"], key="alert-7").submission == 2
    assert submitter.names() == [RUN, f"{RUN}-2"]


@pytest.mark.parametrize("key", [None, "alert-7"])
@pytest.mark.parametrize("left", ["resume.after_claim", "resume.after_create"])
@pytest.mark.parametrize("point", ["", "resume.after_join", "resume.after_create"])
def test_a_key_that_sent_the_claim_of_another_call_makes_no_submission_of_its_own(
    store: Store, submitter: FakeSubmitter, history: History, key: str | None, left: str, point: str
) -> None:
    with dying_at(left):
        resume_run(store, submitter, RUN, rerun=["fit"], key=key)
    if point and (left, point) != ("resume.after_create", "resume.after_create"):  # what was created is not again
        with dying_at(point):
            resume_run(store, submitter, RUN, rerun=["fit"], key="alert-8")
    sent = resume_run(store, submitter, RUN, rerun=["fit"], key="alert-8")
    submitter.end(f"{RUN}-2")
    keys = ["alert-8", *([key] if key else [])]
    again = [resume_run(store, submitter, RUN, rerun=["fit"], key=one) for one in keys]

    assert [one.submission for one in (sent, *again)] == [2] * (1 + len(keys))
    assert submitter.names() == [RUN, f"{RUN}-2"]
    assert resume_run(store, submitter, RUN, rerun=["fit"], key="alert-9").submission == 3
