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
from tiphys_controller.runs import AttemptDetail, RunDetail, RunSummary, StepDetail
from tiphys_controller.submit.plan_report import StartCheckpoint

from hera_pipelines.ui.step_states import find_step_state, suggest_command
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
    return StepDetail(name="fit", kind="train", decision="run", reason="", needs=(), attempts=attempts)


def test_a_step_says_from_which_checkpoint_a_resume_would_go_on() -> None:
    continued = step("failed").model_copy(update={"starts_from": StartCheckpoint(checkpoint="1-600", global_step=600)})
    scratch = step("failed").model_copy(update={"name": "tune", "starts_from": StartCheckpoint()})
    detail = RunDetail(
        store="file:///s",
        summary=RunSummary(
            run="r",
            pipeline="p",
            phase=RunPhase.FAILED,
            reason="",
            submissions=1,
            attempts=1,
            steps_done=0,
            steps_total=2,
            last_activity=None,
        ),
        parameters={},
        code_version=None,
        submissions=(),
        steps=(continued, scratch),
    )
    assert suggest_command(detail)[1] == (
        "It runs 2 of 2 steps again or for the first time: fit, tune; "
        "fit goes on from checkpoint 1-600; tune begins from the beginning."
    )


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
