"""A sweep with real processes: one trial is killed, the others go on, and a resume runs what is missing."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.stories import small_sweep

from tiphys.lineage.run_history import RunHistory
from tiphys.store import DirectoryStore

from .conftest import Answer, Command, Finished


def answered(tiphys: Command, *arguments: str | Path) -> Answer:
    answer = tiphys(*arguments)
    assert answer.code == 0, answer.err
    return answer


def document(tiphys: Command, *options: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answered(tiphys, "sweep", "s", "-o", "json", *options).out)
    return found


def made_by_best() -> dict[str, str | None]:
    store = DirectoryStore(Path(".tiphys/store"))
    end = RunHistory(store, "s").attempts["best"][-1].end
    assert end is not None
    found = {output.name: output.value for output in end.outputs}
    [model] = [output for output in end.outputs if output.name == "model"]
    return {**found, "model": store.read(model.key).decode()}


@pytest.mark.heavy
def test_a_sweep_survives_a_killed_trial_and_a_resume_runs_that_one_alone(tiphys: Command, tmp_path: Path) -> None:
    code = tmp_path / "code"
    answered(tiphys, "run", small_sweep.write(code), "--run", "s")

    assert [line.removesuffix(" from 0") for line in small_sweep.ran(code)] == [
        "lr=0.1 width=128",
        "lr=0.1 width=64",
        "lr=0.2 width=128",
        "lr=0.2 width=64",
    ]
    states = {tuple(trial["parameters"].values()): trial["state"] for trial in document(tiphys)["trials"]}
    assert states == {(0.1, 64): "Done", (0.1, 128): "Done", (0.2, 64): "Failed", (0.2, 128): "Done"}
    assert made_by_best()["model"] == "model of lr 0.2, width 128"
    assert "`tiphys resume s` runs the unfinished trials" in answered(tiphys, "sweep", "s").err

    small_sweep.mend(code)
    answered(tiphys, "resume", "s")

    assert small_sweep.ran(code) == ["lr=0.2 width=64 from 2"]
    assert made_by_best() == {
        "trial": '{"lr": 0.2, "width": 64}',
        "loss": "0.064",
        "model": "model of lr 0.2, width 64",
    }
    _, other, best, *_ = (trial["name"] for trial in sorted(document(tiphys)["trials"], key=lambda one: one["index"]))
    table = answered(tiphys, "sweep", "s/fit", "--metric", "loss")
    header, *rows = (line.split() for line in table.out.splitlines())
    assert header[:6] == ["BEST", "TRIAL", "lr", "width", "STATE", "LOSS"]
    assert rows[0] == ["*", best, "0.2", "64", "Done", "0.064", "output", "2", "0.00"]
    assert rows[-1][:3] == [other, "0.1", "128"]
    assert "4 trials: 4 done\ngrid of 4: lr=[0.1, 0.2], width=[64, 128]" in table.err
    assert "resume" not in table.err

    shown = answered(tiphys, "lineage", f"s/{best}").out.splitlines()
    assert shown[0] == f"s/{best}  lr=0.2 width=64"
    assert "from step 2 of attempt 1" in "\n".join(shown)
    every = answered(tiphys, "lineage", "s/fit").out.splitlines()
    assert sum(line.startswith("s/fit[") for line in every) == 4
    trials = [line.split()[:6] for line in answered(tiphys, "get", "s").out.splitlines()]
    assert [best, "lr=0.2", "width=64", "2", "2", "done"] in trials


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["sweep", "tiny-done"], 2, "has no sweep, because none of its steps fans out"),
        (["sweep", "tiny-done/fit"], 2, "has no sweep 'fit'; its fanned-out steps are: none"),
        (["sweep", "tiny-dome"], 3, "did you mean tiny-done?"),
        (["sweep", "tiny-done", "--mode", "max"], 2, "add --metric NAME"),
        (["lineage", "tiny-done/report"], 3, "report of run tiny-done has no checkpoints; steps with checkpoints: fit"),
        (["lineage", "tiny-done/fat"], 3, "has no step 'fat'; did you mean 'fit'? It has: prepare, fit, report"),
    ],
)
def test_a_sweep_that_is_not_there_is_refused_by_name(
    arguments: list[str], code: int, complaint: str, tiphys: Command, finished: Finished
) -> None:
    answer = tiphys(*arguments, "--store", finished.store)
    assert (answer.code, answer.out) == (code, "")
    assert complaint in answer.error


def test_the_command_shows_examples(tiphys: Command) -> None:
    assert "  tiphys sweep digits" in tiphys("sweep", "--help").out.partition("Examples:")[2]
