"""The near copy: the shards that were saved last, in memory of the pod that outlives the program.

It takes no memory of its own, because a save is staged there: what is uploaded,
and what a restart in the pod reads, are the same bytes. Nothing in it is trusted.
The manifest, which is read from the store, says where each shard would lie and
what its hash is; so a copy that is damaged, torn, or of a save without a commit
only costs the time of a hash.

A program that starts while the near copy exists has less memory than in a new
pod. So there is one only where the pod has room for both, and it is given back
while it is read where memory is short.
"""

import ctypes
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from tiphys.checkpoint.telemetry.events import log_message, log_once
from tiphys.launch.near_memory import REGION_BYTES
from tiphys.launch.pod_memory import PodMemory, read_peak_bytes, read_pod_memory
from tiphys.protocol.quantities import format_bytes
from tiphys.records import CheckpointRef, Shard

_PAGE_BYTES = mmap.PAGESIZE
_SPARE_BYTES = 1 << 20
"""Room for a document that grows from save to save, so that its region need not be mapped anew."""
_PUNCH_HOLE, _KEEP_SIZE = 2, 1
"""Flags of fallocate(2), which Python has no call for."""
_READERS = 4
"""Shards that are read at once, each into a buffer of its own."""


def lay_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where shards of these sizes lie in a region, and where the last one ends, in bytes. Pure.

    Each begins on a page of its own. The first, the document, comes last, since only its size changes between saves.
    """
    offsets, end = [], 0
    for size in (*sizes[1:], *sizes[:1]):
        offsets.append(end)
        end += -(-size // _PAGE_BYTES) * _PAGE_BYTES
    return [*offsets[-1:], *offsets[:-1]], end


def required_bytes(peak_bytes: int, sizes: Sequence[int], ranks: int, *, shared: bool) -> int:
    """Memory that a start of the program beside its near copy takes at most. Pure.

    Args:
        peak_bytes: Most memory of one rank before it reads the checkpoint.
        sizes: Of the shards of the near copy.
        ranks: Ranks in the pod.
        shared: Whether the ranks read one copy, which therefore cannot be given back while it is read.
    """
    return ranks * (peak_bytes + sum(sizes) + _READERS * max(sizes)) + (sum(sizes) if shared else 0)


class NearMemory:
    """The regions of the launcher's file, of which this rank writes its own."""

    def __init__(self, descriptor: int, local_rank: int = 0, ranks: int = 1, *, sharded: bool = False) -> None:
        self.descriptor = descriptor
        self._base = local_rank * REGION_BYTES
        self._ranks = ranks
        self._shared = ranks > 1 and not sharded
        self._peak_bytes = 0
        self._is_refused = False
        self._mapped: mmap.mmap | None = None

    def allocate(self, sizes: Sequence[int]) -> list[memoryview]:
        """Return a buffer for each shard of a save, without a change of its content; empty if there is no room."""
        offsets, end = lay_out(sizes)
        if self._mapped is None or end > len(self._mapped):
            self._grow(sizes, end + _SPARE_BYTES)
        if self._mapped is None or end > len(self._mapped):
            return []
        content = memoryview(self._mapped)
        return [content[offset : offset + size] for offset, size in zip(offsets, sizes, strict=True)]

    def find(self, shards: Sequence[Shard], rank: int) -> "NearShards | None":
        """Return where the near copy of ``shards`` would lie, to be read by ``rank``; None if there is none."""
        self._peak_bytes = self._peak_bytes or read_peak_bytes()
        own = shards[0].rank == rank
        base = self._base if own else 0  # rank 0, which saves for all, is the first in its pod
        sizes = [shard.size for shard in shards]
        offsets, end = lay_out(sizes)
        if not 0 < end <= REGION_BYTES or not self._has_data(base):
            return None
        # Nothing writes these pages: no other session, and this one only once it has mapped its region for its saves.
        is_quiet = own and not self._shared and self._mapped is None and self._set_lock(fcntl.F_WRLCK)
        room = required_bytes(0, sizes, self._ranks, shared=self._shared)
        releases = is_quiet and read_pod_memory().free_bytes < room
        return NearShards(
            self,
            {shard.key: base + offset for shard, offset in zip(shards, offsets, strict=True)},
            self._map_for_reading(end) if is_quiet and not releases else None,
            releases=releases,
        )

    def close(self, *, is_complete: bool) -> None:
        """Let another session write here; ``is_complete`` gives the memory back, since no restart will read it."""
        if self._mapped is not None and is_complete:
            self.release(self._base, REGION_BYTES)
        self._mapped = None
        self._set_lock(fcntl.F_UNLCK)

    def release(self, offset: int, size_bytes: int) -> None:
        """Give pages of the file back, which nothing may use."""
        fallocate = ctypes.CDLL(None).fallocate
        fallocate.argtypes = ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long
        fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, size_bytes)

    def _grow(self, sizes: Sequence[int], size_bytes: int) -> None:
        if self._is_refused:
            return
        self._peak_bytes = self._peak_bytes or read_peak_bytes()
        required = required_bytes(self._peak_bytes, sizes, self._ranks, shared=self._shared)
        if reason := self._find_obstacle(size_bytes, required, read_pod_memory()):
            self._is_refused = True
            if self._set_lock(fcntl.F_WRLCK):  # a copy of an earlier start would soon be stale, and take memory
                self._mapped = None
                self.release(self._base, REGION_BYTES)
            log_once(f"a restart in this pod will read its checkpoint from the store: {reason}")

    def _find_obstacle(self, size_bytes: int, required: int, memory: PodMemory) -> str:
        """Map the region, and return nothing; or return why that cannot be."""
        if required > memory.limit_bytes:
            return (
                f"the program took {format_bytes(self._peak_bytes)} at its start and a copy of its state takes "
                f"{format_bytes(size_bytes)}, for which memory of {format_bytes(memory.limit_bytes)} has no room; "
                f"give the step {format_bytes(required)}, or near_copy=False in its Checkpoints"
            )
        if size_bytes > REGION_BYTES:
            return f"its state has more than {format_bytes(REGION_BYTES)}; set near_copy=False in its Checkpoints"
        if not self._set_lock(fcntl.F_WRLCK):
            return "another program of this pod has a copy there; open the session in one of them"
        try:
            # Allocated first: a write into a page for which there is no memory would end the program.
            os.posix_fallocate(self.descriptor, self._base, size_bytes)
            self._mapped = mmap.mmap(self.descriptor, size_bytes, offset=self._base)
        except OSError as error:
            return f"there is no memory for its copy ({error.strerror}); set near_copy=False in its Checkpoints"
        pages = np.frombuffer(self._mapped, dtype=np.uint8)[::_PAGE_BYTES]
        pages |= 0  # now, and not in the first save, the pages are mapped; what they hold may be a near copy
        return ""

    def _map_for_reading(self, size_bytes: int) -> mmap.mmap | None:
        try:
            return mmap.mmap(self.descriptor, size_bytes, offset=self._base, access=mmap.ACCESS_READ)
        except OSError:
            return None  # a limit of addresses; the pages are copied instead

    def _has_data(self, base: int) -> bool:
        try:
            return os.lseek(self.descriptor, base, os.SEEK_DATA) < base + REGION_BYTES
        except OSError:
            return False

    def _set_lock(self, kind: int) -> bool:
        """Lock the region for this session, or unlock it; return whether that was possible."""
        # An open file description lock: two sessions of one process exclude each other, too. See fcntl(2).
        lock = struct.pack("hhqqi4x", kind, os.SEEK_SET, self._base, 1, 0)
        try:
            fcntl.fcntl(self.descriptor, fcntl.F_OFD_SETLK, lock)
        except OSError:
            return False
        return True

    def __del__(self) -> None:
        os.close(self.descriptor)


class NearShards:
    """The near copy of one checkpoint, of which nothing is known before its hashes were compared.

    Args:
        offsets: Where each shard begins, by its key.
        quiet: The region, where nothing writes to it until all is read; None to read copies of its pages.
        releases: Whether each shard is given back once it was read.
    """

    def __init__(
        self, memory: NearMemory, offsets: Mapping[str, int], quiet: mmap.mmap | None, *, releases: bool
    ) -> None:
        self._memory = memory
        self._offsets = offsets
        self._base = min(offsets.values())
        self._quiet = memoryview(quiet) if quiet is not None else None
        self._releases = releases
        self._lock = threading.Lock()
        self._intact = self._refused = 0

    def view(self, shard: Shard) -> memoryview | None:
        """The unverified content itself; None where it may change."""
        start = self._offsets[shard.key] - self._base
        return None if self._quiet is None else self._quiet[start : start + shard.size]

    def read_into(self, shard: Shard, buffer: memoryview) -> bool:
        """Fill ``buffer`` with unverified content; return whether there is so much."""
        offset, read = self._offsets[shard.key], 0
        try:
            while read < len(buffer) and (count := os.preadv(self._memory.descriptor, [buffer[read:]], offset + read)):
                read += count
        except OSError:
            return False
        return read == len(buffer)

    def record(self, shard: Shard, *, is_intact: bool) -> None:
        """Count a shard whose hash was compared, and give its memory back if that is short."""
        with self._lock:
            self._intact += is_intact
            self._refused += not is_intact
        if self._releases:
            self._memory.release(self._offsets[shard.key], -(-shard.size // _PAGE_BYTES) * _PAGE_BYTES)

    def report(self, ref: CheckpointRef) -> None:
        """Log which shards of ``ref`` the near copy had."""
        if self._refused:
            log_message(
                f"{self._refused} of {self._refused + self._intact} shards of {ref.display_name} were read from the "
                "store: what this pod holds of them in memory is damaged, or of a save that was not committed"
            )
        else:
            log_message(f"{ref.display_name} was read from its copy in the memory of this pod")
