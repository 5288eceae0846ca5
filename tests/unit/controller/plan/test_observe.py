"""How many requests a plan costs: a few listings, and one read for each record that they leave in doubt."""

from collections.abc import Iterator

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of, ungated
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore
from support.fakes.submitted_workflow import SubmittedWorkflow
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import plan_run, start_run

from tiphys.errors import IntegrityError
from tiphys.protocol.fan_out import assign_item_ids
from tiphys.records import ReuseRecord, RunRecord
from tiphys.store import ObjectInfo, RunLayout

RUN = "digits-1"
STEPS = 40
# The run's record; listings of submissions, attempts, projections, adoptions and outputs.
FIXED = 6


def history_of(store: MemoryStore, reads: bool = False) -> History:
    """A chain of steps. With ``reads``, each reads a value of the one before."""
    value = "{{{{tasks.s{}.outputs.parameters.n}}}}"
    tasks = [
        gated(
            f"s{i}",
            **({"depends": f"s{i - 1}"} if i else {}),
            **({"arguments": {"parameters": [{"name": "n", "value": value.format(i - 1)}]}} if i and reads else {}),
        )
        for i in range(STEPS)
    ]
    record = RunRecord(run=RUN, pipeline="digits", workflow=pipeline_of(*tasks), digest="d")
    store.create(RunLayout(RUN).run_record, record.to_bytes())
    return History(store, RUN)


def requests_of(store: MemoryStore) -> int:
    counting = CountingStore(store)
    plan_run(counting, RUN)
    return counting.requests.total()


def test_finished_steps_cost_nothing_of_their_own() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}", parameters={"n": "5"}, artifacts={f"a{j}": b"x" for j in range(5)})

    assert requests_of(store) == FIXED


@pytest.mark.parametrize("failed", [1, 7])
def test_a_failed_step_costs_one_read(failed: int) -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS - failed):
        history.done(f"s{i}", parameters={"n": "5"})
    for i in range(STEPS - failed, STEPS):
        history.failed(f"s{i}")

    assert requests_of(store) == FIXED + failed


def test_steps_that_never_started_cost_nothing() -> None:
    store = MemoryStore()
    history_of(store)

    assert requests_of(store) == FIXED


def test_a_value_that_crosses_the_border_costs_one_read() -> None:
    store = MemoryStore()
    history = history_of(store, reads=True)
    for i in range(STEPS - 3):
        history.done(f"s{i}", parameters={"n": "5"})

    assert requests_of(store) == FIXED + 1


def test_a_lost_projection_costs_one_read() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}", projection=i != 3)

    assert requests_of(store) == FIXED + 1


@pytest.mark.parametrize("is_read", [False, True])
def test_finished_items_of_a_fan_out_cost_a_read_each_only_where_others_read_them(is_read: bool) -> None:
    store, items = MemoryStore(), [str(number) for number in range(STEPS)]
    tasks = [ungated("sweep", parameters=["loss"], withItems=items), ungated("best", depends="sweep")]
    if is_read:
        value = "{{tasks.sweep.outputs.parameters.loss}}"
        tasks[1]["arguments"] = {"parameters": [{"name": "losses", "value": value}]}
    record = RunRecord(run=RUN, pipeline="digits", workflow=pipeline_of(*tasks), digest="d")
    store.create(RunLayout(RUN).run_record, record.to_bytes())
    history = History(store, RUN)
    for item in assign_item_ids("sweep", items)[1:]:
        history.done(item.step_id, parameters={"loss": "5"})

    assert requests_of(store) == FIXED + is_read * (STEPS - 1)


class ListedBefore(MemoryStore):
    """Answers the first listing of outputs with nothing, as if all of it had been written a moment later."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs_listed = 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if prefix == RunLayout(RUN).all_outputs:
            self.outputs_listed += 1
            if self.outputs_listed == 1:
                return iter(())
        return super().list(prefix)


@pytest.mark.parametrize("projection", [True, False])
def test_steps_that_end_while_the_run_is_listed_are_done(projection: bool) -> None:
    store = ListedBefore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}", parameters={"n": "5"}, projection=projection)

    report = plan_run(counting := CountingStore(store), RUN)

    assert report.running == ()
    assert counting.requests.total() == FIXED + STEPS + 1


def test_damage_costs_a_read_for_each_step_and_one_listing() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}", parameters={"n": "5"})
    for i in (3, 5, 8):
        store.delete(f"{history.layout.outputs(f's{i}', 1)}parameters/n")

    assert requests_of(store) == FIXED + 3 + 1
    assert plan_run(store, RUN).running == tuple(f"s{i}" for i in range(3, STEPS))


def test_a_foreign_object_among_the_records_is_passed_over() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}")
    for prefix in (history.layout.attempts, history.layout.done_markers, history.layout.all_outputs):
        store.create(f"{prefix}README.txt", b"left by a person")

    assert plan_run(store, RUN).running == ()


def test_a_submission_whose_claim_was_removed_is_named() -> None:
    store = MemoryStore()
    history_of(store)
    store.create(RunLayout(RUN).submission_binding(1), b"{}")

    with pytest.raises(IntegrityError, match="submission 1 has records but no claim"):
        plan_run(store, RUN)


def took_over(store: MemoryStore, step: str, source: str = RUN) -> None:
    record = ReuseRecord(
        run=RUN, submission=2, step=step, step_key="k", source_run=source, source_step=step, source_attempt=1
    )
    store.create(RunLayout(RUN).reused(2, step), record.to_bytes())


def all_taken_over() -> MemoryStore:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}", parameters={"n": "5"})
        took_over(store, f"s{i}")
    return store


def test_steps_that_were_taken_over_cost_nothing_where_keys_say_which_attempt() -> None:
    store = all_taken_over()
    for i in range(STEPS):
        store.create(RunLayout(RUN).reused_attempt(2, f"s{i}", 1), b"")

    assert requests_of(store) == FIXED


def test_a_step_that_ran_again_after_it_was_taken_over_is_read_about() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(STEPS):
        history.done(f"s{i}")
    took_over(store, "s0")
    store.create(RunLayout(RUN).reused_attempt(2, "s0", 1), b"")
    history.done("s0", 2, submission=3)

    assert requests_of(store) == FIXED + 2


def test_a_step_that_was_taken_over_costs_one_read() -> None:
    assert requests_of(all_taken_over()) == FIXED + STEPS


def test_a_result_of_another_run_costs_a_listing_and_its_end_record_as_well() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(1, STEPS):
        history.done(f"s{i}", parameters={"n": "5"})
    History(store, "digits-0").done("s0")
    took_over(store, "s0", source="digits-0")

    assert requests_of(store) == FIXED + 3


def test_telling_that_an_attempt_came_later_costs_one_read_more() -> None:
    store = MemoryStore()
    history = history_of(store)
    for i in range(1, STEPS):
        history.done(f"s{i}", parameters={"n": "5"})
    took_over(store, "s0", source="digits-0")
    history.done("s0", submission=3)

    assert requests_of(store) == FIXED + 2


@pytest.fixture
def in_pods(submitter: FakeSubmitter) -> tuple[MemoryStore, SubmittedWorkflow]:
    """A run of a chain of steps without gates, which have stored their artifacts below the uid of the Workflow."""
    store = MemoryStore()
    chain = [ungated(f"s{i}", artifacts=("data",), **({"depends": f"s{i - 1}"} if i else {})) for i in range(5)]
    start_run(store, submitter, pipeline_of(*chain), RUN)
    flow = SubmittedWorkflow.of(store, submitter, RUN)
    for i in range(4):
        flow.run_task(f"s{i}", artifacts={"data": b"1,2,3"})
    return store, flow


def test_outputs_below_a_workflow_cost_two_listings_for_each_workflow(
    in_pods: tuple[MemoryStore, SubmittedWorkflow],
) -> None:
    store, _ = in_pods
    submission = 2  # its claim and binding

    assert requests_of(store) == FIXED + submission + 2
    assert plan_run(store, RUN).running == ("s4",)


@pytest.mark.parametrize("damage", ["deleted", "another size", "other bytes"])
def test_a_damaged_output_below_a_workflow_runs_its_step_again_and_all_behind_it(
    in_pods: tuple[MemoryStore, SubmittedWorkflow], damage: str
) -> None:
    store, flow = in_pods
    key = f"{flow.folder('s2')}data"
    store.delete(key)
    if damage != "deleted":
        store.create(key, b"1" if damage == "another size" else b"3,2,1")

    report = plan_run(store, RUN)

    assert report.running == ("s2", "s3", "s4")
    [reason] = [step.reason for step in report.steps if step.name == "s2"]
    assert reason.startswith(f"damaged: {key} ")


def test_an_output_below_a_workflow_that_was_copied_with_the_same_bytes_is_intact(
    in_pods: tuple[MemoryStore, SubmittedWorkflow],
) -> None:
    store, flow = in_pods
    key = f"{flow.folder('s2')}data"
    store.delete(key)
    store.create(key, b"1,2,3")

    assert plan_run(store, RUN).running == ("s4",)


def test_a_foreign_object_beside_the_outputs_of_a_step_is_ignored(
    in_pods: tuple[MemoryStore, SubmittedWorkflow],
) -> None:
    """Such as the outputs of a try that failed, and a log that Argo archived."""
    store, flow = in_pods
    store.create(f"data/workflows/{flow.uid}/another-pod/data", b"x")
    store.create(f"{flow.folder('s2')}main.log", b"x")

    assert plan_run(store, RUN).running == ("s4",)


def test_a_step_runs_again_where_nothing_says_any_more_which_attempt_its_pod_was(
    in_pods: tuple[MemoryStore, SubmittedWorkflow],
) -> None:
    store, flow = in_pods
    for info in list(store.list(f"control/workflows/{flow.uid}/{flow.pod('s2')}/")):
        store.delete(info.key)

    assert plan_run(store, RUN).running == ("s2", "s3", "s4")
