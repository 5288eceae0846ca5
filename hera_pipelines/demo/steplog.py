"""Counts the work that was done, so that the demo can count what was done twice.

A killed trainer can leave no last words, and its last checkpoint does not tell
how far it got. So each executed step is one line in a file of its own attempt,
written before the next step begins; the page cache keeps it when the process is
killed. Only the demo reads it; nothing in resuming depends on it.
"""

import os
from collections import Counter
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from tiphys.protocol import environment


class Executed(NamedTuple):
    """One execution of one global step."""

    attempt: int
    pid: int
    global_step: int
    at: datetime


class StepLog:
    """The log of one attempt, below ``folder``; without a folder it keeps nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._path = folder / f"{int(os.environ.get(environment.ATTEMPT, '0')):04d}.log" if folder else None
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def append(self, global_step: int, at: datetime) -> None:
        """Note that ``global_step`` has been executed by this process."""
        if self._descriptor is not None:
            os.write(self._descriptor, f"{os.getpid()} {global_step} {at.isoformat()}\n".encode())


def read_steps(folder: Path) -> list[Executed]:
    """Every execution on record, attempt by attempt; a line cut short by a kill is left out."""
    return [entry for path in sorted(folder.glob("*.log")) for entry in _read(path)]


def executed_again(steps: Iterable[Executed]) -> int:
    """How many executions were repetitions of a global step that had been executed before."""
    return sum(count - 1 for count in Counter(step.global_step for step in steps).values())


def seconds_lost(steps: list[Executed]) -> list[float]:
    """For every interruption: seconds until training was again where it had been.

    That is from the last execution of an attempt to the first time that a later
    attempt executed the same global step: waiting, starting, loading and
    repeating all count.
    """
    attempts = sorted({step.attempt for step in steps})
    lost = []
    for attempt in attempts[:-1]:
        last = max((s for s in steps if s.attempt == attempt), key=lambda s: s.global_step)
        again = [s.at for s in steps if s.attempt > attempt and s.global_step >= last.global_step]
        if again:
            lost.append((min(again) - last.at).total_seconds())
    return lost


def _read(path: Path) -> list[Executed]:
    attempt = int(path.stem)
    entries = []
    for line in path.read_text().splitlines(keepends=True):
        if line.endswith("\n"):
            pid, step, at = line.split()
            entries.append(Executed(attempt, int(pid), int(step), datetime.fromisoformat(at)))
    return entries
