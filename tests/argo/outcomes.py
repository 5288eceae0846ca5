"""What has to be on record after a Workflow that succeeded, whatever was taken away meanwhile."""

from support.stories.interrupted_training.pipelines import expected_version
from support.stories.interrupted_training.scenarios import check_starts, ended, version

from tiphys.records import AttemptEndOutcome
from tiphys.store import read_submissions

from .world import Workflow

STORY = ("validate", "preprocess", "train", "register")


def check_nothing_lost_or_twice(workflow: Workflow, training_steps: int, steps: tuple[str, ...] = STORY) -> None:
    """The result is that of an undisturbed run, by one submission, with one finished attempt of each step."""
    store = workflow.world.store
    if "register" in steps:
        assert version(store, workflow.run) == expected_version(training_steps)
    [submission] = read_submissions(store, workflow.run)
    assert submission.binding is not None
    assert submission.binding.uid == workflow.uid
    for step in steps:
        outcomes = [ended(attempt).outcome for attempt in workflow.attempts(step)]
        assert outcomes[-1] is AttemptEndOutcome.DONE, step
        assert outcomes.count(AttemptEndOutcome.DONE) == 1, step
    check_starts(store, workflow.run)
