"""The Prometheus metrics of the training loop: their declarations, and how they are exported.

No label contains a run, a step or a user, because their number is unbounded.
Every series has the label ``rank``, so that the processes of one training stay
apart. A training image need not contain prometheus-client, and no training may
fail because of metrics: `open_metrics` logs a problem once and returns
`NoMetrics`.
"""

import re
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import FencedError, ForbiddenError, IntegrityError, StoreError, UsageError
from tiphys.protocol import environment
from tiphys.records import utc_now
from tiphys.threads import start_background_thread

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry


_STALL_BUCKETS = (0.001, 0.005, 0.02, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
_TRANSFER_BUCKETS = (0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600, 1800)

SAVE_FAILURE_CAUSES = ("storage", "forbidden", "integrity", "state", "fenced", "timeout", "other")
"""Values of the label ``cause``; any other value counts as ``other``."""


class MetricDeclaration(NamedTuple):
    """One metric. Counters get Prometheus' suffix ``_total``."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


METRIC_DECLARATIONS = (
    MetricDeclaration("tiphys_train_steps", "counter", "Optimizer steps completed by this process."),
    MetricDeclaration(
        "tiphys_train_steps_since_checkpoint", "gauge", "Steps that would have to be done again after a failure."
    ),
    MetricDeclaration(
        "tiphys_checkpoint_stall_seconds", "histogram", "How long a save stopped the training.", (), _STALL_BUCKETS
    ),
    MetricDeclaration(
        "tiphys_checkpoint_upload_seconds",
        "histogram",
        "From the end of the stall to the commit.",
        (),
        _TRANSFER_BUCKETS,
    ),
    MetricDeclaration("tiphys_checkpoint_upload_bytes", "counter", "Bytes of committed checkpoints."),
    MetricDeclaration(
        "tiphys_checkpoint_saves", "counter", "Saves by result: committed, failed, skipped (busy).", ("result",)
    ),
    MetricDeclaration(
        "tiphys_checkpoint_save_failures",
        "counter",
        f"Failed saves by cause: {', '.join(SAVE_FAILURE_CAUSES)}.",
        ("cause",),
    ),
    MetricDeclaration(
        "tiphys_checkpoint_last_commit_timestamp_seconds",
        "gauge",
        "Unix time of the newest commit; before the first one, of the start of the process.",
    ),
    MetricDeclaration(
        "tiphys_checkpoint_interval_seconds",
        "gauge",
        "Longest intended time between two commits: the configured one, or that between the last two.",
    ),
    MetricDeclaration(
        "tiphys_checkpoint_restore_seconds", "histogram", "Time to restore, checks included.", (), _TRANSFER_BUCKETS
    ),
    MetricDeclaration("tiphys_checkpoint_restore_bytes", "counter", "Bytes of restored checkpoints."),
    MetricDeclaration(
        "tiphys_checkpoint_verify_failures", "counter", "Checkpoints whose bytes were not those of the manifest."
    ),
)


def classify_save_failure(error: BaseException) -> str:
    """Return the value of `SAVE_FAILURE_CAUSES` for an error that ended a save."""
    causes: tuple[tuple[type[BaseException], str], ...] = (
        (FencedError, "fenced"),
        (ForbiddenError, "forbidden"),
        (IntegrityError, "integrity"),
        (UsageError, "state"),
        (TimeoutError, "timeout"),
        (StoreError, "storage"),
    )
    return next((cause for error_type, cause in causes if isinstance(error, error_type)), "other")


class NoMetrics:
    """Ignores every measurement, for a session without metrics."""

    def record_step(self, global_step: int) -> None:
        """Record that ``global_step`` optimizer steps are complete."""

    def record_stall(self, seconds: float) -> None:
        """Record how long a save stopped the training."""

    def record_upload(self, seconds: float, size_bytes: int) -> None:
        """Record that the shards of a checkpoint were uploaded."""

    def record_save(self, global_step: int | None = None) -> None:
        """Record a committed checkpoint of ``global_step``; None for the newest recorded step."""

    def record_failure(self, cause: str) -> None:
        """Record a failed save; ``cause`` is one of `SAVE_FAILURE_CAUSES`."""

    def record_skip(self) -> None:
        """Record that a due save was skipped because another was running."""

    def record_restore(self, seconds: float, size_bytes: int, global_step: int | None = None) -> None:
        """Record a restored checkpoint; steps are counted from its ``global_step``."""

    def record_verify_failure(self) -> None:
        """Record that a checkpoint was skipped because its bytes do not match its manifest."""

    def close(self) -> None:
        """Stop the export."""


class TrainingMetrics(NoMetrics):
    """The metrics of one process, in a registry of their own; methods may be called from any thread."""

    def __init__(
        self,
        rank: str = "0",
        interval_seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = utc_now,
    ) -> None:
        """Create the metrics.

        ``interval_seconds`` is as in `open_metrics`, ``now`` the time that a commit is exported with.

        Raises:
            ImportError: prometheus-client is not installed.
        """
        from prometheus_client import CollectorRegistry

        self.registry: CollectorRegistry = CollectorRegistry()
        self._metrics = {declared.name: _make_metric(declared, self.registry) for declared in METRIC_DECLARATIONS}
        self._rank = rank
        self._global_step: int | None = None
        self._saved_step: int | None = None
        self._lock = threading.Lock()
        self._clock = clock
        self._now = now
        self._is_interval_configured = interval_seconds is not None
        self._committed_at: float | None = None
        for result in ("committed", "failed", "skipped"):  # so that the first failure is an increase, too
            self._series("tiphys_checkpoint_saves", result=result)
        self._series("tiphys_checkpoint_last_commit_timestamp_seconds").set(now().timestamp())
        if interval_seconds is not None:
            self._series("tiphys_checkpoint_interval_seconds").set(interval_seconds)
        self.on_close: Callable[[], None] = lambda: None

    def record_step(self, global_step: int) -> None:
        with self._lock:
            if self._global_step is None:  # the first recorded step counts as one step of this process
                self._global_step = self._saved_step = global_step - 1
            self._series("tiphys_train_steps").inc(max(0, global_step - self._global_step))
            self._global_step = global_step
            self._set_steps_since_checkpoint()

    def record_stall(self, seconds: float) -> None:
        self._series("tiphys_checkpoint_stall_seconds").observe(seconds)

    def record_upload(self, seconds: float, size_bytes: int) -> None:
        self._series("tiphys_checkpoint_upload_seconds").observe(seconds)
        self._series("tiphys_checkpoint_upload_bytes").inc(size_bytes)

    def record_save(self, global_step: int | None = None) -> None:
        with self._lock:
            self._saved_step = self._global_step if global_step is None else global_step
            self._set_steps_since_checkpoint()
            self._record_commit_time()
        self._count_save("committed")

    def record_failure(self, cause: str) -> None:
        label = cause if cause in SAVE_FAILURE_CAUSES else "other"
        self._series("tiphys_checkpoint_save_failures", cause=label).inc()
        self._count_save("failed")

    def record_skip(self) -> None:
        self._count_save("skipped")

    def record_restore(self, seconds: float, size_bytes: int, global_step: int | None = None) -> None:
        with self._lock:
            self._global_step = self._saved_step = global_step
        self._series("tiphys_checkpoint_restore_seconds").observe(seconds)
        self._series("tiphys_checkpoint_restore_bytes").inc(size_bytes)

    def record_verify_failure(self) -> None:
        self._series("tiphys_checkpoint_verify_failures").inc()

    def close(self) -> None:
        self.on_close()

    def _count_save(self, result: str) -> None:
        self._series("tiphys_checkpoint_saves", result=result).inc()

    def _record_commit_time(self) -> None:
        self._series("tiphys_checkpoint_last_commit_timestamp_seconds").set(self._now().timestamp())
        committed_at, before = self._clock(), self._committed_at
        if before is not None and not self._is_interval_configured:
            self._series("tiphys_checkpoint_interval_seconds").set(committed_at - before)
        self._committed_at = committed_at

    def _set_steps_since_checkpoint(self) -> None:
        if self._global_step is not None and self._saved_step is not None:
            since = max(0, self._global_step - self._saved_step)
            self._series("tiphys_train_steps_since_checkpoint").set(since)

    def _series(self, name: str, **labels: str) -> Any:
        return self._metrics[name].labels(rank=self._rank, **labels)


def _make_metric(declared: MetricDeclaration, registry: "CollectorRegistry") -> Any:
    from prometheus_client import Counter, Gauge, Histogram

    labels = ("rank", *declared.labels)
    if declared.kind == "histogram":
        buckets = declared.buckets
        return Histogram(declared.name, declared.meaning, labels, buckets=buckets, registry=registry)
    kind = Counter if declared.kind == "counter" else Gauge
    return kind(declared.name, declared.meaning, labels, registry=registry)


_SHUT_SECONDS = 30.0


class MetricsEndpoint(NamedTuple):
    """The HTTP endpoint where metrics are exported."""

    address: str
    port: int

    @classmethod
    def parse(cls, text: str, error_prefix: str = f"{environment.METRICS}=") -> "MetricsEndpoint":
        """Read ``port:9464``, ``port:127.0.0.1:9464`` or ``port:[::1]:9464``.

        Raises:
            UsageError: ``text`` has none of these forms.
        """
        match = re.fullmatch(r"port:(?:\[([0-9a-fA-F:.]+)\]:|([^:\[\]]+):)?(\d{1,5})", text)
        if match and 0 < (port := int(match[3])) < 1 << 16:
            return cls(match[1] or match[2] or "0.0.0.0", port)  # noqa: S104  Prometheus runs on another machine
        raise UsageError(f"{error_prefix}{text!r} is not valid: write port:9464 or port:127.0.0.1:9464")


def open_metrics(environ: Mapping[str, str], interval_seconds: float | None = None) -> NoMetrics:
    """Open the metrics that ``TIPHYS_METRICS`` configures; `NoMetrics` if they cannot be exported.

    Each local rank serves on its own port: the configured one plus ``LOCAL_RANK``.

    ``interval_seconds`` is the longest configured time between two saves; None: it is counted in steps.

    Raises:
        UsageError: the variable is not valid.
    """
    setting = environ.get(environment.METRICS, "")
    if not setting:
        return NoMetrics()
    endpoint = MetricsEndpoint.parse(setting)
    try:
        metrics = TrainingMetrics(environ.get("RANK") or "0", interval_seconds)
        _serve_metrics(metrics, endpoint.address, endpoint.port + int(environ.get("LOCAL_RANK") or 0))
    except ImportError:
        log_message(
            f"no metrics, although {environment.METRICS}={setting}: this image lacks prometheus-client; install "
            "tiphys[metrics]"
        )
        return NoMetrics()
    except (OSError, OverflowError, ValueError, RuntimeError) as error:  # RuntimeError: no thread can be started
        log_message(f"no metrics, although {environment.METRICS}={setting}: {error}; the training continues")
        return NoMetrics()
    return metrics


def _serve_metrics(metrics: TrainingMetrics, address: str, port: int) -> None:
    from prometheus_client import start_http_server

    server, thread = start_http_server(port, addr=address, registry=metrics.registry)

    def stop_server() -> None:
        # The waits have a timeout: the server's own thread may have died without memory.
        if shutdown := start_background_thread(server.shutdown):
            shutdown.join(_SHUT_SECONDS)
        server.server_close()
        thread.join(_SHUT_SECONDS)

    metrics.on_close = stop_server
