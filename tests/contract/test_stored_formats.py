"""A store that an earlier version wrote is read, verified, resumed and cleaned by this one.

`support.builders.stored_runs` wrote it, and it is never written again. A store of any
other format is refused in one sentence, before anything is read or changed.
"""

import shutil
from pathlib import Path

import pytest
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import plan_run, resume_run

from tiphys.errors import UsageError
from tiphys.lineage.audit.audit import audit_run
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.timeline import read_timeline
from tiphys.records import AttemptEndOutcome, StoreFormatRecord
from tiphys.store import (
    DirectoryStore,
    Store,
    claim_run,
    list_newest_runs,
    list_open_submissions,
    list_runs,
    open_store,
    read_run,
    read_submissions,
)
from tiphys.store.format import STORE_FORMAT
from tiphys.store.layout import FORMAT_MARKER, LineageLayout

STORES = Path(__file__).parent / "stores"
RUN, FORK = "stored", "stored-fork"


@pytest.fixture(params=sorted(path.name for path in STORES.iterdir()))
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(str(shutil.copytree(STORES / request.param, tmp_path / "store")), must_exist=True)


def test_a_store_of_the_current_format_is_committed() -> None:
    assert (STORES / f"format-{STORE_FORMAT}").is_dir()


def test_every_record_of_the_stored_format_is_read(store: Store) -> None:
    assert list(list_runs(store)) == [FORK, RUN]
    assert list(list_newest_runs(store)) == [FORK, RUN]
    assert list_open_submissions(store) == []
    assert read_run(store, FORK).parent == RUN
    assert [(one.claim.submission, one.end.status if one.end else "") for one in read_submissions(store, RUN)] == [
        (1, "Failed"),
        (2, "Failed"),
    ]
    ends = {
        step: [attempt.end.outcome if attempt.end else None for attempt in attempts]
        for step, attempts in RunHistory(store, RUN).attempts.items()
    }
    assert ends == {
        "prepare": [AttemptEndOutcome.DONE],
        "fit": [AttemptEndOutcome.DONE],
        "report": [AttemptEndOutcome.FAILED, AttemptEndOutcome.FAILED],
    }
    names = {event.name for event in read_timeline(RunHistory(store, RUN))}
    assert {"run.resumed", "attempt.ended", "checkpoint.committed"} <= names


@pytest.mark.parametrize("run", [RUN, FORK])
def test_every_byte_of_it_verifies(store: Store, run: str) -> None:
    found = audit_run(store, run, deep=True)

    assert found.damage == ()
    assert found.objects > 0


def test_only_what_is_missing_runs_again(store: Store, tmp_path: Path) -> None:
    submitter = FakeSubmitter(tmp_path / "cluster")

    assert {task.name: task.decision for task in plan_run(store, RUN).steps} == {
        "prepare": "skip",
        "fit": "skip",
        "report": "run",
    }
    resumed = resume_run(store, submitter, RUN)

    assert (resumed.submission, resumed.workflow_name) == (3, f"{RUN}-3")
    spec = submitter.manifest(f"{RUN}-3")["spec"]
    [dag] = [one["dag"] for one in spec["templates"] if one["name"] == spec["entrypoint"]]
    assert [task["name"] for task in dag["tasks"]] == ["report"]


def test_a_pin_of_the_stored_format_is_found(store: Store) -> None:
    layout = LineageLayout(f"{RUN}/fit")

    assert [layout.parse_pin(info.key) for info in store.list(layout.all_pins)]


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        (2, "has format 2, and this version of Tiphys reads format 3; nothing was changed: finish its runs"),
        (4, "has format 4, and this version of Tiphys reads format 3; nothing was changed: update Tiphys here"),
    ],
)
def test_a_store_of_an_unknown_format_is_refused_with_what_to_do(marker: int, sentence: str, tmp_path: Path) -> None:
    DirectoryStore(tmp_path).create(FORMAT_MARKER, StoreFormatRecord(format=marker).to_bytes())

    with pytest.raises(UsageError, match=sentence):
        open_store(str(tmp_path))


@pytest.mark.parametrize("key", ["runs/tensorboard/events", "models/a", "control/alerts/x"])
def test_a_folder_of_others_may_become_a_store(key: str, tmp_path: Path) -> None:
    DirectoryStore(tmp_path).create(key, b"{}")

    assert open_store(str(tmp_path)).url.endswith(tmp_path.name)


def test_the_first_run_writes_the_marker_once(store: Store, tmp_path: Path) -> None:
    empty = open_store(str(tmp_path / "empty"))

    claim_run(empty, read_run(store, RUN))
    claim_run(empty, read_run(store, FORK))

    assert b'"format": 3' in empty.read(FORMAT_MARKER)
