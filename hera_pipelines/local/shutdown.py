"""Who may still run: stop, terminate and the workflow's deadline in one place.

Stop (the first Ctrl-C) ends everything but the exit handler, Terminate (the
second) ends that too, and the deadline spares it, as on a cluster. Unlike
there, Terminate does not wait for grace periods: whoever presses Ctrl-C twice
wants an end now.
"""

import asyncio
from collections.abc import Callable

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
