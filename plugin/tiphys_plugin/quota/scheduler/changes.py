"""Finds what differs between two long sequences of which most objects are the same.

A decision changes a few of tens of thousands of leases and pending requests. The
interpreter compares the parts that did not change, object by object by identity.
Several indexes follow each change, so the newest answers are kept.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_STRIDE = 512
"""Objects that are compared at once."""
_KEPT_ANSWERS = 8
_answers: tuple[tuple[object, object, Any], ...] = ()
"""The newest answers, with the two tuples that each compares. Threads replace it whole: a lost one is found again."""


def find_changes(before: tuple[_Item, ...], after: tuple[_Item, ...]) -> tuple[Sequence[_Item], Sequence[_Item]]:
    """The objects that only ``before`` has, and those that only ``after`` has, each in order.

    An object that equals another at the same place may count as the same one.
    """
    global _answers
    if before is after:
        return (), ()
    answers = _answers
    for earlier, later, answer in answers:
        if earlier is before and later is after:
            return answer  # type: ignore[no-any-return]
    answer = _compare(before, after)
    _answers = ((before, after, answer), *answers[: _KEPT_ANSWERS - 1])
    return answer


def _compare(before: tuple[_Item, ...], after: tuple[_Item, ...]) -> tuple[Sequence[_Item], Sequence[_Item]]:
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
    return tuple(one for one in removed if id(one) not in new), tuple(one for one in added if id(one) not in old)
