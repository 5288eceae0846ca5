"""One training goes for another on this machine: real programs, two sessions over one state folder, one queue file."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG
from support.processes.polling import until
from tiphys_controller import start_run

from hera_pipelines import Checkpoints, Pipeline, Train
from hera_pipelines.local.nodes import NodeChange
from hera_pipelines.local.run_session import LocalSession
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.timeline import read_timeline
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause
from tiphys.store import DirectoryStore, read_step_attempts

QUEUES = """
queues:
  - {name: research, gpus: {A100: 4}, preempts_lower_priority: true}
"""

# The first attempt of a run called low goes on until it is told to go, and has saved nothing before.
TRAIN = """
import os, pathlib, time
from tiphys import checkpoint

forever = os.environ["TIPHYS_RUN"] == "low" and os.environ["TIPHYS_ATTEMPT"] == "1"
seen = pathlib.Path(os.environ["TRAINER_SEEN"])
with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    print("from:", state["step"], flush=True)
    while state["step"] < 3 or (forever and not seen.with_suffix(".over").exists()):
        state["step"] += 1
        session.step(state["step"], state)
        if forever:
            seen.with_suffix(".new").write_text(str(state["step"]))
            seen.with_suffix(".new").rename(seen)
            time.sleep(0.01)
"""


def pipeline(priority: int, seen: Path) -> dict[str, Any]:
    with Pipeline("digits", store="s3://ml-runs", entrypoint="main") as made:
        fit = Train(
            name="fit",
            image="i",
            command=["python", "train.py"],
            env={"TRAINER_SEEN": str(seen)},
            gpus=4,
            gpu_type="A100",
            queue="research",
            priority=priority,
            grace="2m",
            checkpoints=Checkpoints(every="1h", save_time="1s"),
        )
        with DAG(name="main"):
            fit()
    manifest: dict[str, Any] = made.to_dict()
    return manifest


class Lab:
    """A state folder, a store, and what was told about each run."""

    def __init__(self, folder: Path, pool: ThreadPoolExecutor) -> None:
        self.folder = folder
        self.seen = folder / "seen"
        self.store = DirectoryStore(folder / "store")
        self.changes: list[NodeChange] = []
        self._pool = pool

    def submit(self, run: str, priority: int) -> Future[str]:
        def work() -> str:
            with LocalSession(
                self.store,
                self.folder / "state",
                self.folder / "queues.yaml",
                speed=50.0,
                observer=self.changes.append,
                code=self.folder / "code",
            ) as session:
                made = start_run(self.store, session, pipeline(priority, self.seen), run)
                return str(session.run(made.workflow_name))

        return self._pool.submit(work)

    def ends(self, run: str) -> list[AttemptEnd]:
        return [attempt.end for attempt in read_step_attempts(self.store, run, "fit") if attempt.end]

    def told(self, run: str) -> list[str]:
        return [change.message for change in list(self.changes) if change.node.startswith(f"{run}.")]


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(TRAIN)
    (tmp_path / "queues.yaml").write_text(QUEUES)
    with ThreadPoolExecutor(2) as pool:
        made = Lab(tmp_path, pool)
        yield made
        made.seen.with_suffix(".over").touch()  # so that nothing goes on if the test has failed


@pytest.mark.heavy
def test_a_training_of_lower_priority_saves_goes_and_resumes_with_nothing_lost(lab: Lab) -> None:
    low = lab.submit("low", 0)
    until(lab.seen.exists, 120)
    high = lab.submit("high", 5)
    assert high.result(timeout=240) == "Succeeded"
    assert low.result(timeout=240) == "Succeeded"

    first, last = lab.ends("low")
    assert (first.outcome, first.cause, last.outcome) == (
        AttemptEndOutcome.FAILED,
        Cause.PREEMPTION,
        AttemptEndOutcome.DONE,
    )
    preempted = first.preempted
    assert preempted is not None and preempted.committed is not None
    assert (preempted.for_run, preempted.for_step, preempted.gpus) == ("high", "fit", 4)
    assert preempted.seconds_lost == 0
    assert preempted.committed.global_step >= int(lab.seen.read_text())
    assert read_step_attempts(lab.store, "low", "fit")[1].claim.starts_from == preempted.committed
    assert [end.outcome for end in lab.ends("high")] == [AttemptEndOutcome.DONE]
    assert first.written_at < lab.ends("high")[0].written_at < last.written_at
    assert any("to save and go for high/fit" in event.message for event in read_timeline(RunHistory(lab.store, "low")))
