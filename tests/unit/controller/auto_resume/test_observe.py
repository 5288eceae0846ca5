import pytest
from support.compiled import History, gated, pipeline_of
from support.submitter import FakeSubmitter
from support.world import commit
from tiphys_controller import start_run
from tiphys_controller.auto_resume.observe import observe_run

from tiphys.store import Store

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
