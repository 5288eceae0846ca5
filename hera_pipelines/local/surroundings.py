"""What a process sees of this machine: little, so that a pipeline that runs here runs in its image too."""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hera_pipelines.compile.gang.pod import MEMBER
from tiphys.protocol import environment as variables

_INTERPRETERS = ("python", "python3")
_INHERITED = ("PATH", "HOME", "LANG", "TZ", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
_INHERITED_PREFIXES = ("AWS_", "TIPHYS_FAILPOINTS", "CUDA_", "NVIDIA_", "OMP_", "COVERAGE_")


def _started(arguments: Sequence[str]) -> list[str]:
    first, *rest = arguments
    return [sys.executable if first in _INTERPRETERS else first, *rest]


@dataclass(frozen=True)
class Surroundings:
    """The same for every process of an engine."""

    code: Path
    """Folder of the pipeline file: its modules can be imported."""
    store_url: str
    longest_grace_seconds: float | None = None
    """Grace periods are cut to this, if set."""

    def command(self, arguments: Sequence[str]) -> list[str]:
        """``python`` is the interpreter that Tiphys runs in; so it is below the one that fetches and stores files."""
        if tuple(arguments[: len(MEMBER)]) == MEMBER:
            return [*_started(MEMBER), *_started(arguments[len(MEMBER) :])]
        return _started(arguments)

    def environment(self, declared: Mapping[str, str]) -> dict[str, str]:
        """The variables of the template, on top of the few that are inherited.

        A pipeline may name a store that only the cluster reaches; its programs
        get the one that this engine works with. Checkpoints on a volume of
        their own stay there.
        """
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name in _INHERITED or name.startswith(_INHERITED_PREFIXES)
        }
        found = os.pathsep.join(filter(None, (str(self.code), os.environ.get("PYTHONPATH"))))
        named = declared.get(variables.STORE)
        store = {
            name: self.store_url
            for name in (variables.STORE, variables.CHECKPOINT_STORE)
            if declared.get(name) == named
        }
        return {**inherited, "PYTHONPATH": found, "PYTHONUNBUFFERED": "1", **declared, **(store if named else {})}

    def furnish(self, folder: Path) -> None:
        """Make ``folder`` look like the working directory of an image that holds the code.

        ``python train.py`` finds the file, and what the program writes stays in
        its own folder: parallel attempts do not meet.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for entry in self.code.iterdir():
            link = folder / entry.name
            if not entry.name.startswith(".") and not link.exists():
                link.symlink_to(entry)

    def grace_seconds(self, asked: float) -> float:
        """The grace period that a process gets."""
        return asked if self.longest_grace_seconds is None else min(asked, self.longest_grace_seconds)
