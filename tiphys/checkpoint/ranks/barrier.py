"""The processes of one attempt, which save, restore and stop together or not at all.

They meet in storage, so that no other service, and no library of collectives,
is needed to agree. A rank says what it has by an object that only it creates;
the others look for it. Every wait has an end: a rank that has died must not
keep the others from being tried again.
"""

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tiphys.checkpoint.save.commit import LostSaveError
from tiphys.checkpoint.telemetry.events import tell
from tiphys.errors import ObjectExistsError, StoreError, UsageError
from tiphys.lineage.quarantine import quarantined
from tiphys.lineage.validity import read_manifest
from tiphys.protocol import environment
from tiphys.records import CheckpointManifest, CheckpointRef, RankPart, SaveCall, SaveLost, Shard
from tiphys.store import LineageLayout, Store, claim, find_record, read_record

PATIENCE_SECONDS = 600.0
"""How long a rank waits for the others: storage may be slow, and ranks start minutes apart."""
_HINT_SECONDS = 30.0
_ELASTIC = frozenset({environment.ELASTIC, "TORCHELASTIC_RUN_ID"})
"""What a program finds below the torchrun of an elastic training."""
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.02, 1.0


@dataclass(frozen=True)
class Place:
    """Which of the processes that train together this one is, as torchrun and its like tell in the environment."""

    rank: int = 0
    world_size: int = 1
    incarnation: int = 0
    """How often the launcher has started the processes anew within the attempt."""
    local_world_size: int = 1
    """Processes on this node."""
    is_elastic: bool = False
    """Whether the launcher goes on with fewer ranks when some are lost, in processes that it starts anew."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "Place":
        """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, and what tells one start of the processes from another.

        Raises:
            UsageError: one of them is no whole number, or the rank is not below the world size, or an elastic
                training does not tell its ranks or its starts apart.
        """
        is_elastic = environ.keys() >= _ELASTIC
        if environment.ELASTIC in environ and not is_elastic and environ.get("NODE_RANK", "0") != "0":
            raise UsageError(
                "nodes of which some may be lost are told who they are by torchrun, and this program was not started "
                "by it: each node would train for itself; have the command of the step begin with torchrun"
            )
        place = cls(
            rank=_whole(environ, "RANK", 0),
            world_size=_whole(environ, "WORLD_SIZE", 1),
            incarnation=_meeting(environ) if is_elastic else _whole(environ, "TORCHELASTIC_RESTART_COUNT", 0),
            local_world_size=_whole(environ, "LOCAL_WORLD_SIZE", 1),
            is_elastic=is_elastic,
        )
        if place.rank >= place.world_size:
            raise UsageError(
                f"RANK={place.rank} is not below WORLD_SIZE={place.world_size}; the launcher of the processes sets both"
            )
        return place


ALONE = Place()


class Gang:
    """The ranks of one attempt, seen from one of them.

    Args:
        store: The store of the checkpoints, which all of them reach.
        sharded: Whether each rank saves a state of its own; else the first saves for all.
        check_fence: Raises `FencedError` once the attempt was replaced.
        pause: Waits so many seconds; may raise to end the wait.
    """

    def __init__(
        self,
        store: Store,
        lineage: str,
        attempt: int,
        place: Place,
        *,
        sharded: bool,
        check_fence: Callable[[], object],
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = store
        self._layout = LineageLayout(lineage)
        self._attempt = attempt
        self.place = place
        self.sharded = sharded
        self._check_fence = check_fence
        self._clock = clock
        self._pause = pause

    def open(self) -> None:
        """Begin; no rank has said anything yet in this incarnation.

        Raises:
            StoreError: an earlier one of the attempt has left its word under the same number.
        """
        if not (self.place.is_elastic and self.is_first):
            return
        key, mine = self._layout.opened(self._attempt, self.place.incarnation), secrets.token_bytes(8)
        try:
            self._store.create(key, mine)
        except ObjectExistsError as error:
            if self._store.read(key) == mine:  # by a reply that was lost
                return
            raise StoreError(
                f"torchrun has started the processes of attempt {self._attempt} twice on port "
                f"{self.place.incarnation}, by which they are told apart; it starts them once more"
            ) from error

    @property
    def is_first(self) -> bool:
        """Whether this rank commits."""
        return self.place.rank == 0

    def agree(self, ref: CheckpointRef) -> bool:
        """Say that this rank has read ``ref`` and found it valid; whether all ranks say so.

        False as soon as one of them has quarantined it.

        Raises:
            LostSaveError: some rank says nothing.
        """
        votes = self._layout.votes(self._attempt, self.place.incarnation, ref)
        self._create(f"{votes}{self.place.rank:05d}")
        verdict: list[bool] = []

        def decided() -> list[int]:
            if ref in quarantined(self._store, ref.lineage):
                verdict.append(False)
                return []
            missing = self._missing(votes)
            if not missing:
                verdict.append(True)
            return missing

        self._wait(decided, f"restore checkpoint {ref}")
        return verdict[-1]

    def store_part(self, manifest: CheckpointManifest, shards: list[Shard]) -> None:
        """Say that this rank's share of a checkpoint is stored; raises `StoreError` if an earlier one stands."""
        part = RankPart(rank=self.place.rank, global_step=manifest.global_step, shards=tuple(shards))
        held, won = claim(self._store, self._part_key(manifest.global_step, self.place.rank), part)
        if not won and held.shards != part.shards:
            raise StoreError(f"rank {part.rank} has stored another state as step {part.global_step}; that one stands")

    def give_up(self, global_step: int, reason: str) -> None:
        """Say that this rank has no share in the checkpoint of ``global_step``, so that nobody waits for it."""
        lost = SaveLost(rank=self.place.rank, global_step=global_step, reason=reason)
        claim(self._store, self._lost_key(global_step), lost)

    def collect(self, manifest: CheckpointManifest) -> list[Shard]:
        """Wait for every rank's share; all shards by rank.

        Raises:
            LostSaveError: a rank has given the save up, or says nothing.
            FencedError: as from ``check_fence``.
        """
        step = manifest.global_step
        parts = self._layout.parts(self._attempt, step, self.place.incarnation)
        self._wait(lambda: self._missing(parts), f"store their shards of step {step}", step)
        found = [read_record(self._store, info.key, RankPart) for info in self._store.list(parts)]
        return [shard for part in sorted(found, key=lambda part: part.rank) for shard in part.shards]

    def await_commit(self, ref: CheckpointRef) -> CheckpointManifest:
        """Wait until the first rank has committed ``ref``; raises as `collect` does."""
        key, step = self._layout.manifest(ref.attempt, ref.global_step), ref.global_step
        self._wait(lambda: [] if next(self._store.list(key), None) else [0], f"commit step {step}", step)
        return read_manifest(self._store, ref)

    def call(self, global_step: int, *, stop: bool) -> SaveCall:
        """Ask all ranks to save after ``global_step`` steps; the call that stands, which may be another rank's."""
        record = SaveCall(rank=self.place.rank, global_step=global_step, stop=stop)
        number = len(self.calls()) + 1
        return claim(self._store, self._layout.call(self._attempt, self.place.incarnation, number), record).record

    def calls(self) -> list[SaveCall]:
        """All calls so far, in their order; costs a listing, and a read for each."""
        listed = self._store.list(self._layout.calls(self._attempt, self.place.incarnation))
        return [read_record(self._store, info.key, SaveCall) for info in listed]

    def _part_key(self, global_step: int, rank: int) -> str:
        return self._layout.part(self._attempt, global_step, self.place.incarnation, rank)

    def _create(self, key: str) -> None:
        try:
            self._store.create(key, b"")
        except ObjectExistsError:
            return  # by a reply that was lost

    def _missing(self, prefix: str) -> list[int]:
        """Ranks without an object whose key ends with their number."""
        present = {int(info.key.removesuffix(".json")[-5:]) for info in self._store.list(prefix)}
        return [rank for rank in range(self.place.world_size) if rank not in present]

    def _lost_key(self, global_step: int) -> str:
        return self._layout.lost(self._attempt, global_step, self.place.incarnation)

    def _check_lost(self, global_step: int) -> None:
        if lost := find_record(self._store, self._lost_key(global_step), SaveLost):
            raise LostSaveError(f"step {global_step} was given up by rank {lost.rank}: {lost.reason}")

    def _wait(self, missing: Callable[[], list[int]], what: str, global_step: int | None = None) -> None:
        """Wait until no rank is ``missing``, looking ever less often; for a save, while it can still succeed."""
        began, pause, hinted = self._clock(), _FIRST_PAUSE_SECONDS, False
        while absent := missing():
            if global_step is not None:
                self._check_lost(global_step)
                self._check_fence()
            waited = self._clock() - began
            if waited >= PATIENCE_SECONDS:
                raise LostSaveError(f"{_ranks(absent)} did not {what} within {waited:.0f} s; see their logs")
            if waited >= _HINT_SECONDS and not hinted:
                hinted = True
                tell(f"waiting for {_ranks(absent)} to {what}; every rank opens a session, or one does with alone=True")
            self._pause(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _meeting(environ: Mapping[str, str]) -> int:
    """A number on which all ranks of an elastic training agree, and those of an earlier start have another.

    Each node counts its own restarts, and each may have seen another number of
    them. Where torchrun's store is not shared with the program, every meeting of
    the nodes gets a free port for the ranks to meet.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise UsageError(
            "torchrun shares its store with the program, so one start of the ranks cannot be told from the next; leave "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and PET_RDZV_BACKEND=c10d as the compiled step has them"
        )
    return _whole(environ, "MASTER_PORT", 0)


def _whole(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable) or str(default)
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"{variable}={text!r} is not a whole number; the launcher of the processes sets it")
