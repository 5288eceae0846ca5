import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of, ungated
from support.fakes.submitted_workflow import SubmittedWorkflow
from support.fakes.submitter import FakeSubmitter
from support.stories.plugin import commit
from tiphys_controller import resume_run, start_run
from tiphys_controller.auto_resume.observe import observe_run

from tiphys.records import Cause
from tiphys.store import RunLayout, Store

RUN = "digits-1"


@pytest.mark.parametrize(("later_step", "reached"), [(40, 100), (100, 100), (140, 140)])
def test_progress_is_the_highest_step_and_not_that_of_the_newest_attempt(
    store: Store, submitter: FakeSubmitter, later_step: int, reached: int
) -> None:
    start_run(store, submitter, pipeline_of(gated("fit")), RUN)
    history = History(store, RUN)
    for attempt, step in ((1, 100), (2, later_step)):
        history.failed("fit", attempt)
        commit(store, f"{RUN}/fit", attempt, step)
    submitter.end(RUN)

    observation = observe_run(store, submitter, RUN, None)

    assert observation.advance is not None
    assert observation.advance.checkpoints == {"fit": reached}


def test_failures_of_an_earlier_submission_are_none_of_this_one(store: Store, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, pipeline_of(gated("prep"), gated("fit")), RUN)
    history = History(store, RUN)
    history.failed("prep", 1, Cause.USER_ERROR, "a typo", 1)
    submitter.end(RUN)
    resume_run(store, submitter, RUN)
    history.failed("fit", 1, Cause.PREEMPTION, "it was taken away", 2)
    submitter.end(f"{RUN}-2")
    assert [failure.step for failure in observe_run(store, submitter, RUN, None).failures] == ["fit"]


def test_the_causes_of_failures_that_only_the_workflow_shows_are_observed(
    store: Store, submitter: FakeSubmitter
) -> None:
    """A step without a gate fails in the moment in which its Workflow ends, and no recorder has seen it yet."""
    start_run(store, submitter, pipeline_of(ungated("prep")), RUN)
    flow = SubmittedWorkflow.of(store, submitter, RUN)
    flow.fail(flow.start_task("prep"), "Pod was rejected: node is shutting down", phase="Error")
    submitter.show(flow.manifest)
    assert observe_run(store, submitter, RUN, None).failures == ()
    assert list(store.list(RunLayout(RUN).attempts)) == [], "a run that runs is left alone"
    submitter.end(RUN)

    [failure] = observe_run(store, submitter, RUN, None).failures

    assert (failure.step, failure.cause) == ("prep", Cause.INFRASTRUCTURE)
