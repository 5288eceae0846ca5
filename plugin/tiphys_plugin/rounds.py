"""Work that a service repeats in the background for as long as it runs."""

import threading
from abc import ABC, abstractmethod
from types import TracebackType

import structlog

from tiphys.errors import TiphysError

_log = structlog.get_logger()


class Rounds(ABC):
    """Looks every ``every_seconds`` between ``__enter__`` and ``__exit__``.

    Args:
        what: Names the thread, and what the log says of a round that failed; the next one begins anew.
        every_seconds: Between two rounds, and before the first.
        end_seconds: How long ``__exit__`` waits for a round that is under way.
    """

    def __init__(self, what: str, every_seconds: float, end_seconds: float = 0.0) -> None:
        self._what = what
        self._every = every_seconds
        self._end_seconds = end_seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"tiphys-{what}", daemon=True)

    def __enter__(self) -> "Rounds":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join(self._end_seconds)

    @abstractmethod
    def look(self) -> None:
        """One round.

        Raises:
            TiphysError: somebody who is needed did not answer.
        """

    def _run(self) -> None:
        while not self._stop.wait(self._every):
            try:
                self.look()
            except TiphysError as error:
                _log.warning(f"{self._what}.unreachable", error=str(error))
            except Exception:  # noqa: BLE001  the worker loop: the next round begins anew
                _log.exception(f"{self._what}.crashed")
