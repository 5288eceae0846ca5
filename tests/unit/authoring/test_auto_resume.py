"""That an author may have a run go on by itself: off unless asked for, and stored with the run as it was asked for."""

from typing import Any

import pytest

from hera_pipelines import AutoResume, CronPipeline, Pipeline, step
from tiphys.errors import UsageError
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy, read_auto_resume_policy
from tiphys.records import Cause


@step()
def prep(source: str = "raw") -> None:
    _ = source


def digits(**fields: Any) -> Pipeline:
    with Pipeline("digits", store="s3://ml-runs/tiphys", **fields) as pipeline:
        prep()
    return pipeline


def test_a_run_goes_on_by_itself_only_where_its_author_asked_for_it() -> None:
    assert read_auto_resume_policy(digits().compile()) is None
    assert read_auto_resume_policy(digits(auto_resume=AutoResume()).compile()) == AutoResumePolicy()


def test_the_auto_resume_policy_of_the_author_is_read_by_the_controller() -> None:
    asked = AutoResume(
        max_without_progress=5, cooldown="90s", cooldown_cap="10m", retry_after=None, causes=("preemption",)
    )

    assert read_auto_resume_policy(digits(auto_resume=asked).compile()) == AutoResumePolicy(
        max_without_progress=5,
        cooldown_seconds=90,
        cooldown_cap_seconds=600,
        retry_after_seconds=None,
        causes=(Cause.PREEMPTION,),
    )


def test_workflows_of_a_schedule_carry_the_auto_resume_policy() -> None:
    with CronPipeline("nightly", schedules=["0 2 * * *"], auto_resume=AutoResume(cooldown="2m")) as nightly:
        prep()

    handed_on = nightly.compile()["spec"]["workflowMetadata"]
    found = read_auto_resume_policy({"metadata": handed_on})
    assert found is not None
    assert found.cooldown_seconds == 120


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (AutoResume(max_without_progress=0), "AutoResume: max_without_progress cannot be 0"),
        (AutoResume(cooldown="soon"), "AutoResume\\(cooldown=…\\)"),
        (AutoResume(causes=("bad_luck",)), "AutoResume: causes.0 cannot be 'bad_luck'"),
    ],
)
def test_an_invalid_auto_resume_setting_is_refused_at_compile(asked: AutoResume, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        digits(auto_resume=asked).compile()


def test_a_damaged_annotation_is_named() -> None:
    with pytest.raises(UsageError, match=f"annotation {AUTO_RESUME_ANNOTATION} is damaged"):
        read_auto_resume_policy({"metadata": {"annotations": {AUTO_RESUME_ANNOTATION: '{"max_without_progress": -1}'}}})
