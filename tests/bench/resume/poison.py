"""How many attempts a checkpoint that kills its readers costs before it is passed over."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.stories.bad_checkpoint import POISON, Desk

FATES = (("error", 0), ("error", 3), ("signal", 0))
"""How it dies, and after how many steps."""
QUICK_FATES = FATES[:1]


def measure(quick: bool) -> dict[str, Any]:
    rows = list(_rows(quick))
    return {"rows": rows, "line": {"poison_cycles": max(row["failed_cycles"] for row in rows)}}


def _rows(quick: bool) -> Iterator[dict[str, Any]]:
    for fate, after in QUICK_FATES if quick else FATES:
        with tempfile.TemporaryDirectory(prefix="tiphys-poison-") as folder:
            desk = Desk(Path(folder), fate, after)
            phase = desk.start(user_errors=1)
            starts = desk.starts()
            assert phase == "Succeeded", f"{fate} after {after} steps: {phase}, started from {starts}"
            yield {"dies_by": fate, "steps_after_load": after, "failed_cycles": starts.count(POISON.global_step)}
