"""``tiphys logs`` about a run on this machine: whole, of one attempt, followed, and lost."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from hera.workflows import DAG
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from tiphys_controller import start_run

from hera_pipelines import Pipeline, Step
from hera_pipelines.cli.app import main
from hera_pipelines.cli.look.page_sources import AttemptLogReader
from hera_pipelines.local.run_session import LocalSession
from tiphys.errors import UsageError
from tiphys.store import DirectoryStore, read_step_attempts, read_submissions

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


def test_lines_as_documents_say_where_they_are_from(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = logs(finished, capsys, RUN, "-o", "json")
    documents = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [(one["step"], one["attempt"], one["line"]) for one in documents] == [
        ("first", 1, "one"),
        ("first", 1, "two\x1b[31m"),
    ]
    assert {one["run"] for one in documents} == {RUN}
    assert all(one["pod"] and one["source"] for one in documents)
    _, out, _ = logs(finished, capsys, f"{RUN}/first", "-o", "yaml")
    assert [one["line"] for one in yaml.safe_load_all(out)] == ["one", "two\x1b[31m"]


@pytest.mark.parametrize(("options", "lines"), [(["--tail", "1"], "two␛[31m\n"), (["-f"], "one\ntwo␛[31m\n")])
def test_logs_of_a_step_are_printed(
    finished: Path, capsys: pytest.CaptureFixture[str], options: list[str], lines: str
) -> None:
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
def test_a_missing_run_step_or_attempt_is_named(
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


def test_the_pages_read_the_end_of_the_same_file(finished: Path) -> None:
    store = DirectoryStore(finished / "store")
    [attempt], [submission] = read_step_attempts(store, RUN, "first"), read_submissions(store, RUN)

    def read(max_lines: int, max_bytes: int) -> list[str]:
        [log] = AttemptLogReader(store, None)(attempt, submission, max_lines, max_bytes)
        assert log.source.startswith(str(finished / "state"))
        return list(log.lines)

    assert read(9, 1 << 20) == ["one\n", "two\x1b[31m\n"]
    assert read(1, 1 << 20) == ["two\x1b[31m\n"]
    assert read(9, 6) == ["\x1b[31m\n"]


def test_the_pages_ask_no_cluster_unless_they_may(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    run = start_run(
        store,
        FakeSubmitter(tmp_path / "cluster", "kubernetes:east"),
        pipeline_of(gated("fit")),
        RUN,
    ).run
    History(store, run).opened("fit")
    [attempt], [submission] = read_step_attempts(store, run, "fit"), read_submissions(store, run)
    with pytest.raises(UsageError, match="known to kubernetes:east, which these pages do not ask"):
        list(AttemptLogReader(store, None)(attempt, submission, 1, 1))
