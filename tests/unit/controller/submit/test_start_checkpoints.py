"""From where each training of a plan would go on, as the plugin would choose it.

| the training | goes on |
|---|---|
| has a valid checkpoint | from the newest one, with its time |
| has a damaged newest one | from the one before |
| has none, or is asked to run again | from the beginning |
| keeps its checkpoints on a volume, is done, is no training | not said |
"""

from typing import Any

import pytest
from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, commit, end_of, ref, write_claim, write_run
from support.fakes.memory_store import MemoryStore
from tiphys_controller import PlanReport, StartCheckpoint, add_start_checkpoints, find_finished_trainings, plan_run

from tiphys.records import AttemptEndOutcome, item_step_id
from tiphys.store import LineageLayout, RunLayout


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


def trained(store: MemoryStore, *steps: int, **run: Any) -> None:
    """A run whose only attempt has failed after these checkpoints."""
    write_run(store, **run)
    write_claim(store, claim_of(1))
    for step in steps:
        commit(store, ref(1, step))
    store.create(RunLayout(RUN).attempt_end(STEP, 1), end_of(1).to_bytes())


def start(store: MemoryStore, *rerun: str) -> StartCheckpoint | None:
    [step] = add_start_checkpoints(store, plan_run(store, RUN, rerun)).steps
    return step.starts_from


def test_a_training_goes_on_from_its_newest_checkpoint(store: MemoryStore) -> None:
    trained(store, 90, 100)
    found = start(store)
    assert found is not None
    assert (found.checkpoint, found.global_step, found.committed_at is not None) == ("1-100", 100, True)


def test_a_checkpoint_that_cannot_be_used_is_passed_over(store: MemoryStore) -> None:
    trained(store, 90, 100)
    store.objects[LineageLayout(LINEAGE).manifest(1, 100)] = b"damaged"
    found = start(store)
    assert found is not None
    assert found.checkpoint == "1-90"


@pytest.mark.parametrize(
    ("outcome", "finished"), [(AttemptEndOutcome.DONE, {STEP: 100}), (AttemptEndOutcome.FAILED, {})]
)
def test_a_training_that_is_finished_would_go_on_from_its_end(
    store: MemoryStore, outcome: AttemptEndOutcome, finished: dict[str, int]
) -> None:
    write_run(store)
    write_claim(store, claim_of(1))
    commit(store, ref(1, 100))
    plan = plan_run(store, RUN)
    store.create(RunLayout(RUN).attempt_end(STEP, 1), end_of(1, outcome=outcome).to_bytes())
    plan = add_start_checkpoints(store, plan)
    assert find_finished_trainings(plan) == finished
    assert "is_end" not in plan.model_dump_json(), "what is printed stays as it is"


def test_a_training_that_is_asked_to_run_again_costs_no_reads(store: MemoryStore) -> None:
    trained(store, 90)
    plan = plan_run(store, RUN, (STEP,))
    store.refuses = lambda operation, key: f"attempts/{STEP}" in key or key.startswith("data/lineages/")
    [step] = add_start_checkpoints(store, plan).steps
    assert step.starts_from == StartCheckpoint()


def test_without_a_checkpoint_it_begins_at_the_beginning(store: MemoryStore) -> None:
    trained(store)
    assert start(store) == StartCheckpoint()


def test_a_step_that_is_asked_to_run_again_begins_at_the_beginning(store: MemoryStore) -> None:
    trained(store, 100)
    assert start(store, STEP) == StartCheckpoint()


def test_an_item_that_is_asked_to_run_again_begins_at_the_beginning_and_others_go_on(store: MemoryStore) -> None:
    write_run(store, items=["a", "b"])
    first, second = (item_step_id(STEP, item, 0) for item in "ab")
    for step in (first, second):
        write_claim(store, claim_of(1, step=step))
        commit(store, ref(1, 100, lineage=f"{RUN}/{step}"))
        end = end_of(1).model_copy(update={"step": step})
        store.create(RunLayout(RUN).attempt_end(step, 1), end.to_bytes())

    [report] = add_start_checkpoints(store, plan_run(store, RUN, [f"{STEP}[0]"])).steps

    starts = {item.step: item.starts_from for item in report.items}
    assert starts[first] == StartCheckpoint()
    assert starts[second] is not None
    assert starts[second].checkpoint == "1-100"


def test_a_volume_cannot_be_read_from_here(store: MemoryStore) -> None:
    trained(store, checkpoint_store="file:///volume")
    assert start(store) is None


def test_a_plan_without_trainings_costs_no_request_more(store: MemoryStore) -> None:
    write_run(store)
    write_claim(store, claim_of(1))
    store.create(RunLayout(RUN).attempt_end(STEP, 1), end_of(1, outcome=AttemptEndOutcome.DONE).to_bytes())
    report = plan_run(store, RUN)
    store.refuses = lambda operation, key: True
    assert isinstance(add_start_checkpoints(store, report), PlanReport)
    assert report.steps[0].starts_from is None
