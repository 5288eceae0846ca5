"""Wait for something to become true: as long as a slow machine needs, and no longer than it takes."""

import time
from collections.abc import Callable


def until(holds: Callable[[], object], seconds: float = 60.0) -> None:
    """Return once ``holds`` is true; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"it did not become true within {seconds} s"
        time.sleep(0.005)
