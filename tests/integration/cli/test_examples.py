"""The example of a fork runs on this machine as its first lines say."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.tree import read_lineage_tree
from tiphys.store import DirectoryStore

from .conftest import invoke

ROOT = Path(__file__).parents[3]
FORK = ROOT / "examples" / "18-fork-with-new-data.py"


def model_of(folder: Path, run: str) -> dict[str, float]:
    (file,) = (folder / "store" / "data" / "runs" / run / "outputs" / "fit").glob("*/artifacts/model*")
    found: dict[str, float] = json.loads(file.read_text())
    return found


@pytest.mark.heavy
def test_a_fork_reads_new_data_and_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    commands = re.findall(r"^    tiphys (.+)$", FORK.read_text(), re.MULTILINE)
    assert [command.split()[0] for command in commands] == ["run", "fork"]
    for command in commands:
        words = shlex.split(command.replace("examples/", f"{FORK.parent}/"))
        ended = invoke([*words, "--store", "store"], tmp_path)
        assert ended.code == 0, ended.out + ended.err
    before, after = model_of(tmp_path, "base"), model_of(tmp_path, "november")
    assert (before["began_at_step"], after["began_at_step"]) == (0, 200)
    assert after["weight"] == before["weight"] * 2
    (fit,) = read_lineage_tree(RunHistory(DirectoryStore(tmp_path / "store"), "november")).steps
    start = fit.attempts[0].starts_from
    assert start is not None
    assert (start.lineage != fit.lineage, start.global_step) == (True, 200)
