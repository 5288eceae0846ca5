"""Arguments that are equal if they hold the very same objects, which takes no look at their content.

What follows from a book of thousands of entries is worked out once and
remembered for as long as the entries are the same; to compare them one by one
would cost more than to work it out again.
"""

from collections.abc import Hashable, Sequence
from typing import Any


class Same:
    """Equal if all ``parts`` hold the same objects in the same order, and ``values`` are equal."""

    def __init__(self, *parts: Sequence[object], values: Hashable = ()) -> None:
        # Kept alive, so no other object can come to have one of their identities.
        self._parts = tuple(tuple(part) for part in parts)
        self._identities = (values, *(tuple(map(id, part)) for part in self._parts))
        self._hash = hash(self._identities)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Same) and self._identities == other._identities
