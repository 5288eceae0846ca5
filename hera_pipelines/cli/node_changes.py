"""From a Workflow object as Argo keeps it to the changes that the local engine would report: pure.

So a run on a cluster is shown by the same board as one on this machine.
"""

import re
from collections.abc import Iterable
from datetime import datetime

from hera_pipelines.local.changes import NodeChange, NodePhase
from tiphys.protocol.pipeline import Manifest
from tiphys.records import utc_now

_SILENT = frozenset({"PodInitializing", "ContainerCreating"})
"""What every pod passes through within a moment."""


class NodeReader:
    """Remembers what was reported. ``tasks`` are those of the entry DAG."""

    def __init__(self, workflow: str, tasks: Iterable[str]) -> None:
        self._workflow = workflow
        self._tasks = frozenset(tasks)
        self._seen: dict[str, tuple[NodePhase, str]] = {}

    def changes(self, workflow: Manifest) -> list[NodeChange]:
        """What is new in this state of the Workflow, in the order in which it began.

        Of a Workflow so large that Argo packs its nodes away, nothing is known.
        """
        nodes = ((workflow.get("status") or {}).get("nodes") or {}).values()
        return [
            self._change(node)
            for node in sorted(nodes, key=lambda one: (one.get("startedAt") or "~", one["name"]))
            if self._is_new(node)
        ]

    def _is_new(self, node: Manifest) -> bool:
        state = (_phase(node), _message(node))
        if self._seen.get(node["name"]) == state:
            return False
        self._seen[node["name"]] = state
        return True

    def _change(self, node: Manifest) -> NodeChange:
        phase = _phase(node)
        return NodeChange(
            at=_time(node.get("finishedAt") if phase.finished else node.get("startedAt")),
            node=node["name"],
            task=self._task(node["name"]),
            kind=node.get("type") or "",
            template=node.get("templateName") or "",
            phase=phase,
            message=_message(node),
        )

    def _task(self, node: str) -> str:
        """The task that a node belongs to: the name behind that of the Workflow, up to its item or group."""
        inside = node.removeprefix(f"{self._workflow}.")
        first = re.split(r"[.(\[]", inside, maxsplit=1)[0] if inside != node else ""
        return first if first in self._tasks else ""


def _phase(node: Manifest) -> NodePhase:
    try:
        return NodePhase(node.get("phase") or NodePhase.PENDING)
    except ValueError:
        return NodePhase.RUNNING  # a daemon that has come up, or a word of a later Argo


def _message(node: Manifest) -> str:
    message = str(node.get("message") or "")
    return "" if message in _SILENT else message


def _time(text: str | None) -> datetime:
    return datetime.fromisoformat(text) if text else utc_now()
