"""What the training loop tells Prometheus, declared in one place.

No label takes a run, a step or a user, whose number has no bound; ``rank`` is on
every series, so that the processes of one training stay apart.

Where the metrics of the training loop can be seen.

A training image need not hold prometheus-client, and no training may fail for
its metrics: what cannot be shown is told once and left out.
"""

import re
import socket
import threading
import time
from collections.abc import Callable, Mapping
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import FencedError, ForbiddenError, IntegrityError, StoreError, UsageError
from tiphys.protocol import environment
from tiphys.threads import in_background

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


_TEXTFILE_SECONDS = 10.0
_SHUT_SECONDS = 30.0


class Exposure(NamedTuple):
    """Where the metrics can be seen: an HTTP endpoint, or a folder of node-exporter's textfile collector."""

    address: str = ""
    port: int = 0
    folder: Path | None = None

    @classmethod
    def parse(cls, text: str, where: str = f"{environment.METRICS}=") -> "Exposure":
        """Read ``port:9464``, ``port:127.0.0.1:9464``, ``port:[::1]:9464`` or ``textfile:/absolute/folder``.

        ``where`` begins the message of the error.

        Raises:
            UsageError: it is none of them.
        """
        if match := re.fullmatch(r"port:(?:\[([0-9a-fA-F:.]+)\]:|([^:\[\]]+):)?(\d{1,5})", text):
            if 0 < (port := int(match[3])) < 1 << 16:
                return cls(address=match[1] or match[2] or "0.0.0.0", port=port)  # noqa: S104  Prometheus is elsewhere
        elif text.startswith("textfile:/"):
            return cls(folder=Path(text.removeprefix("textfile:")))
        raise UsageError(f"{where}{text!r} is not valid: write port:9464, port:127.0.0.1:9464 or textfile:/folder")


def open_metrics(environ: Mapping[str, str], clock: Callable[[], float] = time.monotonic) -> NoMetrics:
    """The metrics that ``TIPHYS_METRICS`` asks for. Local ranks serve on ports of their own, one after the other.

    Raises:
        UsageError: the variable is not valid.
    """
    asked = environ.get(environment.METRICS, "")
    if not asked:
        return NoMetrics()
    exposure = Exposure.parse(asked)
    try:
        metrics = LoopMetrics(rank=environ.get("RANK") or "0")
        if exposure.folder is None:
            _serve(metrics, exposure.address, exposure.port + int(environ.get("LOCAL_RANK") or 0))
        else:
            _write(metrics, exposure.folder, clock)
    except ImportError:
        tell(f"no metrics, although {environment.METRICS}={asked}: this image lacks prometheus-client; tiphys[metrics]")
        return NoMetrics()
    except (OSError, OverflowError, ValueError, RuntimeError) as error:  # the last: no thread can be started
        tell(f"no metrics, although {environment.METRICS}={asked}: {error}; the training goes on")
        return NoMetrics()
    return metrics


def _serve(metrics: LoopMetrics, address: str, port: int) -> None:
    from prometheus_client import start_http_server

    server, thread = start_http_server(port, addr=address, registry=metrics.registry)

    def shut() -> None:
        # Both wait for a thread of another library, which may have died for want of memory.
        if closing := in_background(server.shutdown):
            closing.join(_SHUT_SECONDS)
        server.server_close()
        thread.join(_SHUT_SECONDS)

    metrics.shut = shut


def _write(metrics: LoopMetrics, folder: Path, clock: Callable[[], float]) -> None:
    # Pods of one node share the folder, so the host's name is that of the pod; it stays out of the series.
    path = folder / f"tiphys-{socket.gethostname()}-{getpid()}.prom"
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder that exists")
    writer = _TextFile(path, metrics.registry, clock)
    metrics.changed = writer.changed
    metrics.shut = writer.remove
    writer.changed(True)


class _TextFile:
    """Written anew at most every few seconds while steps pass, and at once when a checkpoint is concerned."""

    def __init__(self, path: Path, registry: "CollectorRegistry", clock: Callable[[], float]) -> None:
        self._path = path
        self._registry = registry
        self._clock = clock
        self._written_at: float | None = None
        self._lock = threading.Lock()
        self._works = True

    def changed(self, at_once: bool) -> None:
        from prometheus_client import write_to_textfile

        with self._lock:
            now = self._clock()
            recent = self._written_at is not None and now - self._written_at < _TEXTFILE_SECONDS
            if not self._works or (recent and not at_once):
                return
            self._written_at = now
            try:
                write_to_textfile(str(self._path), self._registry)
            except OSError as error:
                self._works = False
                tell(f"no more metrics: {self._path} cannot be written: {error.strerror}; the training goes on")

    def remove(self) -> None:
        """A file that stays would be read as the state of a training that is over."""
        with self._lock:
            self._works = False
            self._path.unlink(missing_ok=True)
