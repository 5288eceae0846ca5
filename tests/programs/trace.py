"""What a program printed while an attempt ran, line by line."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass
class TraceReader:
    """Reads the lines that were added to a file since the last look."""

    path: Path
    lines: list[Line] = field(default_factory=list)
    _offset: int = 0

    def new_lines(self) -> list[Line]:
        """Complete lines since the last call."""
        try:
            size = os.stat(self.path).st_size  # noqa: PTH116  looks often
        except FileNotFoundError:
            return []
        if size == self._offset:
            return []
        with self.path.open("rb") as stream:
            stream.seek(self._offset)
            data = stream.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = [json.loads(line) for line in whole.splitlines()]
        self.lines += found
        return found


def starts_of(lines: list[Line]) -> list[list[Line]]:
    """The lines of each start of the program in one attempt: a rank that resumes once more was started again."""
    starts: list[list[Line]] = [[]]
    resumed: set[int] = set()
    for line in lines:
        if line["event"] == "resumed":
            if line["rank"] in resumed:
                starts.append([])
                resumed.clear()
            resumed.add(line["rank"])
        starts[-1].append(line)
    return starts


def last_step(lines: list[Line], event: str) -> int | None:
    """Highest step that the first rank printed with ``event``."""
    return max((line["step"] for line in lines if line["event"] == event and line["rank"] == 0), default=None)


def consumed(lines: list[Line]) -> Iterator[tuple[int, int, list[int]]]:
    """Step, rank and sample ids of each optimizer step; samples of a step that did not end are left out.

    A program prints the ids with its step, or the ids of each batch before it.
    """
    pending: dict[int, list[int]] = defaultdict(list)
    for line in lines:
        rank = line["rank"]
        if line["event"] == "batch":
            pending[rank] += line["ids"]
        elif line["event"] == "step":
            yield line["step"], rank, line.get("ids", []) + pending.pop(rank, [])
