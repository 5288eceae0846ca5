"""What the watches of Nodes and pods have told so far, and the inventory that follows from it.

It is the very same inventory until something changes that counts, because what
follows from leases on it is remembered for as long as it is the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Generic, TypeVar

from tiphys.kube import Change, ChangeType, Object, Synced
from tiphys_plugin.nodes.health import Evidence
from tiphys_plugin.nodes.node import (
    PodFacts,
    SeenNode,
    essence,
    facts_of,
    foreign_by_node,
    hints_by_node,
    one_of_each_host,
    read,
)
from tiphys_plugin.quota.flavors import ClusterNodes

FactsT = TypeVar("FactsT")
_Source = tuple[ClusterNodes, int, tuple[Evidence, ...], frozenset[str]]
"""What a node is read from beside the object: settings, GPUs of others, hints, labels of flavors."""


@dataclass
class Kept(Generic[FactsT]):
    """Facts by uid of the object that tells them; ``version`` grows with each change."""

    facts_of: Callable[[Object], FactsT | None]
    facts: dict[str, FactsT] = field(default_factory=dict)
    synced: bool = False
    version: int = 0

    def take(self, seen: Synced | Change) -> None:
        """Take in what a watch says."""
        if isinstance(seen, Synced):
            present = {one["metadata"]["uid"] for one in seen.objects}
            for uid in self.facts.keys() - present:
                self._drop(uid)
            for one in seen.objects:
                self._put(one)
            self.synced = True
        elif seen.type is ChangeType.DELETED:
            self._drop(seen.object["metadata"]["uid"])
        else:
            self._put(seen.object)

    def _put(self, document: Object) -> None:
        uid, facts = document["metadata"]["uid"], self.facts_of(document)
        if facts is None:
            self._drop(uid)
        elif facts != self.facts.get(uid):
            self.facts[uid] = facts
            self.version += 1

    def _drop(self, uid: str) -> None:
        if self.facts.pop(uid, None) is not None:
            self.version += 1


class ClusterFacts:
    """Nodes, foreign pods, and failures that point at nodes, also of pods that are gone by now."""

    def __init__(self) -> None:
        self.nodes: Kept[Object] = Kept(essence)
        self.pods: Kept[PodFacts] = Kept(self._facts_of)
        self._hints: dict[str, PodFacts] = {}
        self._heard: Mapping[str, tuple[Evidence, ...]] = {}
        self._heard_version = 0
        self._read_before: dict[str, tuple[tuple[object, ...], SeenNode | None]] = {}

    @property
    def synced(self) -> bool:
        """Whether all there is has been seen."""
        return self.nodes.synced and self.pods.synced

    @property
    def version(self) -> tuple[int, int, int]:
        return self.nodes.version, self.pods.version, self._heard_version

    def hear(self, told: Mapping[str, tuple[Evidence, ...]]) -> None:
        """Take in what somebody else says of nodes, by Node object, in the place of what was said before."""
        if told != self._heard:
            self._heard, self._heard_version = told, self._heard_version + 1

    def inventory(
        self, settings: ClusterNodes, now: datetime, told_apart_by: frozenset[str] = frozenset()
    ) -> list[SeenNode]:
        """All nodes that count, by name, with the labels that flavors are ``told_apart_by``."""
        self._forget(now - timedelta(hours=settings.suspect_hours))
        foreign, hints = foreign_by_node(self.pods.facts.values()), hints_by_node(self._hints.values())
        found = {}
        for one in self.nodes.facts.values():
            name = one["metadata"]["name"]
            against = (*hints.get(name, ()), *self._heard.get(name, ()))
            source = (settings, foreign.get(name, 0), against, told_apart_by)
            found[name] = self._read(one, source, now)
        self._read_before = found
        return one_of_each_host(seen for _, seen in found.values() if seen is not None)

    def _read(self, node: Object, source: _Source, now: datetime) -> tuple[tuple[object, ...], SeenNode | None]:
        """What was read last time, if it was read from the same; on a large cluster little changes at a time."""
        before = self._read_before.get(node["metadata"]["name"])
        if before is not None and before[0][0] is node and before[0][1:] == source and _holds(before[1], now):
            return before
        settings, foreign, hints, told_apart_by = source
        return (node, *source), read(node, settings, foreign, hints, now, told_apart_by)

    def _facts_of(self, pod: Object) -> PodFacts | None:
        facts = facts_of(pod)
        if facts is not None and facts.hint is not None:  # failures outlive their pods, which are soon deleted
            self._hints[pod["metadata"]["uid"]] = facts
        return facts

    def _forget(self, since: datetime) -> None:
        self._hints = {uid: one for uid, one in self._hints.items() if _is_later(one.hint, since)}


def next_change(nodes: Sequence[SeenNode]) -> datetime | None:
    """When a verdict may change although nothing happens."""
    return min((one.verdict.until for one in nodes if one.verdict.until is not None), default=None)


def _is_later(hint: Evidence | None, moment: datetime) -> bool:
    return hint is not None and (hint.at is None or hint.at > moment)


def _holds(seen: SeenNode | None, now: datetime) -> bool:
    return seen is None or seen.verdict.until is None or now < seen.verdict.until
