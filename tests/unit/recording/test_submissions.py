"""Which attempt a Workflow opens for a step that others have tried, and what racing recorders write.

| last attempt of the step         | ours is the last submission | a later one was claimed |
|----------------------------------|-----------------------------|-------------------------|
| none                             | attempt 1                   | none                    |
| of an earlier one, ended         | the next                    | none                    |
| of an earlier one, open          | fence it, then the next     | fence it, then none     |
| ours                             | it                          | it                      |
| of a later one                   | –                           | none                    |
"""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.fakes.argo_workflow import (
    RUN,
    ArgoWorkflow,
    attempt_keys,
    bare,
    claim_of,
    claim_submission,
    end_of,
    ungated,
)
from support.fakes.memory_store import MemoryStore

from tiphys.errors import IntegrityError
from tiphys.recording import WorkflowRecorder
from tiphys.records import AttemptEnd, AttemptEndOutcome, item_step_id
from tiphys.store import RunLayout

ROWS = {"rows": "3"}


@pytest.fixture
def flow() -> ArgoWorkflow:
    return ArgoWorkflow(MemoryStore(), [ungated(artifacts=())])


def test_second_submission_opens_the_second_attempt(flow):
    flow.start()
    flow.fail(exit_code=1)
    flow.record()
    again = flow.resumed()
    again.start()
    again.finish(parameters=ROWS)
    again.record()
    assert [end_of(flow, attempt=number).outcome.value for number in (1, 2)] == ["failed", "done"]
    assert (claim_of(flow, attempt=2).submission, claim_of(flow, attempt=2).uid) == (2, "uid-2")
    assert claim_of(flow, attempt=2).step_key == claim_of(flow).step_key


def test_second_submission_fences_the_open_attempt_of_the_first(flow):
    first = flow.recorder()
    flow.start()
    flow.record(first)
    again = flow.resumed()
    again.start()
    again.record()
    fence = end_of(flow)
    assert (fence.outcome, fence.stopped) == (AttemptEndOutcome.FENCED, False)
    assert fence.message == "submission 2 has started the step again"

    flow.finish(parameters=ROWS)
    recorded = flow.record(first)
    assert recorded.ends["prep"].outcome is AttemptEndOutcome.FENCED, "a late success does not count"
    assert attempt_keys(flow.store) == [f"prep/00000000{name}.json" for name in ("1.end", "1", "2")]


def test_late_success_of_the_first_submission_stands_if_it_was_recorded_first(flow):
    flow.specs = [*flow.specs, bare("check")]
    first, again = flow.recorder(), flow.resumed()
    flow.start()
    flow.record(first)
    second = again.recorder()
    again.start("check")
    again.record(second)  # lists the attempts, and the first has no end
    flow.finish(parameters=ROWS)
    flow.record(first)
    again.start()
    again.record(second)
    assert end_of(flow).outcome is AttemptEndOutcome.DONE
    assert claim_of(flow, attempt=2).submission == 2


def test_superseded_workflow_opens_no_attempts(flow):
    flow.specs = [*flow.specs, bare("check")]
    recorder = flow.recorder()
    flow.start()
    flow.record(recorder)
    claim_submission(flow.store, 2)
    flow.start("check")
    recorded = flow.record(recorder)
    assert recorded.is_superseded
    assert attempt_keys(flow.store) == ["prep/000000001.json"]


def test_superseded_workflow_still_ends_the_attempts_that_it_has(flow):
    recorder = flow.recorder()
    flow.start()
    flow.record(recorder)
    claim_submission(flow.store, 2)
    flow.finish(parameters=ROWS)
    for one in (flow.recorder(), recorder):
        assert flow.record(one).ends["prep"].outcome is AttemptEndOutcome.DONE


def test_workflow_that_is_superseded_while_it_is_recorded_fences_no_later_attempt(flow):
    """The submission may be claimed between the check and the claim, as hashes of large outputs take their time."""
    flow.specs = [ungated(), bare("check")]
    flow.depends = {"check": "prep"}
    again = flow.resumed()
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": b"x"})
    flow.start("check")

    def hash_slowly(_, objects):
        again.start("check")
        again.record()
        return {info.key: "0" * 64 for info in objects}

    recorded = flow.record(hash_objects=hash_slowly)
    assert (set(recorded.ends), recorded.faults) == ({"prep"}, {})
    assert claim_of(flow, "check").submission == 2
    assert flow.end("check") is None
    assert flow.claim("check", 2) is None


def test_third_submission_counts_on(flow):
    for submission in range(3):
        flow.start()
        flow.fail(exit_code=1)
        flow.record()
        if submission < 2:
            flow = flow.resumed()
    assert [claim_of(flow, attempt=number).submission for number in (1, 2, 3)] == [1, 2, 3]


def test_items_of_a_later_submission_are_known_by_their_values(flow):
    flow.specs = [bare("sweep", fan_out=True)]
    for index, item in enumerate(["a", "b", "a"]):
        place = flow.start_item("sweep", index, item)
        flow.finish(place) if item == "b" else flow.fail(place)
    flow.record()
    again = flow.resumed()
    for index in range(2):
        again.finish(again.start_item("sweep", index, "a"))
    again.record()
    steps = {item_step_id("sweep", "a", ordinal) for ordinal in (0, 1)}
    assert {step: end_of(flow, step, 2).outcome.value for step in steps} == dict.fromkeys(steps, "done")
    assert flow.claim(item_step_id("sweep", "b", 0), 2) is None


def test_workflow_of_another_uid_does_not_share_attempts(flow):
    """Argo deletes a Workflow and a person creates one of the same name: its nodes have the same names, too."""
    flow.start()
    flow.record()
    again = flow.resumed()
    again.name = flow.name
    again.start()
    again.record()
    assert claim_of(flow, attempt=2).instance == claim_of(flow).instance
    assert claim_of(flow, attempt=2).uid == "uid-2"


def test_damaged_claim_stops_its_step_and_no_other(flow):
    flow.specs = [*flow.specs, bare("check")]
    flow.start()
    flow.start("check")
    flow.store.create(RunLayout(RUN).attempt("prep", 1), b"{}")
    flow.finish("check")
    recorded = flow.record()
    assert set(recorded.faults) == {"prep"}
    assert "prep/000000001.json is not a valid AttemptClaim" in recorded.faults["prep"]
    assert recorded.ends["check"].outcome is AttemptEndOutcome.DONE


def test_fault_is_gone_with_its_reason(flow):
    recorder = flow.recorder()
    flow.start()
    flow.store.create(RunLayout(RUN).attempt("prep", 1), b"{}")
    assert flow.record(recorder).faults
    flow.store.delete(RunLayout(RUN).attempt("prep", 1))
    recorder = flow.recorder()
    assert flow.record(recorder).faults == {}
    assert flow.claim() is not None


def test_damaged_end_of_this_workflow_is_reported(flow):
    flow.start()
    flow.record()
    flow.store.create(RunLayout(RUN).attempt_end("prep", 1), b"{}")
    flow.finish(parameters=ROWS)
    assert "prep/000000001.end.json is not a valid AttemptEnd" in flow.record().faults["prep"]
    with pytest.raises(IntegrityError):
        flow.end()


class Racers:
    """Recorders of one Workflow in threads that all begin at once."""

    def __init__(self, flow: ArgoWorkflow, count: int = 8) -> None:
        self.flow = flow
        self.ended: list[AttemptEnd] = []
        self.recorders = [flow.recorder(on_end=self.ended.append) for _ in range(count)]

    def race(self) -> list[dict[str, str]]:
        """Outcomes by step that each recorder reports."""
        barrier = threading.Barrier(len(self.recorders))

        def record(recorder: WorkflowRecorder) -> dict[str, str]:
            barrier.wait()
            recorded = self.flow.record(recorder)
            assert recorded.faults == {}
            return {step: end.outcome.value for step, end in recorded.ends.items()}

        with ThreadPoolExecutor(len(self.recorders)) as pool:
            return list(pool.map(record, self.recorders))


@pytest.mark.parametrize("round_", range(5))
def test_racing_recorders_write_one_claim_and_one_end(round_):
    flow = ArgoWorkflow(MemoryStore(), [ungated(), bare("sweep", fan_out=True)])
    racers = Racers(flow)
    flow.start()
    items = [flow.start_item("sweep", index, "same") for index in range(4)]
    assert racers.race() == [{}] * 8
    assert len(attempt_keys(flow.store)) == 5
    flow.finish(parameters=ROWS, artifacts={"data": b"x"})
    for item in items:
        flow.fail(item, exit_code=1)
    steps = {"prep": "done"} | {item_step_id("sweep", "same", ordinal): "failed" for ordinal in range(4)}
    assert racers.race() == [steps] * 8
    assert len(attempt_keys(flow.store)) == 10
    assert Counter(end.step for end in racers.ended) == dict.fromkeys(steps, 1), "one recorder wrote each"
    assert len({claim_of(flow, step).instance for step in steps}) == 5


@pytest.mark.parametrize("round_", range(5))
def test_racing_recorders_that_see_all_at_once_write_the_same(round_):
    flow = ArgoWorkflow(MemoryStore(), [ungated(), bare("check")], {"check": "prep"})
    racers = Racers(flow)
    flow.start()
    flow.finish(parameters=ROWS, artifacts={"data": b"x"})
    flow.start("check", artifacts=[{"name": "data", "s3": {"key": f"{flow.folder()}data"}}])
    flow.finish("check")
    assert racers.race() == [{"prep": "done", "check": "done"}] * 8
    assert len(attempt_keys(flow.store)) == 4


def test_a_recorder_records_once_at_a_time(flow):
    racers = Racers(flow)
    racers.recorders = [racers.recorders[0]] * 8
    flow.start()
    flow.finish(parameters=ROWS)
    assert racers.race() == [{"prep": "done"}] * 8
    assert len(racers.ended) == 1


@pytest.mark.parametrize("round_", range(5))
def test_submissions_that_race_for_a_step_leave_the_later_attempt_last(round_):
    flow = ArgoWorkflow(MemoryStore(), [bare()])
    again = flow.resumed()
    first, second = flow.recorder(), again.recorder()
    flow.start()
    again.start()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(ArgoWorkflow.record, (flow, again), (first, second)))
    again.finish()
    assert again.record(second).ends["prep"].outcome is AttemptEndOutcome.DONE
    submissions = [claim.submission for number in (1, 2) if (claim := flow.claim(attempt=number))]
    assert submissions in ([2], [1, 2])
