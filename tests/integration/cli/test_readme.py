"""README's pipeline and the tutorial: their own text, with their commands, on the default store."""

import os
import re
import shlex
from pathlib import Path

import pytest

from hera_pipelines.cli import main

from .conftest import Answer, invoke

ROOT = Path(__file__).parents[3]
COMMANDS, README, TUTORIAL = (
    (ROOT / page).read_text() for page in ("docs/commands.md", "README.md", "docs/tutorial.md")
)
READING_VERBS = ("plan", "lineage", "verify", "checkpoint", "gc", "report", "sweep", "janitor")
RUN_IN_TEXT = "digits-7xk2p"


def blocks(page: str, language: str) -> list[str]:
    """Code blocks of a page, in order; commands have no language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def tiphys(folder: Path, command: str) -> Answer:
    """Run a command of a page in ``folder``, without settings of this environment."""
    program, *arguments = shlex.split(command)
    assert program == "tiphys"
    return invoke(arguments, folder)


def test_the_pipeline_of_readme_trains_and_registers(tmp_path: Path) -> None:
    [code] = blocks(README, "python")
    (tmp_path / "slope.py").write_text(code)

    done = tiphys(tmp_path, next(command for command in blocks(README, "") if command.startswith("tiphys run")))

    assert done.code == 0, done.err
    assert done.out.startswith("slope-")
    [log] = [
        text for path in (tmp_path / ".tiphys/state/logs").iterdir() if "registered {" in (text := path.read_text())
    ]
    assert '"step": 1000' in log


@pytest.mark.heavy
def test_the_pipeline_of_the_tutorial_fails_where_it_says_and_is_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [code] = blocks(TUTORIAL, "python")
    [change] = blocks(TUTORIAL, "diff")
    removed, added = re.findall(r"^[-+](.*)$", change, re.MULTILINE)
    first, resume = blocks(TUTORIAL, "")
    (tmp_path / "digits.py").write_text(code)

    failed = tiphys(tmp_path, first)
    run = failed.out.strip()

    assert failed.code == 1, failed.err
    last = failed.err.splitlines()[-1]
    assert f"run {run} failed: register failed in attempt 1 by user error: " in last
    assert "logs are in .tiphys/state/logs" in last

    assert code.count(removed) == 1
    (tmp_path / "digits.py").write_text(code.replace(removed, added))
    resumed = tiphys(tmp_path, resume.replace(RUN_IN_TEXT, run))

    assert resumed.code == 0, resumed.err
    assert "1 of 5 steps would run" in resumed.err + resumed.out
    listed = re.findall(rf"^(tiphys (?:{'|'.join(READING_VERBS)})(?: \S+)*)  ", COMMANDS, re.MULTILINE)
    assert len(listed) == len(READING_VERBS)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TIPHYS_")]:
        monkeypatch.delenv(name)
    for command in listed:
        assert main(shlex.split(command.replace(RUN_IN_TEXT, run))[1:]) == 0, command

    logs = (tmp_path / ".tiphys" / "state" / "logs").glob("*register*")
    assert any("registered" in log.read_text() for log in logs)
