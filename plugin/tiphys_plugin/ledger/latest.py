"""What was worked out lately, for those who ask the same again.

Thousands wait and ask every few seconds, and between two changes of the book all
of them ask about the same one. Its entries are mostly the very same objects then,
which makes two books quick to compare, however long they are.
"""

from collections.abc import Callable
from typing import Generic, TypeVar

_Known = TypeVar("_Known")


class Latest(Generic[_Known]):
    """The last ``keep`` answers. Any thread may ask and remember at any time; the worst is that one is forgotten."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._known: tuple[_Known, ...] = ()

    @property
    def newest(self) -> _Known | None:
        return next(iter(self._known), None)

    def find(self, suits: Callable[[_Known], bool]) -> _Known | None:
        return next(filter(suits, self._known), None)

    def remember(self, found: _Known) -> _Known:
        self._known = (found, *self._known[: self._keep - 1])
        return found

    def clear(self) -> None:
        self._known = ()
