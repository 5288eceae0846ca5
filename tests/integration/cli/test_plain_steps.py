"""A plain step beside gated ones: what a resume repeats.

| task | in the next submission |
|---|---|
| plain, and something behind it is missing | runs again |
| gated, behind it, which takes a parameter of it | kept, with the same value |
| gated, behind it, which takes an artifact of it | runs again: the artifact has a new location |
| without a gate, behind it | runs again: its inputs are known only when it runs |
| plain, and everything behind it is finished | left out |
"""

from pathlib import Path

import pytest

from .conftest import Command, invoke

PIPELINE = """
from pathlib import Path
from typing import Annotated

from hera.workflows import Artifact, Parameter
from hera_pipelines import Pipeline, plain, step

HERE = str(Path(__file__).parent)
Name = Annotated[str, Parameter(name="name")]
Rows = Annotated[str, Artifact(name="rows")]


@plain()
def look(here: str) -> tuple[Name, Rows]:
    with open(here + "/ran.txt", "a") as ran:
        print("look", file=ran)
    return "digits", "rows"


@plain()
def visit(here: str, number: str) -> None:
    with open(here + "/ran.txt", "a") as ran:
        print("visit", number, file=ran)


@step(gate=True)
def by_value(here: str, name: str) -> Annotated[str, Parameter(name="done")]:
    with open(here + "/ran.txt", "a") as ran:
        print("by-value", file=ran)
    return name


@step(gate=True)
def by_file(here: str, rows: Annotated[Path, Artifact(name="rows")]) -> Annotated[str, Parameter(name="done")]:
    with open(here + "/ran.txt", "a") as ran:
        print("by-file", file=ran)
    return rows.read_text()


@step()
def without_gate(here: str, name: str) -> Annotated[str, Parameter(name="done")]:
    with open(here + "/ran.txt", "a") as ran:
        print("without-gate", file=ran)
    return name


@step()
def report(here: str, name: str, value: str, text: str, other: str) -> None:
    import os

    with open(here + "/ran.txt", "a") as ran:
        print("report", name, value, text, other, file=ran)
    if not os.path.exists(here + "/ready"):
        raise SystemExit("not ready")


with Pipeline("beside") as pipeline:
    seen = look(HERE)
    visits = visit(HERE, with_items=[{"number": "1"}, {"number": "2"}])
    other = without_gate(HERE, seen)
    visits >> report(HERE, seen.get_parameter("name"), by_value(HERE, seen), by_file(HERE, seen), other)
"""


def ran(folder: Path) -> list[str]:
    """What ran since the last call, sorted."""
    file = folder / "ran.txt"
    lines = sorted(file.read_text().splitlines())
    file.unlink()
    return lines


@pytest.fixture
def code(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "beside.py").write_text(PIPELINE)
    return folder


def plan(tiphys: Command) -> dict[str, tuple[str, str]]:
    """Kind and decision of each task."""
    rows = [line.split() for line in tiphys("plan", "one").out.splitlines()[1:7]]
    return {name: (kind, decision) for name, kind, decision, *_ in rows}


def test_a_resume_repeats_plain_steps_and_keeps_gated_ones_that_they_feed_by_value(tiphys: Command, code: Path) -> None:
    assert tiphys("run", code / "beside.py", "--run", "one").code == 1
    repeated = ["by-file", "look", "report digits digits rows digits", "visit 1", "visit 2", "without-gate"]
    assert ran(code) == sorted([*repeated, "by-value"])
    assert [name for name, found in plan(tiphys).items() if found == ("plain", "run")] == ["look", "visit"]

    (code / "ready").touch()
    resumed = tiphys("resume", "one")

    assert resumed.code == 0, resumed.err
    assert ran(code) == repeated
    assert "by-value: Adopted from attempt 1" in resumed.err
    assert {decision for _, decision in plan(tiphys).values()} == {"skip"}


def test_the_logging_of_an_authors_file_is_about_its_programs_alone(tiphys: Command, tmp_path: Path) -> None:
    (tmp_path / "loud.py").write_text(
        "import logging\n\nfrom hera_pipelines import Pipeline, step\n\n"
        'logging.basicConfig(level="INFO")\nlog = logging.getLogger(__name__)\n\n\n'
        '@step()\ndef say() -> None:\n    log.warning("said")\n\n\nwith Pipeline("loud") as pipeline:\n    say()\n'
    )
    ran = invoke(["run", "loud.py", "--run", "loud"], tmp_path)
    assert ran.code == 0, ran.err
    assert "INFO" not in ran.out + ran.err
    assert "said" in tiphys("logs", "loud/say").out
