"""One run of MLflow for a step, whoever dies or races between MLflow and the store.

| what happens | runs of MLflow afterwards |
|---|---|
| three attempts, one after the other | one parent, one nested |
| a crash before or after any write | the next attempt finds or creates the same one |
| two pods open the parent at once | one; the other is deleted |
| MLflow is down, and the step has a run | its ids, from the store |
| a person deletes the run in MLflow | none; the error says so |
| a fork | runs of its own, with the name and the id of the parent's |
"""

from pathlib import Path

import pytest
from support.builders.irregular_samples import Irregular
from support.fakes.mlflow import RUN, STEP, FakeMlflow, write_run
from support.processes.failpoints import dying_at

from tiphys.errors import IntegrityError, NotFoundError
from tiphys.protocol import environment
from tiphys.records import RunRecord, TrackingRunRecord
from tiphys.records.tracking import MLFLOW_EXPERIMENT_NAME, tracking_id
from tiphys.store import DirectoryStore, RunLayout, read_record
from tiphys.tracking.__main__ import main
from tiphys.tracking.records import tracking_run_key
from tiphys.tracking.server import PARENT_TAG, MlflowRun, RunStatus
from tiphys.tracking.step_run import ID_TAG, close_step_run, find_step_run, open_step_run, parent_status

POINTS = ("tracking.before_create", "tracking.after_create", "tracking.after_record")


@pytest.fixture
def store(tmp_path: Path) -> DirectoryStore:
    store = DirectoryStore(tmp_path)
    write_run(store)
    return store


@pytest.fixture
def server() -> FakeMlflow:
    return FakeMlflow()


def alive(server: FakeMlflow) -> list[dict]:
    return [run for run in server.runs.values() if not run["deleted"]]


def test_attempts_continue_one_nested_run(store: DirectoryStore, server: FakeMlflow) -> None:
    opened = {open_step_run(server, store, RUN, STEP, "digits") for _ in range(3)}
    assert len(opened) == 1
    [ids] = opened
    parent, child = alive(server)
    assert parent["name"] == RUN and PARENT_TAG not in parent["tags"]
    assert child["name"] == STEP and child["tags"][PARENT_TAG] == ids.parent_id
    assert find_step_run(store, RUN, STEP) == ids


@pytest.mark.parametrize("point", POINTS)
def test_a_crash_at_any_point_leaves_one_run(store: DirectoryStore, server: FakeMlflow, point: str) -> None:
    with dying_at(point):
        open_step_run(server, store, RUN, STEP, "digits")
    open_step_run(server, store, RUN, STEP, "digits")
    assert [run["name"] for run in alive(server)] == [RUN, STEP]


def test_of_two_that_create_a_run_at_once_one_stays(store: DirectoryStore, server: FakeMlflow) -> None:
    create, others = server.create_run, []

    def create_beside_another(experiment: str, name: str, tags: dict[str, str]) -> str:
        if not others:
            others.append("racing")
            others.append(open_step_run(server, store, RUN, STEP, "digits"))
        return create(experiment, name, tags)

    server.create_run = create_beside_another  # type: ignore[method-assign]
    mine = open_step_run(server, store, RUN, STEP, "digits")
    assert mine == others[1]
    assert len(server.runs) == 3, "both have created a parent"
    assert [run["name"] for run in alive(server)] == [RUN, STEP]


def test_oldest_of_several_unclaimed_runs_stays(store: DirectoryStore, server: FakeMlflow) -> None:
    experiment = server.experiment("digits")
    identity = tracking_id(read_record(store, RunLayout(RUN).run_record, RunRecord), "")
    oldest, *others = [server.create_run(experiment, RUN, {ID_TAG: identity}) for _ in range(3)]
    assert open_step_run(server, store, RUN, STEP, "digits").parent_id == oldest
    assert not any(server.run_exists(other) for other in others)


def test_steps_with_different_experiments_are_nested_in_one_parent(store: DirectoryStore, server: FakeMlflow) -> None:
    first = open_step_run(server, store, RUN, STEP, "one")
    second = open_step_run(server, store, RUN, "other", "two")
    assert (first.experiment_id, first.parent_id) == (second.experiment_id, second.parent_id)


def test_a_server_that_is_down_hides_no_known_run(store: DirectoryStore, server: FakeMlflow) -> None:
    assert find_step_run(store, RUN, STEP) is None
    ids = open_step_run(server, store, RUN, STEP, "digits")
    server.down = True
    assert find_step_run(store, RUN, STEP) == ids


def test_a_run_that_a_person_deleted_is_not_made_again(store: DirectoryStore, server: FakeMlflow) -> None:
    ids = open_step_run(server, store, RUN, STEP, "digits")
    server.delete_run(ids.run_id)
    with pytest.raises(NotFoundError, match="deleted in MLflow"):
        open_step_run(server, store, RUN, STEP, "digits")
    assert len(server.runs) == 2


def test_a_fork_has_runs_of_its_own_that_name_the_parent(store: DirectoryStore, server: FakeMlflow) -> None:
    origin = open_step_run(server, store, RUN, STEP, "digits")
    write_run(store, "digits-2", parent=RUN)
    fork = open_step_run(server, store, "digits-2", STEP, "digits")
    assert fork.parent_id != origin.parent_id
    assert server.runs[fork.parent_id]["tags"]["tiphys.forked_from"] == RUN
    assert server.runs[fork.parent_id]["tags"]["tiphys.forked_from_run_id"] == origin.parent_id
    assert "tiphys.forked_from" not in server.runs[origin.parent_id]["tags"]


def test_the_status_follows_the_attempts_and_a_resume_reopens_it(store: DirectoryStore, server: FakeMlflow) -> None:
    ids = open_step_run(server, store, RUN, STEP, "digits")
    other = open_step_run(server, store, RUN, "other", "digits")
    close_step_run(server, ids, "FAILED")
    assert (server.runs[ids.run_id]["status"], server.runs[ids.parent_id]["status"]) == ("FAILED", "RUNNING")
    close_step_run(server, other, "FINISHED")
    assert server.runs[ids.parent_id]["status"] == "FAILED"
    open_step_run(server, store, RUN, STEP, "digits")
    assert (server.runs[ids.run_id]["status"], server.runs[ids.parent_id]["status"]) == ("RUNNING", "RUNNING")
    close_step_run(server, ids, "FINISHED")
    assert server.runs[ids.parent_id]["status"] == "FINISHED"


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((), "FINISHED"),
        (("FINISHED", "FINISHED"), "FINISHED"),
        (("FINISHED", "KILLED"), "KILLED"),
        (("KILLED", "FAILED", "FINISHED"), "FAILED"),
        (("FAILED", "RUNNING"), "RUNNING"),
    ],
)
def test_the_parent_has_the_status_of_what_needs_attention(steps: tuple[str, ...], expected: RunStatus) -> None:
    assert parent_status(MlflowRun(str(number), status) for number, status in enumerate(steps)) == expected


def test_the_id_is_that_of_one_step_of_one_run_even_after_a_deletion(store: DirectoryStore, tmp_path: Path) -> None:
    record = read_record(store, RunLayout(RUN).run_record, RunRecord)
    moved = DirectoryStore(tmp_path / "elsewhere")
    moved.create(RunLayout(RUN).run_record, store.read(RunLayout(RUN).run_record))
    again = DirectoryStore(tmp_path / "again")
    write_run(again)
    ids = {
        tracking_id(record, ""),
        tracking_id(record, STEP),
        tracking_id(record, "other"),
        tracking_id(read_record(again, RunLayout(RUN).run_record, RunRecord), STEP),
    }
    assert len(ids) == 4
    assert all(len(one) == 32 and set(one) <= set("0123456789abcdef") for one in ids)
    assert tracking_id(read_record(moved, RunLayout(RUN).run_record, RunRecord), STEP) == tracking_id(record, STEP)


def test_experiment_that_the_author_names_comes_before_that_of_the_pipeline(
    store: DirectoryStore, server: FakeMlflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    [experiment] = Irregular().run_names(1)
    variables = {environment.STORE: store.url, environment.RUN: RUN, environment.STEP: STEP, environment.ATTEMPT: "1"}
    for name, value in {**variables, MLFLOW_EXPERIMENT_NAME: experiment}.items():
        monkeypatch.setenv(name, value)
    assert main(["open"], lambda _: server) == 0
    assert set(server.experiments) == {experiment}
    assert main(["close", "1"], lambda _: server) == 0
    ids = find_step_run(store, RUN, STEP)
    assert ids is not None
    assert server.runs[ids.run_id]["status"] == "FAILED"


@pytest.mark.parametrize("run_id", ["../../other", "x" * 65, "", "a b", "<b>"])
def test_a_record_that_a_program_made_up_is_refused(store: DirectoryStore, server: FakeMlflow, run_id: str) -> None:
    valid = TrackingRunRecord(run=RUN, step=STEP, experiment_id="1", mlflow_run_id="f" * 32)
    forged = valid.to_bytes().replace(b"f" * 32, run_id.encode())
    store.create(tracking_run_key(RUN, STEP), forged)
    with pytest.raises(IntegrityError, match="not a valid TrackingRunRecord"):
        open_step_run(server, store, RUN, STEP, "digits")
