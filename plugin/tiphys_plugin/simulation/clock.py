"""Seconds of a trace as times of the ledger, and back."""

import math
from datetime import UTC, datetime, timedelta

EPOCH = datetime(2000, 1, 1, tzinfo=UTC)
"""Second zero of a trace."""


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def seconds_of(moment: datetime) -> float:
    return (moment - EPOCH).total_seconds()


def next_tick(now: datetime, every_seconds: float) -> datetime:
    """``now``, or the next multiple of ``every_seconds``; with 0 any time is one."""
    if not every_seconds:
        return now
    tick = timedelta(seconds=every_seconds)
    return EPOCH + -(-(now - EPOCH) // tick) * tick


def after(moment: datetime, seconds: float) -> datetime:
    """The first time at which so many seconds are over, however they are rounded."""
    return moment + timedelta(microseconds=math.floor(seconds * 1e6) + 1)
