"""The plugin without HTTP: one request in, one reply out.

Calls about the same step are answered one after the other within a process;
between processes the create-only claims decide. The local engine, the tests
and the service drive the same object.
"""

from collections import Counter
from collections.abc import Callable
from datetime import datetime
from typing import Any

import structlog

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, StoreError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.execute_api import (
    NOT_MINE,
    ExecuteReply,
    ExecuteRequest,
    WorkflowMetadata,
    failed,
    pending,
    succeeded,
)
from tiphys.protocol.operations import (
    Admit,
    Conclude,
    Finalize,
    Operation,
    Settle,
    StepOperation,
    attempt_of,
    instance_of,
)
from tiphys.records import utc_now
from tiphys.store import Store
from tiphys_plugin.attempts.run_binding import Binding, bind, step_id
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.eviction.loop import Preemptions
from tiphys_plugin.operations import replies as answers
from tiphys_plugin.operations.admit import admit
from tiphys_plugin.operations.conclude import conclude
from tiphys_plugin.operations.finalize import finalize
from tiphys_plugin.operations.lease_reclaim import recover
from tiphys_plugin.operations.settle import settle
from tiphys_plugin.quota.lease import AdmissionBackend
from tiphys_plugin.runtime import requests
from tiphys_plugin.runtime.background import OutputHasher
from tiphys_plugin.runtime.concurrency import Busy, KeyedLocks, Together
from tiphys_plugin.runtime.context import OnlyStore, Services, StepCall, Tenant, Waits
from tiphys_plugin.runtime.metrics import Metrics
from tiphys_plugin.runtime.settings import Settings

_log = structlog.get_logger()
_REFUSALS = (UsageError, NotFoundError, ConflictError, IntegrityError)
_BUSY_SECONDS = 2.0
_MOST_BINDINGS = 256


class PluginCore:
    """Answers admit, settle, conclude and finalize.

    ``execute`` raises `StoreError` while storage, ledger or cluster is out of
    reach; everything that a person has to put right is a Failed node with a
    message. `close` stops the background hashing. Making one raises `StoreError`
    if the leases of live attempts cannot be looked up.

    With ``tenant`` it serves one namespace: workflows have to live there and to
    name this store, and the leases are looked up by `recover`, or before the
    first answer, so that making one needs nobody to be in reach.
    """

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        ledger: AdmissionBackend,
        clock: Callable[[], datetime] = utc_now,
        settings: Settings | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        settings = settings or Settings()
        self.metrics = Metrics()
        self._tenant = tenant
        self._services = Services(
            store=store,
            stores=tenant.stores if tenant else OnlyStore(store),
            cluster=cluster,
            ledger=ledger,
            clock=clock,
            settings=settings,
            metrics=self.metrics,
            hasher=OutputHasher(store, settings.verify_workers),
            waits=Waits(),
            together=Together(),
        )
        self._recovered = False
        if tenant is None:
            self.metrics.watch_ledger(ledger.snapshot)
            self.recover()
        self._bindings: dict[tuple[str, ...], Binding] = {}
        self._locks = KeyedLocks()
        self._outages: Counter[str] = Counter()

    def execute_document(self, document: dict[str, Any]) -> ExecuteReply:
        """Answer a request as it was parsed from JSON; one that is not for Tiphys gets the reply "not mine"."""
        if not requests.is_ours(document.get("template")):
            return NOT_MINE
        try:
            request = requests.read_request(document)
        except UsageError as error:
            return refused(requests.identify(document["template"]), error)
        return self.execute(request)

    def execute(self, request: ExecuteRequest) -> ExecuteReply:
        """Answer one request.

        Raises:
            StoreError: storage, ledger or cluster did not answer; the caller shall ask again.
        """
        if not requests.is_ours(request.template):
            return NOT_MINE
        identity = requests.identify(request.template)
        with self.metrics.answer_seconds.labels(op=identity.op).time():
            reply = self._answer(request, identity)
        answer = reply.node.phase.lower() if reply.node else "foreign"
        self.metrics.answers.labels(op=identity.op, answer=answer).inc()
        return reply

    def preemptions(self) -> Preemptions:
        """The job that has trainings go for others; for a plugin that is no tenant among others."""
        services = self._services
        return Preemptions(
            services.ledger,
            services.cluster,
            services.stores,
            every_seconds=services.settings.preemption_seconds,
            clock=services.clock,
        )

    def recover(self) -> None:
        """Record the leases of live attempts that the ledger does not know. Raises `StoreError`; then ask again."""
        if not self._recovered:
            services = self._services
            namespace = self._tenant.namespace if self._tenant else None
            recover(services.store, services.cluster, services.ledger, namespace)
            self._recovered = True

    def check(self) -> None:
        """Raise `StoreError` unless storage and ledger answer."""
        self.check_store()
        self._services.ledger.snapshot()

    def check_store(self) -> None:
        """Raise `StoreError` unless storage answers."""
        next(self._services.store.list("runs/"), None)

    def close(self) -> None:
        """Stop the background work."""
        self._services.hasher.close()

    def _answer(self, request: ExecuteRequest, identity: requests.Identity) -> ExecuteReply:
        place = f"{request.workflow.metadata.uid}/{identity.node}"
        try:
            reply = self._perform(request, requests.read_operation(request))
        except _REFUSALS as error:
            _log.warning("call.refused", op=identity.op, node=identity.node, error=str(error))
            reply = refused(identity, error)
        except Busy:
            return pending("Another call about this step is being answered", _BUSY_SECONDS)
        except StoreError as error:
            return self._out_of_reach(place, identity, error)
        self._outages.pop(place, None)
        return reply

    def _perform(self, request: ExecuteRequest, operation: Operation) -> ExecuteReply:
        services = self._services
        self.recover()
        binding = self._bound(request.workflow.metadata, operation)
        if isinstance(operation, Finalize):
            return finalize(services, binding, operation)
        with self._locks.hold(f"{binding.run}/{operation.step}/{operation.item}", services.settings.lock_seconds):
            return _dispatch(self._call(binding, operation), operation, request.template)

    def _bound(self, metadata: WorkflowMetadata, operation: Operation) -> Binding:
        """The workflow's place. It never changes, and a waiting step would read the whole Workflow each time.

        The steps of a new workflow come together, and one of them finds it for all.
        """
        known = (metadata.uid, metadata.name, metadata.namespace, operation.run, operation.submission)
        if (binding := self._bindings.get(known)) is not None:
            return binding
        with self._locks.hold(f"bind/{metadata.uid}", self._services.settings.lock_seconds):
            binding = self._bindings.get(known)
            if binding is None:
                check = self._refuse_other_store if self._tenant else None
                binding = bind(self._services.store, self._services.cluster, metadata, operation, check)
                if len(self._bindings) >= _MOST_BINDINGS:
                    self._bindings.clear()
                self._bindings[known] = binding
        return binding

    def _refuse_other_store(self, pipeline: CompiledPipeline) -> None:
        ours = self._services.store.url
        if pipeline.store.rstrip("/") != ours.rstrip("/"):
            raise UsageError(
                f"the Workflow was compiled for the store {pipeline.store or '(none)'}, but runs of its namespace are "
                f"kept in {ours}; compile it with `tiphys compile --store {ours}`, or have the administrator change "
                "the store of the plugin"
            )

    def _call(self, binding: Binding, operation: StepOperation) -> StepCall:
        spec = binding.pipeline.step(operation.step)
        return StepCall(
            services=self._services,
            binding=binding,
            spec=spec,
            step=step_id(self._services.store, binding, spec, operation),
            instance=instance_of(operation.node),
            node=operation.node,
        )

    def _out_of_reach(self, place: str, identity: requests.Identity, error: StoreError) -> ExecuteReply:
        """Argo repeats a 503 four times within some 15 s and then fails the node; a longer outage is waited for."""
        _log.error("call.unavailable", op=identity.op, node=identity.node, error=str(error))
        settings = self._services.settings
        self._outages[place] += 1
        if self._outages[place] <= settings.outage_calls:
            self.metrics.answers.labels(op=identity.op, answer="unavailable").inc()
            raise error
        return pending(f"Waiting: {error}", settings.requeue_max_seconds)


def _dispatch(call: StepCall, operation: StepOperation, template: dict[str, Any]) -> ExecuteReply:
    match operation:
        case Admit():
            return admit(call, operation, template)
        case Settle():
            return settle(call, operation)
        case Conclude():
            return conclude(call, operation)


def refused(identity: requests.Identity, error: Exception) -> ExecuteReply:
    """Say what is wrong, in the one phase that does not make Argo try it for ever.

    Inside ``attempts`` a Failed node is tried again, so there the refusal is
    passed on: nothing runs, trying stops, and conclude, which meets the same
    refusal, fails.
    """
    message = f"Refused: {error}"
    if attempt_of(identity.node) is None:
        return failed(message)
    return answers.skip(message) if identity.op == "admit" else succeeded(message)
