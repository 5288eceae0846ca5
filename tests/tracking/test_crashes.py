"""Processes that die by SIGKILL between two writes, against a real MLflow: the next one leaves exactly one of each."""

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fakes.mlflow import ALIAS, MODEL, REGISTER, RUN, STEP, write_run

from tiphys.records.tracking import ModelRegistration
from tiphys.store import DirectoryStore

PATIENCE_SECONDS = 600.0
REGISTER_POINTS = (
    "register.after_request",
    "register.after_model",
    "register.before_version",
    "register.after_version",
    "register.before_alias",
    "register.after_set_alias",
    "register.after_alias",
)
OPEN_POINTS = ("tracking.before_create", "tracking.after_create", "tracking.after_record", "tracking.after_record@2")
CALLERS = 3


class Pod:
    """The pod of a step of one run, whose programs may die."""

    def __init__(self, folder: Path, uri: str) -> None:
        self.folder, self.uri = folder, uri
        self.name = f"crash-{secrets.token_hex(6)}"
        self.store = DirectoryStore(folder / "store")
        write_run(self.store, name=self.name)
        (folder / "model").write_bytes(MODEL)
        self.faults = folder / "faults.log"

    def start(self, module: str, *words: str, step: str, point: str = "") -> subprocess.Popen[bytes]:
        own = {
            "TIPHYS_STORE": self.store.url,
            "TIPHYS_RUN": RUN,
            "TIPHYS_STEP": step,
            "TIPHYS_ATTEMPT": "1",
            "TIPHYS_REGISTRATION": ModelRegistration(model=self.name, alias=ALIAS).model_dump_json(),
            "TIPHYS_INPUT_MODEL": str(self.folder / "model"),
            "MLFLOW_TRACKING_URI": self.uri,
            "MLFLOW_EXPERIMENT_NAME": self.name,
            "TIPHYS_FAILPOINTS_LOG": str(self.faults),
            "PYTHONPATH": os.pathsep.join(sys.path),
        }
        name, _, nth = point.partition("@")
        armed = {"TIPHYS_FAILPOINTS": f"{name}=crash@{nth or 1}"} if point else {}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("TIPHYS_")}
        return subprocess.Popen([sys.executable, "-m", module, *words], env={**kept, **own, **armed})

    def run(self, module: str, *words: str, step: str, point: str = "") -> None:
        code = self.start(module, *words, step=step, point=point).wait(PATIENCE_SECONDS)
        assert code == (-signal.SIGKILL if point else 0)

    @property
    def client(self) -> Any:
        from mlflow import MlflowClient

        return MlflowClient(self.uri, self.uri)

    def check_one_version(self) -> None:
        assert [one.version for one in self.client.search_model_versions(f"name = '{self.name}'")] == ["1"]
        assert str(self.client.get_model_version_by_alias(self.name, ALIAS).version) == "1"

    def check_one_run(self) -> None:
        experiment = self.client.get_experiment_by_name(self.name)
        runs = self.client.search_runs([experiment.experiment_id])
        assert sorted(run.info.run_name for run in runs) == [RUN, STEP]


@pytest.fixture
def pod(tmp_path: Path, tracking_uri: str) -> Pod:
    return Pod(tmp_path, tracking_uri)


@pytest.mark.parametrize("point", REGISTER_POINTS)
def test_a_registration_that_dies_is_finished_by_the_next(pod: Pod, point: str) -> None:
    pod.run("tiphys.tracking.register", step=REGISTER, point=point)
    assert pod.faults.read_text() == f"{point}=crash\n"
    pod.run("tiphys.tracking.register", step=REGISTER)
    pod.check_one_version()


@pytest.mark.parametrize("point", OPEN_POINTS)
def test_a_run_of_which_the_opener_dies_is_continued_by_the_next(pod: Pod, point: str) -> None:
    pod.run("tiphys.tracking", "open", step=STEP, point=point)
    assert pod.faults.read_text() == f"{point.partition('@')[0]}=crash\n"
    pod.run("tiphys.tracking", "open", step=STEP)
    pod.check_one_run()


def test_callers_at_the_same_moment_make_one_version(pod: Pod) -> None:
    callers = [pod.start("tiphys.tracking.register", step=REGISTER) for _ in range(CALLERS)]
    assert [caller.wait(PATIENCE_SECONDS) for caller in callers] == [0] * CALLERS
    [version] = pod.client.search_model_versions(f"name = '{pod.name}'")
    assert pod.client.get_model_version_by_alias(pod.name, ALIAS).version == version.version


def test_attempts_that_open_at_the_same_moment_have_one_run(pod: Pod) -> None:
    callers = [pod.start("tiphys.tracking", "open", step=STEP) for _ in range(CALLERS)]
    assert [caller.wait(PATIENCE_SECONDS) for caller in callers] == [0] * CALLERS
    pod.check_one_run()
