"""Where the metrics of the training loop can be seen.

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
from typing import TYPE_CHECKING, NamedTuple

from tiphys.checkpoint.journal import tell
from tiphys.checkpoint.metrics import LoopMetrics, NoMetrics
from tiphys.errors import UsageError
from tiphys.protocol import environment
from tiphys.threads import in_background

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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
