"""Simulations of a few seeds keep every law, repeat exactly, and find planted bugs.

They run in processes of their own: a seed gives the same history only where Python's sets have the same order.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from chaos.bugs import BUGS

TESTS = Path(__file__).parent.parent
QUICK_BUG = "manifest_before_shards"
MOST_SEEDS = 200


def campaign(folder: Path, *options: str, hours: float = 1) -> subprocess.CompletedProcess[str]:
    environ = os.environ | {"PYTHONPATH": str(TESTS), "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-m", "chaos", "--hours", str(hours), "--out", str(folder), *options]
    return subprocess.run(command, env=environ, text=True, capture_output=True)


def digests(output: str) -> list[str]:
    return re.findall(r"problems, ([0-9a-f]{12}),", output)


def test_simulation_keeps_every_law_and_repeats_exactly(tmp_path):
    first = campaign(tmp_path, "--seed", "1", "--seeds", "2", hours=0.25)
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.search(r"^0 of [\d,]+ acknowledged checkpoints lost over 2 seeds with", first.stdout, re.MULTILINE)
    again = campaign(tmp_path, "--seed", "1", "--seeds", "1", hours=0.25)
    assert digests(again.stdout) == digests(first.stdout)[:1]
    assert len(set(digests(first.stdout))) == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.heavy
def test_simulation_of_a_day_of_faults_keeps_every_law(tmp_path):
    ended = campaign(tmp_path, "--seed", "1", "--seeds", "7", hours=3)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert int(re.findall(r"in (\d+) simulated hours", ended.stdout)[0]) >= 24


def test_simulation_finds_a_planted_bug(tmp_path):
    found = campaign(tmp_path, "--bug", QUICK_BUG, "--seeds", "10")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "make chaos SEEDS=1 SEED=" in found.stdout
    [folder] = tmp_path.iterdir()
    judged = subprocess.run([sys.executable, TESTS / "chaos" / "checker.py", folder], capture_output=True, text=True)
    assert judged.returncode == 1, judged.stdout
    assert json.loads((folder / "history.jsonl").read_text().splitlines()[0])["event"] == "settings"


@pytest.mark.heavy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("bug", sorted(BUGS.keys() - {QUICK_BUG}))
def test_simulation_finds_the_other_planted_bugs(tmp_path, bug):
    found = campaign(tmp_path, "--bug", bug, "--seeds", str(MOST_SEEDS))
    assert found.returncode == 1, found.stdout + found.stderr
