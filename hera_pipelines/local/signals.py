"""Ctrl-C and SIGTERM become `argo stop`, so that programs can save and the exit handler runs."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

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
