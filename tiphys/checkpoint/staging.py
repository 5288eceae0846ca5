"""A copy of the state in memory that is kept from save to save, so that training waits for a memcpy and no more.

Memory that was touched before takes bytes some eight times as fast as fresh
memory, whose pages the kernel first has to find and clear. So the buffers stay,
and are touched ahead of the first save where somebody has time for it.
"""

import contextlib
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tiphys.checkpoint.shards import ShardPlan
from tiphys.threads import Background, in_background, in_parallel

_PAGE_BYTES = 4096
_THREADS = min(4, os.cpu_count() or 1)
"""One core alone does not use all of a machine's memory bandwidth."""


class StagedShard(NamedTuple):
    """A shard whose bytes stand in the staging buffer until the save is over."""

    suffix: str
    buffer: bytearray

    @property
    def size_bytes(self) -> int:
        return len(self.buffer)

    def data(self) -> bytearray:
        return self.buffer


class Staging:
    """Buffers for one copy of the state; in use by one save at a time."""

    def __init__(self) -> None:
        self._buffers: list[bytearray] = []
        self._warming: Background | None = None

    def stage(self, plans: Sequence[ShardPlan]) -> list[StagedShard]:
        """Copy what the plans name; later changes of the state do not reach the copy.

        Raises:
            MemoryError: there is no room for a second copy of the state.
        """
        self._fit(plans)
        in_parallel(lambda index, plan: plan.write_into(self._buffers[index]), plans, _THREADS)
        return [StagedShard(plan.suffix, buffer) for plan, buffer in zip(plans, self._buffers, strict=True)]

    def warm(self, plans: Sequence[ShardPlan]) -> None:
        """Make room for such shards in the background, ahead of the first `stage`."""
        if self._warming is None and not self._buffers:
            sizes = [plan.size_bytes for plan in plans]
            self._warming = in_background(lambda: self._touch(sizes))

    def _touch(self, sizes: Sequence[int]) -> None:
        with contextlib.suppress(MemoryError):  # `stage` says so, if there is none then either
            for size in sizes:
                buffer = bytearray(size)
                np.frombuffer(buffer, dtype=np.uint8)[::_PAGE_BYTES] = 0
                self._buffers.append(buffer)

    def _fit(self, plans: Sequence[ShardPlan]) -> None:
        if self._warming is not None:
            self._warming.join()
            self._warming = None
        for index, plan in enumerate(plans):
            if index == len(self._buffers):
                self._buffers.append(bytearray(plan.size_bytes))
            elif len(self._buffers[index]) != plan.size_bytes:
                self._buffers[index] = bytearray(plan.size_bytes)
        del self._buffers[len(plans) :]
