"""What the documents of one Workflow and of its pods say: times, nodes and bytes. Pure.

Argo writes times as whole seconds, so a `Timeline` takes the clock of the process that saw a change.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from bench.samples import significant

from tiphys.kube import Object
from tiphys.protocol.workflow_nodes import parse_node_time, read_nodes, without_try

FINISHED = ("Succeeded", "Failed", "Error")
AGENT = "agent"
"""Value of Argo's label ``workflows.argoproj.io/component`` on the pod that answers plugin nodes."""
_POINTS = 20


def stored_bytes(document: Object) -> int:
    """Length of the compact JSON, which is how the API server stores a custom resource."""
    return len(json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode())


@dataclass
class PodTimes:
    """When a pod was first seen, first seen running, and first seen with all containers ended."""

    created: float
    running: float | None = None
    ended: float | None = None


@dataclass
class Timeline:
    """One Workflow from its creation on. All times are of one monotonic clock, in seconds."""

    created: float
    finished: float | None = None
    document: Object = field(default_factory=dict)
    """The newest version."""
    growth: list[tuple[float, int, int]] = field(default_factory=list)
    """Seconds since the creation, bytes, and nodes as far as they are not compressed, of each version."""
    cpu_seconds: dict[str, float] = field(default_factory=dict)
    """By program of `installation.WATCHED`, until the end of the Workflow; without those that do not run here."""
    pods: dict[str, PodTimes] = field(default_factory=dict)
    """By name, in the order of creation; without the pod of Argo's agent."""
    shown: dict[str, float] = field(default_factory=dict)
    """When a version of the Workflow first showed the end of a node of a pod, by the name of the node."""

    def see_workflow(self, document: Object, now: float) -> None:
        """Take note of a version of the Workflow."""
        self.document = document
        self.growth.append((now - self.created, stored_bytes(document), count_nodes(document)))
        for node in read_nodes(document):
            if node.get("type") == "Pod" and node.get("phase") in FINISHED:
                self.shown.setdefault(node["name"], now)
        if self.finished is None and phase(document) in FINISHED:
            self.finished = now

    def see_pod(self, pod: Object, now: float) -> None:
        """Take note of a version of one of its pods."""
        metadata = pod["metadata"]
        if (metadata.get("labels") or {}).get("workflows.argoproj.io/component") == AGENT:
            return
        times = self.pods.setdefault(metadata["name"], PodTimes(now))
        state = (pod.get("status") or {}).get("phase")
        if times.running is None and state in ("Running", "Succeeded", "Failed"):
            times.running = now
        if times.ended is None and state in ("Succeeded", "Failed"):
            times.ended = now

    @property
    def seconds(self) -> float:
        """From the creation to the end.

        Raises:
            ValueError: the Workflow has not ended.
        """
        if self.finished is None:
            raise ValueError("the Workflow has not ended")
        return self.finished - self.created

    @property
    def first_pod_seconds(self) -> float:
        """From the creation to the first pod that ran.

        Raises:
            ValueError: no pod ran.
        """
        return min(times.running for times in self.pods.values() if times.running is not None) - self.created

    def next_pod_seconds(self) -> float:
        """From the end of the first pod to the creation of the second.

        Raises:
            ValueError: there are not two pods, or the first one did not end.
        """
        first, second = list(self.pods.values())[:2]
        if first.ended is None:
            raise ValueError("the first pod did not end")
        return second.created - first.ended

    def size(self) -> dict[str, Any]:
        """How large the object was: at its end, at most, and over time at up to 20 points."""
        step = max(1, len(self.growth) // _POINTS)
        points = self.growth[::step]
        return {
            "bytes": stored_bytes(self.document),
            "most_bytes": max(one for _, one, _ in self.growth),
            "nodes": count_nodes(self.document),
            "compressed": is_compressed(self.document),
            "offloaded": is_offloaded(self.document),
            "versions": len(self.growth),
            "seconds_bytes_nodes": [[significant(seconds), *rest] for seconds, *rest in points],
        }


def record_delays(document: Object, written: Mapping[str, datetime]) -> list[float]:
    """Seconds from the end of each step's last pod, in whole seconds of Argo, to the record of its end.

    Args:
        document: The Workflow in its last version.
        written: When the end was recorded, by the name of the node.
    """
    delays = []
    for node in read_nodes(document):
        moment = written.get(without_try(node["name"])) if node.get("type") == "Pod" else None
        ended = parse_node_time(node.get("finishedAt"))
        if moment is not None and ended is not None:
            delays.append((moment - ended).total_seconds())
    return delays


def recorder_delays(shown: Mapping[str, float], written: Mapping[str, datetime], epoch: float) -> list[float]:
    """Seconds from the version of the Workflow that shows the end of a step to the record of it.

    The rest of `record_delays` is the time that Argo takes to write that version.

    Args:
        shown: `Timeline.shown`; of a step that Argo tried again, the last one counts.
        written: When the end was recorded, by the name of the node.
        epoch: What the clock of ``shown`` said at the beginning of Unix time.
    """
    last = {without_try(name): moment for name, moment in sorted(shown.items(), key=lambda one: one[1])}
    return [written[name].timestamp() + epoch - moment for name, moment in last.items() if name in written]


def phase(document: Object) -> str:
    """Phase of the Workflow; empty before Argo has seen it."""
    return str((document.get("status") or {}).get("phase", ""))


def count_nodes(document: Object) -> int:
    """Nodes in the status; those that are compressed or in a database do not count."""
    return len((document.get("status") or {}).get("nodes") or {})


def is_compressed(document: Object) -> bool:
    """Whether Argo keeps the nodes compressed, as it does where they would be too long."""
    return bool((document.get("status") or {}).get("compressedNodes"))


def is_offloaded(document: Object) -> bool:
    """Whether Argo keeps the nodes in its database."""
    return bool((document.get("status") or {}).get("offloadNodeStatusVersion"))


def describe_failure(document: Object) -> str:
    """The nodes that did not succeed, for the message of a benchmark that cannot go on."""
    nodes = (document.get("status") or {}).get("nodes") or {}
    lines = [
        f"  {node['name']}: {node.get('phase')} {node.get('message', '')}"
        for node in nodes.values()
        if node.get("phase") not in ("Succeeded", "Skipped", "Omitted")
    ]
    return "\n".join([f"{document['metadata']['name']} ended as {phase(document)}", *lines])


def per_step(many: float, one: float, steps: int) -> float:
    """What each step adds, from a Workflow with ``steps`` of them and one with a single one."""
    return (many - one) / (steps - 1)
