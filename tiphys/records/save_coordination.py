"""What the processes of one attempt leave for each other in storage."""

from tiphys.records.base import StoredRecord
from tiphys.records.checkpoint import Shard


class RankPart(StoredRecord):
    """``shards/<k>-<step>/part-…json``: one rank's share of a checkpoint is stored. Without a manifest it is none."""

    rank: int
    global_step: int
    shards: tuple[Shard, ...]


class SaveLost(StoredRecord):
    """``shards/<k>-<step>/lost-…json``: a rank has no share in this checkpoint, so nobody waits for it."""

    rank: int
    global_step: int
    reason: str


class SaveCall(StoredRecord):
    """``gangs/…/calls/<n>.json``: all ranks save after ``global_step`` steps, and stop there if ``stop`` is set."""

    rank: int
    """Who called."""
    global_step: int
    stop: bool = False
