"""The API of a training program: restore, step, save. Outside of a compiled step it does nothing.

The same program must run on a laptop without an account, a bucket or a
variable. So `Session` keeps nothing, and `TrackedSession`, which keeps
checkpoints, is imported only inside a compiled step.
"""

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, overload

from tiphys.checkpoint.lifecycle.fork import find_parent_session
from tiphys.checkpoint.ranks.barrier import RankInfo
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.settings import CheckpointSettings, explain_no_checkpoints, open_stores
from tiphys.checkpoint.telemetry.events import log_message, log_once
from tiphys.checkpoint.telemetry.metrics import open_metrics
from tiphys.checkpoint.telemetry.output_copy import copy_output
from tiphys.errors import StoreError, UsageError
from tiphys.launch.near_memory import open_near_memory
from tiphys.protocol.environment import EX_UNAVAILABLE
from tiphys.records import CheckpointRef

# ruff: noqa: ARG002  a session that keeps nothing ignores its arguments


StateT = TypeVar("StateT")


class CheckpointSession:
    """The calls that a session of arrays and one of DCP have in common. This class neither restores nor saves."""

    total_steps: int | None = None
    """Steps of the whole training, from which the time left is estimated; a program may set it once it knows."""

    def step(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        """Report that ``global_step`` steps are complete, and save ``state`` if a save is due.

        Call it after every optimizer step, when ``state`` holds everything that
        the next step needs. After SIGTERM it saves as much as the grace period
        allows, and ends the program with exit code 75, which requests another
        attempt.

        Args:
            global_step: Optimizer steps that are complete: another number whenever ``state`` has changed.
            state: What the next step needs, or a function that returns it,
                which is called at the first step and when a save is due.
            metrics: Numbers that describe this state, such as its loss.
            epoch: Passes over the data that are complete.
            data_position: Where in the data the next step continues, in names of your own.

        Returns:
            The save that was started, or None if none was due. Training need not wait for it.

        Raises:
            UsageError: ``state`` holds a value that cannot be saved exactly, or
                ``global_step`` is no whole number from 0 to 10**15 - 1, is lower than that of an
                earlier save, or was given before with another state.
            FencedError: an earlier save found that another attempt replaced this
                one; the program must stop. Leaving the session's ``with`` block
                turns the error into exit code 76.
        """
        return None

    def save(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        """Save ``state`` now and return as soon as it is copied; the arguments and errors are those of `step`.

        Later changes of ``state`` do not change the checkpoint. A failure of
        storage does not stop the training: it is logged and counted in
        `failed_saves`, and the next save runs when it is due.

        Returns:
            The save, whose `Save.wait` blocks until it ended; None outside of Tiphys.
        """
        return None

    def report(self, global_step: int, metrics: Mapping[str, float] | None = None) -> None:
        """Report progress without saving, for a step after which there is nothing to pass to `step`.

        `step` reports its own; both may be called for the same step.
        """

    def flush(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        """Wait at most ``timeout_seconds`` until no save is running; leaving the ``with`` block waits too.

        Returns:
            The newest checkpoint that this attempt committed; None if it committed none.

        Raises:
            FencedError: as in `step`.
        """
        return None

    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM arrived: the next `step` saves and ends the program."""
        return False

    @property
    def last_committed(self) -> CheckpointRef | None:
        """The newest checkpoint that this attempt committed."""
        return None

    @property
    def failed_saves(self) -> int:
        return 0

    @property
    def skipped_saves(self) -> int:
        """How often a due save was postponed to the next step because another save was running."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: this class opens nothing."""


class Session(CheckpointSession):
    """The checkpoints of one attempt.

    This base class is used outside of Tiphys and neither restores nor saves;
    `tiphys.checkpoint.tracked_session.TrackedSession` does both.
    """

    @overload
    def restore(self) -> Any: ...
    @overload
    def restore(self, default: StateT) -> StateT: ...
    def restore(self, default: Any = None) -> Any:
        """Return the state of the newest valid checkpoint, or ``default`` if there is none.

        Every byte is verified against the manifest. A checkpoint that does not
        match is quarantined, and the previous one is restored instead.
        Classes of objects in a state are found in ``default``, or in the modules
        that are imported.

        Raises:
            UsageError: ``default`` holds a value that cannot be saved, or the
                program's classes differ from those of the checkpoint.
            FencedError: another attempt replaced this one.
            StoreError: storage failed.
        """
        return default

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context manager for code that waits for other ranks, such as a barrier or ``backward`` under DDP.

        The rest of the time between two calls of `step` is the rank's own work.
        Tiphys compares the own time of all ranks, and reports a node whose rank
        is repeatedly slower than the others (docs/nodes.md).
        """
        return contextlib.nullcontext()

    def updating(self) -> AbstractContextManager[None]:
        """Return a context manager for the code that changes the arrays of the state, such as a step of descent.

        If nothing else changes them, a save copies them while the program computes the next step, and entering the
        block waits for the rest of that copy. Without it `step` and `save` return only once all is copied. Programs in
        PyTorch need none: the steps of their optimizers are such blocks.
        """
        return contextlib.nullcontext()

    def agree_by(self, agreement: Any, *, restores: bool) -> None:
        """Decide by ``agreement`` of all ranks, for an adapter that calls `step` at the same steps in each.

        ``agreement`` is a `tiphys.checkpoint.adapters.ranks.RankAgreement`. Only ranks with ``restores`` call
        `restore`.
        """


class _RefusedSession(Session):
    """Stands for the session in a process that may not have one, and says so when it is used."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise UsageError(self._reason)

    restore = step = save = report = flush = updating = agree_by = __enter__ = _refuse


def session(
    total_steps: int | None = None,
    *,
    sharded: bool = False,
    alone: bool = False,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
) -> Session:
    """Open the session of this attempt; use it in a ``with`` block.

    Without one the session begins with its first call and ends with the program.
    A crash that `sys.exit` ends is not recorded then. A forked child is no
    session: its calls are refused, and its end changes nothing.

    Args:
        total_steps: Steps of the whole training, from which Argo and Tiphys show progress and the time left.
        sharded: Each rank saves a state of its own. Otherwise rank 0 saves one
            state for all ranks, as with averaged gradients; every rank restores it.
        alone: This process opens the only session of several ranks, and hands
            the restored state to the others.
        environ: Environment with the ``TIPHYS_*`` variables.
        clock: Seconds since any fixed moment, for saves that are due by time.

    Raises:
        UsageError: the environment differs from the one that compile gives a training step.
        NotFoundError: the folder or bucket of a store does not exist, such as a volume that is not mounted.
        SystemExit: with code 69 if storage is out of reach; the attempt is retried.
    """
    settings = CheckpointSettings.from_environment(environ)
    if settings is None:
        if environ.get("RANK", "0") == "0":
            log_once(explain_no_checkpoints(environ))
        return Session()
    if reason := find_parent_session():
        return _RefusedSession(reason)
    try:
        from tiphys.checkpoint.state.near_copy import NearMemory
        from tiphys.checkpoint.tracked_session import TrackedSession
    except ImportError as error:
        # Python names no module if an installed one cannot be loaded, such as without a system library.
        why = f"{error.name}, which this image lacks" if error.name else f"NumPy, which says {error.__cause__ or error}"
        raise UsageError(f"checkpoints need {why}; install tiphys[numpy] and its libraries into the image") from error
    rank_info = RankInfo() if alone else RankInfo.from_environment(environ)
    if alone and environ.get("RANK", "0") != "0":
        raise UsageError(f"a session with alone=True was opened in rank {environ['RANK']}; open it in rank 0 only")
    if sharded and rank_info.is_elastic:
        raise UsageError(
            "sharded=True saves one state per rank, but an elastic training may continue with fewer ranks, and NumPy "
            "states cannot be resharded: save one state for all ranks, or save with tiphys.checkpoint.adapters.dcp"
        )
    if settings.cache is None and rank_info.local_world_size > 1:
        # Without a shared folder each rank of a node would download the same bytes.
        shared = Path(tempfile.gettempdir()) / f"tiphys-cache-{os.getuid()}"
        settings = dataclasses.replace(settings, cache=shared, fills_cache=False)
    try:
        run_store, store = open_stores(settings)
    except StoreError as error:
        log_message(str(error))
        raise SystemExit(EX_UNAVAILABLE) from error
    descriptor = open_near_memory(environ, rank_info.local_rank)
    ranks = rank_info.local_world_size
    near = None if descriptor is None else NearMemory(descriptor, rank_info.local_rank, ranks, sharded=sharded)
    tracked = TrackedSession(
        settings,
        run_store=run_store,
        store=store,
        clock=clock,
        environ=environ,
        metrics=open_metrics(environ, settings.save_every.longest_seconds),
        total_steps=total_steps,
        rank_info=rank_info,
        sharded=sharded,
        opens_itself=True,
        near=near,
    )
    if rank_info.rank == 0:
        run, step, attempt = settings.run, settings.step, settings.attempt
        copy_output(run_store, run, step, attempt, environ, lambda: tracked.should_stop)
    return tracked
