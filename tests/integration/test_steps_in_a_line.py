"""Steps without a conclude: their ends are recorded and judged by the next step's admission, and by finalize.

| program | Workflow | record | next step |
|---|---|---|---|
| writes its outputs | Succeeded | done | starts |
| leaves out an output artifact | Failed | output missing | is refused |
| leaves out an output parameter | Failed | output missing | is refused |
| leaves out an output, as the last step | Failed, by finalize | output missing | none |
| fails | Failed | user error | is left out |
"""

from pathlib import Path

import pytest
from hera.workflows import Artifact, Parameter
from hera.workflows.models import ValueFrom
from tiphys_controller import resume_run, start_run

from hera_pipelines import Pipeline, Step
from hera_pipelines.local.run_session import LocalSession
from tiphys.lineage.run_history import RunHistory
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.store import DirectoryStore, read_submissions

FIRST, LAST = "first", "last"


def pipeline(folder: Path) -> Manifest:
    """Two steps; each runs the shell script of its name, which a test writes."""
    outputs = [Artifact(name="file", path="/tmp/file"), Parameter(name="value", value_from=ValueFrom(path="/tmp/v"))]
    first = Step(name=FIRST, image="i", command=["sh", str(folder / FIRST)], outputs=outputs)
    last = Step(
        name=LAST,
        image="i",
        command=["sh", str(folder / LAST)],
        inputs=[Artifact(name="file", path="/tmp/file"), Parameter(name="value")],
        outputs=[Artifact(name="file", path="/tmp/out")],
    )
    with Pipeline("line") as made:
        given = first()
        last(file=given.get_artifact("file"), value=given.get_parameter("value"))
    return made.compile()


WRITES = {
    FIRST: 'echo 7 > "$TIPHYS_OUTPUT_VALUE"; echo data > "$TIPHYS_OUTPUT_FILE"',
    LAST: 'cat "$TIPHYS_INPUT_FILE" > "$TIPHYS_OUTPUT_FILE"',
}


class Desk:
    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, DirectoryStore(folder / "store")
        self.session = LocalSession(self.store, folder / "state", speed=50.0, code=folder)

    def write(self, **programs: str) -> None:
        for name, script in {**WRITES, **programs}.items():
            (self.folder / name).write_text(script)

    def run(self, resume: bool = False) -> str:
        with self.session as session:
            if resume:
                return str(session.run(resume_run(self.store, session, "r").workflow_name))
            return str(session.run(start_run(self.store, session, pipeline(self.folder), "r").workflow_name))

    def ends(self) -> dict[str, list[str]]:
        attempts = RunHistory(self.store, "r").attempts
        return {
            step: [str(one.end and (one.end.cause or one.end.outcome)) for one in all_]
            for step, all_ in attempts.items()
        }

    def why(self) -> str:
        end = read_submissions(self.store, "r")[-1].end
        return end.message if end else ""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    made = Desk(tmp_path)
    made.write()
    return made


def test_ends_are_recorded(desk: Desk) -> None:
    assert desk.run() == "Succeeded"
    assert desk.ends() == {FIRST: ["done"], LAST: ["done"]}


@pytest.mark.parametrize("script", ['echo 7 > "$TIPHYS_OUTPUT_VALUE"', 'echo data > "$TIPHYS_OUTPUT_FILE"'])
def test_an_output_that_is_missing_stops_the_next_step(desk: Desk, script: str) -> None:
    desk.write(first=script)

    assert desk.run() == "Error"  # as in Argo, whose executor finds no file

    assert desk.ends() == {FIRST: ["output_missing"]}
    assert desk.why().startswith("first failed in attempt 1 by output missing: a declared output is missing")
    desk.write()
    assert desk.run(resume=True) == "Succeeded"
    assert desk.ends() == {FIRST: ["output_missing", "done"], LAST: ["done"]}


def test_an_output_that_the_last_step_leaves_out_fails_the_run(desk: Desk) -> None:
    desk.write(last="true")

    assert desk.run() == "Error"

    assert desk.ends() == {FIRST: ["done"], LAST: ["output_missing"]}
    assert desk.why().startswith("last failed in attempt 1 by output missing: a declared output is missing")
    desk.write()
    assert desk.run(resume=True) == "Succeeded"
    assert desk.ends() == {FIRST: ["done"], LAST: ["output_missing", "done"]}


@pytest.mark.parametrize("failing", [FIRST, LAST])
def test_a_program_that_fails_is_judged_by_finalize(desk: Desk, failing: str) -> None:
    desk.write(**{failing: "exit 3"})

    assert desk.run() == "Failed"

    assert desk.ends()[failing] == ["user_error"]
    assert desk.why().startswith(f"{failing} failed in attempt 1 by user error: ")
