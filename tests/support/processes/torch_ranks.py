"""Runs programs of `support.programs.torch_programs` as the ranks of one training, over one store."""

import json
import subprocess
from pathlib import Path
from typing import Any

from support.builders.lineage import LINEAGE, RUN, STEP
from tiphys.store import DirectoryStore


class World:
    """Runs programs as ranks, over one store."""

    def __init__(self, launcher: subprocess.Popen[str], folder: Path) -> None:
        self._launcher = launcher
        self._folder = folder
        self._runs = 0
        self.store = DirectoryStore(folder / "store")

    def __call__(
        self,
        ranks: int,
        program: str,
        *,
        attempt: int = 1,
        resume_from: str = "",
        of_rank: dict[int, dict[str, str]] | None = None,
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        self._runs += 1
        order = {
            "world": ranks,
            "program": program,
            "arguments": arguments,
            "folder": str(self._folder / f"run-{self._runs}"),
            "of_rank": of_rank or {},
            "environ": {
                "TIPHYS_STORE": self.store.url,
                "TIPHYS_RUN": RUN,
                "TIPHYS_STEP": STEP,
                "TIPHYS_ATTEMPT": str(attempt),
                "TIPHYS_LINEAGE": LINEAGE,
                "TIPHYS_RESUME_FROM": resume_from,
                "TIPHYS_SAVE_EVERY": "1 steps",
                "TIPHYS_FAILPOINTS_LOG": str(self._folder / "failpoints"),
            },
        }
        assert self._launcher.stdin
        assert self._launcher.stdout
        self._launcher.stdin.write(json.dumps(order) + "\n")
        self._launcher.stdin.flush()
        return json.loads(self._launcher.stdout.readline())

    @property
    def faults(self) -> str:
        return (self._folder / "failpoints").read_text()


def ok(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the ranks returned; fails with what they said if one of them did not end well."""
    assert all(rank["exit"] == 0 for rank in ranks), "\n".join(f"{rank['exit']}: {rank['said']}" for rank in ranks)
    return [rank["result"] for rank in ranks]


def exits(ranks: list[dict[str, Any]]) -> list[int]:
    return [rank["exit"] for rank in ranks]
