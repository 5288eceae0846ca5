"""Reads queues and nodes for the web pages, by what ``tiphys queues``, ``tiphys why`` and ``tiphys nodes`` use."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

from tiphys_plugin import load_queues
from tiphys_plugin.quota.lease import Admission, Deferred, Lease, LedgerState, PendingRequest
from tiphys_plugin.quota.ledger.sqlite_ledger import read_ledger_file
from tiphys_plugin.quota.ledger.usage import QueueUsage, compute_queue_usage
from tiphys_plugin.quota.queue import ANY_TYPE
from tiphys_plugin.quota.queues import MisconfiguredQueues, Queues, format_gpus
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

from hera_pipelines.cli.gpus.kueue import QUOTA_NOTE, KueueView, count_queue_gpus, find_kueue
from hera_pipelines.cli.gpus.nodes import (
    apply_cluster_nodes,
    count_free_gpus,
    count_held_gpus,
    describe_node_status,
    observe_cluster_nodes,
    read_node_settings,
)
from hera_pipelines.cli.gpus.preemption_preview import (
    build_loss_estimate,
    describe_eviction,
    describe_preemption,
    preview_preemption,
)
from hera_pipelines.cli.gpus.queues import (
    describe_queue_policies,
    describe_used_shares,
    existing_ledger,
    find_ledger,
    parse_ledger,
)
from hera_pipelines.cli.look.why import decide_waiting_request, list_reasons
from hera_pipelines.ui.gpu_page import MAX_REQUESTS, HolderRow, NodeRow, NodesView, QueueRow, QueuesView, WaitingRow
from tiphys.errors import NotFoundError
from tiphys.kube import KubeApi
from tiphys.records import utc_now

_PREVIEWED_ENTRIES = 4000
"""A preview of a preemption looks at the whole ledger; all previews of a page look at no more entries than these."""
_NO_QUEUES = "no queues are declared here, so no quota is known; --queues names the file of the engine"


class LocalGpus:
    """The ledger of the engine on this machine, in the file ``ledger``; a `hera_pipelines.ui.gpu_page.GpuSource`.

    Without ``queues``, the queue file that the engine was given, no quota is known.
    """

    has_nodes = False

    def __init__(self, ledger: Path, queues: Path | None) -> None:
        self._ledger = ledger
        self._queues = queues

    def read_queues(self) -> QueuesView:
        place, state = f"the engine on this machine, {self._ledger}", read_ledger_file(self._ledger)
        if self._queues is None:
            return describe_queues(place, state, [_NO_QUEUES], explains=False)
        return describe_queues(place, replace(state, queues=load_queues(self._queues)), [])

    def read_nodes(self) -> NodesView:
        raise NotFoundError("the engine on this machine runs programs on this machine alone; there are no nodes")


class ClusterGpus:
    """A `GPULedger` of a cluster by its name, or Kueue, and the nodes; a `hera_pipelines.ui.gpu_page.GpuSource`.

    ``connect`` is called on the first use, and leads to the namespace of the ledger.
    """

    has_nodes = True

    def __init__(self, connect: Callable[[], KubeApi], ledger: str = "default") -> None:
        self._connect = connect
        self._ledger = ledger

    def read_queues(self) -> QueuesView:
        api, notes = self._api, list[str]()
        if (kueue := find_kueue(api, find_ledger(api, self._ledger))) is not None:
            return _describe_kueue(kueue)
        state = parse_ledger(existing_ledger(api, self._ledger))
        notes += describe_used_shares(state)
        if state.queues is None:
            notes.append("no queues are declared, so GPUs are not limited")
        state = apply_cluster_nodes(api, state, notes.append)
        return describe_queues(f"GPULedger {api.namespace}/{self._ledger}", state, notes)

    def read_nodes(self) -> NodesView:
        api = self._api
        ledger = find_ledger(api, self._ledger)
        state = parse_ledger(ledger) if ledger else LedgerState()
        rules = state.queues
        settings, flavors = read_node_settings(rules)
        held = count_held_gpus(state)
        nodes = [
            NodeRow(
                name=node.node.name,
                gpu_type=flavors.gpu_kind_of(node.node) or f"{node.node.gpu_type}, no flavor",
                gpus=node.node.gpus,
                held=held[node.node.name],
                others=node.node.foreign_gpus,
                free=count_free_gpus(node, held[node.node.name], flavors),
                topology=" / ".join(
                    text for text in (node.node.block, node.node.rack, node.node.nvlink_domain) if text
                ),
                status=describe_node_status(node),
                evidence=tuple((item.source, item.message, item.at) for item in node.verdict.evidence),
            )
            for node in observe_cluster_nodes(api, settings, flavors, state.leases)
        ]
        uses_nodes = isinstance(rules, Queues) and rules.cluster_nodes is not None
        notes = () if uses_nodes else ("The queues ignore the nodes of the cluster.",)
        return NodesView(f"namespace {api.namespace}", tuple(nodes), notes)

    @cached_property
    def _api(self) -> KubeApi:
        return self._connect()


def describe_queues(place: str, state: LedgerState, notes: Sequence[str], *, explains: bool = True) -> QueuesView:
    """The page of a ledger, with ``notes`` at its head.

    ``explains``: whether the queues are those of the ledger, so that they say what each request waits for.
    """
    now, rules, cache = utc_now(), state.queues, SchedulerCache()
    if isinstance(rules, MisconfiguredQueues):
        notes = [*notes, f"no GPUs are granted: {rules.message}"]
    policies = describe_queue_policies(rules)
    previews = _PREVIEWED_ENTRIES // max(1, len(state.leases) + len(state.pending))
    waiting = [
        _explain_waiting(state, pending, now, cache, previews=number < previews)
        if explains
        else _describe_waiting(pending, None, ())
        for number, pending in enumerate(state.pending[:MAX_REQUESTS])
    ]
    queues = [QueueRow(usage, policies.get(usage.queue, "")) for usage in compute_queue_usage(state)]
    return _build_view(place, state, queues, waiting, notes)


def _build_view(
    place: str, state: LedgerState, queues: Sequence[QueueRow], waiting: Sequence[WaitingRow], notes: Sequence[str]
) -> QueuesView:
    return QueuesView(
        place=place,
        queues=tuple(queues),
        holders=tuple(map(_describe_holder, state.leases[:MAX_REQUESTS])),
        waiting=tuple(waiting),
        hidden_holders=max(0, len(state.leases) - MAX_REQUESTS),
        hidden_waiting=max(0, len(state.pending) - MAX_REQUESTS),
        notes=tuple(notes),
    )


def _explain_waiting(
    state: LedgerState, pending: PendingRequest, now: datetime, cache: SchedulerCache, *, previews: bool
) -> WaitingRow:
    admission = decide_waiting_request(state, pending, now, cache)
    if not previews or not isinstance(admission, Deferred) or not isinstance(state.queues, Queues):
        return _describe_waiting(pending, admission, ())
    selection = preview_preemption(state, pending, build_loss_estimate(None, now), now, cache)
    lines = describe_preemption(selection, is_exact=False)
    return _describe_waiting(pending, admission, tuple(line.plain.strip() for line in lines))


def _describe_kueue(kueue: KueueView) -> QueuesView:
    state = kueue.ledger_state
    waiting = [
        _describe_waiting(waiting_request, kueue.explain(waiting_request), ())
        for waiting_request in state.pending[:MAX_REQUESTS]
    ]
    queues = [
        QueueRow(QueueUsage(f"{namespace}/{queue}", ANY_TYPE, None, held, awaited), "")
        for namespace, queue, held, awaited in count_queue_gpus(state)
    ]
    return _build_view("Kueue", state, queues, waiting, (QUOTA_NOTE,))


def _describe_holder(lease: Lease) -> HolderRow:
    request = lease.request
    return HolderRow(
        request,
        format_gpus(request.gpus, request.type_text if lease.pool == ANY_TYPE else lease.pool),
        lease.granted_at,
        nodes=tuple(dict.fromkeys(lease.nodes)),
        eviction=describe_eviction(lease).removeprefix("; "),
    )


def _describe_waiting(pending: PendingRequest, admission: Admission | None, preemption: tuple[str, ...]) -> WaitingRow:
    deferred = admission if isinstance(admission, Deferred) else None
    return WaitingRow(
        pending.request,
        format_gpus(pending.request.gpus, pending.request.type_text),
        pending.since,
        position=deferred.position if deferred else None,
        reasons=tuple(list_reasons(admission)),
        expected_start=deferred.expected_start if deferred else None,
        preemption=preemption,
    )
