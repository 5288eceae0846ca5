"""Finds what differs between two long sequences of which most objects are the same.

A decision changes a few of tens of thousands of leases and pending requests. The
interpreter compares the parts that did not change, object by object by identity.
"""

from collections import deque
from collections.abc import Sequence
from itertools import compress, count
from operator import is_not, not_
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_STRIDE = 512
"""Objects that are compared at once."""
_MOST_SKIPPED = 8
"""Objects removed or added side by side, after which the search for the next same object compares all of them."""
_KEPT_ANSWERS = 8
_Changes = tuple[Sequence[Any], Sequence[Any]]


class RecentChanges:
    """Finds changes, and keeps the newest answers: several indexes follow each change of a ledger state."""

    def __init__(self) -> None:
        self._answers: deque[tuple[object, object, _Changes]] = deque(maxlen=_KEPT_ANSWERS)

    def find(self, before: tuple[_Item, ...], after: tuple[_Item, ...]) -> tuple[Sequence[_Item], Sequence[_Item]]:
        """As `find_changes`."""
        if before is after:
            return (), ()
        for earlier, later, answer in self._answers:
            if earlier is before and later is after:
                return answer
        answer = find_changes(before, after)
        self._answers.appendleft((before, after, answer))
        return answer


def find_changes(before: tuple[_Item, ...], after: tuple[_Item, ...]) -> tuple[Sequence[_Item], Sequence[_Item]]:
    """The objects that only ``before`` has, and those that only ``after`` has, each in order.

    An object that equals another at the same place may count as the same one.
    """
    removed: list[_Item] = []
    added: list[_Item] = []
    old = new = 0
    while True:
        same = _count_same(before, old, after, new)
        old, new = old + same, new + same
        if old == len(before) or new == len(after) or (next_same := _find_same(before, old, after, new)) is None:
            removed += before[old:]
            added += after[new:]
            break
        removed += before[old : next_same[0]]
        added += after[new : next_same[1]]
        old, new = next_same
    if not removed or not added:
        return tuple(removed), tuple(added)
    old_ids, new_ids = list(map(id, removed)), list(map(id, added))
    return _without(removed, old_ids, set(new_ids)), _without(added, new_ids, set(old_ids))


def _count_same(before: tuple[_Item, ...], old: int, after: tuple[_Item, ...], new: int) -> int:
    """How many objects from ``old`` and ``new`` on are the same, side by side."""
    length, same = min(len(before) - old, len(after) - new), 0
    while same < length:
        stride = min(_STRIDE, length - same)
        old_part, new_part = before[old + same : old + same + stride], after[new + same : new + same + stride]
        if old_part != new_part:
            return same + next(compress(count(), map(is_not, old_part, new_part)))
        same += stride
    return same


def _find_same(before: tuple[_Item, ...], old: int, after: tuple[_Item, ...], new: int) -> tuple[int, int] | None:
    """The next places of one object in both, after a few objects were removed, added or replaced; None: after more."""
    for skipped in range(1, _MOST_SKIPPED + 1):
        for place in ((old + skipped, new), (old, new + skipped), (old + skipped, new + skipped)):
            if place[0] < len(before) and place[1] < len(after) and before[place[0]] is after[place[1]]:
                return place
    return None


def _without(items: Sequence[_Item], ids: Sequence[int], others: set[int]) -> tuple[_Item, ...]:
    """The ``items``, which have these ``ids``, without those that have one of ``others``."""
    return tuple(compress(items, map(not_, map(others.__contains__, ids))))
