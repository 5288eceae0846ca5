"""Seeded damage to a sound run, stratified by class and layer, for tests and for the benchmark.

    objects = sound_run(seed)                        # key → bytes of two runs, everything as programs write it
    for kind, layer, apply in mutations(seed, 1_000):
        damaged = dict(objects)
        apply(damaged)                               # changes what a restore, a plan or a resume of RUN relies on

Every mutation changes at least one byte, and each is made from ``seed`` and its
number alone, so that one that gets through can be made again.
"""

import hashlib
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from support.builders.lineage import RUN, STEP, claim_of, ref, write_claim, write_end, write_run
from tiphys import checkpoint
from tiphys.checkpoint.state import shards
from tiphys.records import AttemptEnd, AttemptEndOutcome, Cause, CheckpointRef, Output, OutputKind, OutputObject
from tiphys.store import DirectoryStore, LineageLayout, RunLayout, Store, outputs_digest

KINDS = ("truncate", "bit flip", "zero length", "missing", "extra", "swapped", "stale", "another run's")
LAYERS = ("shard", "manifest", "claim", "end")
OTHER_RUN = "digits-2"
NEWEST, OLDER = ref(2, 30), ref(1, 20)
"""Attempt 1 saved steps 10 and 20, attempt 2 went on from 20, saved 30 and finished."""

Objects = dict[str, bytes]


class Mutation(NamedTuple):
    """``apply`` damages the objects of a `sound_run` in place."""

    kind: str
    layer: str
    apply: Callable[[Objects], None]


def mutations(seed: int, count: int, layers: Sequence[str] = LAYERS) -> Iterator[Mutation]:
    """``count`` mutations, the same for the same seed; every class meets every layer equally often.

    ``layers`` may name ``output`` as well: the files that a finished attempt left.
    """
    cells = [(kind, layer) for layer in layers for kind in KINDS]
    for number in range(count):
        kind, layer = cells[number % len(cells)]
        yield Mutation(kind, layer, _applied(kind, layer, random.Random(f"{seed}/{number}")))


def sound_run(seed: int) -> Objects:
    """All objects of `RUN`, which is finished, and of another run of the same pipeline."""
    with tempfile.TemporaryDirectory() as folder:
        store = DirectoryStore(Path(folder) / "store")
        for number, run in enumerate((RUN, OTHER_RUN)):
            _write(store, run, seed * 2 + number)
        return {info.key: store.read(info.key) for info in store.list("")}


def random_state(seed: int, step: int) -> dict[str, Any]:
    """A few small arrays of several kinds, which differ in every step."""
    generator = np.random.default_rng([seed, step])
    dtypes = (np.float32, np.float64, np.float16, np.int64, np.uint8)
    layers = [generator.integers(0, 255, size=8 + 4 * index).astype(dtype) for index, dtype in enumerate(dtypes)]
    return {"step": step, "layers": layers, "rng": generator.bit_generator.state}


def _write(store: Store, run: str, seed: int) -> None:
    write_run(store, run=run)
    start = None
    for attempt, steps in ((1, (10, 20)), (2, (30,))):
        write_claim(store, claim_of(attempt, start, run=run))
        _train(store, run, attempt, start, steps, seed)
        start = ref(attempt, steps[-1], f"{run}/{STEP}")
        write_end(store, _end(store, run, attempt, done=attempt == 2, seed=seed))


def _train(store: Store, run: str, attempt: int, start: CheckpointRef | None, steps: Sequence[int], seed: int) -> None:
    environ = {
        "TIPHYS_STORE": store.url,
        "TIPHYS_RUN": run,
        "TIPHYS_STEP": STEP,
        "TIPHYS_ATTEMPT": str(attempt),
        "TIPHYS_LINEAGE": f"{run}/{STEP}",
        "TIPHYS_RESUME_FROM": str(start) if start else "",
        "TIPHYS_KEEP_LAST": "all",
    }
    # Several shards to each checkpoint, although the states are small.
    with mock.patch.object(shards, "SHARD_BYTES", 128), checkpoint.session(environ=environ) as session:
        session.restore()
        for step in steps:
            save = session.save(step, random_state(seed, step), metrics={"loss": 1 / step})
            assert save is not None and save.wait() is not None


def _end(store: Store, run: str, attempt: int, *, done: bool, seed: int) -> AttemptEnd:
    fields = {"run": run, "step": STEP, "attempt": attempt, "submission": 1, "progress": True}
    if not done:
        return AttemptEnd(**fields, outcome=AttemptEndOutcome.FAILED, cause=Cause.PREEMPTION)
    layout = RunLayout(run)
    prefix = layout.outputs(STEP, attempt)
    generator = random.Random(seed)
    objects = []
    for name in ("a", "b"):
        key, data = f"{prefix}artifacts/model/{name}", generator.randbytes(64)
        store.create(key, data)
        objects.append(OutputObject(key=key, size=len(data), sha256=_sha256(data)))
    output = Output(
        name="model", kind=OutputKind.ARTIFACT, key=f"{prefix}artifacts/model", directory=True, objects=tuple(objects)
    )
    rows = [(one.key.removeprefix(prefix), one.size) for one in objects]
    store.create(layout.done_marker(STEP, attempt, outputs_digest(rows)), b"")
    return AttemptEnd(**fields, outcome=AttemptEndOutcome.DONE, exit_code=0, outputs=(output,))


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _applied(kind: str, layer: str, rng: random.Random) -> Callable[[Objects], None]:
    def apply(objects: Objects) -> None:
        before = dict(objects)
        _DAMAGE[kind](objects, layer, rng)
        assert objects != before, f"{kind} of {layer} changed nothing"

    return apply


def _targets(objects: Objects, layer: str, run: str = RUN, checkpoint_ref: CheckpointRef = NEWEST) -> list[str]:
    """Keys of one layer, in order; for shards those of one checkpoint."""
    runs, lineage = RunLayout(run), LineageLayout(f"{run}/{STEP}")
    match layer:
        case "shard":
            prefix = lineage.shards(checkpoint_ref.attempt, checkpoint_ref.global_step)
            return sorted(key for key in objects if key.startswith(prefix))
        case "manifest":
            return [lineage.manifest(checkpoint_ref.attempt, checkpoint_ref.global_step)]
        case "claim":
            return [runs.attempt(STEP, attempt) for attempt in (1, 2)]
        case "end":
            return [runs.attempt_end(STEP, attempt) for attempt in (1, 2)]
        case "output":
            return sorted(key for key in objects if key.startswith(runs.all_outputs))
    raise ValueError(layer)


def _truncate(objects: Objects, layer: str, rng: random.Random) -> None:
    key = rng.choice(_targets(objects, layer))
    objects[key] = objects[key][: rng.randrange(1, len(objects[key]))]


def _flip_bit(objects: Objects, layer: str, rng: random.Random) -> None:
    key = rng.choice(_targets(objects, layer))
    data = bytearray(objects[key])
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    objects[key] = bytes(data)


def _empty(objects: Objects, layer: str, rng: random.Random) -> None:
    objects[rng.choice(_targets(objects, layer))] = b""


def _lose(objects: Objects, layer: str, rng: random.Random) -> None:
    del objects[rng.choice(_targets(objects, layer))]


def _append(objects: Objects, layer: str, rng: random.Random) -> None:
    """Something behind the end: noise, or what an editor leaves."""
    tail = rng.choice([b"\n", b" ", rng.randbytes(rng.randrange(1, 9))])
    objects[rng.choice(_targets(objects, layer))] += tail


def _swap(objects: Objects, layer: str, rng: random.Random) -> None:
    keys = _targets(objects, layer)
    if layer == "manifest":
        keys = [*keys, *_targets(objects, layer, checkpoint_ref=OLDER)]
    one, other = rng.sample(keys, 2)
    objects[one], objects[other] = objects[other], objects[one]


def _stale(objects: Objects, layer: str, rng: random.Random) -> None:
    """What the same place held one checkpoint, or one attempt, before."""
    keys = _targets(objects, layer)
    if layer in ("shard", "manifest"):
        index = rng.randrange(1, len(keys)) if len(keys) > 1 else 0
        objects[keys[index]] = objects[_targets(objects, layer, checkpoint_ref=OLDER)[index]]
    else:
        objects[keys[-1]] = objects[keys[0]]


def _foreign(objects: Objects, layer: str, rng: random.Random) -> None:
    """What the same place holds in another run of the same pipeline."""
    keys = _targets(objects, layer)
    index = rng.randrange(1, len(keys)) if layer == "shard" else rng.randrange(len(keys))
    objects[keys[index]] = objects[_targets(objects, layer, run=OTHER_RUN)[index]]


_DAMAGE: dict[str, Callable[[Objects, str, random.Random], None]] = dict(
    zip(KINDS, (_truncate, _flip_bit, _empty, _lose, _append, _swap, _stale, _foreign), strict=True)
)
