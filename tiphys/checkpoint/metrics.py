"""What the training loop tells Prometheus, declared in one place.

No label takes a run, a step or a user, whose number has no bound; ``rank`` is on
every series, so that the processes of one training stay apart.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tiphys.errors import FencedError, ForbiddenError, IntegrityError, StoreError, UsageError

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

_STALLS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
_TRANSFERS = (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800)

CAUSES = ("storage", "forbidden", "integrity", "state", "fenced", "timeout", "other")
"""Why a save failed; any other word counts as ``other``."""


class Declared(NamedTuple):
    """One metric. Counters get Prometheus' suffix ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


DECLARED = (
    Declared("tiphys_train_steps", "counter", "Optimizer steps completed by this process."),
    Declared("tiphys_train_steps_since_checkpoint", "gauge", "Steps that would have to be done again after a failure."),
    Declared("tiphys_checkpoint_stall_seconds", "histogram", "How long a save stopped the training.", (), _STALLS),
    Declared(
        "tiphys_checkpoint_upload_seconds", "histogram", "From the end of the stall to the commit.", (), _TRANSFERS
    ),
    Declared("tiphys_checkpoint_upload_bytes", "counter", "Bytes of committed checkpoints."),
    Declared("tiphys_checkpoint_saves", "counter", "Saves by result: committed, failed, skipped (busy).", ("result",)),
    Declared("tiphys_checkpoint_save_failures", "counter", f"Failed saves by cause: {', '.join(CAUSES)}.", ("cause",)),
    Declared("tiphys_checkpoint_restore_seconds", "histogram", "Time to restore, checks included.", (), _TRANSFERS),
    Declared("tiphys_checkpoint_restore_bytes", "counter", "Bytes of restored checkpoints."),
    Declared("tiphys_checkpoint_verify_failures", "counter", "Checkpoints whose bytes were not those of the manifest."),
)


def cause_of(error: BaseException) -> str:
    """The word of `CAUSES` for an error that ended a save."""
    known: tuple[tuple[type[BaseException], str], ...] = (
        (FencedError, "fenced"),
        (ForbiddenError, "forbidden"),
        (IntegrityError, "integrity"),
        (UsageError, "state"),
        (TimeoutError, "timeout"),
        (StoreError, "storage"),
    )
    return next((word for kind, word in known if isinstance(error, kind)), "other")


class NoMetrics:
    """Takes every number and shows none; what a session uses where no metrics were asked for."""

    def step(self, global_step: int) -> None:
        """``global_step`` optimizer steps are complete."""

    def stalled(self, seconds: float) -> None:
        """A save stopped the training for so long."""

    def uploaded(self, seconds: float, size_bytes: int) -> None:
        """The bytes of a checkpoint have travelled."""

    def saved(self, global_step: int | None = None) -> None:
        """A checkpoint is committed; None: that of the newest step told."""

    def failed(self, cause: str) -> None:
        """A save failed; ``cause`` is one of `CAUSES`."""

    def skipped(self) -> None:
        """A save that was due was left out, because another was under way."""

    def restored(self, seconds: float, size_bytes: int, global_step: int | None = None) -> None:
        """A checkpoint was restored; steps count from its ``global_step`` on."""

    def verify_failed(self) -> None:
        """A checkpoint was passed over because its bytes were wrong."""

    def close(self) -> None:
        """Show no more."""


class LoopMetrics(NoMetrics):
    """The metrics of one process, in a registry of their own; methods may be called from any thread."""

    def __init__(self, rank: str = "0") -> None:
        """Raises ImportError where prometheus-client is not installed."""
        from prometheus_client import CollectorRegistry

        self.registry: CollectorRegistry = CollectorRegistry()
        self._metrics = {declared.name: _made(declared, self.registry) for declared in DECLARED}
        self._rank = rank
        self._global_step: int | None = None
        self._saved_step: int | None = None
        self._lock = threading.Lock()
        self.changed: Callable[[bool], None] = lambda at_once: None  # noqa: ARG005
        """Called after each change; the argument says whether it is worth showing at once."""
        self.shut: Callable[[], None] = lambda: None

    def step(self, global_step: int) -> None:
        with self._lock:
            if self._global_step is None:  # the first step told is one step from where the process began
                self._global_step = self._saved_step = global_step - 1
            self._series("tiphys_train_steps").inc(max(0, global_step - self._global_step))
            self._global_step = global_step
            self._show_distance()
        self.changed(False)

    def stalled(self, seconds: float) -> None:
        self._series("tiphys_checkpoint_stall_seconds").observe(seconds)

    def uploaded(self, seconds: float, size_bytes: int) -> None:
        self._series("tiphys_checkpoint_upload_seconds").observe(seconds)
        self._series("tiphys_checkpoint_upload_bytes").inc(size_bytes)

    def saved(self, global_step: int | None = None) -> None:
        with self._lock:
            self._saved_step = self._global_step if global_step is None else global_step
            self._show_distance()
        self._result("committed")

    def failed(self, cause: str) -> None:
        known = cause if cause in CAUSES else "other"
        self._series("tiphys_checkpoint_save_failures", cause=known).inc()
        self._result("failed")

    def skipped(self) -> None:
        self._result("skipped")

    def restored(self, seconds: float, size_bytes: int, global_step: int | None = None) -> None:
        with self._lock:
            self._global_step = self._saved_step = global_step
        self._series("tiphys_checkpoint_restore_seconds").observe(seconds)
        self._series("tiphys_checkpoint_restore_bytes").inc(size_bytes)
        self.changed(True)

    def verify_failed(self) -> None:
        self._series("tiphys_checkpoint_verify_failures").inc()
        self.changed(True)

    def close(self) -> None:
        self.shut()

    def _result(self, result: str) -> None:
        self._series("tiphys_checkpoint_saves", result=result).inc()
        self.changed(True)

    def _show_distance(self) -> None:
        if self._global_step is not None and self._saved_step is not None:
            since = max(0, self._global_step - self._saved_step)
            self._series("tiphys_train_steps_since_checkpoint").set(since)

    def _series(self, name: str, **labels: str) -> Any:
        return self._metrics[name].labels(rank=self._rank, **labels)


def table() -> str:
    """The declarations as the table of the documentation."""
    rows = ["| metric | kind | meaning |", "|---|---|---|"]
    for declared in DECLARED:
        shown = declared.name + ("_total" if declared.kind == "counter" else "")
        rows.append(f"| `{shown}` | {declared.kind} | {declared.meaning} |")
    return "\n".join(rows) + "\n"


def _made(declared: Declared, registry: "CollectorRegistry") -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    labels = ("rank", *declared.labels)
    if declared.kind == "histogram":
        buckets = declared.buckets
        return Histogram(declared.name, declared.meaning, labels, buckets=buckets, registry=registry)
    kind = Counter if declared.kind == "counter" else Gauge
    return kind(declared.name, declared.meaning, labels, registry=registry)
