"""Coordinates the ranks of one attempt, which save, restore and stop together or not at all.

The ranks meet in storage, so that they need neither another service nor a
library for collectives. A rank publishes its state by creating an object that
only it creates; the other ranks list these objects. Every wait has a timeout: a
rank that died must not block the retry of the others.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tiphys.checkpoint.telemetry.events import log_message
from tiphys.errors import ObjectExistsError, StoreError, UsageError
from tiphys.lineage.quarantine import list_quarantined
from tiphys.lineage.validity import read_manifest
from tiphys.protocol import environment
from tiphys.records import CheckpointManifest, CheckpointRef, RankShardsRecord, SaveAbandonedRecord, SaveRequest, Shard
from tiphys.store import LineageLayout, Store, claim_record, find_record, read_record

BARRIER_TIMEOUT_SECONDS = 600.0
"""How long a rank waits for the others. Storage may be slow, and ranks may start minutes apart."""
_HINT_SECONDS = 30.0
_ELASTIC_VARIABLES = frozenset({environment.ELASTIC, "TORCHELASTIC_RUN_ID"})
"""Variables that a program has under torchrun in an elastic training."""
_STARTS = 100_000
"""More than torchrun starts the processes of one program, and more than there are ports."""
_MIN_POLL_SECONDS, _MAX_POLL_SECONDS = 0.02, 1.0


class SaveAbandonedError(StoreError):
    """Another rank does not take part in this save, so a retry cannot help."""


@dataclass(frozen=True)
class RankInfo:
    """Position of this process among the ranks of a training, as launchers such as torchrun set it."""

    rank: int = 0
    world_size: int = 1
    incarnation: int = 0
    """Identifies one start of the processes within the attempt: by that of the program, and a restart count of torchrun
    within it, or a port if elastic. What an earlier start has left in storage is thus never that of a later one."""
    local_world_size: int = 1
    """Processes on this node."""
    local_rank: int = 0
    """Number of this process among them."""
    is_elastic: bool = False
    """Whether the launcher restarts the training with fewer ranks after some are lost."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "RankInfo":
        """Read ``RANK``, ``WORLD_SIZE``, those of the node, and the incarnation.

        Raises:
            UsageError: a variable is not a whole number, or the rank is not
                below the world size, or an elastic training was not started by
                torchrun as the compiled step configures it.
        """
        is_elastic = environ.keys() >= _ELASTIC_VARIABLES
        if environment.ELASTIC in environ and not is_elastic and environ.get("NODE_RANK", "0") != "0":
            raise UsageError(
                "in an elastic training torchrun assigns the ranks, but it did not start this program, so each node "
                "would train alone; start the command of the step with torchrun"
            )
        program = _read_whole_number(environ, environment.INCARNATION, 1)
        start = (
            _rendezvous_port(environ) if is_elastic else _read_whole_number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
        )
        rank_info = cls(
            rank=_read_whole_number(environ, "RANK", 0),
            world_size=_read_whole_number(environ, "WORLD_SIZE", 1),
            incarnation=(program - 1) * _STARTS + start,
            local_world_size=_read_whole_number(environ, "LOCAL_WORLD_SIZE", 1),
            local_rank=_read_whole_number(environ, "LOCAL_RANK", 0),
            is_elastic=is_elastic,
        )
        if rank_info.rank >= rank_info.world_size:
            raise UsageError(
                f"RANK={rank_info.rank} is not below WORLD_SIZE={rank_info.world_size}; the launcher sets both, so "
                "remove other settings of them"
            )
        return rank_info


SINGLE_RANK = RankInfo()


class RankBarrier:
    """One rank's view of the coordination between the ranks of its attempt.

    Args:
        store: The store of the checkpoints, which all ranks reach.
        sharded: Whether each rank saves a state of its own; otherwise rank 0 saves for all.
        sleep: Waits for a number of seconds; may raise to end the wait.
    """

    def __init__(
        self,
        store: Store,
        lineage: str,
        attempt: int,
        rank_info: RankInfo,
        *,
        sharded: bool,
        check_fence: Callable[[], object],
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._store = store
        self._layout = LineageLayout(lineage)
        self._attempt = attempt
        self.rank_info = rank_info
        self.sharded = sharded
        self.voters: Sequence[int] = range(rank_info.world_size)
        """The ranks that restore, and so vote."""
        self._check_fence = check_fence
        self._sleep = sleep

    def open(self) -> None:
        """Claim the incarnation of an elastic training, which no earlier start may have used.

        Raises:
            StoreError: an earlier start of the processes used the same incarnation.
        """
        if not (self.rank_info.is_elastic and self.is_first):
            return
        key, nonce = self._layout.gang_opened(self._attempt, self.rank_info.incarnation), secrets.token_bytes(8)
        try:
            self._store.create(key, nonce)
        except ObjectExistsError as error:
            if self._store.read(key) == nonce:  # this process created it, and the reply was lost
                return
            raise StoreError(
                f"torchrun started the processes of attempt {self._attempt} twice on port "
                f"{self.rank_info.incarnation}, so the two starts cannot be distinguished; it restarts them once more"
            ) from error

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which commits."""
        return self.rank_info.rank == 0

    def vote_valid(self, ref: CheckpointRef) -> bool:
        """Vote that ``ref`` is valid, and wait for the votes of the other ranks.

        Returns:
            True once all ranks voted; False as soon as a rank quarantined ``ref``.

        Raises:
            SaveAbandonedError: a rank did not vote within `BARRIER_TIMEOUT_SECONDS`.
        """
        votes = self._layout.votes(self._attempt, self.rank_info.incarnation, ref)
        with contextlib.suppress(ObjectExistsError):  # this rank created it, and the reply was lost
            self._store.create(f"{votes}{self.rank_info.rank:05d}", b"")
        is_quarantined = False

        def missing_votes() -> list[int]:
            nonlocal is_quarantined
            is_quarantined = ref in list_quarantined(self._store, ref.lineage)
            return [] if is_quarantined else [rank for rank in self._missing_ranks(votes) if rank in self.voters]

        self._wait_for_ranks(missing_votes, f"restore checkpoint {ref}")
        return not is_quarantined

    def store_rank_shards(self, manifest: CheckpointManifest, shards: list[Shard]) -> None:
        """Publish the shards that this rank stored; raises `StoreError` if it published others for this step before."""
        record = RankShardsRecord(rank=self.rank_info.rank, global_step=manifest.global_step, shards=tuple(shards))
        incarnation = self.rank_info.incarnation
        key = self._layout.rank_part(self._attempt, record.global_step, incarnation, record.rank)
        stored, created = claim_record(self._store, key, record)
        if not created and stored.shards != record.shards:
            raise StoreError(
                f"rank {record.rank} has already stored another state of step {record.global_step}, which is kept; the "
                "next step can be saved"
            )

    def abandon_save(self, global_step: int, reason: str) -> None:
        """Publish that this rank does not save ``global_step``, so that no rank waits for its shards."""
        record = SaveAbandonedRecord(rank=self.rank_info.rank, global_step=global_step, reason=reason)
        claim_record(self._store, self._abandoned_key(global_step), record)

    def collect_shards(self, manifest: CheckpointManifest) -> list[Shard]:
        """Wait until every rank published its shards, and return all shards in the order of the ranks.

        Raises:
            SaveAbandonedError: a rank abandoned the save, or did not publish within `BARRIER_TIMEOUT_SECONDS`.
            FencedError: another attempt replaced this one.
        """
        step = manifest.global_step
        prefix = self._layout.rank_parts(self._attempt, step, self.rank_info.incarnation)
        self._wait_for_ranks(lambda: self._missing_ranks(prefix), f"store their shards of step {step}", step)
        records = [read_record(self._store, info.key, RankShardsRecord) for info in self._store.list(prefix)]
        return [shard for record in sorted(records, key=lambda record: record.rank) for shard in record.shards]

    def await_commit(self, ref: CheckpointRef) -> CheckpointManifest:
        """Wait until rank 0 committed ``ref``, and return the manifest; raises as `collect_shards` does."""
        key, step = self._layout.manifest(ref.attempt, ref.global_step), ref.global_step
        self._wait_for_ranks(lambda: [] if next(self._store.list(key), None) else [0], f"commit step {step}", step)
        return read_manifest(self._store, ref)

    def request_save(self, global_step: int, *, stop: bool) -> SaveRequest:
        """Request that all ranks save after ``global_step`` steps, and stop then if ``stop`` is set.

        Returns:
            The request that was stored, which is another rank's if that was first. All ranks stop by one request:
            with two, each rank could obey the one that it read first, and train on without the others.
        """
        earlier = self.read_save_requests()
        if stop and (to_stop := next((request for request in earlier if request.stop), None)):
            return to_stop
        record = SaveRequest(rank=self.rank_info.rank, global_step=global_step, stop=stop)
        number = len(earlier) + 1
        return claim_record(
            self._store, self._layout.save_request(self._attempt, self.rank_info.incarnation, number), record
        ).record

    def read_save_requests(self) -> list[SaveRequest]:
        """Return all save requests in their order; costs a listing, and a read for each request."""
        listed = self._store.list(self._layout.save_requests(self._attempt, self.rank_info.incarnation))
        return [read_record(self._store, info.key, SaveRequest) for info in listed]

    def _missing_ranks(self, prefix: str) -> list[int]:
        """Return the ranks that have no object below ``prefix``; keys end with the rank."""
        present = {int(info.key.removesuffix(".json")[-5:]) for info in self._store.list(prefix)}
        return [rank for rank in range(self.rank_info.world_size) if rank not in present]

    def _abandoned_key(self, global_step: int) -> str:
        return self._layout.abandoned_save(self._attempt, global_step, self.rank_info.incarnation)

    def _raise_if_abandoned(self, global_step: int) -> None:
        if record := find_record(self._store, self._abandoned_key(global_step), SaveAbandonedRecord):
            raise SaveAbandonedError(f"step {global_step} was abandoned by rank {record.rank}: {record.reason}")

    def _wait_for_ranks(self, missing: Callable[[], list[int]], action: str, global_step: int | None = None) -> None:
        """Poll ``missing`` with growing pauses until it returns no rank.

        With ``global_step``, the wait also ends once that save cannot succeed any more.
        """
        started_at, pause, hinted = time.monotonic(), _MIN_POLL_SECONDS, False
        while missing_ranks := missing():
            if global_step is not None:
                self._raise_if_abandoned(global_step)
                self._check_fence()
            waited = time.monotonic() - started_at
            if waited >= BARRIER_TIMEOUT_SECONDS:
                raise SaveAbandonedError(
                    f"{_format_ranks(missing_ranks)} did not {action} within {waited:.0f} s; check their logs"
                )
            if waited >= _HINT_SECONDS and not hinted:
                hinted = True
                log_message(
                    f"waiting for {_format_ranks(missing_ranks)} to {action}; every rank must open a session, or only "
                    "one with alone=True"
                )
            self._sleep(pause)
            pause = min(2 * pause, _MAX_POLL_SECONDS)


def _format_ranks(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _rendezvous_port(environ: Mapping[str, str]) -> int:
    """Return a number that all ranks of one elastic start share, and that differs from those of earlier starts.

    Restart counts do not work: each node counts its own restarts. If torchrun
    does not share its store with the program, each rendezvous chooses a free
    port for the ranks, which identifies it.
    """
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
        raise UsageError(
            "torchrun shares its store with the program, so two starts of the ranks cannot be distinguished; keep "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and PET_RDZV_BACKEND=c10d as the compiled step sets them"
        )
    return _read_whole_number(environ, "MASTER_PORT", 0)


def _read_whole_number(environ: Mapping[str, str], variable: str, default: int) -> int:
    text = environ.get(variable) or str(default)
    if text.isascii() and text.isdigit():
        return int(text)
    raise UsageError(f"{variable}={text!r} is not a whole number; the launcher sets it, so remove other settings of it")
