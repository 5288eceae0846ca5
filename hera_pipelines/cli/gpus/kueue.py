"""What the commands about GPUs show where Kueue grants them: Kueue's own reasons, and no queue rules of Tiphys."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tiphys_plugin.quota.lease import LedgerState

from hera_pipelines.cli.screen import Format, Screen
from tiphys.errors import NotFoundError, StoreError

if TYPE_CHECKING:
    from tiphys_plugin.quota.kueue.backend import KueueAdmission
    from tiphys_plugin.quota.kueue.workload import KueueWorkload
    from tiphys_plugin.quota.lease import Deferred, PendingRequest

    from tiphys.kube import KubeApi, Object

QUOTA_NOTE = "Kueue grants the GPUs; `kubectl get clusterqueues` shows its quotas"


class KueueView(NamedTuple):
    """The Workloads of Tiphys that the caller may see."""

    admission: "KueueAdmission"
    workloads: "Sequence[KueueWorkload]"

    @property
    def ledger_state(self) -> LedgerState:
        """Leases and pending requests."""
        return self.admission.snapshot_of(self.workloads)

    def explain(self, pending: "PendingRequest") -> "Deferred":
        """Why Kueue has not admitted a pending request."""
        workload = next(candidate for candidate in self.workloads if candidate.request == pending.request)
        return self.admission.explain(workload)


def find_kueue(api: "KubeApi", ledger: "Object | None") -> KueueView | None:
    """The Workloads of Tiphys; None where a `GPULedger` holds the queues, or nothing of Tiphys waits in Kueue.

    Those of all namespaces, or of the namespace of ``api`` if the caller may not list more.
    """
    if ledger is not None:
        return None
    from tiphys_plugin.quota.kueue.backend import KueueAdmission

    for namespaces in (None, (api.namespace,)):
        admission = KueueAdmission(api, namespaces)
        try:
            workloads = admission.workloads()
        except (NotFoundError, StoreError):
            continue
        return KueueView(admission, workloads) if workloads else None
    return None


def show_kueue_queues(screen: Screen, kueue: KueueView, output: Format) -> None:
    """The LocalQueues with leases and pending requests of Tiphys, for ``tiphys queues show``."""
    rows = list(count_queue_gpus(kueue.ledger_state))
    if output is not Format.TABLE:
        fields = ("namespace", "name", "held", "waiting")
        queues = [dict(zip(fields, row, strict=True)) for row in rows]
        screen.typed_document("QueueList", output, ledger="kueue", queues=queues)
        return
    texts = [(namespace, queue, str(held), str(waiting)) for namespace, queue, held, waiting in rows]
    screen.table(("NAMESPACE", "LOCAL QUEUE", "HELD", "WAITING"), texts)
    screen.note(QUOTA_NOTE)


def count_queue_gpus(ledger_state: LedgerState) -> Iterator[tuple[str, str, int, int]]:
    """Namespace, LocalQueue, held and awaited GPUs."""
    held, waiting = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for counted, requests in ((held, ledger_state.leases), (waiting, ledger_state.pending)):
        for request in (entry.request for entry in requests):
            counted[request.namespace, request.queue] += request.gpus
    for namespace, queue in sorted(held.keys() | waiting.keys()):
        yield namespace, queue, held[namespace, queue], waiting[namespace, queue]
