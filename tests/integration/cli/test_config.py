"""Which store a command uses, and the configuration file that names one.

| `--store` | `store=` of the pipeline | `TIPHYS_STORE` | profile | default of the file | used |
|---|---|---|---|---|---|
| given | any | any | any | any | `--store` |
| | named, and the command reads the pipeline | any | any | any | the pipeline's |
| | | set | any | any | `TIPHYS_STORE` |
| | | | has one | any | the profile's |
| | | | | has one | the default of the file |
| | | | | | `.tiphys/store` |
"""

import json
from pathlib import Path

import pytest

from .conftest import Command, Finished

SOURCES = ("option", "pipeline", "variable", "profile", "file")


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
    assert tiphys("config", "set", "store", "s3://ml-runs/file").code == 0
    if "profile" in used:
        tiphys("config", "set", "store", "s3://ml-runs/profile", "--profile", "east")
        tiphys("config", "use", "east")
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


@pytest.mark.parametrize("source", ["--store", "TIPHYS_STORE", "config.toml"])
def test_an_error_of_a_store_says_what_named_it(
    source: str, tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if source == "TIPHYS_STORE":
        monkeypatch.setenv("TIPHYS_STORE", "/gone")
    elif source == "config.toml":
        tiphys("config", "set", "store", "/gone")
    answer = tiphys("--quiet", "runs", *(["--store", "/gone"] if source == "--store" else []))
    assert answer.code == 3
    assert answer.error.endswith(source)
    assert "; the store is from " in answer.error


def test_a_run_with_a_profile_names_its_store_in_later_commands(
    tiphys: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, store = pipeline_file(tmp_path / "code", command="false"), str(tmp_path / "runs")
    tiphys("config", "set", "store", store, "--profile", "east")
    assert f"--store file://{store}" in tiphys("run", file, "--run", "a", "--profile", "east").err
    monkeypatch.setenv("TIPHYS_PROFILE", "east")
    lasting = tiphys("run", file, "--run", "b").err
    assert "tiphys resume b" in lasting
    assert "--store" not in lasting


def test_config_shows_each_value_and_its_source(
    tiphys: Command, finished: Finished, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "none" / "tiphys" / "config.toml"
    for words in (["store", str(finished.store)], ["namespace", "ml"], ["context", "east", "--profile", "east"]):
        assert tiphys("config", "set", *words).code == 0
    assert tiphys("config", "use", "east").code == 0
    rows = {row["key"]: row for row in json.loads(tiphys("config", "-o", "json").out)["settings"]}
    assert rows["profile"] == {"key": "profile", "value": "east", "source": str(path)}
    assert rows["context"] == {"key": "context", "value": "east", "source": f"profile east of {path}"}
    assert rows["namespace"] == {"key": "namespace", "value": "ml", "source": str(path)}
    assert finished.run in tiphys("runs").out
    monkeypatch.setenv("TIPHYS_STORE", "s3://ml-runs/tiphys")
    [line] = [line for line in tiphys("config").out.splitlines() if line.startswith("store")]
    assert line.split() == ["store", "s3://ml-runs/tiphys", "TIPHYS_STORE"]


def test_a_value_can_be_removed(tiphys: Command) -> None:
    tiphys("config", "set", "namespace", "ml", "--profile", "east")
    assert tiphys("config", "unset", "namespace").error.endswith("there is no namespace in the defaults to remove")
    assert tiphys("config", "unset", "namespace", "--profile", "east").code == 0
    tiphys("config", "use", "east")
    assert tiphys("config", "use", "").code == 0
    assert json.loads(tiphys("config", "-o", "json").out)["settings"][0]["value"] == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["config", "set", "stoer", "s3://a"], "has no key 'stoer'; did you mean 'store'? It has: store, context"),
        (["config", "set", "store", "runs"], "store 'runs' must be a URL or an absolute path"),
        (["config", "set", "context", "a\nb"], "context must be a text of printable characters, not 'a\\nb'"),
        (["config", "set", "context", "a", "--profile", "a\nb"], "profile must be a text of printable characters"),
        (["config", "use", "eats"], "has no profile 'eats'; did you mean 'east'? It has: east"),
        (["runs", "--profile", "eats"], "has no profile 'eats'; did you mean 'east'? It has: east"),
        (["runs", "--profile"], "--profile needs the name of a profile"),
    ],
)
def test_a_wrong_name_or_value_changes_nothing(words: list[str], message: str, tiphys: Command, tmp_path: Path) -> None:
    tiphys("config", "set", "context", "east", "--profile", "east")
    [file] = (tmp_path / "none").rglob("config.toml")
    before = file.read_text()
    answer = tiphys(*words)
    assert answer.code == 2
    assert message in answer.error
    assert file.read_text() == before


def test_a_profile_of_the_environment_that_does_not_exist_is_named(
    tiphys: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TIPHYS_PROFILE", "west")
    assert tiphys("runs").error.endswith("; the profile is from TIPHYS_PROFILE")
