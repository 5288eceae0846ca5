"""Records through which the ranks of one attempt coordinate a save.

Ranks agree through storage, so that no other service and no library of
collectives is needed (see `tiphys.checkpoint.ranks.barrier`).
"""

from tiphys.records.base import StoredRecord
from tiphys.records.checkpoint import Shard


class RankShardsRecord(StoredRecord):
    """``shards/<k>-<step>/part-…json``: one rank has stored its shards. They count only once there is a manifest."""

    rank: int
    global_step: int
    shards: tuple[Shard, ...]


class SaveAbandonedRecord(StoredRecord):
    """``shards/<k>-<step>/abandoned-…json``: a rank could not store its shards, so the others stop waiting."""

    rank: int
    global_step: int
    reason: str


class SaveRequest(StoredRecord):
    """``gangs/…/save-requests/<n>.json``: all ranks save after ``global_step`` steps, and may stop there."""

    rank: int
    """The rank that made the request."""
    global_step: int
    stop: bool = False
