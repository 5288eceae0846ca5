"""Trackers on the local engine without their libraries: W&B by the environment alone, and MLflow out of reach.

`make test-mlflow` has the same with a real MLflow.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import Artifact
from tiphys_controller import resume_run, start_run

from hera_pipelines import Mlflow, Pipeline, Retries, Train, Wandb
from hera_pipelines.local.run_session import LocalSession
from tiphys.store import DirectoryStore, read_step_attempts

# Fails in its first two attempts, and says what it was given in each.
PROGRAM = """
import json, os, pathlib, sys
given = {name: value for name, value in os.environ.items() if name.startswith(("WANDB_", "MLFLOW_"))}
attempt = os.environ["TIPHYS_ATTEMPT"]
(pathlib.Path(__file__).resolve().parent / f"given-{os.environ['TIPHYS_RUN']}-{attempt}").write_text(json.dumps(given))
if attempt in ("1", "2"):
    sys.exit(1)
pathlib.Path(os.environ["TIPHYS_OUTPUT_MODEL"]).write_text("weights")
"""


class Desk:
    """A folder with a program and a store."""

    def __init__(self, folder: Path) -> None:
        self.code = folder / "code"
        self.code.mkdir()
        (self.code / "train.py").write_text(PROGRAM)
        self.store = DirectoryStore(folder / "store")
        self.state = folder / "state"

    def session(self) -> LocalSession:
        return LocalSession(self.store, self.state, speed=50.0, code=self.code)

    def run(self, manifest: dict[str, Any], name: str) -> str:
        with self.session() as session:
            return str(session.run(start_run(self.store, session, manifest, name).workflow_name))

    def resume(self, name: str) -> str:
        with self.session() as session:
            return str(session.run(resume_run(self.store, session, name).workflow_name))

    def given(self, run: str, attempt: int) -> dict[str, str]:
        found: dict[str, str] = json.loads((self.code / f"given-{run}-{attempt}").read_text())
        return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    for name in ("MLFLOW_TRACKING_URI", "WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    return Desk(tmp_path)


def pipeline(tracking: Mlflow | Wandb) -> dict[str, Any]:
    fit = Train(
        name="fit",
        image="i",
        command=["python", "train.py"],
        outputs=Artifact(name="model", path="/tmp/model"),
        tracking=tracking,
        retries=Retries(user_error=1, unknown=1, backoff="1s"),
    )
    with Pipeline("digits", store="s3://ml-runs") as made:
        fit()
    manifest: dict[str, Any] = made.to_dict()
    return manifest


@pytest.mark.heavy
def test_wandb_continues_one_run_in_all_attempts_and_submissions(desk: Desk) -> None:
    assert desk.run(pipeline(Wandb("digits")), "night") == "Failed"
    assert desk.resume("night") == "Succeeded"
    given = [desk.given("night", attempt) for attempt in (1, 2, 3)]
    assert given[0] == given[1] == given[2]
    assert len(given[0]["WANDB_RUN_ID"]) == 32
    assert set(given[0]["WANDB_RUN_ID"]) <= set("0123456789abcdef")
    assert given[0] == {
        "WANDB_RUN_ID": given[0]["WANDB_RUN_ID"],
        "WANDB_RESUME": "allow",
        "WANDB_RUN_GROUP": "night",
        "WANDB_NAME": "night/fit",
        "WANDB_PROJECT": "digits",
    }
    desk.run(pipeline(Wandb("digits")), "day")
    assert desk.given("day", 1)["WANDB_RUN_ID"] != given[0]["WANDB_RUN_ID"]


@pytest.mark.heavy
def test_a_training_goes_on_where_mlflow_cannot_be_reached(desk: Desk) -> None:
    assert desk.run(pipeline(Mlflow("http://127.0.0.1:9")), "night") == "Failed"
    assert desk.resume("night") == "Succeeded"
    assert desk.given("night", 3) == {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    outcomes = [attempt.end.outcome for attempt in read_step_attempts(desk.store, "night", "fit") if attempt.end]
    assert outcomes == ["failed", "failed", "done"]
    logs = "".join(log.read_text() for log in sorted((desk.state / "logs").glob("*fit-run*.log")))
    assert "this attempt is not tracked in MLflow" in logs
