"""Requests, leases and queues for tests of admission."""

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from tiphys_plugin.quota.lease import (
    Admission,
    AdmissionReason,
    Deferred,
    Lease,
    LeaseRequest,
    LedgerState,
    PendingRequest,
    hash_node_name,
)
from tiphys_plugin.quota.ledger import status_codec
from tiphys_plugin.quota.ledger.log_entry import encode_changes
from tiphys_plugin.quota.queues import Queues
from tiphys_plugin.quota.scheduler.cache import SchedulerCache

from support.servers.kube_store import Collection, ObjectStore, Place, RefusedError, Selector
from tiphys.errors import ConflictError, NotFoundError, ObjectExistsError, StoreError, UsageError
from tiphys.kube.api import ObjectList
from tiphys.kube.ledger_log import LOG_FORMAT, LogHead
from tiphys.kube.resources import GPU_LEDGER_RECORDS, GPU_LEDGERS, Resource

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def queues(inventory: dict[str, dict[str, int]] | None = None, **quotas: dict[str, int]) -> Queues:
    """``queues(research={"A100": 8})``."""
    document = {"queues": [{"name": name, "gpus": gpus} for name, gpus in quotas.items()], "inventory": inventory}
    return Queues.model_validate(document)


def cohort(inventory: dict[str, dict[str, int]] | None = None, **members: dict[str, Any]) -> Queues:
    """Queues that lend to each other: ``cohort(research={"gpus": {"A100": 8}, "weight": 2})``."""
    document = [{"name": name, "cohort": "lab", **fields} for name, fields in members.items()]
    return Queues.model_validate({"queues": document, "inventory": inventory})


def strict(declared: Queues) -> Queues:
    """The same queues, in which nothing starts on what a blocked request lacks."""
    document = declared.model_dump(mode="json", exclude_defaults=True)
    for queue in document["queues"]:
        queue["backfill"] = "strict"
    return Queues.model_validate(document)


def spec(declared: Queues) -> dict[str, Any]:
    """Queues as the spec of a `GPULedger`."""
    return declared.model_dump(mode="json", exclude_defaults=True)


def ask(
    gpus: int, uid: str = "u1", step: str = "fit", node: str = "", instance: str = "", **changes: Any
) -> LeaseRequest:
    """``node`` is the name of the admit node, and ``instance`` that of the step."""
    given = {
        "node_hash": hash_node_name(node or f"{uid}.{step}(0).admit"),
        "instance_hash": hash_node_name(instance or f"wf-{uid}.{step}"),
        "uid": uid,
        "step": step,
        "namespace": "ml",
        "workflow": f"wf-{uid}",
        "run": f"run-{uid}",
        "attempt": 1,
        "queue": "research",
        "gpus": gpus,
        "gpu_type": "A100",
        **changes,
    }
    return LeaseRequest(**given)


def deferral(answer: Admission) -> AdmissionReason:
    """Why the request has to wait; fails if it need not."""
    assert isinstance(answer, Deferred), answer
    return answer.reason


def lease(gpus: int, uid: str = "holder", pool: str = "A100", **changes: Any) -> Lease:
    request = ask(gpus, uid, **changes)
    return Lease(f"lease-{uid}", request, pool, NOW, NOW)


def ledger_status(state: LedgerState) -> dict[str, Any]:
    """The status of a `GPULedger` with a log of one entry, which holds all of ``state``."""
    cache = SchedulerCache()
    head = LogHead(id="5eed5eed", number=1, entries=({"n": 1, **encode_changes(LedgerState(), state, cache)},))
    summary = status_codec.encode_summary(state, cache.sum_held_gpus(state))
    return {"version": LOG_FORMAT, "summary": summary, "log": head.to_json()}


def waiting(gpus: int, arrival: int, uid: str = "", **changes: Any) -> PendingRequest:
    return PendingRequest(ask(gpus, uid or f"waiter-{arrival}", **changes), arrival, NOW, NOW)


class LedgerApi:
    """The verbs of `KubeApi` that the ledger needs, straight on the store of the API server for tests.

    Without HTTP in between, a search can afford thousands of decisions, and a
    fault hits exactly the write that it is meant for.
    """

    def __init__(self, store: ObjectStore | None = None, meanwhile: Callable[[], str] = lambda: "") -> None:
        self.store = store or ObjectStore({"gpuledgers"})
        self.meanwhile = meanwhile
        """Asked before each write what happens to it: "conflict", "refused" (not done), "lost" (done) or nothing. A
        record of the log is created or not, and meets no conflict."""
        self.calls: list[str] = []

    def get(self, resource: Resource, namespace: str, name: str) -> Any:
        self.calls.append("get")
        try:
            return self._answer(lambda: self.store.get(_place(resource, namespace, name)))
        except NotFoundError:
            return None

    def create(self, resource: Resource, namespace: str, body: Any) -> Any:
        self.calls.append("create")
        typed = {"apiVersion": resource.api_version, "kind": resource.kind, **body}
        collection = _place(resource, namespace, "").collection
        fault = self.meanwhile() if resource == GPU_LEDGER_RECORDS else ""
        if fault == "refused":
            raise StoreError("the API server did not answer")
        created = self._answer(lambda: self.store.create(collection, namespace, typed))
        if fault == "lost":
            raise StoreError("the answer of the API server got lost")
        return created

    def replace(self, resource: Resource, namespace: str, body: Any, subresource: str = "") -> Any:
        self.calls.append("replace")
        place = _place(resource, namespace, body["metadata"]["name"])
        fault = self.meanwhile()
        if fault == "refused":
            raise StoreError("the API server did not answer")
        if fault == "conflict":
            self.touch(place)
        sent = json.loads(json.dumps(body))
        written = self._answer(lambda: self.store.write(place, subresource, lambda _: sent))
        if fault == "lost":
            raise StoreError("the answer of the API server got lost")
        return written

    def list(
        self,
        resource: Resource,
        namespace: str,
        labels: str = "",
        *,
        transform: Any = lambda one: one,
        metadata_only: bool = False,
    ) -> Any:
        self.calls.append("list")
        place = _place(resource, namespace, "")
        return ObjectList(
            [transform(one) for one in self.store.select(Selector(place.collection, namespace, labels))], ""
        )

    def delete(self, resource: Resource, namespace: str, name: str) -> bool:
        self.calls.append("delete")
        return self._answer(lambda: self.store.delete(_place(resource, namespace, name), {})[1])

    def touch(self, place: Place) -> None:
        """Somebody else writes the object and changes nothing that matters."""
        before = self.store.get(place)
        stamp = {"touched": str(self.store.version)}
        self.store.write(place, "", lambda _: {**before, "metadata": {**before["metadata"], "annotations": stamp}})

    @staticmethod
    def _answer(call: Callable[[], Any]) -> Any:
        try:
            return json.loads(json.dumps(call()))
        except RefusedError as refused:
            known = {(404, "NotFound"): NotFoundError, (409, "AlreadyExists"): ObjectExistsError}
            kind = known.get((refused.status, refused.reason), ConflictError if refused.status == 409 else UsageError)
            raise kind(str(refused)) from refused


def _place(resource: Resource, namespace: str, name: str) -> Place:
    return Place(Collection(resource.group, resource.plural), namespace, name)


def ledger_api(declared: Queues | None, name: str = "default") -> LedgerApi:
    """An API server that holds a `GPULedger` in the namespace ``tiphys`` and nothing else."""
    api = LedgerApi()
    given = {} if declared is None else {"spec": spec(declared)}
    api.create(GPU_LEDGERS, "tiphys", {"metadata": {"name": name}, **given})
    return api
