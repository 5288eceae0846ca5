"""Which agent pods stand in the way of their Workflow.

Argo makes one agent pod for each Workflow and never replaces it. One that has
Failed (evicted, its node shut down) makes every plugin step end in Error, the
later ones too, until somebody deletes it (Argo Workflows, issue 14200). One that
was deleted on a node that nobody reaches stays for ever, and no step goes on.
"""

from collections.abc import Collection, Iterable
from datetime import datetime, timedelta
from typing import NamedTuple

from tiphys.kube import KubeApi, Object
from tiphys.kube.resources import PODS

AGENT_LABELS = "workflows.argoproj.io/component=agent"
OVERDUE = timedelta(seconds=60)
"""How long a pod may outstay its deletion: a kubelet that is alive needs seconds, and clocks differ."""


class StuckAgent(NamedTuple):
    """An agent pod that does not work, and the uid of the Workflow that owns it."""

    namespace: str
    name: str
    uid: str
    workflow_uid: str
    reason: str
    gone_by: datetime | None = None
    """When it should have been gone, if its deletion was asked for."""


def stuck_agent(pod: Object) -> StuckAgent | None:
    """The facts of an agent pod; None for one that works, or belongs to no Workflow."""
    metadata, status = pod["metadata"], pod.get("status") or {}
    deleted = metadata.get("deletionTimestamp")
    if status.get("phase") != "Failed" and not deleted:
        return None
    owners = [one["uid"] for one in metadata.get("ownerReferences") or [] if one.get("kind") == "Workflow"]
    if not owners:
        return None
    reason = " ".join(str(status[field]) for field in ("reason", "message") if status.get(field))
    gone_by = datetime.fromisoformat(deleted) if deleted else None
    told = f"its node has not ended it since {deleted}" if deleted else reason or "no reason given"
    return StuckAgent(metadata["namespace"], metadata["name"], metadata["uid"], owners[0], told, gone_by)


def delete_agent(api: KubeApi, pod: StuckAgent) -> bool:
    """Delete this pod and no other of its name, without its node if that has not done it; False if it is gone.

    Raises:
        ConflictError: another pod has its name.
        StoreError: the API server is out of reach.
    """
    return api.delete(PODS, pod.namespace, pod.name, uid=pod.uid, grace=0 if pod.gone_by else None)


def to_delete(stuck: Iterable[StuckAgent], live: Collection[str], now: datetime) -> list[StuckAgent]:
    """Those whose Workflow goes on. ``live`` holds the uids of ours; other people's pods are theirs to look after.

    A pod that is being deleted has until `OVERDUE` after its time.
    """
    ours = (pod for pod in stuck if pod.workflow_uid in live)
    return sorted(pod for pod in ours if pod.gone_by is None or now - pod.gone_by > OVERDUE)
