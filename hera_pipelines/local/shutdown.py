"""Stopping a workflow.

As on a cluster, Stop (the first Ctrl-C or SIGTERM, or a terminal that is closed) and the workflow's deadline
end all nodes but the exit handler, so that programs can save; Terminate (the
second Ctrl-C) ends the exit handler too. Unlike on a cluster, Terminate does not
wait for grace periods, because a person who presses Ctrl-C twice wants an
immediate end, and Stop does not wait for storage that cannot be written: when the
longest grace period of the running programs is over, the end stays unrecorded.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tiphys_plugin.sidecar.outages import find_wait_reason

STOP, TERMINATE = "Stop", "Terminate"
ANSWER_SECONDS = 5.0
"""Time that a plugin step of the exit handler of a stopped workflow has for its first answer, at the least."""


class WorkflowShutdown:
    """Stop requests and the deadline of one running workflow. Use only in its event loop.

    Args:
        announce: Called when a strategy is set, before a node ends because of it.
        grace_seconds: Returns the longest grace period of the running programs.
    """

    def __init__(self, announce: Callable[[], None], grace_seconds: Callable[[], float]) -> None:
        self._announce = announce
        self._grace_seconds = grace_seconds
        self.strategy = ""
        self.unrecorded = ""
        """Why the exit handler of the stopped workflow was given up, as a sentence; empty if it was not."""
        self._overdue = False
        self._grace_ends_at = 0.0
        self._stopped = asyncio.Event()
        self._main_stopped = asyncio.Event()
        self._exit_handler_stopped = asyncio.Event()

    def request(self) -> None:
        """Stop the workflow; a second call terminates it."""
        if not self.strategy:
            self._grace_ends_at = asyncio.get_running_loop().time() + self._grace_seconds()
        self.strategy = TERMINATE if self.strategy else STOP
        self._announce()
        self._stopped.set()
        self._main_stopped.set()
        if self.strategy == TERMINATE:
            self._exit_handler_stopped.set()

    def request_stop(self) -> None:
        """Stop the workflow; a later call does nothing."""
        if not self.strategy:
            self.request()

    def exceed_deadline(self) -> None:
        """Stop the workflow because its activeDeadlineSeconds are over; the exit handler still runs."""
        self._overdue = True
        self._main_stopped.set()

    def stop_reason(self, on_exit: bool) -> str:
        """Why a node may not run; empty if it may. ``on_exit`` is true for nodes of the exit handler."""
        if self.strategy and (not on_exit or self.strategy == TERMINATE):
            return f"Stopped with strategy '{self.strategy}'"
        if self._overdue and not on_exit:
            return "Step exceeded its deadline"
        return ""

    async def wait_until_stopped(self, on_exit: bool) -> None:
        """Wait until `stop_reason` is not empty."""
        await (self._exit_handler_stopped if on_exit else self._main_stopped).wait()

    async def wait_until_grace_is_over(self) -> None:
        """Wait until the workflow was stopped and the grace period of its programs is over."""
        await self._stopped.wait()
        await asyncio.sleep(self._grace_ends_at - asyncio.get_running_loop().time())

    def give_up_recording(self, answers: Sequence[str]) -> str:
        """Note and return why the exit handler is given up; ``answers`` are the Pending ones to its step."""
        if answers:
            tries = "once" if len(answers) == 1 else f"{len(answers)} times"
            self.unrecorded = f"{find_wait_reason(answers[-1])} (tried {tries})"
        else:
            self.unrecorded = f"storage did not answer within {ANSWER_SECONDS:g} s"
        return self.unrecorded

    async def sleep(self, seconds: float, on_exit: bool) -> None:
        """Sleep for ``seconds``, or until the node may not run any more."""
        try:
            await asyncio.wait_for(self.wait_until_stopped(on_exit), seconds)
        except TimeoutError:
            return


_OUTPUT_STREAMS = (1, 2)


@contextmanager
def handle_stop_signals(loop: asyncio.AbstractEventLoop, shutdown: WorkflowShutdown) -> Iterator[None]:
    """Request ``shutdown`` by every SIGINT and SIGTERM, and by the first SIGHUP, while the body runs.

    Has no effect outside the main thread, and leaves a SIGHUP that is ignored, as below ``nohup``.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminals = [stream for stream in _OUTPUT_STREAMS if os.isatty(stream)]

    def hang_up() -> None:
        for stream in terminals:
            if not os.isatty(stream):  # it is closed: a message would end the run with an error
                with open(os.devnull, "wb") as nowhere:  # noqa: PTH123  for its descriptor
                    os.dup2(nowhere.fileno(), stream)
        shutdown.request_stop()

    requests = {signal.SIGINT: shutdown.request, signal.SIGTERM: shutdown.request, signal.SIGHUP: hang_up}
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        del requests[signal.SIGHUP]
    previous_handlers = {number: signal.getsignal(number) for number in requests}
    for number, request in requests.items():
        loop.add_signal_handler(number, request)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
