"""The process that a session belongs to: it opens and closes the session once, also without a ``with`` block."""

import atexit
import contextlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager

from tiphys.checkpoint.lifecycle.fork import FORKED, keep_in_children, undo_in_children
from tiphys.checkpoint.lifecycle.preemption import StopSignal
from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import FencedError, StoreError, UsageError
from tiphys.launch.session_registry import CLOSED, register_session
from tiphys.protocol.environment import EX_FENCED, EX_UNAVAILABLE


class SessionProcess:
    """The process of one session.

    Args:
        opens_itself: Whether the first call opens the session, and the end of the program closes it, if the program
            uses no ``with`` block. None: such a program is refused. False: that is left to the caller.
    """

    def __init__(
        self, session: AbstractContextManager[object], stop_signal: StopSignal, *, opens_itself: bool | None
    ) -> None:
        self._session = session
        self._stop_signal = stop_signal
        self._opens_itself = opens_itself
        self._process: int | None = None
        self._has_ended = False
        self._ends_with_program = False

    def open(self) -> bool:
        """Return whether the session is to be opened, which its first call may have done before."""
        self._refuse_other_process()
        is_first, self._process = self._process is None, os.getpid()
        undo_in_children(self, lambda _: None)  # marks the child, also if the session handles no signal
        return is_first

    def check_call(self) -> None:
        """Open the session unless the program did, and handle SIGTERM again if other code took it over.

        Raises:
            UsageError: the session has ended, belongs to another process, or needs a ``with`` block.
        """
        self._refuse_other_process()
        if self._has_ended:
            raise UsageError("the session has ended; call it inside its with block only, or open another one")
        if self._process is None and self._opens_itself is None:
            raise UsageError("open this session in a with block: its end waits for the last save of all ranks")
        if self._process is None and self._opens_itself:
            self._session.__enter__()
            self._ends_with_program = True
            atexit.register(self._end_with_program)
        self._stop_signal.reinstall()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """`check_call`, and without a ``with`` block end the program as its end would: with `exit_on`."""
        self.check_call()
        try:
            yield
        except (FencedError, StoreError) as error:
            if self._ends_with_program:
                exit_on(error)
            raise

    def close(self) -> bool:
        """Return whether the session is to be closed here: once, in its own process."""
        if self._is_other or self._has_ended:
            return False
        self._has_ended = True
        register_session(os.environ, CLOSED)
        keep_in_children(self)
        return True

    @property
    def _is_other(self) -> bool:
        return self._process not in (None, os.getpid())

    def _refuse_other_process(self) -> None:
        if self._is_other:
            raise UsageError(FORKED.format(self._process))

    def _end_with_program(self) -> None:
        error: BaseException | None = getattr(sys, "last_value", None)  # set by the interpreter before the traceback
        with contextlib.suppress(SystemExit):  # too late for another exit code
            self._session.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)


def exit_on(error: BaseException | None) -> None:
    """End the program with the exit code of an error that is not its own: 76 if it was replaced, 69 for storage.

    Raises:
        SystemExit: ``error`` is a `FencedError` or a `StoreError`; otherwise this returns.
    """
    for error_type, code in ((FencedError, EX_FENCED), (StoreError, EX_UNAVAILABLE)):
        if isinstance(error, error_type):
            log_message(str(error))
            raise SystemExit(code) from error
