"""A training whose newest checkpoint kills whoever loads it, with the local engine and real processes."""

from pathlib import Path
from typing import Any

from hera.workflows import DAG
from tiphys_controller import resume_run, start_run

from hera_pipelines import Checkpoints, Pipeline, Retries, Train
from hera_pipelines.local.run_session import LocalSession
from tiphys.records import AttemptEnd, CheckpointRef
from tiphys.store import DirectoryStore, read_step_attempts

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
            return str(session.run(start_run(self.store, session, pipeline(user_errors), "night").workflow_name))

    def resume(self) -> str:
        with self.session() as session:
            return str(session.run(resume_run(self.store, session, "night").workflow_name))

    def ends(self) -> list[AttemptEnd | None]:
        return [attempt.end for attempt in read_step_attempts(self.store, "night", "fit")]

    def starts(self) -> list[int]:
        claims = [attempt.claim for attempt in read_step_attempts(self.store, "night", "fit")]
        return [claim.starts_from.global_step if claim.starts_from else 0 for claim in claims]


def pipeline(user_errors: int) -> dict[str, Any]:
    with Pipeline("digits", store="s3://ml-runs", entrypoint="main") as made:
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
