"""Which agent pods stand in the way of their Workflow.

Argo makes one agent pod for each Workflow and never replaces it. One that has
Failed (evicted, its node shut down) makes every plugin step end in Error, the
later ones too, until somebody deletes it (Argo Workflows, issue 14200).
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from tiphys.kube import Object

AGENT_LABELS = "workflows.argoproj.io/component=agent"
FAILED_FIELDS = "status.phase=Failed"


class FailedAgent(NamedTuple):
    """An agent pod that has failed, and the uid of the Workflow that owns it."""

    namespace: str
    name: str
    uid: str
    workflow_uid: str
    reason: str


def failed_agent(pod: Object) -> FailedAgent | None:
    """The facts of an agent pod; None for one that works, or is being deleted, or belongs to no Workflow."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    if status.get("phase") != "Failed" or metadata.get("deletionTimestamp"):
        return None
    owners = [one["uid"] for one in metadata.get("ownerReferences") or [] if one.get("kind") == "Workflow"]
    if not owners:
        return None
    reason = " ".join(str(status[field]) for field in ("reason", "message") if status.get(field))
    return FailedAgent(metadata["namespace"], metadata["name"], metadata["uid"], owners[0], reason or "no reason given")


def to_delete(failed: Iterable[FailedAgent], live: Collection[str]) -> list[FailedAgent]:
    """Those whose Workflow goes on. ``live`` holds the uids of ours; other people's pods are theirs to look after."""
    return sorted(pod for pod in failed if pod.workflow_uid in live)
