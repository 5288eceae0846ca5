"""The list of runs is read in the background, and only what may have changed is read again."""

from pathlib import Path
from typing import NoReturn

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.lineage import STEP, claim_of, end_of, write_claim, write_end, write_run
from support.fakes.counting_store import CountingStore
from support.fakes.submitter import FakeSubmitter
from support.processes.polling import until
from tiphys_controller import RunPhase, start_run

from hera_pipelines.ui import run_index
from hera_pipelines.ui.home_page import PAGE_SIZE, HomeFilter, read_home_view
from hera_pipelines.ui.run_index import RunIndex
from tiphys.errors import StoreError
from tiphys.protocol.step_spec import GpuRequest
from tiphys.records import SubmissionEnd, utc_now
from tiphys.store import DirectoryStore, RunLayout, end_submission, open_submission, read_last_claim
from tiphys.store.run_markers import OpenSubmission, newest_marker

PIPELINE = pipeline_of(gated("prep"))


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(DirectoryStore(tmp_path / "store"))


def finish(store: CountingStore, submitter: FakeSubmitter, run: str) -> None:
    started = start_run(store, submitter, PIPELINE, run)
    History(store, run).done("prep")
    submitter.end(started.workflow_name, "Succeeded")
    end = SubmissionEnd(run=run, submission=1, status="Succeeded", message="")
    end_submission(store, end, may_be_resumed=False)


def test_an_ended_run_is_read_once(store: CountingStore, submitter: FakeSubmitter) -> None:
    finish(store, submitter, "digits-1")
    index = RunIndex(store, submitter)

    def requests() -> int:
        before = store.requests.total()
        index.refresh()
        return store.requests.total() - before

    assert requests() > 5
    assert requests() == 2, "what is open, and what is newest"
    assert [one.summary.phase for one in index.runs] == [RunPhase.SUCCEEDED]


def test_a_resumed_run_is_noticed(store: CountingStore, submitter: FakeSubmitter) -> None:
    finish(store, submitter, "digits-1")
    index = RunIndex(store, submitter)
    index.refresh()
    claim = read_last_claim(store, "digits-1")
    assert claim is not None
    open_submission(store, claim.model_copy(update={"submission": 2, "workflow_name": "digits-1-2"}))

    index.refresh()

    [run] = index.runs
    assert (run.summary.submissions, run.summary.phase) == (2, RunPhase.INTERRUPTED)


@pytest.mark.parametrize("first_stays_open", [False, True], ids=["closed", "open for an automatic resume"])
def test_a_resume_that_began_and_ended_between_two_looks_is_noticed(
    store: CountingStore, submitter: FakeSubmitter, first_stays_open: bool
) -> None:
    finish(store, submitter, "digits-1")
    if first_stays_open:
        store.create(OpenSubmission(utc_now(), "digits-1", 1).marker, b"")
    index = RunIndex(store, submitter)
    index.refresh()
    claim = read_last_claim(store, "digits-1")
    assert claim is not None
    open_submission(store, claim.model_copy(update={"submission": 2, "workflow_name": "digits-1-2"}))
    end = SubmissionEnd(run="digits-1", submission=2, status="Failed", message="")
    end_submission(store, end, may_be_resumed=False)

    index.refresh()

    [run] = index.runs
    assert (run.summary.submissions, run.summary.phase) == (2, RunPhase.FAILED)


def test_a_deleted_run_disappears(store: CountingStore, submitter: FakeSubmitter) -> None:
    finish(store, submitter, "digits-1")
    index = RunIndex(store, submitter)
    index.refresh()
    for info in list(store.list("")):
        if "digits-1" in info.key:
            store.delete(info.key)
    index.refresh()
    assert (index.runs, index.total) == ([], 0)


@pytest.mark.parametrize("error", [StoreError("one object is refused"), RuntimeError("a defect of a library")])
def test_the_list_recovers_from_a_round_that_failed(
    store: CountingStore, submitter: FakeSubmitter, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    finish(store, submitter, "digits-1")
    index = RunIndex(store, submitter)

    def fail(*_: object) -> NoReturn:
        raise error

    monkeypatch.setattr(run_index, "_REFRESH_SECONDS", 0.01)
    with monkeypatch.context() as broken:
        broken.setattr(index, "_read", fail)
        index.start()
        until(lambda: str(error) in index.error)
    until(lambda: index.runs and not index.error)
    index.stop()


def test_the_list_is_paged_filtered_and_grouped(store: CountingStore, submitter: FakeSubmitter) -> None:
    for number in range(PAGE_SIZE + 3):
        start_run(store, submitter, PIPELINE, f"digits-{number:03}")
    finish(store, submitter, "words-1")
    index = RunIndex(store, submitter)
    index.refresh()

    first, second = (read_home_view(index, HomeFilter(page=page)) for page in (1, 2))
    assert (first.selected, first.pages, first.counts["Running"]) == (PAGE_SIZE + 4, 2, PAGE_SIZE + 3)
    assert sum(len(runs) for _, runs in first.groups) == PAGE_SIZE
    assert sum(len(runs) for _, runs in second.groups) == 4

    [(pipeline, [only])] = read_home_view(index, HomeFilter(search="WORDS")).groups
    assert (pipeline, only.summary.run) == ("digits", "words-1")
    assert [part.status for part in only.timeline] == ["Succeeded"]
    assert not read_home_view(index, HomeFilter(pipeline="other")).groups
    assert HomeFilter(search="a b", page=3).address(page=4) == "/?search=a+b&page=4"
    assert HomeFilter(phase="Failed", page=3).address(phase="") == "/"


def write_training(store: CountingStore, run: str) -> None:
    write_run(store, run=run, gpu=GpuRequest(gpus=8, members=4, min_members=2, queue="research"))
    write_claim(store, claim_of(1, run=run))
    write_end(store, end_of(1).model_copy(update={"run": run}))
    write_claim(store, claim_of(2, run=run).model_copy(update={"members": 2}))


def test_the_gpus_that_attempts_held_are_read_where_a_page_shows_them(store: CountingStore) -> None:
    write_training(store, "digits-1")
    write_run(store, run="plain")
    plain, index = RunIndex(store), RunIndex(store, reads_holds=True)

    plain.refresh()
    index.refresh()

    first, second = next(one.holds for one in index.runs if one.summary.run == "digits-1")
    assert (first.queue, first.gpus, second.gpus) == ("research", 8, 4)
    assert first.end is not None and first.begin <= first.end
    assert second.end is not None, "the run does not go on, so its attempt is over"
    assert not any(one.holds for one in plain.runs)
    assert not any(one.holds for one in index.runs if one.summary.run == "plain")


def test_holds_are_read_again_when_the_run_has_changed(store: CountingStore) -> None:
    write_training(store, "digits-1")
    index = RunIndex(store, reads_holds=True)
    index.refresh()
    before = store.requests.total()
    index.refresh()
    unchanged = store.requests.total() - before

    write_end(store, end_of(2).model_copy(update={"run": "digits-1"}))
    index.refresh()
    [run] = index.runs
    assert run.holds[1].end is not None and run.holds_of == run.summary
    assert store.requests.total() - before - unchanged > unchanged


def test_a_run_whose_workflow_is_damaged_held_nothing_that_is_known(store: CountingStore) -> None:
    write_training(store, "digits-1")
    store.create(newest_marker("broken", utc_now()), b"")
    store.create(RunLayout("broken").run_record, b"{broken")
    store.create(RunLayout("digits-1").attempt(STEP, 3), b"{broken")
    index = RunIndex(store, reads_holds=True)
    index.refresh()
    assert {one.summary.run: len(one.holds) for one in index.runs} == {"broken": 0, "digits-1": 2}
