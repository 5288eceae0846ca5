"""How much damage is noticed, and how often something sound is refused.

Every damaged run is verified as ``tiphys verify --deep`` does, and its newest
checkpoint restored, which must give what was saved or refuse. Damage to the
cache of a node must change nothing about what a restore gives.
"""

import hashlib
import multiprocessing
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from bench.checkpoint.workload import Workload
from bench.progress import say
from bench.samples import significant, wilson_lower
from support.builders.corruption import (
    KINDS,
    LAYERS,
    NEWEST,
    OLDER,
    OTHER_RUN,
    Objects,
    mutations,
    random_state,
    sound_run,
)
from support.builders.lineage import RUN, STEP, ref
from support.fakes.memory_store import MemoryStore

from tiphys.checkpoint.restore.loader import CheckpointLoader
from tiphys.checkpoint.restore.shard_reader import NodeCache
from tiphys.errors import IntegrityError
from tiphys.lineage.audit.audit import audit_run
from tiphys.lineage.validity import read_manifest
from tiphys.records import CheckpointRef

TRIALS = 1_000
CACHE = "local cache"
SEED = 20_261_121
"""Base of all runs and mutations: number n of them is made from it and n."""

_ORIGINALS = 8
_BATCH = 50
_CACHE_SHARE = len(LAYERS) + 1
_CHECKPOINTS = (ref(1, 10), OLDER, NEWEST)
_SOUND = range(-(-TRIALS // (2 * len(_CHECKPOINTS))))
"""Seeds of sound runs, each of which comes with another, so that together they have `TRIALS` checkpoints."""


class Case(NamedTuple):
    kind: str
    layer: str
    noticed: bool


def measure(work: Workload) -> dict[str, Any]:
    """In one process for each core; `work` says nothing, since what is damaged are small runs, byte by byte."""
    batches = [range(start, start + _BATCH) for start in range(0, TRIALS, _BATCH)]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=spawn, initializer=_be_quiet) as pool:
        cases = list(chain.from_iterable(pool.map(damaged, batches)))
        say(f"damaged: {sum(case.noticed for case in cases)} of {len(cases)} noticed")
        good = list(chain.from_iterable(pool.map(sound, _SOUND, chunksize=10)))
        say(f"sound: {good.count(False)} of {len(good)} refused")
    found = sum(case.noticed for case in cases)
    return {
        "seed": SEED,
        "wilson_lower_bound": significant(wilson_lower(found, len(cases))),
        "by_class": _shares(cases, lambda case: case.kind),
        "by_layer": _shares(cases, lambda case: case.layer),
        "sound_checkpoints": len(good),
        "line": {"corrupt_found": found, "corrupt_total": len(cases), "good_refused": good.count(False)},
    }


def damaged(numbers: Sequence[int]) -> list[Case]:
    """The mutations of these numbers; one of five damages the cache of a node."""
    stored = TRIALS // _CACHE_SHARE * (_CACHE_SHARE - 1)
    begin, end = numbers[0], numbers[-1] + 1
    cases = [_damaged_run(number, *mutation) for number, mutation in _numbered(begin, min(end, stored))]
    return cases + [_damaged_cache(number) for number in range(max(begin, stored), end)]


def sound(number: int) -> list[bool]:
    """Of each checkpoint of two sound runs: whether its run is found sound, and it is restored as it was saved."""
    seed = SEED + number
    store = MemoryStore(_made(seed))
    accepted = []
    for index, run in enumerate((RUN, OTHER_RUN)):
        passes = audit_run(store, run, deep=True, threads=1).is_sound
        for one in _CHECKPOINTS:
            place = ref(one.attempt, one.global_step, f"{run}/{STEP}")
            accepted.append(passes and _is_saved_state(_restored(store, place), seed * 2 + index, one.global_step))
    return accepted


def _numbered(begin: int, end: int) -> Any:
    return zip(range(begin, end), islice(mutations(SEED, end), begin, end), strict=False)


def _damaged_run(number: int, kind: str, layer: str, apply: Callable[[Objects], None]) -> Case:
    objects = dict(_original(number % _ORIGINALS))
    apply(objects)
    store = MemoryStore(objects)
    restored = _restored(store)
    harmless = restored is None or _is_saved_state(restored, 2 * (SEED + number % _ORIGINALS))
    return Case(kind, layer, harmless and not audit_run(store, RUN, deep=True, threads=1).is_sound)


def _damaged_cache(number: int) -> Case:
    """The restore must give what was saved, and must have replaced the damaged file."""
    chance = random.Random(f"{SEED}/cache/{number}")
    kind = KINDS[number % len(KINDS)]
    store = MemoryStore(_original(number % _ORIGINALS))
    with _folder() as name:
        folder = Path(name)
        for sha256, content in _shards(store, NEWEST):
            (folder / sha256).write_bytes(content)
        damaged = _damage_file(folder, kind, chance, store)
        restored = _restored(store, node=NodeCache(folder))
        healed = all(hashlib.sha256(path.read_bytes()).hexdigest() == path.name for path in damaged)
    return Case(kind, CACHE, healed and _is_saved_state(restored, 2 * (SEED + number % _ORIGINALS)))


def _damage_file(folder: Path, kind: str, chance: random.Random, store: MemoryStore) -> list[Path]:
    one, other = chance.sample(sorted(path for path in folder.iterdir() if not path.suffix), 2)
    content = one.read_bytes()
    position = chance.randrange(len(content))
    flipped = content[:position] + bytes([content[position] ^ 1 << chance.randrange(8)]) + content[position + 1 :]
    foreign = {"stale": OLDER, "another run's": ref(2, 30, f"{OTHER_RUN}/{STEP}")}
    match kind:
        case "truncate":
            one.write_bytes(content[: max(1, position)] if position < len(content) else content[:-1])
        case "bit flip":
            one.write_bytes(flipped)
        case "zero length":
            one.write_bytes(b"")
        case "missing":
            one.unlink()
        case "extra":
            one.write_bytes(content + chance.randbytes(1 + position % 8))
        case "swapped":
            one.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return [one, other]
        case _:
            shards = [data for _, data in _shards(store, foreign[kind]) if data != content]
            one.write_bytes(chance.choice(shards))
    return [one]


def _restored(store: MemoryStore, place: CheckpointRef = NEWEST, node: NodeCache | None = None) -> Any:
    """The state of a checkpoint; None if it was refused."""
    loader = CheckpointLoader(store, cache=node, threads=1)
    try:
        return loader.load(loader.read_manifest(place))
    except IntegrityError:
        return None


def _is_saved_state(restored: Any, seed: int, step: int = NEWEST.global_step) -> bool:
    saved = random_state(seed, step)
    if restored is None or restored["rng"] != saved["rng"] or restored["step"] != saved["step"]:
        return False
    pairs = zip(restored["layers"], saved["layers"], strict=True)
    return all(one.dtype == other.dtype and one.tobytes() == other.tobytes() for one, other in pairs)


def _shards(store: MemoryStore, checkpoint: CheckpointRef) -> list[tuple[str, bytes]]:
    return [(shard.sha256, store.read(shard.key)) for shard in read_manifest(store, checkpoint).shards]


@cache
def _original(index: int) -> Objects:
    return _made(SEED + index)


def _made(seed: int) -> Objects:
    with _folder() as folder, mock.patch.object(tempfile, "tempdir", folder):
        return sound_run(seed)


def _folder() -> "tempfile.TemporaryDirectory[str]":
    """In memory where that is possible: no disk is tried here."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(prefix="tiphys-bench-", dir=memory if memory.is_dir() else None)


def _be_quiet() -> None:
    """What sessions tell of thousands of restores is of no interest."""
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  for the life of the process


def _shares(cases: Sequence[Case], of: Callable[[Case], str]) -> dict[str, str]:
    """``noticed/total`` of each class."""
    totals, noticed = Counter(map(of, cases)), Counter(of(case) for case in cases if case.noticed)
    return {name: f"{noticed[name]}/{count}" for name, count in totals.items()}
