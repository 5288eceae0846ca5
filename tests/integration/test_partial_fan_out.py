"""A fan-out without gates of which one item failed: the next Workflow has that item alone, and the reader gets all."""

from pathlib import Path

from hera.workflows import DAG, Parameter
from tiphys_controller import resume_run, start_run
from tiphys_controller.runs import summarize_run

from hera_pipelines import Pipeline, Step
from hera_pipelines.local.run_session import LocalSession
from tiphys.lineage.run_history import RunHistory
from tiphys.store import DirectoryStore

_PROGRAM = """
import os, pathlib, sys
if sys.argv[1] == "2" and not pathlib.Path(sys.argv[2]).exists():
    sys.exit(3)
pathlib.Path(os.environ["TIPHYS_OUTPUT_LOSS"]).write_text("loss {" + sys.argv[1] + "😀}")
"""
_READER = "import os, pathlib, sys; pathlib.Path(os.environ['TIPHYS_OUTPUT_GOT']).write_text('\\n'.join(sys.argv[1:]))"


def _pipeline(store: str, allowed: Path) -> Pipeline:
    def output(name: str) -> Parameter:
        return Parameter(name=name, value_from={"path": f"/tmp/out/{name}"})

    with Pipeline("sweep", store=store, entrypoint="main") as pipeline:
        fit = Step(
            name="fit",
            image="any",
            inputs=Parameter(name="lr"),
            command=["python", "-c", _PROGRAM, "{{inputs.parameters.lr}}", str(allowed)],
            outputs=output("loss"),
        )
        best = Step(
            name="best",
            image="any",
            inputs=[Parameter(name="losses"), Parameter(name="whole")],
            command=["python", "-c", _READER, "{{inputs.parameters.losses}}", "{{inputs.parameters.whole}}"],
            outputs=output("got"),
        )
        with DAG(name="main"):
            fits = fit(name="fit", arguments={"lr": "{{item}}"}, with_items=[1, 2, 3])
            lists = {"losses": "{{tasks.fit.outputs.parameters.loss}}", "whole": "{{tasks.fit.outputs.parameters}}"}
            fits >> best(name="best", arguments=lists)
    return pipeline


def test_the_missing_item_runs_alone_and_the_run_is_done_with_those_before(tmp_path: Path) -> None:
    store, allowed = DirectoryStore(tmp_path / "store"), tmp_path / "allowed"
    manifest = _pipeline(store.url, allowed).compile()
    with LocalSession(store, tmp_path / "state", speed=20) as session:
        first = start_run(store, session, manifest, "sweep-1")
        assert str(session.run(first.workflow_name)) == "Failed"
        allowed.touch()
        assert str(session.run(resume_run(store, session, "sweep-1").workflow_name)) == "Succeeded"
    attempts = RunHistory(store, "sweep-1").attempts
    assert sorted(map(len, attempts.values())) == [1, 1, 1, 2]
    [done] = [end for attempt in attempts["best"] if (end := attempt.end) is not None]
    losses = [f"loss {{{number}😀}}" for number in (1, 2, 3)]
    quoted = [f'"{loss}"' for loss in losses]
    assert done.outputs[0].value == "\n".join(
        ["[" + ",".join(quoted) + "]", "[" + ",".join(f'{{"loss":{loss}}}' for loss in quoted) + "]"]
    )
    summary = summarize_run(RunHistory(store, "sweep-1"))
    assert (summary.steps_done, summary.steps_total) == (2, 2)
