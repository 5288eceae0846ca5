"""A checkpoint that crashes whoever loads it, with real processes: bypassed after two deaths, and people are told."""

from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG
from tiphys_controller import resume, start

from hera_pipelines import Checkpoints, Pipeline, Retries, Train
from hera_pipelines.local.session import LocalSession
from tiphys.lineage import Status, timeline, tree
from tiphys.lineage.quarantine import quarantine_records
from tiphys.records import AttemptEnd, CheckpointRef
from tiphys.store import DirectoryStore, step_attempts

# Saves steps 1 to 6 and is preempted once; whoever restores step 6 dies as `fate` says.
TRAIN = """
import os, pathlib, signal, sys
from tiphys import checkpoint

def train(state, step):
    if state["step"] == 6 and step == 6 + int(pathlib.Path("after").read_text()):
        if pathlib.Path("fate").read_text() == "signal":
            os.kill(os.getpid(), signal.SIGSEGV)
        raise ValueError(f"loss is nan at step {step} of process {os.getpid()}")

with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    print("from:", state["step"], flush=True)
    train(state, state["step"])
    for step in range(state["step"] + 1, 13):
        train(state, step)
        if step <= 6 or state["step"] != 6:
            session.save(step, {"step": step}).wait()
        else:
            session.step(step, {"step": step})
        if step == 6 and state["step"] == 0:
            sys.exit(75)
"""


class Desk:
    """One state folder and one store, with the program above."""

    def __init__(self, folder: Path, fate: str, after: int) -> None:
        self.folder = folder
        self.store = DirectoryStore(folder / "store")
        code = folder / "code"
        code.mkdir()
        for name, text in (("train.py", TRAIN), ("fate", fate), ("after", str(after))):
            (code / name).write_text(text)

    def session(self) -> LocalSession:
        return LocalSession(self.store, self.folder / "state", speed=50.0, code=self.folder / "code")

    def start(self, user_errors: int) -> str:
        with self.session() as session:
            return str(session.run(start(self.store, session, pipeline(user_errors), "night").workflow_name))

    def resume(self) -> str:
        with self.session() as session:
            return str(session.run(resume(self.store, session, "night").workflow_name))

    def ends(self) -> list[AttemptEnd | None]:
        return [attempt.end for attempt in step_attempts(self.store, "night", "fit")]

    def starts(self) -> list[int]:
        claims = [attempt.claim for attempt in step_attempts(self.store, "night", "fit")]
        return [claim.starts_from.global_step if claim.starts_from else 0 for claim in claims]


def pipeline(user_errors: int) -> dict[str, Any]:
    with Pipeline("digits", store="s3://ml/tiphys", entrypoint="main") as made:
        fit = Train(
            name="fit",
            image="i",
            command=["python", "train.py"],
            checkpoints=Checkpoints(every="1000 steps", keep_last=None),
            retries=Retries(user_error=user_errors),
        )
        with DAG(name="main"):
            fit()
    manifest: dict[str, Any] = made.to_dict()
    return manifest


POISON = CheckpointRef(lineage="night/fit", attempt=1, global_step=6)


@pytest.mark.parametrize(("fate", "after"), [("error", 0), ("error", 3), ("signal", 0)])
def test_the_third_attempt_succeeds_from_the_checkpoint_before(tmp_path: Path, fate: str, after: int) -> None:
    desk = Desk(tmp_path, fate, after)
    assert desk.start(user_errors=1) == "Succeeded"
    assert desk.starts() == [0, 6, 6, 5]
    causes = [str(end.cause or end.outcome) for end in desk.ends() if end]
    assert causes == ["preemption", "user_error", "user_error", "done"]
    record = quarantine_records(desk.store, "night/fit")[POISON]
    assert (record.by, "2 attempts that loaded it died alike" in record.reason) == ("settle", True)


def test_people_are_told_in_the_lineage_and_among_the_events(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "error", 3)
    desk.start(user_errors=1)
    nodes = [node for attempt in tree(desk.store, "night").steps[0].attempts for node in attempt.checkpoints]
    assert [node.ref for node in nodes if node.status is Status.QUARANTINED] == [POISON]
    told = [event.message for event in timeline(desk.store, "night")]
    assert any(
        "checkpoint 6 of attempt 1 was quarantined" in message and "loss is <number>" in message for message in told
    )
    assert any("ValueError: loss is nan at step 9" in message for message in told)


def test_without_a_budget_the_second_death_comes_after_a_resume_and_is_followed_by_the_try(tmp_path: Path) -> None:
    desk = Desk(tmp_path, "error", 0)
    assert desk.start(user_errors=0) == "Failed"
    assert desk.starts() == [0, 6]
    assert desk.resume() == "Succeeded"
    assert desk.starts() == [0, 6, 6, 5]
