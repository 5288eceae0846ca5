"""Work for many tenants in one loop: an error about one tenant never ends the work for the others."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType

import structlog

from tiphys.errors import ConflictError, FencedError, TiphysError

_log = structlog.get_logger()


@dataclass(frozen=True)
class TenantGuard:
    """Logs and counts the errors of the visits of a loop.

    Attributes:
        name: First part of the event ids in the log: ``.failed`` for an error of Tiphys, ``.crashed`` for a bug, and
            ``.left`` for work that another process has.
        count_failure: Called once for each visit that failed or crashed.
        left: The error for work that another process has. By default: another process leads.
    """

    name: str
    count_failure: Callable[[], object]
    left: type[ConflictError] = FencedError

    def visit(self, **subject: str) -> "GuardedVisit":
        """A visit, as a ``with`` statement; ``subject`` says in the log what it is about."""
        return GuardedVisit(self, subject)


class GuardedVisit:
    """One visit. An error ends it, and is its ``failure``."""

    def __init__(self, guard: TenantGuard, subject: Mapping[str, str]) -> None:
        self.failure: Exception | None = None
        self._guard, self._subject = guard, subject

    def __enter__(self) -> "GuardedVisit":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if not isinstance(error, Exception):
            return False
        self.failure = error
        if isinstance(error, self._guard.left):
            _log.info(f"{self._guard.name}.left", error=str(error), **self._subject)
            return True
        if isinstance(error, TiphysError):
            _log.warning(f"{self._guard.name}.failed", error=str(error), **self._subject)
        else:
            _log.error(f"{self._guard.name}.crashed", exc_info=error, **self._subject)
        self._guard.count_failure()
        return True
