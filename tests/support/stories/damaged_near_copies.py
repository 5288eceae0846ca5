"""Near copies that are damaged in every way, and what a restore makes of them.

The newest commit, an older one, the next save, which was killed, and another training write their copies. Each trial
damages that of the newest commit in a way drawn from its number, and restores it.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from support.builders.lineage import ref
from support.builders.near_memory import KINDS, damaged_image, held_memory, opened, read_image, write_image
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import open_session
from tiphys.checkpoint.restore.loader import CheckpointLoader
from tiphys.checkpoint.save import passed_states
from tiphys.checkpoint.state.near_copy import lay_out
from tiphys.checkpoint.state.shards import plan_shards
from tiphys.records import Shard
from tiphys.store import Store

_OLDER, _NEWEST, _NEXT, _FOREIGN = 1, 2, 3, 9


class ShardStore(MemoryStore):
    """Counts the shards that are read."""

    shards_read = 0

    def chunks(self, key: str, size_bytes: int = 8 << 20) -> Iterator[bytes]:
        self.shards_read += 1
        return super().chunks(key, size_bytes)


class Trial(NamedTuple):
    kind: str
    is_right: bool
    """Whether the restored state is that of the newest commit, bit for bit."""
    shards_read: int
    """From the store."""
    shards_damaged: int


class DamagedCopies:
    """The store and the memory of a pod, whose content each trial damages."""

    def __init__(self, variables: dict[str, str], seed: int) -> None:
        self._variables, self._seed = variables, seed
        self._store = ShardStore()
        foreign = self._write(MemoryStore(), _FOREIGN)
        stale = self._write(self._store, _OLDER)
        self._intact = self._write(self._store, _NEWEST)
        offsets, _ = lay_out([shard.size for shard in self._shards(self._store, _NEWEST)])
        sizes = [shard.size for shard in self._shards(self._store, _NEWEST)]
        self._spans = list(zip(offsets, sizes, strict=True))
        following = self._write(MemoryStore(), _NEXT)
        size = len(self._intact)
        named = {"another training's": foreign, "stale": stale, "torn by the next save": following}
        self._others = {kind: image[:size].ljust(size, b"\0") for kind, image in named.items()}
        self.shards = len(sizes)

    def run_trial(self, number: int) -> Trial:
        """Damage the copy as the seed and ``number`` say, and restore."""
        kind = KINDS[number % len(KINDS)]
        chance = random.Random(f"{self._seed}/{number}")
        return self._restore(kind, damaged_image(kind, chance, self._intact, self._others, self._spans))

    def restore_intact(self) -> Trial:
        return self._restore("intact", self._intact)

    def restore_next(self) -> Trial:
        """Restore where the memory holds the next save, which was not committed."""
        return self._restore("uncommitted", self._others["torn by the next save"])

    def _restore(self, kind: str, image: bytes) -> Trial:
        write_image(self._variables, image)
        self._store.shards_read = 0
        loader = CheckpointLoader(self._store, near=opened(self._variables), threads=2)
        found = loader.load(loader.read_manifest(ref(1, _NEWEST)))
        damaged = sum(image[at : at + size] != self._intact[at : at + size] for at, size in self._spans)
        return Trial(kind, _digest(found) == _digest(_state(_NEWEST)), self._store.shards_read, damaged)

    def _write(self, store: Store, step: int) -> bytes:
        """Save ``step``, and return the content of the memory."""
        session = open_session(store, asynchronous=True, near=opened(self._variables))
        save = session.save(step, _state(step))
        assert save is not None
        assert save.wait()
        session.flush()
        session._saver.close()
        _, end = lay_out([shard.size for shard in self._shards(store, step)])
        return read_image(self._variables, end)

    def _shards(self, store: Store, step: int) -> tuple[Shard, ...]:
        return CheckpointLoader(store).read_manifest(ref(1, step)).shards


@contextmanager
def damaged_copies(seed: int) -> Iterator[DamagedCopies]:
    """Small copies of many shards, of which some are equal in all saves."""
    small = mock.patch.object(passed_states, "plan_shards", lambda flat: plan_shards(flat, shard_bytes=10_000))
    with small, held_memory() as variables:
        yield DamagedCopies(dict(variables), seed)


def _state(step: int) -> dict[str, Any]:
    numbers, frozen = np.random.default_rng(step), np.random.default_rng(0)
    return {"step": step, "frozen": frozen.random(3000), "trained": [numbers.random(2000) for _ in range(4)]}


def _digest(state: dict[str, Any]) -> list[Any]:
    return [state["step"], state["frozen"].tobytes(), *(layer.tobytes() for layer in state["trained"])]
