"""``step/total`` for the progress bar of Argo, through the file that it reads."""

import contextlib
from collections.abc import Callable
from pathlib import Path

_INTERVAL_SECONDS = 1.0


class Progress:
    """Writes the file at most once a second; does nothing without a path or a total."""

    def __init__(self, path: str, total_steps: int | None, clock: Callable[[], float]) -> None:
        self._path = Path(path) if path and total_steps else None
        self._total = total_steps or 0
        self._clock = clock
        self._written_at: float | None = None

    def report(self, global_step: int) -> None:
        """Note that ``global_step`` steps are complete."""
        if self._path is None:
            return
        now = self._clock()
        recent = self._written_at is not None and now - self._written_at < _INTERVAL_SECONDS
        if recent and global_step < self._total:
            return
        self._written_at = now
        with contextlib.suppress(OSError):  # a progress bar is not worth a training
            self._path.write_text(f"{min(global_step, self._total)}/{self._total}\n")
