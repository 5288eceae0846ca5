"""A local session records a step without a gate soon after it has ended, while the other steps still run."""

from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Parameter
from hera.workflows.models import ValueFrom
from structlog.testing import capture_logs
from tiphys_controller import start_run

from hera_pipelines import Pipeline, Step
from hera_pipelines.local import run_session
from hera_pipelines.local.run_session import LocalSession
from tiphys.errors import StoreError
from tiphys.records import AttemptEndOutcome
from tiphys.store import DirectoryStore, RunLayout, read_step_attempts

RUN = "night"
FIRST_END = RunLayout(RUN).attempt_end("first", 1)


class Outage(DirectoryStore):
    """A store whose next ``failures`` listings of attempts fail."""

    failures = 0

    def list(self, prefix: str) -> Any:
        if self.failures and prefix == RunLayout(RUN).attempts:
            self.failures -= 1
            raise StoreError("storage is away")
        return super().list(prefix)


@pytest.fixture
def store(tmp_path: Path) -> Outage:
    return Outage(tmp_path / "store")


def wait_for(end: Path) -> str:
    """A program that ends well once the file ``end`` exists, and badly if that takes longer than four minutes."""
    return f"for _ in $(seq 4800); do [ -e '{end}' ] && exit 0; sleep 0.05; done; exit 1"


def pipeline(second: str, **fields: Any) -> dict[str, Any]:
    """Two steps one after the other; ``second`` is the shell program of the latter."""
    first = "mkdir -p /tmp/out; echo 7 > /tmp/out/rows"
    with Pipeline("digits", store="s3://ml-runs/tiphys", entrypoint="main", **fields) as made:
        one = Step(
            name="first",
            image="i",
            command=["sh", "-c", first],
            outputs=[Parameter(name="rows", value_from=ValueFrom(path="/tmp/out/rows"))],
        )
        two = Step(name="second", image="i", command=["sh", "-c", second])
        with DAG(name="main"):
            one() >> two()
    manifest: dict[str, Any] = made.to_dict()
    return manifest


def run(store: DirectoryStore, folder: Path, manifest: dict[str, Any], run: str | None = RUN) -> str:
    with LocalSession(store, folder / "state", speed=50.0, code=folder) as session:
        return str(session.run(start_run(store, session, manifest, run).workflow_name))


def test_step_is_recorded_while_the_next_one_runs(store: Outage, tmp_path: Path) -> None:
    assert run(store, tmp_path, pipeline(wait_for(tmp_path / "store" / FIRST_END))) == "Succeeded"
    (first,), (second,) = (read_step_attempts(store, RUN, step) for step in ("first", "second"))
    assert first.end is not None
    assert second.end is not None, "finalize records the last"
    assert [output.value for output in first.end.outputs] == ["7"]
    assert (first.end.outcome, second.end.outcome) == (AttemptEndOutcome.DONE, AttemptEndOutcome.DONE)


def test_run_that_names_itself_is_recorded_under_its_own_name(store: Outage, tmp_path: Path) -> None:
    end = tmp_path / "store" / RunLayout("digits-7").attempt_end("first", 1)
    manifest = pipeline(wait_for(end), run_name="digits-{n}", arguments={"n": "7"})
    assert run(store, tmp_path, manifest, None) == "Succeeded"
    assert len(read_step_attempts(store, "digits-7", "second")) == 1


def test_storage_that_was_away_delays_the_record_and_not_the_run(
    store: Outage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_session, "_RECORD_PAUSE_SECONDS", 0.1)
    with (
        capture_logs() as logs,
        LocalSession(store, tmp_path / "state", speed=50.0, code=tmp_path) as session,
    ):
        manifest = pipeline(wait_for(tmp_path / "store" / FIRST_END))
        name = start_run(store, session, manifest, RUN).workflow_name
        store.failures = 2
        assert session.run(name) == "Succeeded"
    errors = [entry["error"] for entry in logs if entry["event"] == "steps.unrecorded"]
    assert errors == ["storage is away"] * 2
