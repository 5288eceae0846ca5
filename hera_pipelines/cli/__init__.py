"""The ``tiphys`` command.

Its modules take up to a second to import. An interrupt in that time ends the
process at once, because an exception in the middle of an import may surface
anywhere, with a traceback.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INTERRUPTED_EXIT_CODE = 130
_STDERR = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments`` (default: ``sys.argv``) and return its exit code."""
    with exit_on_interrupt():
        from hera_pipelines.cli import app
    return app.main(arguments)


@contextmanager
def exit_on_interrupt() -> Iterator[None]:
    """Let Ctrl-C end the process while the body runs; has no effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGINT, _exit_interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def _exit_interrupted(*_: object) -> None:
    os.write(_STDERR, b"tiphys: interrupted\n")
    os._exit(INTERRUPTED_EXIT_CODE)
