"""Who may still run: stop, terminate and the workflow's deadline in one place.

Stop (the first Ctrl-C) ends everything but the exit handler, Terminate (the
second) ends that too, and the deadline spares it, as on a cluster. Unlike
there, Terminate does not wait for grace periods: whoever presses Ctrl-C twice
wants an end now.

Ctrl-C and SIGTERM become `argo stop`, so that programs can save and the exit handler runs.

Which engines are alive: each holds a lock on the workflow that it runs.

The kernel drops the lock with the process, however that dies, so a workflow
that says Running without a held lock has lost its engine.
"""

import asyncio
import fcntl
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tiphys.errors import ConflictError

STOP, TERMINATE = "Stop", "Terminate"


class Shutdown:
    """The state of one running workflow. Belongs to its event loop.

    Args:
        announce: Called when a strategy is set, before any node ends by it.
    """

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce = announce
        self.strategy = ""
        self._overdue = False
        self._main = asyncio.Event()
        self._handler = asyncio.Event()

    def request(self) -> None:
        """Stop; asked a second time, terminate."""
        self.strategy = TERMINATE if self.strategy else STOP
        self._announce()
        self._main.set()
        if self.strategy == TERMINATE:
            self._handler.set()

    def pass_deadline(self) -> None:
        """The workflow's activeDeadlineSeconds are over."""
        self._overdue = True
        self._main.set()

    def reason(self, on_exit: bool) -> str:
        """Why a node may not run (any more); empty if it may."""
        if self.strategy and (not on_exit or self.strategy == TERMINATE):
            return f"Stopped with strategy '{self.strategy}'"
        if self._overdue and not on_exit:
            return "Step exceeded its deadline"
        return ""

    async def denied(self, on_exit: bool) -> None:
        """Return once `reason` has something to say."""
        await (self._handler if on_exit else self._main).wait()

    async def sleep(self, seconds: float, on_exit: bool) -> None:
        """Sleep, but no longer than the node may run."""
        try:
            await asyncio.wait_for(self.denied(on_exit), seconds)
        except TimeoutError:
            return


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interrupts(loop: asyncio.AbstractEventLoop, request: Callable[[], None]) -> Iterator[None]:
    """Call ``request`` at every signal; only the main thread gets any."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        loop.add_signal_handler(number, request)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


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
