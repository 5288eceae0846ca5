"""What lists of runs and loops over runs cost: what is shown or open, however many runs have ended before."""

from datetime import timedelta

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.counting_store import CountingStore
from support.fakes.memory_store import MemoryStore
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import RunPhase, start_run
from tiphys_controller.cleanup import CleanupKind, WorkflowPresence, find_stalled_runs
from tiphys_controller.run_search import RunFilter, RunOrder, search_runs, sort_runs

from hera_pipelines.ui.run_index import RunIndex
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.records import SubmissionEnd, utc_now
from tiphys.store import RunLayout, end_submission, open_submission, read_last_claim
from tiphys.store.run_markers import NEWEST, OPEN, newest_marker

PIPELINE = pipeline_of(gated("prep"))
HOUR = timedelta(hours=1)


@pytest.fixture
def store() -> CountingStore:
    return CountingStore(MemoryStore())


def end_run(store: CountingStore, run: str, status: str = "Succeeded", *, may_be_resumed: bool = False) -> None:
    end_submission(store, SubmissionEnd(run=run, submission=1, status=status), may_be_resumed=may_be_resumed)


def add_ended_runs(store: CountingStore, submitter: FakeSubmitter, begin: int, end: int) -> None:
    for number in range(begin, end):
        run = start_run(store, submitter, PIPELINE, f"run-{number:03}").run
        History(store, run).done("prep")
        submitter.end(run, "Succeeded")
        end_run(store, run)


def test_a_limited_list_costs_the_same_however_many_runs_have_ended(
    store: CountingStore, submitter: FakeSubmitter
) -> None:
    start_run(store, submitter, PIPELINE, "goes-on")
    costs = []
    for begin, end in ((0, 10), (10, 60)):
        add_ended_runs(store, submitter, begin, end)
        store.requests.clear()
        search = search_runs(store, RunFilter(), submitter, 3)
        costs.append(store.requests.total())
    newest = sort_runs(search.summaries, RunOrder.ACTIVITY)

    assert costs[0] == costs[1]
    assert {summary.run for summary in newest} >= {"run-059", "run-058", "run-057", "goes-on"}
    assert {summary.run: summary.phase for summary in newest}["goes-on"] is RunPhase.RUNNING
    assert search.looked_at < 15 and not search.is_complete


def test_a_filter_reads_on_until_the_limit_is_reached(store: CountingStore, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, "failed")
    end_run(store, "failed", "Failed")
    add_ended_runs(store, submitter, 0, 30)

    search = search_runs(store, RunFilter(phases=[RunPhase.FAILED]), None, 1)
    assert ([summary.run for summary in search.summaries], search.looked_at) == (["failed"], 31)
    none = search_runs(store, RunFilter(pipeline="other"), None, 1)
    assert (none.summaries, none.looked_at, none.is_complete) == ([], 31, True)


def test_a_list_since_a_time_ends_there(store: CountingStore, submitter: FakeSubmitter) -> None:
    add_ended_runs(store, submitter, 0, 20)
    later = utc_now() + 3 * HOUR

    search = search_runs(store, RunFilter(since=later))
    assert (search.summaries, search.looked_at) == ([], 0)
    assert len(search_runs(store, RunFilter(since=later - 4 * HOUR)).summaries) == 20


def test_markers_that_a_crash_left_show_no_run(store: CountingStore, submitter: FakeSubmitter) -> None:
    add_ended_runs(store, submitter, 0, 1)
    store.create(newest_marker("never-was", utc_now()), b"")
    claim = read_last_claim(store, "run-000")
    assert claim is not None
    ghost = claim.model_copy(update={"run": "ghost"})
    open_submission(store, ghost)
    store.delete(RunLayout("ghost").submission(1))

    assert [summary.run for summary in search_runs(store, RunFilter(), None, 9).summaries] == ["run-000"]
    index = RunIndex(store)
    index.refresh()
    assert ([run.summary.run for run in index.runs], index.total) == (["run-000"], 1)
    unclaimed = find_stalled_runs(store, WorkflowPresence(None, lambda _: True), utc_now() + 2 * HOUR)
    [finding] = unclaimed
    assert (finding.kind, finding.name) == (CleanupKind.MARKER, "ghost")
    assert finding.remove is not None
    finding.remove()
    assert list(store.list(f"{OPEN}ghost")) == []


def test_a_search_for_stalled_runs_reads_no_run_that_has_ended(store: CountingStore, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, "gone")
    presence = WorkflowPresence("west", lambda _: False)
    costs = []
    for begin, end in ((0, 5), (5, 40)):
        add_ended_runs(store, submitter, begin, end)
        store.requests.clear()
        [found] = find_stalled_runs(store, presence, utc_now())
        costs.append(store.requests.total())

    assert costs[0] == costs[1]
    assert (found.kind, found.name) == (CleanupKind.GONE, "gone")


@pytest.mark.parametrize("asks", [False, True])
def test_a_submission_whose_end_was_recorded_by_a_process_that_died_is_closed(
    store: CountingStore, submitter: FakeSubmitter, asks: bool
) -> None:
    manifest = pipeline_of(gated("prep"))
    if asks:
        manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = AutoResumePolicy().model_dump_json()
    start_run(store, submitter, manifest, "digits")
    end = SubmissionEnd(run="digits", submission=1, status="Failed", written_at=utc_now() + HOUR)
    store.create(RunLayout("digits").submission_end(1), end.to_bytes())

    found = list(find_stalled_runs(store, WorkflowPresence(None, lambda _: True), utc_now()))

    assert [finding.kind for finding in found] == ([] if asks else [CleanupKind.MARKER])
    for finding in found:
        assert finding.remove is not None
        finding.remove()
    assert any(store.list(OPEN)) is asks
    assert len(list(store.list(NEWEST))) == (1 if asks else 2)


def test_a_failed_submission_that_nothing_has_resumed_for_a_month_is_closed(
    store: CountingStore, submitter: FakeSubmitter
) -> None:
    manifest = pipeline_of(gated("prep"))
    manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = AutoResumePolicy().model_dump_json()
    start_run(store, submitter, manifest, "digits")
    end_run(store, "digits", "Failed", may_be_resumed=True)
    presence = WorkflowPresence(None, lambda _: True)
    assert list(find_stalled_runs(store, presence, utc_now() + timedelta(days=29))) == []

    [finding] = find_stalled_runs(store, presence, utc_now() + timedelta(days=31))

    assert finding.remove is not None
    finding.remove()
    assert list(store.list(OPEN)) == []


def test_a_submission_that_another_has_replaced_is_closed(store: CountingStore, submitter: FakeSubmitter) -> None:
    start_run(store, submitter, PIPELINE, "digits")
    first = read_last_claim(store, "digits")
    assert first is not None
    open_submission(store, first.model_copy(update={"submission": 2}))

    [finding] = find_stalled_runs(store, WorkflowPresence(None, lambda _: True), utc_now())

    assert finding.reason.startswith("submission 2 has replaced submission 1")


def test_the_list_of_the_pages_costs_the_same_however_many_runs_have_ended(
    store: CountingStore, submitter: FakeSubmitter
) -> None:
    start_run(store, submitter, PIPELINE, "goes-on")
    index, costs = RunIndex(store, submitter), []
    for begin, end in ((0, 5), (5, 40)):
        add_ended_runs(store, submitter, begin, end)
        index.refresh()
        store.requests.clear()
        index.refresh()
        costs.append(store.requests.total())

    assert costs[0] == costs[1]
    assert (len(index.runs), index.is_whole) == (41, True)
