"""Writes a store with a bit of everything, to be committed once per format and read by every later version.

    PYTHONPATH=tests python -m support.builders.stored_runs FOLDER

The store of a format is never written again: its records must stay what the version of that time wrote.
"""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from support.stories import small_pipeline

RUN, FORK = "stored", "stored-fork"
WORK = Path("/tmp/tiphys-stored")


def main(folder: Path) -> None:
    """A run whose last step fails twice, a pin, and a fork that starts from it."""
    shutil.rmtree(WORK, ignore_errors=True)
    small_pipeline.write(WORK)
    store = ("--store", "store")
    _tiphys("run", "tiny.py", "--run", RUN, "--parameter", "steps=10", "--parameter", "fail=yes", *store, code=1)
    _tiphys("resume", RUN, *store, code=1)
    _tiphys("checkpoint", "pin", f"{RUN}/fit", "1-5", "--name", "keep", *store)
    _tiphys("fork", RUN, "--from", "fit", "--run", FORK, "--parameter", "steps=15", *store, code=1)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(WORK / "store", folder, ignore=shutil.ignore_patterns(".tmp"))
    for record in folder.glob("control/runs/*/submissions/*.json"):  # these have no seal
        record.write_text(record.read_text().replace(socket.gethostname(), "desk"))


def _tiphys(*arguments: str, code: int = 0) -> None:
    outside = {name: value for name, value in os.environ.items() if not name.startswith("TIPHYS_")}
    done = subprocess.run([sys.executable, "-m", "hera_pipelines.cli", *arguments], cwd=WORK, env=outside, check=False)
    if done.returncode != code:
        sys.exit(f"tiphys {' '.join(arguments)} ended with {done.returncode}, not {code}")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
