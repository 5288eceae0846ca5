"""What the compiled step tells the training program, read once from its environment.

A typing error here must not surface after hours as a checkpoint that was never
written, so everything is checked when the session opens.

When is a save due? Pure, so that hours of training are tested in no time.

The stores of an attempt: that of its run, and that of its checkpoints.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.step_spec import DELETE_AFTER_SECONDS, Keep, WhenBusy, parse_best, parse_every
from tiphys.records import CheckpointRef, check_run, check_step
from tiphys.store import Store, lineage_of, open_store

Unit = Literal["seconds", "steps"]
WHEN_BUSY: tuple[WhenBusy, ...] = get_args(WhenBusy)

_AMOUNT = r"(\d+(?:\.\d+)?(?:e\+?\d+)?)"
ChoiceT = TypeVar("ChoiceT", bound=str | None)

_EVERY = re.compile(rf"{_AMOUNT}\s*(s|m|h|steps?)")
_AUTO = re.compile(rf"auto(?::{_AMOUNT}(s|m|h)\.\.{_AMOUNT}(s|m|h))?")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_DEFAULT_SECONDS = 600.0
_DEFAULT_EVERY = f"{_DEFAULT_SECONDS:g}s"


class Bounds(NamedTuple):
    """Between which intervals Tiphys may choose."""

    lowest_seconds: float
    highest_seconds: float

    @property
    def begin_seconds(self) -> float:
        """The interval while nothing was measured: what those have who set nothing, within the bounds."""
        return min(max(_DEFAULT_SECONDS, self.lowest_seconds), self.highest_seconds)


@dataclass(frozen=True)
class Every:
    """How much may be lost at most: an interval in seconds of training, or in optimizer steps.

    With ``auto``, ``amount`` is only where to begin: the interval follows what
    saves and failures were measured to cost (`tiphys.checkpoint.save.interval`).
    """

    amount: float
    unit: Unit
    auto: Bounds | None = None


AUTO_BOUNDS = Bounds(60.0, 3600.0)
"""What ``auto`` means where nobody said more."""


@dataclass(frozen=True)
class Settings:
    """One attempt of one training step, and how it keeps its checkpoints."""

    run: str
    step: str
    attempt: int
    lineage: str
    store: str
    """URL of the run's store: attempts and events."""
    checkpoint_store: str
    """URL of the store that holds the checkpoints; often the same."""
    resume_from: CheckpointRef | None = None
    """What this attempt was told to start from."""
    save_every: Every = Every(600.0, "seconds")
    keep: Keep | None = None
    """Which checkpoints retention leaves; None keeps all."""
    grace_seconds: float | None = None
    """Time between SIGTERM and SIGKILL; None when nobody said."""
    hang_after_seconds: float | None = None
    """How long the training may complete no step before it is ended; None for as long as it likes."""
    asynchronous: bool = True
    """Whether saves go on behind the training, which takes memory for a copy of the state."""
    when_busy: WhenBusy | None = None
    """What a save does that is due while another is under way: ``skip`` puts it off to the next step, ``wait`` has
    the training wait, ``queue`` takes memory for one more copy. None: see `busy_rule`."""
    cache: Path | None = None
    """Folder on the node where shards that were read are kept for its other processes; None for none."""

    @property
    def busy_rule(self) -> WhenBusy:
        """`when_busy`, or what suits the interval: who counts steps expects a save at those, and the training waits."""
        return self.when_busy or ("wait" if self.save_every.unit == "steps" else "skip")

    @property
    def has_volume(self) -> bool:
        """Whether checkpoints lie in a store of their own, which the plugin may not see."""
        return self.checkpoint_store != self.store

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Settings | None":
        """Read ``TIPHYS_*``; None outside of Tiphys, and for a step that keeps no checkpoints.

        Raises:
            UsageError: a variable is missing or not valid.
        """
        lineage = environ.get(environment.LINEAGE, "")
        if not lineage:
            return None
        store = _required(environ, environment.STORE)
        return cls(
            run=check_run(_required(environ, environment.RUN)),
            step=check_step(_required(environ, environment.STEP)),
            attempt=_positive(environment.ATTEMPT, _required(environ, environment.ATTEMPT)),
            lineage=lineage,
            store=store,
            checkpoint_store=environ.get(environment.CHECKPOINT_STORE) or store,
            resume_from=_reference(lineage, environ.get(environment.RESUME_FROM, "")),
            save_every=_every(environ.get(environment.SAVE_EVERY) or _DEFAULT_EVERY),
            keep=_keep(environ),
            grace_seconds=_seconds(environment.GRACE_SECONDS, environ.get(environment.GRACE_SECONDS)),
            hang_after_seconds=_seconds(environment.HANG_AFTER_SECONDS, environ.get(environment.HANG_AFTER_SECONDS)),
            asynchronous=_choice(environ, environment.ASYNCHRONOUS, ("true", "false")) == "true",
            when_busy=_choice(environ, environment.WHEN_BUSY, (None, *WHEN_BUSY)),
            cache=Path(folder) if (folder := environ.get(environment.CACHE)) else None,
        )


def _required(environ: Mapping[str, str], variable: str) -> str:
    if value := environ.get(variable):
        return value
    raise UsageError(
        f"{environment.LINEAGE} is set but {variable} is not: the environment of the training program is not the one "
        "that compile gave it; look for an entry that overrides it, or a child process started without it"
    )


def _choice(environ: Mapping[str, str], variable: str, choices: tuple[ChoiceT, ...]) -> ChoiceT:
    """The value of ``variable``, which is one of ``choices``; the first where it is not set."""
    text = environ.get(variable)
    for choice in choices:
        if not text or text == choice:
            return choice
    *words, last = [str(choice) for choice in choices if choice]
    raise UsageError(f"{variable}={text!r} is not valid: write {', '.join(words)} or {last}")


def _positive(variable: str, text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise UsageError(f"{variable}={text!r} is not a whole number above 0")


def _keep(environ: Mapping[str, str]) -> Keep | None:
    last = environ.get(environment.KEEP_LAST, "")
    every, best = environ.get(environment.KEEP_EVERY), environ.get(environment.KEEP_BEST)
    delay = _seconds(environment.DELETE_AFTER_SECONDS, environ.get(environment.DELETE_AFTER_SECONDS))
    keep = Keep(
        last=1 if last in ("", "all") else _positive(environment.KEEP_LAST, last),
        every_steps=parse_every(every, f"{environment.KEEP_EVERY}=") if every else None,
        best=parse_best(best, f"{environment.KEEP_BEST}=") if best else None,
        delay_seconds=DELETE_AFTER_SECONDS if delay is None else delay,
    )
    return None if last in ("", "all") else keep


def _seconds(variable: str, text: str | None) -> float | None:
    if not text:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    raise UsageError(f"{variable}={text!r} is not a number of seconds")


def _every(text: str) -> Every:
    if automatic := _AUTO.fullmatch(text.strip()):
        return _automatic(text, automatic)
    match = _EVERY.fullmatch(text.strip())
    if not match or float(match[1]) == 0:
        raise UsageError(
            f"{environment.SAVE_EVERY}={text!r} is not valid: write 600s, 10m, 1h, 100 steps, auto or auto:1m..1h"
        )
    amount, unit = float(match[1]), match[2]
    return Every(amount * _SECONDS[unit], "seconds") if unit in _SECONDS else Every(amount, "steps")


def _automatic(text: str, match: re.Match[str]) -> Every:
    low, low_unit, high, high_unit = match.groups()
    bounds = AUTO_BOUNDS
    if low is not None:
        bounds = Bounds(float(low) * _SECONDS[low_unit], float(high) * _SECONDS[high_unit])
    if not 0 < bounds.lowest_seconds <= bounds.highest_seconds:
        raise UsageError(f"{environment.SAVE_EVERY}={text!r} is not valid: the lower bound comes first, above 0")
    return Every(bounds.begin_seconds, "seconds", auto=bounds)


def _reference(lineage: str, text: str) -> CheckpointRef | None:
    if not text:
        return None
    match = re.fullmatch(r"(?:([^/]+)/([^/]+)/)?(\d+)-(\d+)", text)
    if not match:
        raise UsageError(
            f"{environment.RESUME_FROM}={text!r} is not valid: write <attempt>-<global step>, with <run>/<step>/ "
            "before it for a checkpoint of another run, or nothing"
        )
    of = lineage_of(match[1], match[2]) if match[1] else lineage
    return CheckpointRef(lineage=of, attempt=int(match[3]), global_step=int(match[4]))


def is_due(every: Every, *, seconds_since_save: float, last_step: int, global_step: int) -> bool:
    """Whether state after ``global_step`` steps shall be saved.

    By time: once ``every`` seconds have passed since the last save ended or
    failed. By steps: when a multiple of ``every`` was reached since, so that a
    run saves at the same steps however often it was interrupted.
    """
    if every.unit == "seconds":
        return seconds_since_save >= every.amount
    return global_step // every.amount > last_step // every.amount


def open_stores(settings: Settings) -> tuple[Store, Store]:
    """The store of the run, and that of its checkpoints; raises as `open_store` does."""
    # A volume that is not mounted must not become a folder that dies with the pod.
    run_store = open_store(settings.store, must_exist=True)
    return run_store, open_store(settings.checkpoint_store, must_exist=True) if settings.has_volume else run_store
