"""Finds files that a program writes again by themselves, such as metrics after every step.

Files of one checkpoint are written again together, or in turn. A file that is
written twice, and nothing else in between, is none of several: that it is new
does not show that others of its checkpoint are about to follow.
"""

import re
from collections.abc import Collection

_VERSION_WORDS = re.compile(r"last|latest|best|newest|current|final", re.IGNORECASE)
_TIMES = 2


def drop_version_words(path: str) -> str:
    """Return ``path`` without words such as ``last`` and ``best``: copies of one state differ by them alone."""
    return _VERSION_WORDS.sub("", path)


def has_version_word(name: str) -> bool:
    """Return whether a file of this name is a copy of a state."""
    return _VERSION_WORDS.search(name) is not None


class IndependentFiles:
    """The files of one folder that are written again alone, as far as scans have shown."""

    def __init__(self) -> None:
        self._found: set[str] = set()
        self._times: dict[str, int] = {}

    def record(self, rewritten: Collection[str]) -> None:
        """Note the files that one scan found written again, since the scan before."""
        names = {drop_version_words(path) for path in rewritten} - self._found
        if names:
            self._times = {name: self._times.get(name, 0) + 1 for name in names} if len(names) == 1 else {}
            self._found |= {name for name, times in self._times.items() if times >= _TIMES}

    def __contains__(self, path: str) -> bool:
        return drop_version_words(path) in self._found
