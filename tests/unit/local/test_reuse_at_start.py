"""A pipeline with ``reuse=True`` whose Workflow is submitted as it is takes over what other runs share.

| step | the second run |
|---|---|
| its program and inputs are those of a shared result | is skipped; its readers get the shared outputs |
| behind one that is taken over, with the same inputs | is skipped as well |
| behind one that runs | runs: its inputs are new |
| with other inputs, without `share`, behind a condition | runs |
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
from hera.workflows import DAG, Artifact, Parameter, Task
from hera.workflows.models import ValueFrom
from tiphys_controller import resume_run, start_run

from hera_pipelines import Pipeline, Step
from hera_pipelines.local.run_session import LocalSession
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.store import DirectoryStore, RunLayout, find_output_fault, list_outputs, read_step_attempts


def count(folder: Path, name: str) -> str:
    """A line of shell that notes that the program of a step ran."""
    return f"echo x >> '{folder / name}'"


EXPRESSION = "{{=tasks.double.outputs.parameters.m}}"


def value(name: str) -> Parameter:
    return Parameter(name=name, value_from=ValueFrom(path=f"/tmp/out/{name}"))


def pipeline(
    folder: Path, source: str = "s3", *, fetched: str = "", doubled: str = EXPRESSION, **fields: Any
) -> dict[str, Any]:
    """fetch makes a number and a file, double reads both; show, which is not shared, reads all."""
    with Pipeline("sums", store="s3://ml-runs", entrypoint="main", arguments={"source": source}, **fields) as made:
        fetch = Step(
            name="fetch",
            image="i",
            command=["sh", "-c"],
            args=[
                f"{count(folder, 'fetch')}; mkdir -p /tmp/out; printf '{{{{inputs.parameters.source}}}} ü{fetched}' "
                "> /tmp/out/data; printf 21 > /tmp/out/n"
            ],
            inputs=[Parameter(name="source")],
            outputs=[value("n"), Artifact(name="data", path="/tmp/out/data")],
            share=True,
        )
        double = Step(
            name="double",
            image="i",
            command=["sh", "-c"],
            args=[
                f"{count(folder, 'double')}; mkdir -p /tmp/out; cat /tmp/data; "
                "echo $(( {{inputs.parameters.n}} * 2 )) > /tmp/out/m"
            ],
            inputs=[Parameter(name="n"), Artifact(name="data", path="/tmp/data")],
            outputs=[value("m")],
            share=True,
        )
        show = Step(
            name="show",
            image="i",
            command=["sh", "-c"],
            args=[
                f"{count(folder, 'show')}; printf '%s %s %s' {{{{inputs.parameters.n}}}} {{{{inputs.parameters.m}}}} "
                f"\"$(cat /tmp/data)\" > '{folder / 'shown'}'"
            ],
            inputs=[Parameter(name="n"), Parameter(name="m"), Artifact(name="data", path="/tmp/data")],
        )
        with DAG(name="main"):
            first = fetch(arguments={"source": "{{workflow.parameters.source}}"})
            data = Artifact(name="data", from_="{{tasks.fetch.outputs.artifacts.data}}")
            number = {"n": "{{tasks.fetch.outputs.parameters.n}}"}
            second = double(arguments=[number, data])
            third = show(arguments=[number, {"m": doubled}, data])
            assert isinstance(first, Task) and isinstance(second, Task)
            third.depends = "double.Succeeded"
    manifest: dict[str, Any] = made.to_dict()
    return manifest


class Runs:
    """Runs one after the other in one store, and how often each program of them ran."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = DirectoryStore(folder / "store")

    def with_tiphys(self, manifest: dict[str, Any], run: str) -> str:
        with LocalSession(self.store, self.folder / "state", speed=50.0, code=self.folder) as session:
            return str(session.run(start_run(self.store, session, manifest, run).workflow_name))

    def as_it_is(self, manifest: dict[str, Any], run: str) -> str:
        """What `argo submit` does."""
        named = {**manifest, "metadata": {**manifest["metadata"], "name": run, "namespace": "local"}}
        named["metadata"].pop("generateName", None)
        with LocalSession(self.store, self.folder / "state", speed=50.0, code=self.folder) as session:
            session.create(named)
            return str(session.run(run))

    def programs(self) -> dict[str, int]:
        files = (self.folder / name for name in ("fetch", "double", "show"))
        return {file.name: len(file.read_text().split()) for file in files if file.exists()}

    def shown(self) -> str:
        return (self.folder / "shown").read_text()


@pytest.fixture
def runs(tmp_path: Path) -> Runs:
    return Runs(tmp_path)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A first run, whose paths are in the programs of the pipeline: so it stays where it is."""
    runs = Runs(tmp_path_factory.mktemp("shared") / "desk")
    runs.with_tiphys(pipeline(runs.folder, reuse=True), "first")
    shutil.copytree(runs.folder, runs.folder.with_name("kept"))
    return runs


@pytest.fixture
def later(first: Runs) -> Runs:
    """What the first run left, whatever other tests made of it."""
    shutil.rmtree(first.folder)
    shutil.copytree(first.folder.with_name("kept"), first.folder)
    return first


def test_record_of_a_run_has_no_gate(tmp_path: Path) -> None:
    recorded = CompiledPipeline.from_manifest(pipeline(tmp_path, reuse=True)).manifest
    assert recorded == pipeline(tmp_path)


def test_shared_results_are_taken_over_with_their_outputs(runs: Runs) -> None:
    assert runs.as_it_is(pipeline(runs.folder, reuse=True), "first") == "Succeeded"
    assert runs.programs() == {"fetch": 1, "double": 1, "show": 1}
    (runs.folder / "shown").unlink()
    assert runs.as_it_is(pipeline(runs.folder, reuse=True), "second.b") == "Succeeded"
    assert runs.programs() == {"fetch": 1, "double": 1, "show": 2}
    assert runs.shown() == "21 42 s3 ü"
    assert not read_step_attempts(runs.store, "second.b", "fetch")
    assert {key.key for key in runs.store.list(RunLayout("second.b").all_reused)} == {
        RunLayout("second.b").reused(1, step) for step in ("fetch", "double")
    }


def test_steps_with_other_inputs_run(later: Runs) -> None:
    assert later.as_it_is(pipeline(later.folder, "gs", reuse=True), "second") == "Succeeded"
    assert later.programs() == {"fetch": 2, "double": 2, "show": 2}
    assert later.shown() == "21 42 gs ü"


def test_step_behind_one_that_runs_runs(later: Runs) -> None:
    changed = pipeline(later.folder, fetched="!", reuse=True)
    assert later.as_it_is(changed, "second") == "Succeeded"
    assert later.programs() == {"fetch": 2, "double": 2, "show": 2}
    assert later.shown() == "21 42 s3 ü!"


def test_damaged_result_is_not_taken_over(later: Runs) -> None:
    [attempt] = read_step_attempts(later.store, "first", "fetch")
    assert attempt.end is not None
    [data] = [output.key for output in attempt.end.outputs if output.name == "data"]
    later.store.delete(data)
    assert find_output_fault(attempt.end, list_outputs(later.store, attempt.end)) is not None
    assert later.as_it_is(pipeline(later.folder, reuse=True), "second") == "Succeeded"
    assert later.programs() == {"fetch": 2, "double": 2, "show": 2}


def test_resume_of_a_run_that_took_over_results_runs_only_what_is_missing(later: Runs) -> None:
    broken = pipeline(later.folder, doubled="{{tasks.double.outputs.parameters.m}}", reuse=True)
    [show] = [one for one in broken["spec"]["templates"] if one["name"] == "show"]
    show["container"]["args"][0] = f"[ -e '{later.folder / 'mended'}' ] || exit 3; {show['container']['args'][0]}"
    assert later.as_it_is(broken, "second") == "Failed"
    (later.folder / "mended").touch()
    with LocalSession(later.store, later.folder / "state", speed=50.0, code=later.folder) as session:
        resumed = resume_run(later.store, session, "second")
        assert resumed.workflow_name is not None
        assert session.run(resumed.workflow_name) == "Succeeded"
    assert later.programs() == {"fetch": 1, "double": 1, "show": 2}
    assert later.shown() == "21 42 s3 ü"
