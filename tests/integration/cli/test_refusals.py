"""Bad input: the message says what, where and what to do; the exit code is the documented one; storage is as it was.

| input                                   | code |
|-----------------------------------------|------|
| a pipeline file that does not import    | 2    |
| no pipeline file, or no pipeline in it  | 2    |
| a parameter that the pipeline lacks     | 2    |
| a queue that the queue file lacks       | 2    |
| a missing store                         | 3    |
| an unknown run                          | 3    |
| a run name that is taken                | 4    |
| a port in use                           | 4    |
| a store that is a file                  | 75   |
| a loopback interface that is down       | 78   |
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.stories import small_pipeline

from .conftest import Command, Finished, snapshot


def test_a_file_that_does_not_import_is_named_with_its_line(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import hera_pipelines\n\nimport no_such_module\n")
    answer = tiphys("run", "broken.py")
    assert (answer.code, answer.out) == (2, "")
    assert answer.error.startswith("tiphys: broken.py:3: ModuleNotFoundError: No module named 'no_such_module'")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["broken.py"]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "tiphys: pipe.py does not exist; name the Python file"),
        ("x = 1\n", "tiphys: pipe.py defines no pipeline at its top level; write"),
        ("def f(:\n", "tiphys: pipe.py:1: SyntaxError"),
    ],
)
@pytest.mark.parametrize("command", ["run", "compile"])
def test_a_file_without_a_pipeline_is_refused(
    content: str | None, sentence: str, command: str, tiphys: Command, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "pipe.py").write_text(content)
    answer = tiphys(command, "pipe.py")
    assert (answer.code, answer.out) == (2, "")
    assert answer.error.startswith(sentence)
    assert not (tmp_path / ".tiphys").exists()


def test_a_file_that_ends_the_program_is_refused(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "p.py").write_text("import sys\nsys.exit(3)\n")
    answer = tiphys("compile", "p.py")
    assert answer.code == 2
    assert "p.py:2: the file exits while it is loaded (exit 3)" in answer.error


def test_a_pipeline_among_several_must_be_named(tiphys: Command, tmp_path: Path) -> None:
    file = small_pipeline.write(tmp_path)
    (tmp_path / "two.py").write_text(file.read_text() + "\nwith Pipeline('other') as other:\n    prepare()\n")
    answer = tiphys("compile", "two.py")
    assert answer.code == 2
    assert "say which one with --pipeline NAME" in answer.error
    assert tiphys("compile", "two.py", "--pipeline", "other").code == 0
    assert "no pipeline 'third'" in tiphys("run", "two.py", "--pipeline", "third").error


def test_an_unknown_parameter_is_refused_before_anything_is_written(tiphys: Command, tmp_path: Path) -> None:
    answer = tiphys("run", small_pipeline.write(tmp_path), "-p", "step=7")
    assert answer.code == 2
    assert "no parameter 'step'; did you mean 'steps'? It has: steps, fail" in answer.error
    assert snapshot(tmp_path / ".tiphys") == {}


@pytest.mark.parametrize(
    "arguments", [["runs"], ["get", "r"], ["plan", "r"], ["lineage", "r"], ["events", "r"], ["resume", "r"]]
)
def test_a_missing_store_is_said_and_not_made(arguments: list[str], tiphys: Command, tmp_path: Path) -> None:
    answer = tiphys(*arguments, "--store", "missing")
    assert (answer.code, answer.out) == (3, "")
    assert "missing" in answer.error
    assert "check the path" in answer.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["get"], ["plan"], ["lineage"], ["events"], ["resume"]])
def test_an_unknown_run_is_named_with_the_likely_one(arguments: list[str], tiphys: Command, finished: Finished) -> None:
    before = snapshot(finished.store)
    answer = tiphys(*arguments, "tiny-don", "--store", finished.store)
    assert (answer.code, answer.out) == (3, "")
    assert "has no run 'tiny-don'; did you mean tiny-done?" in answer.error
    assert snapshot(finished.store) == before


@pytest.mark.parametrize("arguments", [["runs"], ["get", "r"], ["run", "code/tiny.py"]])
def test_a_store_that_is_a_file_is_refused(arguments: list[str], tiphys: Command, tmp_path: Path) -> None:
    small_pipeline.write(tmp_path / "code")
    (tmp_path / "file").write_text("precious")
    answer = tiphys(*arguments, "--store", "file")
    assert answer.code == 78
    assert "file" in answer.error
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize("arguments", [["runs"], ["get", "r"], ["run", "code/tiny.py"]])
def test_missing_credentials_are_not_to_be_tried_again(
    arguments: list[str], tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_pipeline.write(tmp_path / "code")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    answer = tiphys(*arguments, "--store", "s3://ml-runs/tiphys")
    assert answer.code == 78
    assert "AWS_ACCESS_KEY_ID" in answer.error


def test_a_run_name_that_is_taken_is_refused(tiphys: Command, finished: Finished) -> None:
    before = snapshot(finished.store)
    answer = tiphys("run", finished.folder / "code" / "tiny.py", "--run", "tiny-done", "--store", finished.store)
    assert (answer.code, answer.out) == (4, "")
    assert "already has a run 'tiny-done'" in answer.error
    assert "tiphys resume tiny-done" in answer.error
    assert snapshot(finished.store) == before


def test_a_name_that_cannot_be_one_is_refused(tiphys: Command, tmp_path: Path) -> None:
    answer = tiphys("run", small_pipeline.write(tmp_path), "--run", "Not A Name")
    assert answer.code == 2
    assert "lower-case" in answer.error
    assert snapshot(tmp_path / ".tiphys" / "store") == {}


def test_a_port_in_use_is_named_and_nothing_is_recorded(tiphys: Command, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = tiphys("run", small_pipeline.write(tmp_path), "--plugin-port", port)
    assert (answer.code, answer.out) == (4, "")
    assert str(port) in answer.error
    assert "--plugin-port 0" in answer.error
    assert snapshot(tmp_path / ".tiphys" / "store") == {}


_WITHOUT_NETWORK = ("unshare", "--map-root-user", "--net")


@pytest.mark.heavy
@pytest.mark.skipif(
    subprocess.run([*_WITHOUT_NETWORK, "true"], capture_output=True, check=False).returncode != 0,
    reason="this account may not make a network namespace",
)
def test_a_loopback_interface_that_is_down_is_named_and_nothing_is_recorded(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "hera_pipelines.cli",
        "run",
        small_pipeline.write(tmp_path / "code"),
        "--store",
        "store",
    ]
    ended = subprocess.run(
        [*_WITHOUT_NETWORK, *command], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False
    )
    assert (ended.returncode, ended.stdout) == (78, "")
    [line] = [line for line in ended.stderr.splitlines() if line.startswith("tiphys: ")]
    assert "the loopback interface (127.0.0.1), which is down" in line
    assert "`ip link set lo up`" in line
    assert snapshot(tmp_path / "store") == {}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [("queues: [{name: research", "queues.yaml"), ("queues: [{name: other, gpus: {A100: 1}}]\n", "research")],
)
def test_a_queue_file_that_cannot_serve_the_pipeline_is_refused(
    content: str, sentence: str, tiphys: Command, tmp_path: Path
) -> None:
    file = small_pipeline.write(tmp_path)
    file.write_text(file.read_text().replace('name="fit",', 'name="fit", gpus=1, gpu_type="A100", queue="research",'))
    (tmp_path / "queues.yaml").write_text(content)
    answer = tiphys("run", file, "--queues", "queues.yaml")
    assert answer.code == 2
    assert sentence in answer.error
    assert snapshot(tmp_path / ".tiphys" / "store") == {}


@pytest.mark.parametrize(
    ("arguments", "help_of"),
    [
        (["nonsense"], "tiphys"),
        (["run"], "tiphys run"),
        (["plan", "r", "-o", "xml"], "tiphys plan"),
        (["run", "f.py", "--speed", "fast"], "tiphys run"),
        (["lineage", "r", "--nope"], "tiphys lineage"),
        (["checkpoint", "nonsense"], "tiphys checkpoint"),
        (["checkpoint", "show", "r"], "tiphys checkpoint show"),
    ],
)
def test_a_wrong_call_is_one_line_and_code_2(
    arguments: list[str], help_of: str, tiphys: Command, tmp_path: Path
) -> None:
    answer = tiphys(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.error.endswith(f"see `{help_of} --help`")
    assert "Value error" not in answer.error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["plan", "resume"])
def test_other_parameters_are_for_a_fork(command: str, tiphys: Command) -> None:
    answer = tiphys(command, "r", "-p", "lr=1")
    assert answer.code == 2
    assert "`tiphys fork RUN -p NAME=VALUE` starts one with others" in answer.error


@pytest.mark.parametrize("arguments", [[], ["checkpoint"], ["queues"]])
def test_a_group_without_a_command_shows_its_help(arguments: list[str], tiphys: Command) -> None:
    answer = tiphys(*arguments)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(" ".join(["Usage: tiphys", *arguments]))
    assert len(answer.err.splitlines()) > 5


def test_a_picture_that_cannot_be_written_is_said(tiphys: Command, finished: Finished) -> None:
    answer = tiphys("lineage", "tiny-done", "-o", "svg", "--output", "no/such/a.svg", "--store", finished.store)
    assert answer.code == 2
    assert "cannot write the picture to no/such/a.svg: No such file or directory" in answer.error


def test_a_file_for_what_is_no_picture_is_refused(tiphys: Command, finished: Finished) -> None:
    answer = tiphys("lineage", "tiny-done", "--output", "a.svg", "--store", finished.store)
    assert answer.code == 2
    assert "add -o svg" in answer.error


def test_the_demo_refuses_a_folder_with_something_in_it(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious").write_text("x")
    answer = tiphys("demo", "--dir", "full")
    assert answer.code == 4
    assert "is not an empty folder" in answer.error
    assert snapshot(tmp_path) == {"full/precious": b"x"}
