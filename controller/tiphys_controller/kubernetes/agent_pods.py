"""Finds agent pods that block their Workflow.

Argo creates one agent pod per Workflow and never replaces it. A Failed one
(evicted, or its node shut down) makes every plugin step end in Error until it is
deleted (Argo Workflows, issue 14200). One whose deletion an unreachable node
does not confirm stays, and no plugin step of its Workflow proceeds.
"""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import AGENT_POD_LABEL, PODS

AGENT_LABELS = "=".join(AGENT_POD_LABEL)
DELETION_GRACE = timedelta(seconds=60)
"""How long a pod may outlive its deletion deadline: a live kubelet needs seconds, and clocks differ."""


class StuckAgentPod(NamedTuple):
    """An agent pod that does not work, and the uid of the Workflow that owns it."""

    namespace: str
    name: str
    uid: str
    workflow_uid: str
    reason: str
    deletion_deadline: datetime | None = None
    """Deadline of its deletion (``deletionTimestamp``); None if it is not being deleted."""


def parse_stuck_agent_pod(pod: Object) -> StuckAgentPod | None:
    """Parse an agent pod that does not work; None for a working one, or one without a Workflow."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    deleted = metadata.get("deletionTimestamp")
    if status.get("phase") != "Failed" and not deleted:
        return None
    owners = [
        reference["uid"] for reference in metadata.get("ownerReferences") or [] if reference.get("kind") == "Workflow"
    ]
    if not owners:
        return None
    reason = " ".join(str(status[field]) for field in ("reason", "message") if status.get(field))
    deadline = datetime.fromisoformat(deleted) if deleted else None
    message = f"its node has not ended it since {deleted}" if deleted else reason or "no reason given"
    return StuckAgentPod(metadata["namespace"], metadata["name"], metadata["uid"], owners[0], message, deadline)


def delete_agent_pod(api: KubeApi, pod: StuckAgentPod) -> bool:
    """Delete this pod, and no later one of its name; False if it is gone.

    A pod that its node failed to delete is removed without waiting for the node.

    Raises:
        ConflictError: another pod has its name.
        StoreError: the API server is out of reach.
    """
    return api.delete(PODS, pod.namespace, pod.name, uid=pod.uid, grace_seconds=0 if pod.deletion_deadline else None)


def select_agent_pods_to_delete(
    stuck: Iterable[StuckAgentPod], live_workflow_uids: Collection[str], now: datetime
) -> list[StuckAgentPod]:
    """Pods whose Workflow still runs. Pods of Workflows that are not in ``live_workflow_uids`` are left alone.

    A pod that is being deleted has until `DELETION_GRACE` after its deadline.
    """
    owned = (pod for pod in stuck if pod.workflow_uid in live_workflow_uids)
    return sorted(pod for pod in owned if pod.deletion_deadline is None or now - pod.deletion_deadline > DELETION_GRACE)
