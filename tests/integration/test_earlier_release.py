"""What an earlier release has written, this tree goes on with, and the other way round: commands, runs, GPU ledger.

The earlier release is the newest tag ``v…``, or the commit that ``TIPHYS_EARLIER`` names. It is exported and set up
from its own lock file. A training with GPUs is killed with its engine in the middle, by one of the two; the other reads
and resumes it, and the first reads what became of it.
"""

import contextlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.processes.polling import until

from tiphys.lineage.select import list_commits
from tiphys.store import DirectoryStore

ROOT = Path(__file__).parents[2]
UV = os.environ.get("UV") or shutil.which("uv") or str(ROOT / ".tools" / "bin" / "uv")
STEPS, KILLED_AT, EVERY = 20, 12, 5
COMMITS = KILLED_AT // EVERY
STORY = """
from typing import Annotated

from hera.workflows import Artifact
from hera_pipelines import Checkpoints, Pipeline, step, train

Result = Annotated[dict, Artifact(name="result")]


@step(image="any")
def begin(folder: str) -> Result:
    with open(f"{folder}/begun", "a") as stream:
        stream.write("begun\\n")
    return {"sum": 3}


@train(image="any", gpus=1, queue="team", checkpoints=Checkpoints(every="EVERY steps"), grace="1m")
def fit(begun: Result, folder: str) -> Result:
    import time
    from pathlib import Path

    from tiphys import checkpoint

    with checkpoint.session() as session:
        state = session.restore(default={"step": 0, "sum": 3})
        with open(f"{folder}/starts", "a") as stream:
            stream.write(f"{state['step']}\\n")
        while state["step"] < STEPS:
            state["step"] += 1
            state["sum"] += state["step"]
            session.step(state["step"], state)
            while state["step"] == KILLED_AT and not Path(folder, "go-on").exists():
                time.sleep(0.05)
    Path(folder, "sum").write_text(str(state["sum"]))
    return state


with Pipeline("story") as pipeline:
    fit(begin("FOLDER"), "FOLDER")
"""
QUEUES = 'queues:\n  - {name: team, gpus: {"*": 2}}\n'

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(1800)]


class Version(NamedTuple):
    """An installed version, and the folder in which its commands run."""

    name: str
    python: Path
    folder: Path

    def start(self, *words: str) -> "subprocess.Popen[str]":
        """Start ``tiphys`` with these words, leader of its own process group."""
        command = [str(self.python), "-m", "hera_pipelines.cli", *words]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        return subprocess.Popen(
            command, cwd=self.folder, env=kept, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip

    def tiphys(self, *words: str) -> str:
        output, errors = (process := self.start(*words)).communicate(timeout=600)
        assert process.returncode == 0, (self.name, words, output, errors)
        return output

    def get(self) -> Any:
        return json.loads(self.tiphys("get", "night", "-o", "json"))


def earlier_ref() -> str:
    if ref := os.environ.get("TIPHYS_EARLIER"):
        return ref
    tags = subprocess.run(
        ["git", "tag", "--list", "v*", "--sort=-v:refname"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return next(iter(tags.stdout.split()), "")


@pytest.fixture(scope="module")
def earlier_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ref := earlier_ref()):
        pytest.skip("no release is tagged yet; TIPHYS_EARLIER=COMMIT names another version")
    tree = tmp_path_factory.mktemp("earlier")
    archive = subprocess.run(["git", "archive", ref], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")
    kept = {name: value for name, value in os.environ.items() if name not in ("VIRTUAL_ENV", "UV_PROJECT_ENVIRONMENT")}
    subprocess.run(["make", "setup", f"UV={UV}"], cwd=tree, env=kept, check=True, timeout=1200)
    return tree / ".venv" / "bin" / "python"


@pytest.fixture(params=["earlier", "this"])
def versions(request: pytest.FixtureRequest, earlier_python: Path, tmp_path: Path) -> tuple[Version, Version]:
    """Who begins, and who goes on."""
    story = STORY
    for name, value in {"FOLDER": tmp_path, "STEPS": STEPS, "KILLED_AT": KILLED_AT, "EVERY": EVERY}.items():
        story = story.replace(name, str(value))
    (tmp_path / "story.py").write_text(story)
    (tmp_path / "queues.yaml").write_text(QUEUES)
    earlier = Version("earlier", earlier_python, tmp_path)
    this = Version("this", Path(sys.executable), tmp_path)
    return (earlier, this) if request.param == "earlier" else (this, earlier)


def test_run_of_one_release_is_read_and_resumed_by_the_other(versions: tuple[Version, Version], tmp_path: Path) -> None:
    begins, goes_on = versions
    engine = begins.start("run", "story.py", "--queues", "queues.yaml", "--run", "night")
    store = DirectoryStore(tmp_path / ".tiphys" / "store")
    try:
        until(lambda: len(list_commits(store, "night/fit")) == COMMITS or engine.poll() is not None, seconds=600)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(engine.pid, signal.SIGKILL)
        _, errors = engine.communicate()
    assert engine.returncode == -signal.SIGKILL, errors
    (tmp_path / "go-on").touch()
    assert [run["run"] for run in json.loads(goes_on.tiphys("runs", "-o", "json"))["runs"]] == ["night"]
    interrupted = goes_on.get()
    goes_on.tiphys("resume", "night")
    finished = begins.get()
    assert (tmp_path / "begun").read_text().splitlines() == ["begun"]
    assert (tmp_path / "starts").read_text().split() == ["0", str(COMMITS * EVERY)]
    assert (tmp_path / "sum").read_text() == str(3 + sum(range(STEPS + 1)))
    assert interrupted["summary"]["phase"] != finished["summary"]["phase"] == "Succeeded"
    assert goes_on.get() == finished
