"""What every part measures with: one state, one server, sessions as a training program opens them."""

import io
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from bench.checkpoint.server import S3, STORE
from bench.samples import seconds
from support.builders.lineage import claim_of, write_claim

from tiphys import checkpoint
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.session import Session
from tiphys.protocol import environment
from tiphys.store import Store, open_store

STEP = "fit"
TENSORS = 64
MIB = 1 << 20
State = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class Workload:
    server: S3
    quick: bool
    seed: int
    state_mib: int
    repeats: int
    """Of each measurement."""
    throttle: float = 100.0
    """Megabytes per second that the slow network grants."""
    state: State = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", make_state(self.state_mib, self.seed))

    @property
    def networks(self) -> dict[str, float | None]:
        """Megabytes per second of the slow network and, where there is time for it, of one that grants all."""
        return {"throttled": self.throttle} if self.quick else {"throttled": self.throttle, "free": None}


def make_state(mib: int, seed: int) -> State:
    """Float32 arrays of equal size and random content."""
    random = np.random.default_rng(seed)
    size = mib * MIB // TENSORS // 4
    return {f"layer{index:02}": random.random(size, dtype=np.float32) for index in range(TENSORS)}


def variables(store_url: str, run: str, **more: str) -> dict[str, str]:
    """What a compiled step gives its program; retention stays away, since it is no part of a save's time."""
    return {
        environment.STORE: store_url,
        environment.RUN: run,
        environment.STEP: STEP,
        environment.ATTEMPT: "1",
        environment.LINEAGE: f"{run}/{STEP}",
        environment.SAVE_EVERY: "1000000000 steps",
        environment.KEEP_LAST: "all",
        **more,
    }


def new_run(store: Store) -> str:
    """A run whose training step has its first attempt."""
    run = f"bench-{uuid.uuid4().hex[:8]}"
    write_claim(store, claim_of(1, run=run, step=STEP))
    return run


@contextmanager
def session(url: str = STORE, run: str = "", **more: str) -> Iterator[Session]:
    """A session of a run, by default a new one; what it has to tell goes nowhere."""
    run = run or new_run(open_store(url))
    with redirect_stderr(io.StringIO()), checkpoint.session(environ=variables(url, run, **more)) as opened:
        yield opened


def commit(opened: Session, step: int, work: Workload) -> float:
    """Save, and wait for the commit; seconds of which training stood still."""
    saves: list[Save | None] = []
    took = seconds(lambda: saves.append(opened.save(step, work.state)))
    if saves[0] is None or saves[0].wait() is None:
        raise RuntimeError(f"the save of step {step} was not committed")
    return took
