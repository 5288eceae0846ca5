"""What became of a step, in a word.

| newest attempt | run         | word        |
|----------------|-------------|-------------|
| open           | running     | running     |
| open           | interrupted | interrupted |
| open           | unknown     | unknown     |
| stopped        | stopped     | stopped     |
| failed         | stopped     | failed      |
| none           | stopped     | never started |
"""

import pytest
from tiphys_controller.run_phase import RunPhase
from tiphys_controller.runs import AttemptDetail, StepDetail

from hera_pipelines.ui.step_states import find_step_state
from tiphys.records import utc_now


def step(*outcomes: str) -> StepDetail:
    attempts = tuple(
        AttemptDetail(
            step="fit",
            attempt=number,
            submission=1,
            outcome=outcome,
            cause="",
            message="",
            exit_code=None,
            starts_from="",
            opened_at=utc_now(),
            ended_at=None,
            outputs={},
        )
        for number, outcome in enumerate(outcomes, 1)
    )
    return StepDetail(name="fit", kind="train", done=False, reason="", needs=(), attempts=attempts)


@pytest.mark.parametrize(
    ("outcomes", "phase", "word"),
    [
        (("failed", ""), RunPhase.RUNNING, "running"),
        (("failed", ""), RunPhase.INTERRUPTED, "interrupted"),
        (("failed", ""), RunPhase.UNKNOWN, "unknown"),
        (("failed", "stopped"), RunPhase.STOPPED, "stopped"),
        (("stopped", "failed"), RunPhase.STOPPED, "failed"),
        ((), RunPhase.STOPPED, "never started"),
    ],
)
def test_state(outcomes: tuple[str, ...], phase: RunPhase, word: str) -> None:
    assert find_step_state(step(*outcomes), phase) == word


@pytest.mark.parametrize(
    ("taken_over", "word"), [({"fit": "run other, attempt 1"}, "taken over"), ({}, "never started")]
)
def test_a_step_that_is_done_without_an_attempt_took_a_result_over_or_had_nothing_to_do(
    taken_over: dict[str, str], word: str
) -> None:
    done = step().model_copy(update={"done": True, "taken_over": taken_over})
    assert find_step_state(done, RunPhase.SUCCEEDED) == word
