"""Resume on the real engine: what is pruned here runs there, and what is kept is taken over."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Artifact, Parameter
from hera.workflows.models import ValueFrom
from tiphys_controller import PlanReport, ResumeResult, plan_run, resume_run, start_run

from hera_pipelines import Pipeline, Step
from hera_pipelines.local.run_session import LocalSession
from tiphys.lineage.run_history import RunHistory
from tiphys.store import DirectoryStore, RunLayout, read_attempt_end

RUN = "sweep-1"

# Each program leaves a line in a file beside its code (@), so that a test can count what really ran.
PREP = """
import os, pathlib
with open("@/ran", "a") as ran: ran.write("prep\\n")
pathlib.Path(os.environ["TIPHYS_OUTPUT_DATA"]).write_text("rows")
pathlib.Path(os.environ["TIPHYS_OUTPUT_COUNT"]).write_text("4")
"""
TRY = """
import os, pathlib, sys
with open("@/ran", "a") as ran: ran.write(f"try {sys.argv[1]}\\n")
assert pathlib.Path(os.environ["TIPHYS_INPUT_DATA"]).read_text() == "rows"
pathlib.Path(os.environ["TIPHYS_OUTPUT_LOSS"]).write_text(str(float(sys.argv[1]) * 2))
"""
BEST = """
import json, os, pathlib, sys
with open("@/ran", "a") as ran: ran.write("best\\n")
if pathlib.Path("@/broken").exists(): sys.exit(1)
losses = [float(loss) for loss in json.loads(sys.argv[1])]
pathlib.Path(os.environ["TIPHYS_OUTPUT_ANSWER"]).write_text(f"{losses} of {sys.argv[2]}")
"""


def parameter(name: str) -> Parameter:
    return Parameter(name=name, value_from=ValueFrom(path=f"/tmp/{name}"))


def pipeline() -> dict[str, Any]:
    data = Artifact(name="data", path="/tmp/data")
    with Pipeline("sweep", store="s3://ml-runs", entrypoint="main") as made:
        prep = Step(name="prep", image="i", command=["python", "prep.py"], outputs=[data, parameter("count")])
        attempt = Step(
            name="try",
            image="i",
            command=["python", "try.py", "{{inputs.parameters.lr}}"],
            inputs=[data, Parameter(name="lr")],
            outputs=[parameter("loss")],
        )
        best = Step(
            name="best",
            image="i",
            command=["python", "best.py", "{{inputs.parameters.losses}}", "{{inputs.parameters.count}}"],
            inputs=[Parameter(name="losses"), Parameter(name="count")],
            outputs=[parameter("answer")],
        )
        with DAG(name="main"):
            made_data = prep()
            tries = attempt(
                arguments=[made_data.get_artifact("data"), Parameter(name="lr", value="{{item}}")],
                with_items=[0.5, 0.25, 1.0],
            )
            losses = Parameter(name="losses", value="{{tasks.try.outputs.parameters.loss}}")
            count = Parameter(name="count", value="{{tasks.prep.outputs.parameters.count}}")
            made_data >> tries >> best(arguments=[losses, count])
    manifest: dict[str, Any] = made.to_dict()
    return manifest


class Desk:
    """One store and one state folder, and what ran there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.code = folder / "code"
        self.code.mkdir()
        for name, text in (("prep", PREP), ("try", TRY), ("best", BEST)):
            (self.code / f"{name}.py").write_text(text.replace("@", str(self.code)))
        self.store = DirectoryStore(folder / "store")

    def session(self) -> LocalSession:
        return LocalSession(self.store, self.folder / "state", speed=50.0, code=self.code)

    def start(self) -> str:
        with self.session() as session:
            return str(session.run(start_run(self.store, session, pipeline(), RUN).workflow_name))

    def resume(self) -> tuple[ResumeResult, str]:
        with self.session() as session:
            resumed = resume_run(self.store, session, RUN)
            return resumed, str(session.run(resumed.workflow_name)) if resumed.submission else ""

    def plan(self) -> PlanReport:
        return plan_run(self.store, RUN)

    def ran(self) -> list[str]:
        """What ran since the last time this was asked, in any order."""
        path = self.code / "ran"
        lines = sorted(path.read_text().splitlines()) if path.exists() else []
        path.unlink(missing_ok=True)
        return lines

    def answer(self) -> str | None:
        end = RunHistory(self.store, RUN).attempts["best"][-1].end
        return next((output.value for output in end.outputs), None) if end else None


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.fixture
def finished(desk: Desk) -> Desk:
    """A run that succeeded."""
    assert desk.start() == "Succeeded"
    assert desk.ran() == ["best", "prep", "try 0.25", "try 0.5", "try 1"]
    assert desk.answer() == "[1.0, 0.5, 2.0] of 4"
    return desk


def test_only_what_failed_runs_again_with_the_values_of_the_rest_in_their_order(desk: Desk) -> None:
    (desk.code / "broken").touch()
    assert desk.start() == "Failed"
    desk.ran()
    for number in (2, 3):
        resumed, phase = desk.resume()
        assert (resumed.submission, resumed.plan.running, phase) == (number, ("best",), "Failed")
        assert desk.ran() == ["best"]
    (desk.code / "broken").unlink()

    resumed, phase = desk.resume()

    assert (resumed.submission, phase) == (4, "Succeeded")
    assert desk.ran() == ["best"]
    assert desk.answer() == "[1.0, 0.5, 2.0] of 4"
    assert desk.resume()[0].submission is None


def test_a_deleted_output_is_made_again_and_the_steps_behind_it_run_again(finished: Desk) -> None:
    assert finished.resume()[0].submission is None
    assert {step.decision for step in finished.plan().steps} == {"skip"}
    [data] = [output for output in read_attempt_end(finished.store, RUN, "prep", 1).outputs if output.objects]
    finished.store.delete(data.key)

    resumed, phase = finished.resume()

    assert resumed.plan.running == ("prep", "try", "best")
    assert phase == "Succeeded"
    assert sorted(finished.ran()) == ["best", "prep", "try 0.25", "try 0.5", "try 1"]
    assert finished.resume()[0].submission is None


@pytest.mark.heavy
def test_a_lost_item_runs_again_and_the_other_items_are_reused(finished: Desk) -> None:
    item, layout = finished.plan().steps[1].items[1], RunLayout(RUN)
    assert item.item == "0.25"
    for prefix in (layout.attempt_end(item.step, 1), f"{layout.done_markers}{item.step}/"):
        for info in list(finished.store.list(prefix)):
            finished.store.delete(info.key)
    shutil.rmtree(finished.folder / "state")  # a resume would record the item again from the Workflow

    resumed, phase = finished.resume()

    assert resumed.plan.running == ("try", "best")
    assert phase == "Succeeded"
    assert sorted(finished.ran()) == ["best", "try 0.25"]
