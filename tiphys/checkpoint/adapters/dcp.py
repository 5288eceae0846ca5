"""``torch.distributed.checkpoint`` (DCP) whose checkpoints are verified, committed at once, and fallen back from.

    from tiphys.checkpoint.adapters import dcp as checkpoints

    state = {"model": model.state_dict(), "optimizer": …}     # or DCP's Stateful objects
    with checkpoints.session(total_steps) as session:         # in every rank, after init_process_group
        done = session.restore(state)                         # 0 at the beginning
        for step in range(done + 1, total_steps + 1):
            train_one_step()
            session.step(step, state)

Who calls ``dcp.save``, ``dcp.async_save`` and ``dcp.load`` himself takes
`DistributedSession.writer` and `DistributedSession.reader`. Outside of a
compiled step the session does nothing, as `tiphys.checkpoint.session` does.
"""

import os
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from tiphys.checkpoint.adapters.dcp_storage import ShardReader, ShardWriter
from tiphys.checkpoint.adapters.ranks import Ranks
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.settings import Settings, open_stores
from tiphys.checkpoint.telemetry.metrics import open_metrics
from tiphys.errors import UsageError
from tiphys.records import CheckpointRef

# ruff: noqa: ARG002  the session that keeps nothing uses nothing of what it is given


class DistributedSession:
    """The checkpoints of one attempt, as each of its ranks sees them; this class keeps none.

    Every rank makes the same calls in the same order.
    """

    def restore(self, state: dict[str, Any]) -> int:
        """Load the newest valid checkpoint into ``state``, as ``dcp.load`` does; the steps completed by then, or 0.

        Nothing reaches ``state`` before every rank has verified all that it
        reads. A checkpoint that is damaged is quarantined, and the one before it
        taken, in all ranks alike. The world may have another size than when it was saved.

        Raises:
            UsageError: the checkpoint is not one of DCP.
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
        """Tell that ``global_step`` steps are complete; saves ``state`` behind the training when that is due.

        The ranks agree first whether to save, and whether some rank was told to
        stop by SIGTERM: then all of them save and exit with code 75. That costs
        one small message between all ranks, on the CPU.

        Returns:
            The save that was begun; None if none was due, or the one before is still under way.
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
        """Save ``state``: returns once it is copied, after waiting for a save that is under way.

        A save that fails does not stop the training; it is counted in `failed_saves`.

        Raises:
            FencedError: another attempt took this one's place. Leaving the
                session's ``with`` block turns it into exit code 76.
        """
        return None

    def writer(self, global_step: int, metrics: Mapping[str, float] | None = None) -> ShardWriter:
        """A storage writer for ``dcp.save`` or ``dcp.async_save``; the checkpoint exists once that has returned.

        Raises:
            UsageError: this program does not run in a compiled step, so there is no place for checkpoints.
        """
        raise UsageError("there is no place for checkpoints outside of a compiled step; give dcp.save a folder there")

    def reader(self) -> ShardReader | None:
        """A storage reader of the newest checkpoint for ``dcp.load``; None if there is none.

        ``dcp.load`` fails where a shard is damaged, and the next reader is of the checkpoint before.
        """
        return None

    def flush(self) -> CheckpointRef | None:
        """Wait until no save is under way; the newest checkpoint that this attempt has committed."""
        return None

    @property
    def should_stop(self) -> bool:
        """Whether SIGTERM has arrived in this rank; the next `step` tells the others."""
        return False

    @property
    def last_committed(self) -> CheckpointRef | None:
        """The newest checkpoint that this attempt committed."""
        return None

    @property
    def failed_saves(self) -> int:
        """How many saves have failed so far."""
        return 0

    @property
    def skipped_saves(self) -> int:
        """How often a save was due while the one before was still under way."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to leave behind."""


def session(
    total_steps: int | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
) -> DistributedSession:
    """Open the session of this attempt, in every rank and after ``init_process_group``.

    Raises like `tiphys.checkpoint.session`, but lets `StoreError` through.
    """
    # Here every rank opens one, and all of them save together.
    settings = Settings.from_environment({**environ, "RANK": "0"})
    if settings is None:
        return DistributedSession()
    from tiphys.checkpoint.adapters.dcp_session import TrackedRanks

    run_store, store = open_stores(settings)
    return TrackedRanks(
        settings,
        run_store=run_store,
        store=store,
        ranks=Ranks(),
        environ=environ,
        clock=clock,
        metrics=open_metrics(environ),
        total_steps=total_steps,
    )
