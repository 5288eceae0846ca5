"""``tiphys logs`` about a run on this machine: whole, of one attempt, followed, and lost."""

import shutil
from pathlib import Path

import pytest
from hera.workflows import DAG
from tiphys_controller import start_run

from hera_pipelines import Pipeline, Step
from hera_pipelines.cli.app import main
from hera_pipelines.local.run_session import LocalSession
from tiphys.store import DirectoryStore

RUN = "spoken-1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a run whose first step says two lines, and whose second one nothing."""
    folder = tmp_path_factory.mktemp("desk")
    with Pipeline("spoken", store="s3://ml-runs/tiphys", entrypoint="main") as pipeline:
        first = Step(name="first", image="i", command=["python", "-c", "print('one'); print('two\\x1b[31m')"])
        second = Step(name="second", image="i", command=["true"])
        with DAG(name="main"):
            first() >> second()
    store = DirectoryStore(folder / "store")
    with LocalSession(store, folder / "state", speed=50.0, code=folder) as session:
        session.run(start_run(store, session, pipeline.to_dict(), RUN).workflow_name)
    return folder


def logs(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["logs", *arguments, "--store", str(folder / "store")])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_every_step_in_the_order_of_its_start(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = logs(finished, capsys, RUN)
    assert (code, out) == (0, "one\ntwo␛[31m\n")
    assert err.index(f"{RUN}/first attempt 1, ") < err.index(f"{RUN}/second attempt 1, ")


@pytest.mark.parametrize(("options", "lines"), [(["--tail", "1"], "two␛[31m\n"), (["-f"], "one\ntwo␛[31m\n")])
def test_one_step(finished: Path, capsys: pytest.CaptureFixture[str], options: list[str], lines: str) -> None:
    code, out, _ = logs(finished, capsys, f"{RUN}/first", *options)
    assert (code, out) == (0, lines)


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        ([f"{RUN}/first", "--attempt", "7"], 3, "has no attempt 7 yet"),
        ([RUN, "-f"], 2, f"name one as {RUN}/STEP"),
        ([f"{RUN}/third"], 3, "third"),
        (["another"], 3, "has no run 'another'"),
    ],
)
def test_what_there_is_not(
    finished: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, sentence: str
) -> None:
    refused, out, err = logs(finished, capsys, *arguments)
    assert (refused, out) == (code, "")
    assert sentence in err


def test_output_that_is_lost_is_said_to_be(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    moved = tmp_path / "moved"
    shutil.move(finished / "state" / "logs", moved)
    try:
        code, out, err = logs(finished, capsys, f"{RUN}/first")
    finally:
        shutil.move(moved, finished / "state" / "logs")
    assert (code, out) == (3, "")
    assert f"{RUN}/first attempt 1: its pods are gone" in err
