"""The settings of one attempt, read once from the environment that compile gives a training step.

A misspelt value must not surface after hours as a checkpoint that was never
written, so `CheckpointSettings.from_environment` checks everything when the
session opens. `is_save_due` is pure, so that tests of hours of training take no
time. `open_stores` opens the store of the run and that of the checkpoints.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar, get_args

from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.protocol.quantities import format_duration, parse_duration_seconds
from tiphys.protocol.step_spec import DELETE_AFTER_SECONDS, RetentionPolicy, WhenBusy, parse_keep_best, parse_keep_every
from tiphys.records import CheckpointRef, check_run_name, check_step_id
from tiphys.store import Store, lineage_name, open_store

IntervalUnit = Literal["seconds", "steps"]
WHEN_BUSY: tuple[WhenBusy, ...] = get_args(WhenBusy)

ChoiceT = TypeVar("ChoiceT", bound=str | None)

_STEPS_PATTERN = re.compile(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)\s*steps?")
_AUTO_PATTERN = re.compile(r"auto(?::((?:[^.]|\.(?!\.))+)\.\.(.+))?")
_DEFAULT_SECONDS = 600.0
_DEFAULT_EVERY = f"{_DEFAULT_SECONDS:g}s"


class IntervalBounds(NamedTuple):
    """Bounds of an automatic save interval."""

    lowest_seconds: float
    highest_seconds: float

    @property
    def initial_seconds(self) -> float:
        """The interval before the first measurement: the default interval, within the bounds."""
        return min(max(_DEFAULT_SECONDS, self.lowest_seconds), self.highest_seconds)


@dataclass(frozen=True)
class SaveInterval:
    """The interval between saves, in seconds of training or in optimizer steps.

    With ``auto``, ``amount`` is only the initial interval, which then follows the
    measured cost of saves and failures (`tiphys.checkpoint.save.interval`).
    """

    amount: float
    unit: IntervalUnit
    auto: IntervalBounds | None = None

    @property
    def longest_seconds(self) -> float | None:
        """Longest time between two saves, in seconds; None if it is counted in steps."""
        if self.auto is not None:
            return self.auto.highest_seconds
        return self.amount if self.unit == "seconds" else None


AUTO_BOUNDS = IntervalBounds(60.0, 3600.0)
"""Bounds of ``auto`` without explicit bounds."""


@dataclass(frozen=True)
class CheckpointSettings:
    """Identity of one attempt of a training step, and how it saves and keeps its checkpoints."""

    run: str
    step: str
    attempt: int
    lineage: str
    store: str
    """URL of the run's store: attempts and events."""
    checkpoint_store: str
    """URL of the checkpoint store; often equal to ``store``."""
    resume_from: CheckpointRef | None = None
    """Checkpoint that the plugin chose for this attempt; None to start from the beginning."""
    save_every: SaveInterval = SaveInterval(600.0, "seconds")
    keep: RetentionPolicy | None = None
    """Checkpoints that retention keeps; None keeps all."""
    grace_seconds: float | None = None
    """Seconds between SIGTERM and SIGKILL; None if unknown."""
    hang_after_seconds: float | None = None
    """Shortest time without a completed step after which the watchdog ends the program; None disables the watchdog."""
    asynchronous: bool = True
    """Whether saves run in the background, which takes memory for a copy of the state."""
    when_busy: WhenBusy | None = None
    """What happens if a save is due while another is running: ``skip`` postpones it to the next step, ``wait`` blocks
    the training, ``queue`` takes memory for a second copy. None: see `busy_rule`."""
    incarnation: int = 1
    """Which process of its attempt this is: the launcher starts a program that died again in its pod."""
    cache: Path | None = None
    """Folder on the node that caches shards for its other processes; None disables the cache."""
    fills_cache: bool = True
    """Whether commits fill the cache, too; restores always do."""

    @property
    def busy_rule(self) -> WhenBusy:
        """`when_busy`, or its default: an interval in steps promises a save at those steps, so the training waits."""
        return self.when_busy or ("wait" if self.save_every.unit == "steps" else "skip")

    @property
    def has_own_store(self) -> bool:
        """Whether checkpoints are in a separate store, which the plugin may not reach."""
        return self.checkpoint_store != self.store

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "CheckpointSettings | None":
        """Read the ``TIPHYS_*`` variables; None outside of Tiphys, and for a step that keeps no checkpoints.

        Raises:
            UsageError: a variable is missing or not valid.
        """
        lineage = environ.get(environment.LINEAGE, "")
        if not lineage:
            return None
        store = _required_variable(environ, environment.STORE)
        return cls(
            run=check_run_name(_required_variable(environ, environment.RUN)),
            step=check_step_id(_required_variable(environ, environment.STEP)),
            attempt=_parse_positive(environment.ATTEMPT, _required_variable(environ, environment.ATTEMPT)),
            lineage=lineage,
            store=store,
            checkpoint_store=environ.get(environment.CHECKPOINT_STORE) or store,
            resume_from=_parse_checkpoint_ref(lineage, environ.get(environment.RESUME_FROM, "")),
            save_every=_parse_interval(environ.get(environment.SAVE_EVERY) or _DEFAULT_EVERY),
            keep=_parse_retention(environ),
            grace_seconds=_parse_seconds(environment.GRACE_SECONDS, environ.get(environment.GRACE_SECONDS)),
            hang_after_seconds=_parse_seconds(
                environment.HANG_AFTER_SECONDS, environ.get(environment.HANG_AFTER_SECONDS)
            ),
            asynchronous=_parse_choice(environ, environment.ASYNCHRONOUS, ("true", "false")) == "true",
            when_busy=_parse_choice(environ, environment.WHEN_BUSY, (None, *WHEN_BUSY)),
            incarnation=_parse_positive(environment.INCARNATION, environ.get(environment.INCARNATION) or "1"),
            cache=Path(folder) if (folder := environ.get(environment.CACHE)) else None,
        )


def explain_no_checkpoints(environ: Mapping[str, str]) -> str:
    """Why a program for which `CheckpointSettings.from_environment` finds no settings keeps nothing; one line."""
    if not environ.get(environment.RUN):
        return "outside of a Tiphys step nothing is restored or saved"
    step = environ.get(environment.STEP, "")
    if environ.get(environment.SAVE_EVERY):  # only tiphys-exec removes the variable of the lineage alone
        return f"tiphys-exec keeps the files of step {step!r}, so a session in its program restores and saves nothing"
    return (
        f"step {step!r} keeps no checkpoints, so nothing is restored or saved and each attempt starts from the "
        "beginning; make it a @train or Train without checkpoints=None"
    )


def _required_variable(environ: Mapping[str, str], variable: str) -> str:
    if value := environ.get(variable):
        return value
    raise UsageError(
        f"{environment.LINEAGE} is set but {variable} is not: the environment of the training program differs from the "
        "one that compile wrote; look for an entry that overrides it, or for a child process started without it"
    )


def _parse_choice(environ: Mapping[str, str], variable: str, choices: tuple[ChoiceT, ...]) -> ChoiceT:
    """Return the value of ``variable``, which is one of ``choices``; the first choice if it is not set."""
    text = environ.get(variable)
    for choice in choices:
        if not text or text == choice:
            return choice
    *words, last = [str(choice) for choice in choices if choice]
    raise UsageError(f"{variable}={text!r} is not valid: write {', '.join(words)} or {last}")


def _parse_positive(variable: str, text: str) -> int:
    if text.isascii() and text.isdigit() and int(text) > 0:
        return int(text)
    raise UsageError(f"{variable}={text!r} is not a whole number above 0")


def _parse_retention(environ: Mapping[str, str]) -> RetentionPolicy | None:
    last = environ.get(environment.KEEP_LAST, "")
    every, best = environ.get(environment.KEEP_EVERY), environ.get(environment.KEEP_BEST)
    delay = _parse_seconds(environment.DELETE_AFTER_SECONDS, environ.get(environment.DELETE_AFTER_SECONDS))
    keep = RetentionPolicy(
        last=1 if last in ("", "all") else _parse_positive(environment.KEEP_LAST, last),
        every_steps=parse_keep_every(every, f"{environment.KEEP_EVERY}=") if every else None,
        best=parse_keep_best(best, f"{environment.KEEP_BEST}=") if best else None,
        delay_seconds=DELETE_AFTER_SECONDS if delay is None else delay,
    )
    return None if last in ("", "all") else keep


def _parse_seconds(variable: str, text: str | None) -> float | None:
    if not text:
        return None
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    raise UsageError(f"{variable}={text!r} is not a number of seconds")


def _parse_interval(text: str) -> SaveInterval:
    if automatic := _AUTO_PATTERN.fullmatch(text.strip()):
        return _parse_auto_interval(text, automatic)
    steps = _STEPS_PATTERN.fullmatch(text.strip())
    interval = SaveInterval(float(steps[1]), "steps") if steps else SaveInterval(_parse_time(text, text), "seconds")
    if not interval.amount:
        raise _invalid_interval(text)
    return interval


def _parse_time(time: str, variable_text: str) -> float:
    # A number without a unit could mean seconds or steps.
    if not time.strip()[-1:].isalpha():
        raise _invalid_interval(variable_text)
    try:
        return parse_duration_seconds(time)
    except UsageError as error:
        raise _invalid_interval(variable_text) from error


def _invalid_interval(text: str) -> UsageError:
    return UsageError(
        f"{environment.SAVE_EVERY}={text!r} is not valid: write 600s, 10m, 1h, 100 steps, auto or auto:1m..1h"
    )


def _parse_auto_interval(text: str, match: re.Match[str]) -> SaveInterval:
    lowest, highest = match.groups()
    bounds = AUTO_BOUNDS
    if lowest is not None:
        bounds = IntervalBounds(_parse_time(lowest, text), _parse_time(highest, text))
    if not 0 < bounds.lowest_seconds <= bounds.highest_seconds:
        raise UsageError(f"{environment.SAVE_EVERY}={text!r} is not valid: the lower bound comes first, above 0")
    return SaveInterval(bounds.initial_seconds, "seconds", auto=bounds)


def _parse_checkpoint_ref(lineage: str, text: str) -> CheckpointRef | None:
    if not text:
        return None
    match = re.fullmatch(r"(?:([^/]+)/([^/]+)/)?(\d+)-(\d+)", text)
    if not match:
        raise UsageError(
            f"{environment.RESUME_FROM}={text!r} is not valid: write <attempt>-<global step>, with the prefix "
            "<run>/<step>/ for a checkpoint of another run, or leave it empty"
        )
    lineage = lineage_name(match[1], match[2]) if match[1] else lineage
    return CheckpointRef(lineage=lineage, attempt=int(match[3]), global_step=int(match[4]))


def is_save_due(every: SaveInterval, *, seconds_since_save: float, last_step: int, global_step: int) -> bool:
    """Return whether the state after ``global_step`` steps is to be saved. Pure.

    An interval in steps is due at its multiples, so that a run saves at the same
    steps however often it was interrupted.

    ``last_step`` is the step of the last save, or the restored one.
    """
    if every.unit == "seconds":
        return seconds_since_save >= every.amount
    return global_step // every.amount > last_step // every.amount


def describe_next_save(every: SaveInterval, *, seconds_since_save: float, global_step: int) -> str:
    """When `is_save_due`: ``the next save is due in 9m 40s``, or ``the next save is due at step 1,000``. Pure."""
    if every.unit == "steps":
        return f"the next save is due at step {(global_step // every.amount + 1) * every.amount:,.0f}"
    seconds_left = round(every.amount - seconds_since_save)
    return f"the next save is due {f'in {format_duration(seconds_left)}' if seconds_left > 0 else 'at the next step'}"


def open_stores(settings: CheckpointSettings) -> tuple[Store, Store]:
    """Open the store of the run and that of its checkpoints; raises as `open_store` does."""
    # must_exist: an unmounted volume must not become a folder that is lost with the pod.
    run_store = open_store(settings.store, must_exist=True)
    return run_store, open_store(settings.checkpoint_store, must_exist=True) if settings.has_own_store else run_store
