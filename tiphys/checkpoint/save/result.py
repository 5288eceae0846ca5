"""The handle of a save, which the training program gets while the save still runs in the background."""

import threading
from collections.abc import Callable

from tiphys.records import CheckpointRef


class Save:
    """A save that was started. Call `wait` to block until it ended, or continue training.

    ``before_wait`` is called first where a thread waits.
    """

    def __init__(self, global_step: int, before_wait: Callable[[], object] = lambda: None) -> None:
        self.global_step = global_step
        self._before_wait = before_wait
        self._over = threading.Event()
        self._checkpoint: CheckpointRef | None = None

    @property
    def done(self) -> bool:
        """Whether the save ended: committed, failed or cancelled."""
        return self._over.is_set()

    def wait(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        """Wait for the end; return the checkpoint, or None if it was not committed within ``timeout_seconds``."""
        self._before_wait()
        self._over.wait(timeout_seconds)
        return self._checkpoint

    def end(self, checkpoint: CheckpointRef | None) -> None:
        """Record the outcome; called by the session. ``checkpoint`` is None if nothing was committed."""
        self._checkpoint = checkpoint
        self._over.set()
