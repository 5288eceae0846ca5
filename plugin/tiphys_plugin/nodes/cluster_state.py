"""The state that the watches of Nodes and pods have delivered, and the inventory derived from it.

The inventory stays equal until a relevant field changes, because results that are
derived from leases on it are cached for as long as it is the same.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import chain
from types import MappingProxyType
from typing import Generic, TypeVar

from tiphys.kube import ListSnapshot, Object, WatchEvent, WatchEventType
from tiphys_plugin.nodes.health import NodeEvidence
from tiphys_plugin.nodes.node import (
    NO_FLAVORS,
    ObservedNode,
    PodFacts,
    deduplicate_hosts,
    foreign_gpus_by_node,
    hints_by_node,
    parse_node,
    read_pod_facts,
    relevant_node_fields,
)
from tiphys_plugin.quota.flavors import ClusterNodes, Flavor, FlavorSet
from tiphys_plugin.quota.lease import Lease

FactsT = TypeVar("FactsT")
_NodeInputs = tuple[ClusterNodes, Mapping[str, int], tuple[NodeEvidence, ...], tuple[Flavor, ...]]
"""Inputs of a node beside its object: settings, resources of foreign pods, hints, flavors."""


@dataclass
class WatchedFacts(Generic[FactsT]):
    """Facts extracted from watched objects, by uid of the object; ``version`` grows with each change."""

    extract: Callable[[Object], FactsT | None]
    facts: dict[str, FactsT] = field(default_factory=dict)
    synced: bool = False
    version: int = 0

    def apply(self, update: ListSnapshot | WatchEvent) -> None:
        """Apply a list or an event of a watch."""
        if isinstance(update, ListSnapshot):
            present = {document["metadata"]["uid"] for document in update.objects}
            for uid in self.facts.keys() - present:
                self._drop(uid)
            for document in update.objects:
                self._put(document)
            self.synced = True
        elif update.type is WatchEventType.DELETED:
            self._drop(update.object["metadata"]["uid"])
        else:
            self._put(update.object)

    def _put(self, document: Object) -> None:
        uid, facts = document["metadata"]["uid"], self.extract(document)
        if facts is None:
            self._drop(uid)
        elif facts != self.facts.get(uid):
            self.facts[uid] = facts
            self.version += 1

    def _drop(self, uid: str) -> None:
        if self.facts.pop(uid, None) is not None:
            self.version += 1


class ClusterState:
    """Nodes, pods with GPUs, and failures that point at nodes, including failures of deleted pods."""

    def __init__(self) -> None:
        self.nodes: WatchedFacts[Object] = WatchedFacts(relevant_node_fields)
        self.pods: WatchedFacts[PodFacts] = WatchedFacts(self._extract_pod_facts)
        self._hints: dict[str, PodFacts] = {}
        self._external_evidence: dict[str, Mapping[str, tuple[NodeEvidence, ...]]] = {}
        self._external_version = 0
        self._last_read: dict[str, tuple[tuple[object, ...], ObservedNode | None]] = {}

    @property
    def synced(self) -> bool:
        """Whether both watches have delivered a full list."""
        return self.nodes.synced and self.pods.synced

    @property
    def version(self) -> tuple[int, int, int]:
        return self.nodes.version, self.pods.version, self._external_version

    def set_external_evidence(self, source: str, evidence: Mapping[str, tuple[NodeEvidence, ...]]) -> None:
        """Replace the evidence of ``source``, which is not in the Node objects, by name of the Node object."""
        if evidence != self._external_evidence.get(source, {}):
            self._external_evidence[source] = evidence
            self._external_version += 1

    def observe_nodes(
        self,
        settings: ClusterNodes,
        now: datetime,
        flavors: FlavorSet = NO_FLAVORS,
        leases: Sequence[Lease] | None = None,
    ) -> list[ObservedNode]:
        """All GPU nodes that ``settings`` select, sorted by name; of their labels only those of flavors are kept.

        ``leases`` are as in `foreign_gpus_by_node`.
        """
        self._expire_hints(now - timedelta(hours=settings.suspect_hours))
        foreign = foreign_gpus_by_node(self.pods.facts.values(), self.nodes.facts.values(), leases)
        hints = hints_by_node(self._hints.values())
        parsed = {}
        for node in self.nodes.facts.values():
            name = node["metadata"]["name"]
            external = chain.from_iterable(found.get(name, ()) for found in self._external_evidence.values())
            evidence = (*hints.get(name, ()), *external)
            inputs: _NodeInputs = (settings, foreign.get(name, {}), evidence, flavors.flavors)
            parsed[name] = self._read(node, inputs, now, flavors)
        self._last_read = parsed
        return deduplicate_hosts(observed for _, observed in parsed.values() if observed is not None)

    def _read(
        self, node: Object, inputs: _NodeInputs, now: datetime, flavors: FlavorSet
    ) -> tuple[tuple[object, ...], ObservedNode | None]:
        """Parse a node, or return the last result if its inputs are unchanged, as most are on a large cluster."""
        last = self._last_read.get(node["metadata"]["name"])
        if last is not None and last[0][0] is node and last[0][1:] == inputs and _is_still_valid(last[1], now):
            return last
        settings, foreign, hints, _ = inputs
        return (node, *inputs), parse_node(node, settings, foreign, hints, now, flavors)

    def _extract_pod_facts(self, pod: Object) -> PodFacts | None:
        facts = read_pod_facts(pod)
        if facts is not None and facts.hint is not None:  # kept separately, because failed pods are soon deleted
            self._hints[pod["metadata"]["uid"]] = facts
        return facts

    def _expire_hints(self, since: datetime) -> None:
        self._hints = {uid: facts for uid, facts in self._hints.items() if _is_later(facts.hint, since)}


def observe_nodes(
    nodes: Iterable[Object],
    pods: Iterable[Object],
    settings: ClusterNodes,
    now: datetime,
    flavors: FlavorSet = NO_FLAVORS,
    external_evidence: Mapping[str, tuple[NodeEvidence, ...]] = MappingProxyType({}),
    leases: Sequence[Lease] = (),
) -> list[ObservedNode]:
    """As `ClusterState.observe_nodes`, once, from listed Node and Pod objects.

    ``external_evidence`` is evidence from outside the API server, by Node object. ``leases`` are all leases.
    """
    state = ClusterState()
    state.nodes.apply(ListSnapshot(list(nodes)))
    state.pods.apply(ListSnapshot(list(pods)))
    state.set_external_evidence("", external_evidence)
    return state.observe_nodes(settings, now, flavors, leases)


def next_verdict_change(nodes: Sequence[ObservedNode]) -> datetime | None:
    """When the next verdict may change by time alone; None if none can."""
    changes = (observed.verdict.valid_until for observed in nodes)
    return min((moment for moment in changes if moment is not None), default=None)


def _is_later(hint: NodeEvidence | None, moment: datetime) -> bool:
    return hint is not None and (hint.at is None or hint.at > moment)


def _is_still_valid(observed: ObservedNode | None, now: datetime) -> bool:
    return observed is None or observed.verdict.valid_until is None or now < observed.verdict.valid_until
