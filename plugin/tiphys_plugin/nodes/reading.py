"""A Node object of Kubernetes as a node of the inventory, with a verdict on its health."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Any

from tiphys.kube import Object
from tiphys_plugin.gangs import HOSTNAME_LABEL
from tiphys_plugin.nodes.health import Evidence, State, Verdict, judge
from tiphys_plugin.nodes.pods import PodFacts, facts_of, foreign_by_node
from tiphys_plugin.nodes.settings import GPU, GPU_TYPE_LABEL, ClusterNodes
from tiphys_plugin.nodes.signs import signs_of
from tiphys_plugin.placement import Node

UNKNOWN_TYPE = "unknown"
"""Type of GPUs whose node does not say it: they serve those who do not ask for a type."""


@dataclass(frozen=True)
class SeenNode:
    """What is known of one node. ``node`` is cordoned if somebody has cordoned it, or the verdict is not healthy."""

    node: Node
    object_name: str
    """Pods say by it where they are; what they ask for is the host name, by which ``node`` is called."""
    unschedulable: bool
    verdict: Verdict


def essence(node: Object) -> Object:
    """The part of a Node object that counts here; its heartbeats and images are not."""
    metadata, spec, status = node["metadata"], node.get("spec") or {}, node.get("status") or {}
    conditions = status.get("conditions") or ()
    taints = spec.get("taints") or ()
    return {
        "metadata": {"name": metadata["name"], "labels": metadata.get("labels") or {}},
        "spec": {
            "unschedulable": bool(spec.get("unschedulable")),
            "taints": [{"key": one["key"], "value": one.get("value") or ""} for one in taints],
        },
        "status": {
            "conditions": [{key: one.get(key) or "" for key in ("type", "status", "message")} for one in conditions],
            "gpus": _amount(status.get("allocatable")),
            "installed": _amount(status.get("capacity")),
        },
    }


def read(
    node: Object,
    settings: ClusterNodes,
    foreign: int,
    hints: Sequence[Evidence],
    now: datetime,
    told_apart_by: Collection[str] = (),
) -> SeenNode | None:
    """The node of an `essence`; None if it is none of those that count.

    Of its labels only those are kept that flavors are ``told_apart_by``: others may change every minute.
    """
    labels, status = node["metadata"]["labels"], node["status"]
    wanted = all(labels.get(key) == value for key, value in settings.selector.items())
    host = labels.get(HOSTNAME_LABEL)
    if not wanted or not host or not status["installed"]:
        return None
    verdict = judge(
        (*signs_of(node, settings), *_missing(status), *hints), now, timedelta(hours=settings.suspect_hours)
    )
    memory = labels.get(settings.memory_label, "")
    seen = Node(
        name=host,
        gpu_type=labels.get(GPU_TYPE_LABEL) or UNKNOWN_TYPE,
        gpus=status["gpus"],
        memory_mb=int(memory) if memory.isdecimal() and int(memory) else None,
        block=labels.get(settings.block_label, ""),
        rack=labels.get(settings.rack_label, ""),
        nvlink_domain=labels.get(settings.nvlink_label, ""),
        labels={key: value for key, value in labels.items() if key in told_apart_by},
        cordoned=node["spec"]["unschedulable"] or verdict.state is not State.HEALTHY,
        foreign_gpus=foreign,
    )
    return SeenNode(seen, node["metadata"]["name"], node["spec"]["unschedulable"], verdict)


def observe(
    nodes: Iterable[Object],
    pods: Iterable[Object],
    settings: ClusterNodes,
    now: datetime,
    told_apart_by: Collection[str] = (),
    heard: Mapping[str, tuple[Evidence, ...]] = MappingProxyType({}),
) -> list[SeenNode]:
    """All nodes that count, by name, from Node and Pod objects as they are listed.

    ``heard`` is what others say of nodes, by Node object.
    """
    facts = [found for pod in pods if (found := facts_of(pod)) is not None]
    foreign, hints = foreign_by_node(facts), hints_by_node(facts)
    essences = map(essence, nodes)
    names = ((one, one["metadata"]["name"]) for one in essences)
    against = ((one, name, (*hints.get(name, ()), *heard.get(name, ()))) for one, name in names)
    seen = (read(one, settings, foreign.get(name, 0), said, now, told_apart_by) for one, name, said in against)
    return one_of_each_host(one for one in seen if one is not None)


def one_of_each_host(seen: Iterable[SeenNode]) -> list[SeenNode]:
    """By name. Two nodes that give themselves out as one host would both get the pods of one: the first counts."""
    found: dict[str, SeenNode] = {}
    for one in sorted(seen, key=lambda one: (one.node.name, one.object_name)):
        found.setdefault(one.node.name, one)
    return list(found.values())


def hints_by_node(facts: Iterable[PodFacts]) -> dict[str, tuple[Evidence, ...]]:
    """What failed pods point at, by Node object."""
    found: dict[str, tuple[Evidence, ...]] = {}
    for one in facts:
        if one.hint is not None:
            found[one.node] = (*found.get(one.node, ()), one.hint)
    return found


def _missing(status: dict[str, Any]) -> Iterable[Evidence]:
    """GPUs that the device plugin has taken out, as it does after an Xid: those that are left go on."""
    lost = status["installed"] - status["gpus"]
    if lost > 0:
        said = f"{lost} of {status['installed']} GPUs are not offered by the device plugin"
        yield Evidence("allocatable GPUs", said, "hint")


def _amount(resources: dict[str, Any] | None) -> int:
    text = str((resources or {}).get(GPU, "0"))
    return int(text) if text.isdecimal() else 0
