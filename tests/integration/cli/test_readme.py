"""The first pipeline of the README: its own text, with its commands, on the default store."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hera_pipelines.cli import main

TEXT = (Path(__file__).parents[3] / "README.md").read_text()
LIST = TEXT.partition("\n## What you type\n")[2].partition("\n## ")[0]
READING_VERBS = ("plan", "lineage", "verify", "checkpoint", "gc", "report", "sweep", "janitor")
SECTION = TEXT.partition("\n## Your first pipeline\n")[2].partition("\n## ")[0]
RUN_IN_TEXT = "digits-7xk2p"


def blocks(language: str) -> list[str]:
    """Code blocks of the section, in order; commands have no language."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", SECTION, re.DOTALL | re.MULTILINE)
    return [text for name, text in found if name == language]


def tiphys(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the README in ``folder``, without settings of this environment."""
    program, *arguments = shlex.split(command)
    assert program == "tiphys"
    return subprocess.run(
        [sys.executable, "-m", "hera_pipelines.cli", *arguments],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if not name.startswith(("TIPHYS_", "AWS_"))},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_the_first_pipeline_fails_where_it_says_and_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [code] = blocks("python")
    [change] = blocks("diff")
    removed, added = re.findall(r"^[-+](.*)$", change, re.MULTILINE)
    first, resume = blocks("")
    (tmp_path / "digits.py").write_text(code)

    failed = tiphys(tmp_path, first)
    run = failed.stdout.strip()

    assert failed.returncode == 1, failed.stderr
    last = failed.stderr.splitlines()[-1]
    assert f"run {run} failed: register failed in attempt 1 by user error: " in last
    assert "logs are in .tiphys/state/logs" in last

    assert code.count(removed) == 1
    (tmp_path / "digits.py").write_text(code.replace(removed, added))
    resumed = tiphys(tmp_path, resume.replace(RUN_IN_TEXT, run))

    assert resumed.returncode == 0, resumed.stderr
    assert "1 of 5 steps would run" in resumed.stderr + resumed.stdout
    listed = re.findall(rf"^(tiphys (?:{'|'.join(READING_VERBS)})(?: \S+)*)  ", LIST, re.MULTILINE)
    assert len(listed) == len(READING_VERBS)
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TIPHYS_")]:
        monkeypatch.delenv(name)
    for command in listed:
        assert main(shlex.split(command.replace(RUN_IN_TEXT, run))[1:]) == 0, command

    logs = (tmp_path / ".tiphys" / "state" / "logs").glob("*register*")
    assert any("registered" in log.read_text() for log in logs)
