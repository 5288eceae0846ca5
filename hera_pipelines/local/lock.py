"""Which engines are alive: each holds a lock on the workflow that it runs.

The kernel drops the lock with the process, however that dies, so a workflow
that says Running without a held lock has lost its engine.
"""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiphys.errors import ConflictError


@contextmanager
def hold(state: Path, workflow: str) -> Iterator[None]:
    """Hold the lock of ``workflow``.

    Raises:
        ConflictError: another engine runs it.
    """
    path = _path(state, workflow)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(
                f"another engine runs workflow {workflow} in {state}; wait for it, or stop it"
            ) from error
        yield


def is_held(state: Path, workflow: str) -> bool:
    """Whether a live engine runs ``workflow``."""
    path = _path(state, workflow)
    if not path.exists():
        return False
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _path(state: Path, workflow: str) -> Path:
    return state / "locks" / f"{workflow}.lock"
