"""Checkpoints of ``torch.distributed.checkpoint`` (DCP) with atomic commits, verification and fallback.

    from tiphys.checkpoint.adapters import dcp as checkpoints

    state = {"model": model.state_dict(), "optimizer": …}     # or DCP's Stateful objects
    with checkpoints.session(total_steps) as session:         # in every rank, after init_process_group
        done = session.restore(state)                         # 0 at the beginning
        for step in range(done + 1, total_steps + 1):
            train_one_step()
            session.step(step, state)

A program that calls ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` itself
uses `DistributedSession.writer` and `DistributedSession.reader`. Outside of a
compiled step the session does nothing, like `tiphys.checkpoint.session`.
"""

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from tiphys.checkpoint.adapters.dcp_storage import DcpReader, DcpWriter
from tiphys.checkpoint.adapters.ranks import RankAgreement
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.settings import CheckpointSettings, explain_no_checkpoints, open_stores
from tiphys.checkpoint.telemetry.events import log_once
from tiphys.checkpoint.telemetry.metrics import open_metrics
from tiphys.errors import UsageError
from tiphys.records import CheckpointRef

# ruff: noqa: ARG002  a session that keeps nothing ignores its arguments


class DistributedSession:
    """The checkpoints of one attempt, opened in each of its ranks.

    Every rank makes the same calls in the same order. This base class is used
    outside of Tiphys and neither restores nor saves.
    """

    total_steps: int | None = None
    """Steps of the whole training, from which the time left is estimated."""

    def restore(self, state: dict[str, Any]) -> int:
        """Load the newest valid checkpoint into ``state``, as ``dcp.load`` does.

        ``state`` does not change before every rank has verified everything that
        it reads. A damaged checkpoint is quarantined, and all ranks load the
        previous one. The world size may differ from that of the save.

        Returns:
            The steps that the checkpoint has completed; 0 if there is no checkpoint.

        Raises:
            UsageError: DCP did not write the checkpoint.
            FencedError: another attempt replaced this one.
            StoreError: storage failed.
        """
        return 0

    def step(
        self,
        global_step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        """Report that ``global_step`` steps are complete, and save ``state`` in the background if a save is due.

        The ranks first agree whether to save, and whether a rank received SIGTERM;
        then all of them save and exit with code 75. This costs one small
        all-reduce on the CPU.

        Args:
            global_step: Steps that are complete.
            state: The state, as ``dcp.save`` takes it.
            metrics: Numbers that describe this state, such as its loss.
            epoch: Passes over the data that are complete.
            data_position: Where in the data the next step continues, in names of your own.

        Returns:
            The save that was started; None if none was due, or a running save postponed it.

        Raises:
            FencedError: an earlier save found that another attempt replaced this one.
        """
        return None

    def save(
        self,
        global_step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        """Save ``state`` now, after a running save ended; return once the state is copied.

        A save that fails does not stop the training; it is counted in
        `failed_saves`. The arguments are those of `step`.

        Raises:
            FencedError: another attempt replaced this one. Leaving the session's
                ``with`` block turns the error into exit code 76.
        """
        return None

    def writer(self, global_step: int, metrics: Mapping[str, float] | None = None) -> DcpWriter:
        """Return a storage writer for ``dcp.save`` or ``dcp.async_save``, which commits at its end.

        Raises:
            UsageError: this program does not run in a compiled step, so there is no checkpoint store.
        """
        raise UsageError("there is no checkpoint store outside of a compiled step; pass a folder to dcp.save there")

    def reader(self) -> DcpReader | None:
        """Return a storage reader of the newest checkpoint for ``dcp.load``; None if there is none.

        ``dcp.load`` fails if a shard is damaged; the next reader is of the previous checkpoint.
        """
        return None

    def flush(self) -> CheckpointRef | None:
        """Wait until no save is running; return the newest checkpoint that this attempt committed."""
        return None

    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM arrived in this rank; the next `step` informs the other ranks."""
        return False

    @property
    def last_committed(self) -> CheckpointRef | None:
        """The newest checkpoint that this attempt committed."""
        return None

    @property
    def failed_saves(self) -> int:
        """Number of saves that failed."""
        return 0

    @property
    def skipped_saves(self) -> int:
        """How often a due save was postponed because another save was running."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: this class opens nothing."""


def session(
    total_steps: int | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
) -> DistributedSession:
    """Open the session of this attempt, in every rank and after ``init_process_group``.

    Raises as `tiphys.checkpoint.session` does, but a `StoreError` instead of `SystemExit`.

    Args:
        total_steps: Steps of the whole training, from which Argo and Tiphys show progress and the time left.
        environ: Environment with the ``TIPHYS_*`` variables.
        clock: Seconds since any fixed moment, for saves that are due by time.
    """
    settings = CheckpointSettings.from_environment(environ)
    if settings is None:
        if environ.get("RANK", "0") == "0":
            log_once(explain_no_checkpoints(environ))
        return DistributedSession()
    from tiphys.checkpoint.adapters.dcp_session import TrackedDistributedSession

    run_store, store = open_stores(settings)
    return TrackedDistributedSession(
        settings,
        run_store=run_store,
        store=store,
        ranks=RankAgreement(),
        environ=environ,
        clock=clock,
        metrics=open_metrics(environ, settings.save_every.longest_seconds),
        total_steps=total_steps,
    )
