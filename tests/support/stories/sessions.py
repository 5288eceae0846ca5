"""Sessions over a store in memory, with a clock that only moves when told."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from support.builders.lineage import LINEAGE, RUN, STEP, claim_of, write_claim
from support.fakes.memory_store import MemoryStore
from tiphys.checkpoint.settings import CheckpointSettings, SaveInterval, WhenBusy
from tiphys.checkpoint.tracked_session import TrackedSession
from tiphys.errors import ObjectExistsError, StoreError
from tiphys.protocol.step_spec import RetentionPolicy
from tiphys.records import CheckpointRef
from tiphys.store import Store

EVERY_STEP = SaveInterval(1, "steps")


class Clock:
    """Seconds that pass by `advance` alone."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def open_session(
    store: Store,
    attempt: int = 1,
    *,
    checkpoints: Store | None = None,
    resume_from: CheckpointRef | None = None,
    every: SaveInterval = EVERY_STEP,
    keep_last: int | None = None,
    delay_seconds: float = 0,
    clock: Callable[[], float] | None = None,
    grace_seconds: float | None = None,
    asynchronous: bool = False,
    when_busy: WhenBusy | None = None,
    cache: Path | None = None,
    fills_cache: bool = True,
    admit: bool = True,
    incarnation: int = 1,
    **others: Any,
) -> TrackedSession:
    if admit:
        admitted(store, attempt, resume_from)
    settings = CheckpointSettings(
        run=RUN,
        step=STEP,
        attempt=attempt,
        incarnation=incarnation,
        lineage=LINEAGE,
        store=store.url,
        checkpoint_store=(checkpoints or store).url,
        resume_from=resume_from,
        save_every=every,
        keep=RetentionPolicy(last=keep_last, delay_seconds=delay_seconds) if keep_last else None,
        grace_seconds=grace_seconds,
        asynchronous=asynchronous,
        when_busy=when_busy,
        cache=cache,
        fills_cache=fills_cache,
    )
    clock = clock or Clock()
    others.setdefault("upload_threads", 1)
    progress = {"ARGO_PROGRESS_FILE": others.pop("progress_file")} if "progress_file" in others else {}
    others.setdefault("environ", progress)
    return TrackedSession(settings, run_store=store, store=checkpoints or store, clock=clock, **others)


def admitted(store: Store, attempt: int, resume_from: CheckpointRef | None = None) -> None:
    """What admit leaves before a program starts: the claim of its attempt."""
    with contextlib.suppress(ObjectExistsError, StoreError):
        write_claim(store, claim_of(attempt, resume_from))


def state_at(step: int) -> dict[str, Any]:
    """A state that differs at every step, with arrays of several kinds."""
    return {
        "step": step,
        "weights": np.arange(16, dtype=np.float32) * step,
        "momentum": np.full(8, step, dtype=np.float64),
        "rng": {"state": 2**100 + step},
    }


def train(store: Store, total: int, attempt: int = 1, **options: Any) -> None:
    """Run a program that saves after each of ``total`` steps."""
    with open_session(store, attempt, **options) as session:
        state = session.restore(default=state_at(0))
        for step in range(state["step"] + 1, total + 1):
            session.step(step, state_at(step), metrics={"loss": 1 / step})


def newest_shards(store: MemoryStore, attempt: int, step: int) -> list[str]:
    """Keys of the shards of one checkpoint, in order."""
    return [key for key in sorted(store.objects) if f"shards/{attempt:09d}-{step:015d}/" in key]
