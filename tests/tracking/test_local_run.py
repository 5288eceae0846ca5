"""Pipelines with MLflow as a person runs them: killed, resumed and forked, against a real server.

| what happens | in MLflow |
|---|---|
| the example | one parent with one nested run; one version, promoted |
| each attempt of a submission is killed, then a resume | the same two runs, every metric, one version |
| the same run is resumed once more | no second version |
| a fork | runs of its own that name the parent |
| MLflow is down all the time | the run succeeds, `tiphys get` says what is pending, `tiphys register` finishes it |
"""

import json
import os
import secrets
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiphys.store import DirectoryStore, read_step_attempts

pytestmark = pytest.mark.timeout(3600)  # several runs of several programs that import MLflow
EXAMPLE = Path(__file__).parents[2] / "examples" / "21-mlflow.py"
PATIENCE_SECONDS = 900.0
NOWHERE = "http://127.0.0.1:9"
"""The discard port, where nothing listens."""

PIPELINE = """
from hera.workflows import Artifact, Parameter
from hera_pipelines import Checkpoints, Mlflow, Pipeline, RegisterModel, Retries, Train

fit = Train(
    name="fit",
    image="trainer",
    command=["python", "train.py"],
    args=["{{inputs.parameters.steps}}"],
    inputs=Parameter(name="steps"),
    outputs=Artifact(name="model", path="/tmp/model"),
    tracking=Mlflow(experiment="EXPERIMENT"),
    checkpoints=Checkpoints(every="5 steps", keep_last=None),
    retries=Retries(unknown=1, infrastructure=1, out_of_memory=1, backoff="1s"),
)
register = RegisterModel(name="register", model="EXPERIMENT", alias="champion", image="trainer")
with Pipeline("tracked", arguments=[Parameter(name="steps", value="20")]) as pipeline:
    register(model=fit(steps=pipeline.get_parameter("steps")))
"""

PROGRAM = """
import os
import signal
import sys

import mlflow
from tiphys import checkpoint, outputs

steps, run, attempt = int(sys.argv[1]), os.environ["TIPHYS_RUN"], os.environ["TIPHYS_ATTEMPT"]
with checkpoint.session() as session:
    state = session.restore(default={"step": 0})
    while state["step"] < steps:
        state["step"] += 1
        mlflow.log_metric("loss", 1 / state["step"], step=state["step"])
        session.step(state["step"], state)
        if attempt in ("1", "2") and state["step"] == 12 and run.startswith("k"):
            session.flush()
            os.kill(os.getpid(), signal.SIGKILL)
outputs.path("model").write_text(f"weights of {run} after {steps} steps")
"""


class Desk:
    """A person at a shell in one folder, with an experiment and a model of one name."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri
        self.name = f"tracked-{secrets.token_hex(4)}"
        (folder / "train.py").write_text(PROGRAM)
        (folder / "pipeline.py").write_text(PIPELINE.replace("EXPERIMENT", self.name))

    def tiphys(self, *words: str, code: int = 0, uri: str = "") -> str:
        """Run a command; return its standard output."""
        command = [sys.executable, "-m", "hera_pipelines.cli", *words, "--store", "store"]
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}
        ended = subprocess.run(
            command,
            cwd=self.folder,
            env={**kept, "MLFLOW_TRACKING_URI": uri or self.uri, "NO_COLOR": "1", "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert ended.returncode == code, ended.stdout + ended.stderr
        return ended.stdout

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri, self.uri)

    def runs(self, run: str, experiment: str = "") -> tuple[Any, Any]:
        """The runs of MLflow of a run of Tiphys, which are two: the parent and the one that is nested in it."""
        found = self.client.get_experiment_by_name(experiment or self.name)
        listed = self.client.search_runs([found.experiment_id], f"tags.`tiphys.run` = '{run}'")
        [parent] = [one for one in listed if "mlflow.parentRunId" not in one.data.tags]
        [child] = [one for one in listed if one is not parent]
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        return parent, child

    def versions(self, model: str = "") -> list[Any]:
        return list(self.client.search_model_versions(f"name = '{model or self.name}'"))

    def champion(self, model: str = "") -> str:
        return str(self.client.get_model_version_by_alias(model or self.name, "champion").version)


@pytest.fixture
def desk(tmp_path: Path, tracking_uri: str) -> Desk:
    return Desk(tmp_path, tracking_uri)


def test_the_example(desk: Desk) -> None:
    desk.tiphys("run", str(EXAMPLE), "--run", desk.name, "--state", "state")
    parent, child = desk.runs(desk.name, "digits")
    assert (parent.info.status, child.info.status) == ("FINISHED", "FINISHED")
    assert [metric.step for metric in desk.client.get_metric_history(child.info.run_id, "loss")] == list(range(1, 31))
    [version] = desk.versions("digits")
    assert version.run_id == child.info.run_id
    assert desk.champion("digits") == version.version


def test_kills_resumes_and_a_fork_continue_one_run(desk: Desk) -> None:
    run = f"k{desk.name}"
    desk.tiphys("run", "pipeline.py", "--run", run, "--state", "state", code=1)
    store = DirectoryStore(desk.folder / "store")
    assert len(read_step_attempts(store, run, "fit")) == 2, "both attempts of the first submission were killed"
    parent, child = desk.runs(run)
    assert (parent.info.status, child.info.status) == ("FAILED", "FAILED")

    desk.tiphys("resume", run, "--state", "state")
    assert len(read_step_attempts(store, run, "fit")) == 3
    assert [one.info.run_id for one in desk.runs(run)] == [parent.info.run_id, child.info.run_id]
    assert [one.info.status for one in desk.runs(run)] == ["FINISHED", "FINISHED"]
    logged = [metric.step for metric in desk.client.get_metric_history(child.info.run_id, "loss")]
    assert set(logged) == set(range(1, 21))
    assert logged.count(12) > 1, "two attempts have logged it"
    [version] = desk.versions()
    assert (version.run_id, version.tags["tiphys.attempt"], desk.champion()) == (child.info.run_id, "3", "1")

    desk.tiphys("resume", run, "--state", "state", "--from", "register")
    assert [one.version for one in desk.versions()] == ["1"]
    assert [one.info.run_id for one in desk.runs(run)] == [parent.info.run_id, child.info.run_id]

    desk.tiphys("fork", run, "--run", "forked", "--state", "state", "-p", "steps=25")
    forked, _ = desk.runs("forked")
    assert forked.info.run_id != parent.info.run_id
    assert forked.data.tags["tiphys.forked_from"] == run
    assert forked.data.tags["tiphys.forked_from_run_id"] == parent.info.run_id
    assert desk.champion() == "2"


def test_a_run_goes_on_without_mlflow_and_its_model_is_registered_later(desk: Desk) -> None:
    program = PROGRAM.replace("import mlflow\n", "").replace('        mlflow.log_metric("loss"', '        ("loss"')
    (desk.folder / "train.py").write_text(program.replace("step=state", "state"))
    desk.tiphys("run", "pipeline.py", "--run", desk.name, "--state", "state", uri=NOWHERE)
    assert f"pending; `tiphys register {desk.name}`" in desk.tiphys("get", desk.name)
    listed = json.loads(desk.tiphys("register", desk.name, "--dry-run", "-o", "json"))
    assert [one["model_version"] for one in listed["registrations"]] == [""]
    desk.tiphys("register", desk.name, code=75, uri=NOWHERE)
    assert "champion" in desk.tiphys("register", desk.name)
    assert [one.version for one in desk.versions()] == ["1"]
    assert desk.champion() == "1"
    assert f"model {desk.name} of step register: version 1" in desk.tiphys("get", desk.name)
    desk.tiphys("register", desk.name)
    assert [one.version for one in desk.versions()] == ["1"]
