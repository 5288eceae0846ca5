"""Finds what differs between two long sequences of which most objects are the same.

A decision changes a few of tens of thousands of leases and pending requests. The
interpreter compares the parts that did not change, object by object by identity.
"""

from collections.abc import Sequence
from typing import TypeVar

_Item = TypeVar("_Item")
_STRIDE = 512
"""Objects that are compared at once."""


def find_changes(before: Sequence[_Item], after: Sequence[_Item]) -> tuple[Sequence[_Item], Sequence[_Item]]:
    """The objects that only ``before`` has, and those that only ``after`` has, each in order.

    An object that equals another at the same place may count as the same one.
    """
    if before is after:
        return (), ()
    start, shorter = 0, min(len(before), len(after))
    while start < shorter and before[start : start + _STRIDE] == after[start : start + _STRIDE]:
        start += _STRIDE
    start = min(start, shorter)
    end = 0
    while end + _STRIDE <= shorter - start and (
        before[len(before) - end - _STRIDE : len(before) - end] == after[len(after) - end - _STRIDE : len(after) - end]
    ):
        end += _STRIDE
    removed, added = before[start : len(before) - end], after[start : len(after) - end]
    if not removed or not added:
        return removed, added
    old, new = set(map(id, removed)), set(map(id, added))
    return [one for one in removed if id(one) not in new], [one for one in added if id(one) not in old]
