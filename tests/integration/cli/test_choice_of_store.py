"""Which store a command uses.

| `--store` | `store=` of the pipeline | `TIPHYS_STORE` | used |
|---|---|---|---|
| given | any | any | `--store` |
| | named, and the command reads the pipeline | any | the pipeline's |
| | | set | `TIPHYS_STORE` |
| | | | `.tiphys/store` |
"""

from pathlib import Path

import pytest

from .conftest import Command

SOURCES = ("option", "pipeline", "variable")


def pipeline_file(folder: Path, store: str = "", command: str = "true") -> Path:
    """A pipeline of one step, which runs ``command``."""
    folder.mkdir()
    file = folder / "tiny.py"
    named = f", store={store!r}" if store else ""
    file.write_text(
        "from hera_pipelines import Pipeline, Step\n"
        f'with Pipeline("tiny"{named}) as pipeline:\n    Step(name="only", image="i", command=[{command!r}])()\n'
    )
    return file


@pytest.mark.parametrize("source", SOURCES)
def test_the_most_specific_source_names_the_store(
    source: str, tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = SOURCES[SOURCES.index(source) :]
    file = pipeline_file(tmp_path / "code", "s3://ml-runs/pipeline" if "pipeline" in used else "")
    if "variable" in used:
        monkeypatch.setenv("TIPHYS_STORE", "s3://ml-runs/variable")
    answer = tiphys("compile", file, *(["--store", "s3://ml-runs/option"] if "option" in used else []))
    assert f"s3://ml-runs/{source}" in answer.out
    assert not [other for other in SOURCES if other != source and f"s3://ml-runs/{other}" in answer.out]


def test_a_variable_that_names_another_store_than_the_pipeline_is_mentioned(
    tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIPHYS_STORE", "s3://ml-runs/variable")
    answer = tiphys("compile", pipeline_file(tmp_path / "code", "s3://ml-runs/pipeline"))
    assert answer.err.splitlines() == [
        "store s3://ml-runs/pipeline (from the pipeline; TIPHYS_STORE names s3://ml-runs/variable, "
        "which --store can choose)"
    ]


def test_a_resume_with_the_file_finds_the_store_of_the_pipeline(
    tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = pipeline_file(tmp_path / "code", str(tmp_path / "runs"))
    monkeypatch.setenv("TIPHYS_STORE", str(tmp_path / "variable"))
    assert tiphys("run", file, "--run", "tiny-1").code == 0
    for command in (["plan", "tiny-1", file], ["resume", "tiny-1", file], ["fork", "tiny-1", file, "--dry-run"]):
        assert tiphys(*command).code == 0
    assert tiphys("plan", "tiny-1").code == 3


@pytest.mark.parametrize("source", ["--store", "TIPHYS_STORE"])
def test_an_error_of_a_store_says_what_named_it(
    source: str, tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "TIPHYS_STORE":
        monkeypatch.setenv("TIPHYS_STORE", "/gone")
    answer = tiphys("--quiet", "runs", *(["--store", "/gone"] if source == "--store" else []))
    assert answer.code == 3
    assert answer.error.endswith(source)
    assert "; the store is from " in answer.error


def test_a_run_names_its_store_in_later_commands_unless_the_variable_does(
    tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, store = pipeline_file(tmp_path / "code", command="false"), str(tmp_path / "runs")
    assert f"--store file://{store}" in tiphys("run", file, "--run", "a", "--store", store).err
    monkeypatch.setenv("TIPHYS_STORE", store)
    lasting = tiphys("run", file, "--run", "b").err
    assert "tiphys resume b" in lasting
    assert "--store" not in lasting
