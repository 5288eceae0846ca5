"""What a training program uses: restore, step, save. Outside of Tiphys it does nothing.

The same program must run on a laptop without an account, a bucket or a
variable set. So `Session` is the one that keeps nothing, and the one that keeps
checkpoints is only loaded inside a compiled step.
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

from tiphys.checkpoint.ranks.barrier import Place
from tiphys.checkpoint.save.result import Save
from tiphys.checkpoint.settings import Settings, open_stores
from tiphys.checkpoint.telemetry.events import tell
from tiphys.checkpoint.telemetry.metrics import open_metrics
from tiphys.errors import StoreError, UsageError
from tiphys.protocol.environment import EX_UNAVAILABLE
from tiphys.records import CheckpointRef

# ruff: noqa: ARG002  the session that keeps nothing uses nothing of what it is given


StateT = TypeVar("StateT")


class Session:
    """The checkpoints of one attempt, as the training program sees them.

    This class is what runs outside of Tiphys: nothing is restored or saved.
    """

    @overload
    def restore(self) -> Any: ...
    @overload
    def restore(self, default: StateT) -> StateT: ...
    def restore(self, default: Any = None) -> Any:
        """The state of the newest valid checkpoint, or ``default`` if there is none.

        Every byte is checked against the manifest. A checkpoint that does not
        match is quarantined and the one before it taken. Dataclasses in a state
        are built from the classes found in ``default``.

        Raises:
            UsageError: ``default`` holds what cannot be saved, or the program's
                classes are not those of the checkpoint.
        """
        return default

    def step(
        self,
        global_step: int,
        state: Any,
        metrics: Mapping[str, float] | None = None,
        *,
        epoch: int | None = None,
        data_position: Mapping[str, int | float | str] | None = None,
    ) -> Save | None:
        """Tell that ``global_step`` steps are complete; saves ``state`` when that is due.

        Call it after every optimizer step, when ``state`` holds all that the
        next one needs. ``state`` may also be a function that makes it, which is
        called only when a save is due. After SIGTERM it saves what the grace
        period leaves time for, and ends the program with exit code 75, which
        asks to be tried again.

        Returns:
            The save that was begun now, if one was due. Training need not wait for it.

        Raises:
            FencedError: an earlier save found that another attempt took this
                one's place; the program must stop. Leaving the session's
                ``with`` block turns it into exit code 76.
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
        """Save ``state`` now; returns as soon as it is copied.

        What happens to ``state`` afterwards does not change what is saved.
        Storage that fails does not stop the training: the failure is told,
        counted in `failed_saves`, and the next save is tried when it is due.

        Args:
            global_step: Steps that are complete.
            state: What the next step needs, or a function that makes it.
            metrics: Numbers that describe this state, such as its loss.
            epoch: Passes over the data that are complete.
            data_position: Where in the data the next step goes on, in your own words.

        Returns:
            The save, to `Save.wait` for where it matters; None outside of Tiphys.

        Raises:
            UsageError: ``state`` holds what cannot be saved exactly, or
                ``global_step`` is lower than that of an earlier save.
            FencedError: as in `step`.
        """
        return None

    def flush(self, timeout_seconds: float | None = None) -> CheckpointRef | None:
        """Wait until no save is under way; leaving the ``with`` block does so, too.

        Returns:
            The newest checkpoint that this attempt committed.

        Raises:
            FencedError: as in `step`.
        """
        return None

    def waiting(self) -> AbstractContextManager[None]:
        """Use it in a ``with`` block around what waits for other ranks, such as a barrier or ``backward`` below DDP.

        What is left of the time between two calls of `step` is the rank's own
        work. That of all ranks is compared, and a node whose rank works longer
        than the others, again and again, is told of (docs/nodes.md).
        """
        return contextlib.nullcontext()

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
        """How many saves storage has refused so far."""
        return 0

    @property
    def skipped_saves(self) -> int:
        """How often a save was due while another was under way, and was put off to the next step."""
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
    sharded: bool = False,
    alone: bool = False,
    environ: Mapping[str, str] = os.environ,
    clock: Callable[[], float] = time.monotonic,
) -> Session:
    """Open the session of this attempt; use it in a ``with`` block.

    Args:
        total_steps: Steps of the whole training, for the progress that Argo shows.
        sharded: Each rank saves a state of its own. Otherwise the first saves one
            for all, as where gradients are averaged; every rank restores it.
        alone: This process opens the only session of several ranks, and hands
            what it restores to the others.
        environ: Where ``TIPHYS_*`` is read from.
        clock: Seconds since any fixed moment, for saves that are due by time.

    Raises:
        UsageError: the environment is not the one that compile gives a training step.
        NotFoundError: a store's folder or bucket is not there, such as a volume that is not mounted.
        SystemExit: with code 69, storage is out of reach; the attempt is tried again.
    """
    settings = Settings.from_environment(environ)
    if settings is None:
        return Session()
    try:
        from tiphys.checkpoint.tracked_session import TrackedSession
    except ImportError as error:
        # A module that is there and cannot be loaded, as for want of a system library, is not named.
        why = f"{error.name}, which this image lacks" if error.name else f"NumPy, which says {error.__cause__ or error}"
        raise UsageError(f"checkpoints need {why}; install tiphys[numpy] and its libraries into the image") from error
    place = Place() if alone else Place.from_environment(environ)
    if alone and environ.get("RANK", "0") != "0":
        raise UsageError(f"a session with alone=True was opened in rank {environ['RANK']}; rank 0 is the one that may")
    if sharded and place.is_elastic:
        raise UsageError(
            "sharded=True keeps a state of each rank, and this training goes on with fewer ranks, to which NumPy "
            "states are not divided anew: save one state for all, or save with tiphys.checkpoint.adapters.dcp"
        )
    if settings.cache is None and place.local_world_size > 1:
        # Ranks of one node would each fetch the same bytes.
        shared = Path(tempfile.gettempdir()) / f"tiphys-cache-{os.getuid()}"
        settings = dataclasses.replace(settings, cache=shared)
    try:
        run_store, store = open_stores(settings)
    except StoreError as error:
        tell(str(error))
        raise SystemExit(EX_UNAVAILABLE) from error
    return TrackedSession(
        settings,
        run_store=run_store,
        store=store,
        clock=clock,
        environ=environ,
        metrics=open_metrics(environ),
        total_steps=total_steps,
        place=place,
        sharded=sharded,
    )
