"""The handle of a save, which the training program gets while the save still runs in the background."""

import threading

from tiphys.records import CheckpointRef


class Save:
    """A save that was started. Call `wait` to block until it ended, or continue training."""

    def __init__(self, global_step: int) -> None:
        self.global_step = global_step
        self._over = threading.Event()
        self._checkpoint: CheckpointRef | None = None

    @property
    def done(self) -> bool:
        """Whether the save ended: committed, failed or cancelled."""
        return self._over.is_set()

    def wait(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        """Wait for the end; return the checkpoint, or None if it was not committed within ``timeout_seconds``."""
        self._over.wait(timeout_seconds)
        return self._checkpoint

    def end(self, checkpoint: CheckpointRef | None) -> None:
        """Record the outcome; called by the session. ``checkpoint`` is None if nothing was committed."""
        self._checkpoint = checkpoint
        self._over.set()
