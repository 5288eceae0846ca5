"""The saves of earlier runs: which runs count, and which times."""

from datetime import timedelta
from pathlib import Path

import pytest
from support.builders.authored_workflows import STORE, step, train, workflow
from support.builders.preflights import subject_of, write_save

from hera_pipelines.compile import CompileOptions, compile_workflow
from hera_pipelines.preflight import build_subject
from hera_pipelines.preflight.observation import SaveTimes
from hera_pipelines.preflight.save_times import read_save_times, summarize_saves
from tiphys.protocol.fan_out import assign_item_ids
from tiphys.records import RunRecord, utc_now
from tiphys.store import LineageLayout, RunLayout, Store, claim_run

SUBJECT = subject_of(step(), train())


def add_run(store: Store, run: str, pipeline: str = "digits", *, days_ago: float = 0) -> None:
    record = RunRecord(
        run=run, pipeline=pipeline, workflow={}, digest="d", written_at=utc_now() - timedelta(days=days_ago)
    )
    claim_run(store, record)


def test_stage_and_upload_of_all_runs_of_the_pipeline(store: Store) -> None:
    for run, seconds in (("digits-1", 4.0), ("digits-2", 8.0)):
        add_run(store, run)
        write_save(store, run, seconds)
    assert read_save_times(store, SUBJECT) == {"fit": SaveTimes(2, 4.0, 8.0)}


def test_other_pipelines_do_not_count(store: Store) -> None:
    add_run(store, "digits-large-1", "digits-large")
    write_save(store, "digits-large-1", 400)
    assert read_save_times(store, SUBJECT) == {}


def test_the_newest_runs_count(store: Store) -> None:
    for number in range(25):
        add_run(store, f"digits-{number:02}", days_ago=number)
        write_save(store, f"digits-{number:02}", 400 if number >= 20 else 4)
    assert read_save_times(store, SUBJECT) == {"fit": SaveTimes(20, 4.0, 4.0)}


def test_the_newest_saves_of_a_run_count(store: Store) -> None:
    add_run(store, "digits-1")
    for number in range(1, 61):
        write_save(store, "digits-1", 400 if number <= 10 else 4, number)
    assert read_save_times(store, SUBJECT) == {"fit": SaveTimes(50, 4.0, 4.0)}


def test_damaged_and_impossible_records_are_left_out(store: Store) -> None:
    add_run(store, "digits-1")
    for number, seconds in enumerate((4.0, -40.0, float("inf"), float("nan"), 0.0), start=1):
        write_save(store, "digits-1", seconds, number)
    store.create(LineageLayout("digits-1/fit").manifest(1, 9), b"{}")
    add_run(store, "digits-broken")
    store.delete(RunLayout("digits-broken").run_record)
    store.create(RunLayout("digits-broken").run_record, b"\xff\x00")
    assert read_save_times(store, SUBJECT) == {"fit": SaveTimes(1, 4.0, 4.0)}


def test_items_of_a_fan_out_count_as_their_step(store: Store) -> None:
    add_run(store, "digits-1")
    ids = [one.step_id for one in assign_item_ids("fit", ["a", "b"])]
    for number, name in enumerate(ids, start=1):
        write_save(store, "digits-1", 4.0 * number, step=name)
    assert read_save_times(store, SUBJECT) == {"fit": SaveTimes(2, 4.0, 8.0)}


def test_a_pipeline_without_checkpoints_reads_nothing() -> None:
    assert read_save_times(None, subject_of(step())) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "median", "p99"),
    [([3], 3, 3), ([1, 2], 1, 2), (list(range(1, 101)), 50, 99), (list(range(200, 0, -1)), 100, 198)],
)
def test_percentiles_by_nearest_rank(seconds: list[float], median: float, p99: float) -> None:
    assert summarize_saves(seconds) == SaveTimes(len(seconds), median, p99)


def test_runs_that_the_author_names(store: Store) -> None:
    compiled = compile_workflow(
        workflow(train(), arguments={"parameters": [{"name": "lr", "value": "1"}]}),
        CompileOptions(store=STORE, run_name="hot-lr{lr}"),
    )
    subject = build_subject(Path("digits.py"), compiled, "tiphys-workflow", "ml")
    for run in ("hot-lr1", "hot-lr2", "digits-1"):
        add_run(store, run)
        write_save(store, run, 4.0)
    assert read_save_times(store, subject) == {"fit": SaveTimes(2, 4.0, 4.0)}
