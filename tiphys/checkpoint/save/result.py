"""What a save gives the training program at once, while its bytes are still on their way."""

import threading

from tiphys.records import CheckpointRef


class Save:
    """A save that was begun. `wait` for it, or go on training."""

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step
        self._over = threading.Event()
        self._checkpoint: CheckpointRef | None = None

    @property
    def done(self) -> bool:
        """Whether it is over: committed, failed, or given up."""
        return self._over.is_set()

    def wait(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        """The checkpoint once it is committed; None if it was not, or not yet after ``timeout_seconds``."""
        self._over.wait(timeout_seconds)
        return self._checkpoint

    def end(self, checkpoint: CheckpointRef | None) -> None:
        """Say how it ended; the session does."""
        self._checkpoint = checkpoint
        self._over.set()
