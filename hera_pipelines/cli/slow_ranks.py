"""Ranks that stay behind the others of their gang, as the services see them, where a store is given."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.text import Text
from tiphys_plugin.ledger.model import Lease
from tiphys_plugin.nodes.health import Evidence
from tiphys_plugin.nodes.pace import evidence_by_node, in_words, slow_in
from tiphys_plugin.nodes.stragglers import Slow

from hera_pipelines.cli.rehearsing import stores_at
from tiphys.protocol.policy import ATTEMPT_LABEL

SlowGangs = Sequence[tuple[Lease, Sequence[Slow]]]


def slow_gangs(url: str | None, leases: Sequence[Lease], now: datetime) -> SlowGangs:
    """Those of ``leases`` that have slow members, by what their ranks have told in this store; none without one."""
    return slow_in(stores_at(url), leases, now) if url is not None else ()


def told_of_nodes(slow: SlowGangs, pods: Sequence[dict[str, Any]]) -> Mapping[str, tuple[Evidence, ...]]:
    """What they point at, by Node object; ``pods`` are all that have a node."""
    from tiphys_plugin.kubernetes.judging import pod_status

    ours = [pod_status(pod) for pod in pods if ATTEMPT_LABEL in (pod["metadata"].get("labels") or {})] if slow else []
    return evidence_by_node(slow, ours)


def told_of(lease: Lease, slow: SlowGangs) -> Iterator[Text]:
    """A line for each slow member of a gang."""
    for held, members in slow:
        if held is lease:
            yield from (Text(f"  SlowRank: {in_words(one)}") for one in members)
