"""A checkpoint that kills whoever loads it is passed over after two deaths, whatever the budget says."""

import pytest
from support.builders.lineage import ref
from support.stories.plugin import Flow, World, commit, fit, keys, outputs, phase, said

from tiphys.faults import InjectedFaultError
from tiphys.lineage.quarantine import list_quarantined, read_quarantine_records
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.timeline import read_timeline
from tiphys.lineage.tree import CheckpointStatus, read_lineage_tree
from tiphys.protocol.step_spec import CheckpointPolicy, RetryPolicy
from tiphys.records import CheckpointRef, CrashRecord
from tiphys.store import RunLayout, read_step_attempts
from tiphys.store.incarnations import crash_key

RUN = "digits-abc12"
LINEAGE = f"{RUN}/fit"
ONE_RETRY = RetryPolicy(user_error=1, backoff_seconds=1)


def at(attempt: int, step: int) -> CheckpointRef:
    return ref(attempt, step, LINEAGE)


def crashes(flow: Flow, attempt: int, retry: int, error: str = "NaN", restored: CheckpointRef | None = None) -> str:
    """One attempt that leaves an account of its crash and exits with 1; what conclude says."""
    record = CrashRecord(
        run=RUN,
        step="fit",
        attempt=attempt,
        error=f"ValueError: {error}",
        fingerprint=f"ValueError: {error}",
        global_step=restored.global_step + 3 if restored else None,
        restored=restored,
    )
    flow.world.store.create(crash_key(RunLayout(RUN), "fit", attempt), record.to_bytes())
    return dies(flow, attempt, retry, 1)


def dies(flow: Flow, attempt: int, retry: int, code: int) -> str:
    flow.pod("fit", attempt, retry, phase="Failed", exit_code=code)
    reply = flow.end_try("fit", retry, exit_code=str(code))
    return f"{phase(reply)}: {said(reply)}"


def preempted(flow: Flow, retry: int) -> None:
    assert phase(flow.end_try("fit", retry, exit_code="75")) == "Error"


def two_checkpoints(here: World, retry: RetryPolicy = ONE_RETRY) -> Flow:
    """Attempt 1 saved steps 10 and 20 and was preempted; attempt 2 has started from 20."""
    flow = here.submit(fit(retry=retry))
    flow.admit("fit", 0)
    commit(here.store, LINEAGE, 1, 10)
    commit(here.store, LINEAGE, 1, 20)
    preempted(flow, 0)
    assert outputs(flow.admit("fit", 1))["resume-from"] == "1-20"
    return flow


def test_a_second_death_alike_quarantines_the_checkpoint_and_attempt_three_starts_before_it(here):
    flow = two_checkpoints(here)
    assert crashes(flow, 2, 1, restored=at(1, 20)).startswith("Error: ")
    assert outputs(flow.admit("fit", 2))["resume-from"] == "1-20"
    answer = crashes(flow, 3, 2, restored=at(1, 20))
    assert answer == (
        "Error: Attempt 3 ended by user error, the program exited with 1 (ValueError: NaN); "
        "checkpoint 20 of attempt 1 is quarantined, since 2 attempts that loaded it crashed in the same way, "
        "the last one 3 steps after the load: "
        "ValueError: NaN; attempt 4 resumes from step 10"
    )
    assert outputs(flow.admit("fit", 3))["resume-from"] == "1-10"
    assert read_quarantine_records(here.store, LINEAGE)[at(1, 20)].by == "conclude"


def test_people_find_it_in_the_lineage_and_among_the_events(here):
    flow = two_checkpoints(here)
    crashes(flow, 2, 1, restored=at(1, 20))
    flow.admit("fit", 2)
    crashes(flow, 3, 2, restored=at(1, 20))
    node = next(
        n
        for a in read_lineage_tree(RunHistory.for_display(here.store, RUN)).steps[0].attempts
        for n in a.checkpoints
        if n.ref == at(1, 20)
    )
    assert node.status is CheckpointStatus.QUARANTINED
    assert "crashed in the same way" in node.reason and node.reason.endswith("(by conclude)")
    messages = [
        event.message
        for event in read_timeline(RunHistory.for_display(here.store, RUN))
        if event.name == "checkpoint.quarantined"
    ]
    assert len(messages) == 1 and "checkpoint 20 of attempt 1 was quarantined" in messages[0]


def test_the_try_from_the_older_checkpoint_is_given_although_the_budget_is_spent_and_only_once(here):
    flow = two_checkpoints(here, RetryPolicy(user_error=1, backoff_seconds=1))
    crashes(flow, 2, 1, restored=at(1, 20))
    flow.admit("fit", 2)
    assert crashes(flow, 3, 2, restored=at(1, 20)).startswith("Error: ")  # the budget of 1 is spent by now
    assert outputs(flow.admit("fit", 3))["run"] == "true"
    answer = crashes(flow, 4, 3, restored=at(1, 10))
    assert answer.startswith("Failed: fit failed in attempt 4 by user error: ")
    assert list_quarantined(here.store, LINEAGE) == {at(1, 20)}


def test_deaths_of_another_kind_do_not_add_up(here):
    flow = two_checkpoints(here)
    crashes(flow, 2, 1, "NaN", restored=at(1, 20))
    flow.admit("fit", 2)
    assert crashes(flow, 3, 2, "other", restored=at(1, 20)).startswith(
        "Failed: fit failed in attempt 3 by user error: "
    )
    assert list_quarantined(here.store, LINEAGE) == set()


def test_a_program_that_always_crashes_from_the_beginning_is_just_broken(here):
    flow = here.submit(fit(retry=ONE_RETRY))
    for number in (1, 2):
        flow.admit("fit", number - 1)
        answer = crashes(flow, number, number - 1)
    assert answer.startswith("Failed: fit failed in attempt 2 by user error: ")
    assert keys(here.store, "data/lineages/") == []


def test_segfaults_without_an_account_count_and_plain_exit_codes_do_not(here):
    flow = two_checkpoints(here, RetryPolicy(user_error=9, backoff_seconds=1))
    for attempt, code in ((2, 1), (3, 1), (4, 139)):
        dies(flow, attempt, attempt - 1, code)
        flow.admit("fit", attempt)
    assert list_quarantined(here.store, LINEAGE) == set()
    assert "SIGSEGV" in dies(flow, 5, 4, 139)
    assert list_quarantined(here.store, LINEAGE) == {at(1, 20)}


def test_the_only_checkpoint_gives_way_to_the_beginning(here):
    flow = here.submit(fit(retry=ONE_RETRY))
    flow.admit("fit", 0)
    commit(here.store, LINEAGE, 1, 20)
    preempted(flow, 0)
    for attempt in (2, 3):
        flow.admit("fit", attempt - 1)
        answer = crashes(flow, attempt, attempt - 1, restored=at(1, 20))
    assert answer.endswith("attempt 4 starts from the beginning")


@pytest.mark.parametrize(
    "point", ["conclude.before_failure", "end.before_record", "end.after_record", "conclude.after_failure"]
)
def test_a_crash_of_the_plugin_at_any_write_changes_nothing(here, monkeypatch, point):
    flow = two_checkpoints(here)
    crashes(flow, 2, 1, restored=at(1, 20))
    flow.admit("fit", 2)
    monkeypatch.setenv("TIPHYS_FAILPOINTS", f"{point}=raise")
    with pytest.raises(InjectedFaultError):
        crashes(flow, 3, 2, restored=at(1, 20))
    monkeypatch.delenv("TIPHYS_FAILPOINTS")
    here.core = here.restart()
    answer = flow.end_try("fit", 2)
    assert (phase(answer), said(answer).endswith("attempt 4 resumes from step 10")) == ("Error", True)
    assert outputs(flow.admit("fit", 3))["resume-from"] == "1-10"


def test_an_account_that_cannot_be_read_is_no_account(here):
    flow = two_checkpoints(here)
    here.store.create(crash_key(RunLayout(RUN), "fit", 2), b"garbage")
    assert dies(flow, 2, 1, 1).startswith("Error: Attempt 2 ended by user error, the program exited with 1; attempt 3")


def test_resumes_add_up(here):
    """With no retries after a user error, the second death comes in a later submission."""
    flow = two_checkpoints(here, RetryPolicy(user_error=0, backoff_seconds=1))
    assert crashes(flow, 2, 1, restored=at(1, 20)).startswith("Failed: fit failed in attempt 2 by user error: ")
    ends = [attempt.end for attempt in read_step_attempts(here.store, RUN, "fit")]
    assert ends[1] is not None and ends[1].checkpoint_crash is not None and ends[1].suspect is None


def test_on_a_volume_the_end_alone_tells(here):
    flow = here.submit(fit(retry=ONE_RETRY, checkpoints=CheckpointPolicy(store="file:///mnt/checkpoints")))
    for attempt in (1, 2):
        flow.admit("fit", attempt - 1)
        crashes(flow, attempt, attempt - 1, restored=at(1, 20))
    end = read_step_attempts(here.store, RUN, "fit")[-1].end
    assert end is not None and end.suspect == at(1, 20)
    assert keys(here.store, "data/lineages/") == []
