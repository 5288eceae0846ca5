"""The Workflows of a state folder, and the lock by which a live engine is recognized.

Each engine holds a lock on the workflow that it runs. The kernel releases the lock
when the process ends for any reason, so a Running workflow without a lock has lost
its engine. Commands that only look at runs need no more than this module.
"""

import fcntl
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from tiphys_controller.submit.submitter import LiveWorkflow, ShutdownStrategy
from tiphys_plugin.cluster.interface import DirectoryCluster

from tiphys.errors import ConflictError, NotFoundError
from tiphys.protocol.compiled_workflow import Manifest

_WATCH_SECONDS = 0.3


class LocalWorkflows:
    """Finds the Workflows of the state folder ``state``; a `tiphys_controller.Submitter` that creates none."""

    def __init__(self, state: Path) -> None:
        self._state = state.absolute()
        self._cluster = DirectoryCluster(self._state / "cluster")

    @property
    def state(self) -> Path:
        return self._state

    @property
    def cluster(self) -> str:
        return self._cluster.name

    def find(self, namespace: str, name: str) -> LiveWorkflow | None:
        """Find the Workflow ``name``; it counts as running only while a live engine runs it."""
        document = self._cluster.workflow(namespace, name)
        return self._live_workflow(document) if document is not None else None

    def read(self, namespace: str, name: str) -> Manifest | None:
        """The whole object of that name; None if there is none."""
        return self._cluster.workflow(namespace, name)

    def create(self, manifest: Manifest) -> LiveWorkflow:
        """Raise `ConflictError`: no engine runs here."""
        name = manifest["metadata"].get("name", "")
        raise ConflictError(f"no engine is open for Workflow {name}; use a LocalSession as a context manager")

    def watch(self, name: str) -> Iterator[Manifest]:
        """Yield the Workflow ``name`` now and at each change, until it has finished or its engine is gone.

        Raises:
            NotFoundError: there is no such Workflow.
        """
        last: Manifest | None = None
        while True:
            is_alive = is_workflow_locked(self._state, name)  # before the read, so that the last one sees the end
            document = self._cluster.workflow("default", name)
            if document is None:
                raise NotFoundError(f"there is no Workflow {name} in {self._state}")
            if document != last:
                yield document
            last = document
            if not is_alive:
                return
            time.sleep(_WATCH_SECONDS)

    def stop(self, workflow: LiveWorkflow, strategy: ShutdownStrategy = ShutdownStrategy.STOP) -> None:
        """Stop a running Workflow by the signals that its terminal would send.

        Raises:
            ConflictError: its engine cannot be signalled from here.
        """
        engine = _read_engine_pid(self._state, workflow.name)
        try:
            if engine is None:
                raise ProcessLookupError
            os.kill(engine, signal.SIGTERM)
            if strategy is ShutdownStrategy.TERMINATE:
                os.kill(engine, signal.SIGINT)  # another signal, because two pending ones of a kind are one
        except (ProcessLookupError, PermissionError) as error:
            raise ConflictError(
                f"the engine of Workflow {workflow.name} in {self._state} belongs to another program or user, or runs "
                "in another container; stop it there"
            ) from error

    def _live_workflow(self, document: Manifest) -> LiveWorkflow:
        metadata, status = document["metadata"], document.get("status") or {}
        name, phase = metadata["name"], status.get("phase", "Pending")
        is_running = phase == "Running" and is_workflow_locked(self._state, name)
        finished_at = datetime.fromisoformat(status["finishedAt"]) if status.get("finishedAt") else None
        if finished_at is None and not is_running and _lock_path(self._state, name).exists():
            finished_at = last_alive_at(self._state, name)
        return LiveWorkflow(
            name,
            metadata["namespace"],
            metadata["uid"],
            phase,
            is_running,
            finished_at,
            stopped="shutdown" in document["spec"],
        )


@contextmanager
def hold_workflow_lock(state: Path, workflow: str) -> Iterator[None]:
    """Hold the lock of ``workflow`` while the body runs.

    Raises:
        ConflictError: another engine runs the workflow.
    """
    path = _lock_path(state, workflow)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConflictError(
                f"another engine runs workflow {workflow} in {state}; wait until it ends, or stop it"
            ) from error
        yield


def is_workflow_locked(state: Path, workflow: str) -> bool:
    """Whether a live engine runs ``workflow``."""
    path = _lock_path(state, workflow)
    if not path.exists():
        return False
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def record_engine(state: Path, workflow: str) -> None:
    """Note in the lock of ``workflow``, which this process holds, that signals to this process stop it."""
    with suppress(OSError):
        _lock_path(state, workflow).write_text(str(os.getpid()))


def _read_engine_pid(state: Path, workflow: str) -> int | None:
    text = _lock_path(state, workflow).read_text()
    return int(text) if text.isdecimal() else None


def mark_alive(state: Path, workflow: str) -> None:
    """Note that the engine of ``workflow`` is alive, for `last_alive_at`."""
    with suppress(OSError):
        os.utime(_lock_path(state, workflow))


def last_alive_at(state: Path, workflow: str) -> datetime:
    """Last sign of life of the engine of ``workflow``, which has held its lock."""
    return datetime.fromtimestamp(_lock_path(state, workflow).stat().st_mtime, UTC)


def _lock_path(state: Path, workflow: str) -> Path:
    return state / "locks" / f"{workflow}.lock"
