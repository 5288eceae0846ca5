"""A state as the bytes of its shards, and back, without a session or a store."""

from collections.abc import Iterable
from typing import Any

from tiphys.checkpoint.state.serialization import flatten_state
from tiphys.checkpoint.state.shards import StateAssembly, plan_shards


def packed(state: Any, shard_bytes: int | None = None) -> list[bytearray]:
    return [plan.data() for plan in plan_shards(flatten_state(state), shard_bytes)]


def unpack(shards: Iterable[bytes | bytearray], like: Any = None) -> Any:
    """The state whose shards these are, in the order of `packed`."""
    rest = iter(shards)
    assembly = StateAssembly(bytes(next(rest)))
    for shard in rest:
        assembly.add_shard(shard)
    return assembly.state(like)
