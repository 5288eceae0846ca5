"""Damaged checkpoints are refused and good ones accepted, from one seed that is printed.

Each trial damages the newest of two checkpoints in one way and restores: the
state must be that of the older one, bit for bit, and the damaged one must be
quarantined. The plugin's choice, which reads no bytes, must not fail on it.
"""

import json
import random
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from support.builders.lineage import LINEAGE, attempts_of, ref, resealed
from support.builders.seeds import SEED
from support.fakes.memory_store import MemoryStore
from support.stories.sessions import newest_shards, open_session

from tiphys.checkpoint.restore import shard_reader
from tiphys.checkpoint.save import passed_states
from tiphys.checkpoint.state import shards
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.select import choose_checkpoint
from tiphys.records import CheckpointManifest
from tiphys.store import LineageLayout

ORIGINALS = 20
LAYOUT = LineageLayout(LINEAGE)
NEWEST = LAYOUT.manifest(1, 20)


def random_state(rng: random.Random) -> dict[str, Any]:
    generator = np.random.default_rng(rng.getrandbits(64))
    dtypes = (np.float32, np.float64, np.float16, np.int64, np.uint8)
    arrays = [
        generator.integers(0, 255, size=generator.integers(1, 40)).astype(dtypes[rng.randrange(5)])
        for _ in range(rng.randrange(2, 6))
    ]
    return {"step": rng.randrange(10**6), "layers": arrays, "rng": generator.bit_generator.state}


def fingerprint(state: dict[str, Any]) -> Any:
    layers = [(array.dtype.str, array.shape, array.tobytes()) for array in state["layers"]]
    return state["step"], layers, repr(state["rng"])


@pytest.fixture(autouse=True)
def _small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several shards to each checkpoint, each read in several pieces, although the states are small."""
    monkeypatch.setattr(shard_reader, "_PIECE_BYTES", 16)
    monkeypatch.setattr(passed_states, "plan_shards", lambda state: shards.plan_shards(state, shard_bytes=64))


def saved(rng: random.Random, lineage_seed: int) -> tuple[MemoryStore, dict[int, Any]]:
    """A store with checkpoints 10 and 20 of attempt 1, and what they hold."""
    store = MemoryStore()
    states = {}
    with open_session(store) as session:
        for step in (10, 20):
            states[step] = random_state(random.Random(lineage_seed + step))
            assert session.save(step, states[step]) is not None
    return store, {step: fingerprint(state) for step, state in states.items()}


Damage = Callable[[random.Random, MemoryStore], None]


def _shard(rng: random.Random, store: MemoryStore) -> str:
    return rng.choice(newest_shards(store, 1, 20))


def truncate(rng: random.Random, store: MemoryStore) -> None:
    key = _shard(rng, store)
    store.objects[key] = store.objects[key][: rng.randrange(len(store.objects[key]))]


def append(rng: random.Random, store: MemoryStore) -> None:
    store.objects[_shard(rng, store)] += rng.randbytes(rng.randrange(1, 9))


def flip_bit(rng: random.Random, store: MemoryStore) -> None:
    key = _shard(rng, store)
    data = bytearray(store.objects[key])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    store.objects[key] = bytes(data)


def empty(rng: random.Random, store: MemoryStore) -> None:
    store.objects[_shard(rng, store)] = b""


def zero(rng: random.Random, store: MemoryStore) -> None:
    key = _shard(rng, store)
    store.objects[key] = bytes(len(store.objects[key]))


def lose_shard(rng: random.Random, store: MemoryStore) -> None:
    del store.objects[_shard(rng, store)]


def swap_shards(rng: random.Random, store: MemoryStore) -> None:
    one, other = rng.sample(newest_shards(store, 1, 20), 2)
    store.objects[one], store.objects[other] = store.objects[other], store.objects[one]


def older_shard(rng: random.Random, store: MemoryStore) -> None:
    """Bytes of the checkpoint before, as a stale cache would give them."""
    store.objects[_shard(rng, store)] = store.objects[rng.choice(newest_shards(store, 1, 10))]


def older_manifest(rng: random.Random, store: MemoryStore) -> None:
    store.objects[NEWEST] = store.objects[LAYOUT.manifest(1, 10)]


def manifest_of_another_run(rng: random.Random, store: MemoryStore) -> None:
    store.objects[NEWEST] = resealed(store.objects[NEWEST], lineage="digits-2/fit", run="digits-2")


def manifest_with_older_shards(rng: random.Random, store: MemoryStore) -> None:
    older = CheckpointManifest.model_validate_json(store.objects[LAYOUT.manifest(1, 10)])
    store.objects[NEWEST] = resealed(store.objects[NEWEST], shards=older.shards)


def manifest_with_fewer_shards(rng: random.Random, store: MemoryStore) -> None:
    shards = CheckpointManifest.model_validate_json(store.objects[NEWEST]).shards
    store.objects[NEWEST] = resealed(store.objects[NEWEST], shards=shards[:-1])


def edited_manifest(rng: random.Random, store: MemoryStore) -> None:
    store.objects[NEWEST] = store.objects[NEWEST].replace(b'"numpy"', b'"torch"')


def garbage_manifest(rng: random.Random, store: MemoryStore) -> None:
    store.objects[NEWEST] = rng.randbytes(rng.randrange(200))


def truncated_manifest(rng: random.Random, store: MemoryStore) -> None:
    store.objects[NEWEST] = store.objects[NEWEST][: rng.randrange(len(store.objects[NEWEST]) - 2)]


def manifest_without_its_seal(rng: random.Random, store: MemoryStore) -> None:
    document = json.loads(store.objects[NEWEST])
    del document["seal"]
    store.objects[NEWEST] = json.dumps(document).encode()


def wrong_hash_in_manifest(rng: random.Random, store: MemoryStore) -> None:
    data = store.objects[NEWEST]
    place = data.index(b'"sha256": "') + 11 + rng.randrange(64)
    digit = b"0" if data[place : place + 1] != b"0" else b"1"
    store.objects[NEWEST] = data[:place] + digit + data[place + 1 :]


DAMAGES: list[Damage] = [
    truncate,
    append,
    flip_bit,
    empty,
    zero,
    lose_shard,
    swap_shards,
    older_shard,
    older_manifest,
    manifest_of_another_run,
    manifest_with_older_shards,
    manifest_with_fewer_shards,
    edited_manifest,
    garbage_manifest,
    truncated_manifest,
    manifest_without_its_seal,
    wrong_hash_in_manifest,
]


@cache
def originals(count: int) -> list[tuple[MemoryStore, dict[int, Any]]]:
    rng = random.Random(SEED)
    return [saved(rng, lineage_seed=1_000 * number) for number in range(count)]


@pytest.fixture(params=[ORIGINALS * len(DAMAGES), pytest.param(1_000, marks=pytest.mark.heavy)])
def trials(request: pytest.FixtureRequest) -> int:
    """At least so many that each damage is done to each original."""
    count: int = request.param
    return count


def restore(objects: dict[str, bytes]) -> tuple[Any, MemoryStore]:
    store = MemoryStore(objects)
    state = open_session(store, 2, resume_from=ref(1, 20)).restore(default=None)
    return state, store


def test_no_damaged_checkpoint_is_accepted(trials):
    rng = random.Random(SEED)
    seen: Counter[str] = Counter()
    for trial in range(trials):
        original, expected = originals(ORIGINALS)[trial % ORIGINALS]
        damage = DAMAGES[trial % len(DAMAGES)]
        store = MemoryStore(original.objects)
        damage(rng, store)
        assert store.objects != original.objects, f"seed {SEED}, trial {trial}: {damage.__name__} changed nothing"
        choose_checkpoint(store, LINEAGE, attempts_of(None))
        state, after = restore(store.objects)
        where = f"seed {SEED}, trial {trial}: {damage.__name__}"
        assert fingerprint(state) == expected[10], where
        assert list_quarantined(after, LINEAGE) == {ref(1, 20)}, where
        seen[damage.__name__] += 1
    assert sum(seen.values()) == trials
    assert len(seen) == len(DAMAGES)


def test_a_flipped_bit_anywhere_in_a_manifest_never_changes_the_state(trials):
    """A flip that leaves the meaning alone, such as 1e-05 to 1E-05, may pass; none may do harm."""
    rng = random.Random(SEED)
    refused = 0
    for trial in range(trials):
        original, expected = originals(ORIGINALS)[trial % ORIGINALS]
        objects = dict(original.objects)
        data = bytearray(objects[NEWEST])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        objects[NEWEST] = bytes(data)
        state, after = restore(objects)
        step = 10 if list_quarantined(after, LINEAGE) else 20
        assert fingerprint(state) == expected[step], f"seed {SEED}, trial {trial}"
        refused += step == 10
    assert refused > 0.99 * trials


def test_every_good_checkpoint_is_accepted(trials):
    for trial in range(trials):
        rng = random.Random(SEED + trial)
        state = random_state(rng)
        store = MemoryStore()
        assert open_session(store).save(20, state) is not None
        assert choose_checkpoint(store, LINEAGE, attempts_of(None)).checkpoint == ref(1, 20)
        found, after = restore(store.objects)
        assert fingerprint(found) == fingerprint(state), f"seed {SEED}, trial {trial}"
        assert list_quarantined(after, LINEAGE) == set(), f"seed {SEED}, trial {trial}"


def test_the_checker_notices_a_reader_that_compares_no_hashes(monkeypatch):
    """Planted bug: without the comparison a flipped bit must come through, or the trials above prove nothing."""
    monkeypatch.setattr(shard_reader.ShardReader, "_read", lambda self, shard: memoryview(self._store.read(shard.key)))
    original, expected = originals(ORIGINALS)[0]
    accepted = 0
    for trial in range(50):
        store = MemoryStore(original.objects)
        key = newest_shards(store, 1, 20)[-1]
        data = bytearray(store.objects[key])
        data[-1 - trial % 4] ^= 1
        store.objects[key] = bytes(data)
        state, _ = restore(store.objects)
        accepted += fingerprint(state) not in expected.values()
    assert accepted == 50


def test_checkpoints_of_the_trials_have_several_shards():
    for store, _ in originals(ORIGINALS):
        assert len(newest_shards(store, 1, 20)) >= 3
