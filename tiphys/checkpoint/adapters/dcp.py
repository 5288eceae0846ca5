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
from typing import Any

from tiphys.checkpoint.adapters.dcp_storage import DcpReader, DcpWriter
from tiphys.checkpoint.adapters.ranks import RankAgreement
from tiphys.checkpoint.session import CheckpointSession
from tiphys.checkpoint.settings import CheckpointSettings, explain_no_checkpoints, open_stores
from tiphys.checkpoint.telemetry.events import log_once
from tiphys.checkpoint.telemetry.metrics import open_metrics
from tiphys.errors import UsageError

# ruff: noqa: ARG002  a session that keeps nothing ignores its arguments


class DistributedSession(CheckpointSession):
    """The checkpoints of one attempt, opened in each of its ranks.

    Every rank makes the same calls in the same order; the state is what ``dcp.save`` takes. In `step` the ranks first
    agree whether to save, and whether a rank received SIGTERM, which costs one small all-reduce on the CPU. `save`
    waits for a running save. This base class is used outside of Tiphys and neither restores nor saves.
    """

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
