"""What a shell offers for the names of runs and steps.

| typed | offered |
|---|---|
| the beginning of a run | the runs of the store that begin so |
| a run and a slash | its steps, and the items of its fan-outs |
| an unknown run, a missing store, a bucket | nothing, and no error |
"""

import os
from pathlib import Path

import pytest
from support.builders.lineage import write_run
from support.processes.forking import COMMAND, ForkingProcess

from tiphys.store import DirectoryStore

FIT = ["digits-1/fit", "digits-1/fit[0]", "digits-1/fit[1]"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a store of two runs, one of which has a fan-out, and a name that is no text."""
    store = DirectoryStore(tmp_path / ".tiphys" / "store")
    write_run(store, run="digits-1", items=("0.1", "0.3"))
    write_run(store, run="other-1", step="prep")
    store.create("control/runs/other\x1b[31m/run.json", b"{}")
    return tmp_path


def offered(process: ForkingProcess, folder: Path, line: str, **variables: str) -> list[str]:
    """What bash offers for the last word of ``line``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}
    asked = {"_TIPHYS_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    none = {"AWS_EC2_METADATA_DISABLED": "true"}
    done = process.run(COMMAND, cwd=folder, environ={**kept, **none, **asked, **variables})
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("tiphys get ", ["digits-1", "other-1"]),
        ("tiphys resume di", ["digits-1"]),
        ("tiphys runs rm digits-1 o", ["other-1"]),
        ("tiphys lineage x", []),
        ("tiphys get digits-1/", FIT),
        ("tiphys verify digits-1/fit[", FIT[1:]),
        ("tiphys why other-1/p", ["other-1/prep"]),
        ("tiphys get unknown-1/", []),
        ("tiphys get --store missing ", []),
        ("tiphys get --store s3://ml-runs/tiphys ", []),
    ],
)
def test_names_of_runs_and_steps_are_offered(
    engine_loaded: ForkingProcess, folder: Path, line: str, names: list[str]
) -> None:
    assert offered(engine_loaded, folder, line) == names


def test_the_store_of_an_option_comes_before_that_of_the_folder(engine_loaded: ForkingProcess, folder: Path) -> None:
    write_run(DirectoryStore(folder / "else"), run="night-1")
    assert offered(engine_loaded, folder, "tiphys get --store else ") == ["night-1"]
    assert offered(engine_loaded, folder, "tiphys get ", TIPHYS_STORE="else") == ["night-1"]
