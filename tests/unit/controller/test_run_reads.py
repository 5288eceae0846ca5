"""How many requests each view of a run costs: it lists a prefix once, and reads a record once.

| view | lists | reads |
|---|---|---|
| runs | submissions, attempts, projections, reused results | these but attempts; ends that no projection decides |
| get | these, and events | these, every attempt and every batch of events |
| page | these, and checkpoints of a training whose end names none | these, and checkpoints that attempts started from |
| plan | that of `runs`, outputs, attempts of a step that may take over a result | that of `runs`, and these attempts |
"""

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.builders.lineage import claim_of, commit, ref, write_claim
from support.fakes.counting_store import CountingStore
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import describe_run, plan_run, resume_run, start_run
from tiphys_controller.goodput import measure_time_usage
from tiphys_controller.runs import summarize_run

from hera_pipelines.traces.spans import derive_spans, describe_service
from hera_pipelines.ui.run_page import UsageReader, read_run_view
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.timeline import read_timeline
from tiphys.lineage.tree import read_lineage_tree
from tiphys.protocol.step_spec import CheckpointPolicy, StepKind
from tiphys.records import AttemptEnd, AttemptEndOutcome, Event, SubmissionEnd
from tiphys.records.names import item_step_id
from tiphys.store import DirectoryStore, ObjectInfo, RunLayout, Store, append_events, lineage_name

RUN = "digits-1"
NOW = datetime(2040, 1, 1, tzinfo=UTC)
PIPELINE = pipeline_of(
    gated("prep"),
    gated("fit", kind=StepKind.TRAIN, depends="prep") | {"_spec": {"checkpoints": CheckpointPolicy()}},
    gated("sweep", depends="prep", withItems=["a", "b"]),
    gated("report", depends="fit && sweep"),
)


class WatchedStore(CountingStore):
    """Also counts what is asked for twice."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.asked: Counter[tuple[str, str]] = Counter()

    @property
    def repeated(self) -> list[tuple[str, str]]:
        return [request for request, count in self.asked.items() if count > 1]

    def read(self, key: str) -> bytes:
        self.asked["read", key] += 1
        return super().read(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.asked["list", prefix] += 1
        return super().list(prefix)


@pytest.fixture
def store(tmp_path: Path) -> WatchedStore:
    """A run of two submissions, both of which failed. Its training has three attempts, of which two have an end."""
    folder, submitter = DirectoryStore(tmp_path / "store"), FakeSubmitter(tmp_path / "cluster")
    history, layout, lineage = History(folder, RUN), RunLayout(RUN), lineage_name(RUN, "fit")

    def fail(attempt: int, submission: int) -> None:
        outcome = AttemptEndOutcome.FAILED
        end = AttemptEnd(run=RUN, step="fit", attempt=attempt, submission=submission, outcome=outcome)
        folder.create(layout.attempt_end("fit", attempt), end.to_bytes())

    def end(submission: int, workflow: str) -> None:
        submitter.end(workflow)
        sealed = SubmissionEnd(run=RUN, submission=submission, status="Failed")
        folder.create(layout.submission_end(submission), sealed.to_bytes())

    started = start_run(folder, submitter, PIPELINE, RUN)
    history.done("prep", artifacts={"data": b"x"}, parameters={"n": "5"})
    write_claim(folder, claim_of(1, run=RUN))
    for step in (10, 20):
        commit(folder, ref(1, step, lineage))
    fail(1, 1)
    write_claim(folder, claim_of(2, ref(1, 20, lineage), run=RUN))
    end(1, started.workflow_name)
    resumed = resume_run(folder, submitter, RUN)  # fences the second attempt
    write_claim(folder, claim_of(3, ref(1, 20, lineage), run=RUN, submission=2))
    restored = Event(name="checkpoint.restored", step="fit", attempt=3, message="", data={"checkpoint": "1-20"})
    append_events(folder, RUN, "trainer", [restored])
    commit(folder, ref(3, 30, lineage))
    fail(3, 2)
    history.done(item_step_id("sweep", "a", 0), submission=2)
    history.failed(item_step_id("sweep", "b", 0), submission=2)
    end(2, resumed.workflow_name)
    return WatchedStore(folder)


Show = Callable[[RunHistory], object]
VIEWS: dict[str, tuple[Show, int, int]] = {
    "runs": (summarize_run, 4, 10),
    "get": (describe_run, 6, 21),
    "report": (lambda history: measure_time_usage(history, NOW), 5, 23),
    "lineage": (read_lineage_tree, 6, 19),
    "events": (read_timeline, 6, 24),
    "traces": (lambda history: derive_spans(history, describe_service()), 4, 22),
}
"""What shows a run, the listings, and the reads."""


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_lists_each_prefix_once_and_reads_each_record_once(store: WatchedStore, view: str) -> None:
    show, listings, reads = VIEWS[view]

    show(RunHistory.for_display(store, RUN))

    assert store.repeated == []
    assert (store.requests["list"], store.requests["read"]) == (listings, reads)


def test_the_page_of_a_run_costs_hardly_more_than_what_get_costs(store: WatchedStore) -> None:
    read_run_view(store, UsageReader(lambda: NOW), None, RUN, None, 1, 1, NOW)

    assert store.repeated == []
    assert (store.requests["list"], store.requests["read"]) == (8, 23), "one listing is of what the program printed"


def test_views_of_one_history_share_what_they_read(store: WatchedStore) -> None:
    history = RunHistory.for_display(store, RUN)

    for view in ("get", "report", "lineage", "events", "traces"):
        VIEWS[view][0](history)

    assert not [request for request in store.repeated if request[1].startswith("control/")], "each lists checkpoints"


def test_a_plan_reads_no_attempt_but_of_steps_whose_result_may_be_taken_over(store: WatchedStore) -> None:
    plan_run(store, RUN)

    layout = RunLayout(RUN)
    assert (store.requests["list"], store.requests["read"]) == (6, 16)
    assert store.repeated == [("read", layout.attempt_end("fit", 3))], "once to decide, once for a result to take over"
