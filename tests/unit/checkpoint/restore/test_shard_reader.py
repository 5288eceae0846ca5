import hashlib

import numpy as np
import pytest
from support.fakes.memory_store import MemoryStore

from tiphys.checkpoint.restore.shard_reader import NodeCache, ShardReader
from tiphys.checkpoint.state.shards import SHARD_BYTES
from tiphys.errors import IntegrityError
from tiphys.records import Shard

DATA = np.random.default_rng(5).bytes(SHARD_BYTES)
SHARD = Shard(key="shard", size=SHARD_BYTES, sha256=hashlib.sha256(DATA).hexdigest())


@pytest.mark.parametrize("place", [0, SHARD_BYTES // 2, SHARD_BYTES - 1])
def test_a_flipped_bit_in_a_shard_of_full_size_is_noticed(place: int) -> None:
    damaged = bytearray(DATA)
    damaged[place] ^= 1
    store = MemoryStore({SHARD.key: bytes(damaged)})

    with pytest.raises(IntegrityError, match="shard shard has sha256"):
        ShardReader(store).read(SHARD)

    store.objects[SHARD.key] = DATA
    assert ShardReader(store).read(SHARD) == DATA


def test_a_flipped_bit_in_a_cached_shard_of_full_size_is_noticed(tmp_path) -> None:
    store = MemoryStore({SHARD.key: DATA})
    damaged = bytearray(DATA)
    damaged[SHARD_BYTES // 2] ^= 1
    (tmp_path / SHARD.sha256).write_bytes(damaged)

    assert ShardReader(store, cache=NodeCache(tmp_path)).read(SHARD) == DATA
    assert (tmp_path / SHARD.sha256).read_bytes() == DATA
