"""One look at a namespace, for a round that a person goes by hand: lists in the place of the controller's watches."""

from collections.abc import Iterator, Sequence
from datetime import datetime
from functools import partial

from tiphys.kube import KubeApi, cluster_name
from tiphys.kube.resources import GPU_LEDGERS, LEDGER_NAME, PODS, WORKFLOWS
from tiphys.protocol.policy import PIPELINE_ANNOTATION
from tiphys.records import RunRecord
from tiphys.store import RunLayout, Store, find_record
from tiphys_controller.cleaning import Found, Sight, What, held_leases, orphaned
from tiphys_controller.kubernetes.agent_pods import AGENT_LABELS, delete_agent, stuck_agent, to_delete
from tiphys_controller.kubernetes.seen import see


class Look:
    """What there is in the namespace that ``api`` looks at, listed once.

    Raises:
        StoreError: the API server is out of reach.
        NotFoundError: it has no Workflows.
        ForbiddenError: they may not be listed.
    """

    def __init__(self, api: KubeApi) -> None:
        self._api = api
        self.namespace = api.namespace
        self._workflows = [see(one) for one in api.list(WORKFLOWS, self.namespace, PIPELINE_ANNOTATION).items]

    def sight(self) -> Sight:
        """For runs; those of other namespaces count as seen."""
        present = {one.uid for one in self._workflows}
        return Sight(cluster_name(self._api), lambda bound: bound.namespace != self.namespace or bound.uid in present)

    def agents(self, now: datetime) -> Iterator[Found]:
        """Agent pods that stand in the way of a Workflow that goes on."""
        pods = self._api.list(PODS, self.namespace, AGENT_LABELS).items
        stuck = [found for pod in pods if (found := stuck_agent(pod)) is not None]
        for pod in to_delete(stuck, self._alive(), now):
            why = f"no plugin step of its Workflow goes on: {pod.reason}"
            yield Found(What.AGENT, pod.namespace, pod.name, why, partial(delete_agent, self._api, pod))

    def leases(self, stores: Sequence[Store], ledger_namespace: str, now: datetime) -> Iterator[Found]:
        """Leases of this namespace, in a ledger beside it, that nobody counts on."""
        ledger, alive = self._api.get(GPU_LEDGERS, ledger_namespace, LEDGER_NAME), self._alive()
        for lease in held_leases(ledger):
            if lease.namespace != self.namespace:
                continue
            of = next((one for one in stores if find_record(one, RunLayout(lease.run).record, RunRecord)), stores[0])
            if (found := orphaned(lease, of, lease.uid in alive, now)) is not None:
                yield found

    def _alive(self) -> set[str]:
        return {one.uid for one in self._workflows if not one.finished}
