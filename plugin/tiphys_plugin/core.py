"""The plugin without HTTP: one request in, one reply out.

Within a process, calls about the same step are answered one after the other.
Between processes, create-only records decide. The local engine, the tests, the
service and the shared agent all use `PluginCore`.
"""

import threading
import zlib
from collections.abc import Callable
from datetime import datetime
from typing import Any

import structlog
from cachetools import LRUCache
from pydantic_core import to_json

from tiphys.errors import ConflictError, StoreError, UsageError
from tiphys.protocol.compiled_workflow import CompiledPipeline
from tiphys.protocol.execute_api import (
    NOT_MINE,
    ExecuteReply,
    ExecuteRequest,
    WorkflowMetadata,
    pending_reply,
)
from tiphys.protocol.operations import (
    AdmitOperation,
    ConcludeOperation,
    FinalizeOperation,
    Operation,
    ReuseOperation,
    StepOperation,
    step_instance_name,
)
from tiphys.recording.run_binding import RunBinding, bind_workflow, read_binding, resolve_step_id
from tiphys.records import AttemptClaim, make_run_name, utc_now
from tiphys.store import Store
from tiphys.store.layout import RUNS
from tiphys_plugin.attempts import pods
from tiphys_plugin.cluster.interface import Cluster
from tiphys_plugin.eviction.loop import PreemptionLoop
from tiphys_plugin.operations import end_attempt, replies
from tiphys_plugin.operations.admit import admit
from tiphys_plugin.operations.conclude import conclude
from tiphys_plugin.operations.finalize import finalize
from tiphys_plugin.operations.lease_reclaim import recover_leases
from tiphys_plugin.operations.reuse_gate import decide_reuse
from tiphys_plugin.quota.admission_backend import AdmissionBackend, LedgerLostError
from tiphys_plugin.runtime import requests
from tiphys_plugin.runtime.background import OutputHasher
from tiphys_plugin.runtime.concurrency import KeyedLocks, LockTimeoutError, SingleFlight
from tiphys_plugin.runtime.context import PluginContext, SingleStore, StepCall, Tenant, WaitTracker
from tiphys_plugin.runtime.metrics import PluginMetrics
from tiphys_plugin.runtime.settings import PluginSettings
from tiphys_plugin.sidecar.outages import take_nothing_over

_log = structlog.get_logger()
_BUSY_SECONDS = 2.0
_MAX_BINDINGS, _MAX_BINDING_BYTES = 256, 4 << 20
"""Bindings that are kept, and the JSON of their Workflows, which takes eight times as much memory once parsed."""
_MAX_KNOWN_RUNS = 10_000
_CONCURRENT_BINDS = 2
"""Workflows of up to 1.5 MB that one namespace has read, parsed and stored at once."""
_MAX_LOGGED_CHARACTERS = 512


class PluginCore:
    """Answers admit, conclude, finalize and reuse.

    `execute` raises `StoreError` while storage, ledger or cluster is
    unreachable. A problem that a person has to fix becomes a Failed node with a
    message. `close` stops the background hashing.

    With ``tenant`` the core serves one namespace: workflows must live in that
    namespace and name this store. `recover_leases` then runs before the first
    reply, or earlier if the caller wants it, so that the constructor needs
    neither storage nor cluster.

    Raises:
        StoreError: without ``tenant``, if the leases of live attempts cannot be recovered.
    """

    def __init__(
        self,
        store: Store,
        cluster: Cluster,
        ledger: AdmissionBackend,
        clock: Callable[[], datetime] = utc_now,
        settings: PluginSettings | None = None,
        tenant: Tenant | None = None,
    ) -> None:
        settings = settings or PluginSettings()
        self.metrics = PluginMetrics()
        self._tenant = tenant
        self._context = PluginContext(
            store=store,
            stores=tenant.stores if tenant else SingleStore(store),
            cluster=cluster,
            ledger=ledger,
            clock=clock,
            settings=settings,
            metrics=self.metrics,
            hasher=OutputHasher(store, settings.verify_workers),
            wait_tracker=WaitTracker(),
            single_flight=SingleFlight(),
        )
        self._recovered = False
        if tenant is None:
            self.metrics.register_ledger(ledger.snapshot)
            self.recover_leases()
        self._bindings: LRUCache[tuple[str, ...], RunBinding] = LRUCache(_MAX_BINDING_BYTES, _measure_binding)
        self._runs: LRUCache[str, str] = LRUCache(_MAX_KNOWN_RUNS)
        """The run of each workflow uid, for the last `_MAX_KNOWN_RUNS` that called."""
        self._bindings_lock = threading.Lock()
        self._locks = KeyedLocks()

    def execute_document(self, document: dict[str, Any]) -> ExecuteReply:
        """Answer a request as parsed from JSON; the reply is `NOT_MINE` if its template is of another plugin.

        Raises:
            StoreError: storage, ledger or cluster did not answer; the caller should repeat the call.
        """
        if not requests.is_tiphys_template(document.get("template")):
            return NOT_MINE
        try:
            request = requests.read_request(document)
        except UsageError as error:
            return replies.refused_reply(error)
        return self.execute(request)

    def execute(self, request: ExecuteRequest) -> ExecuteReply:
        """Answer one request.

        Raises:
            StoreError: storage, ledger or cluster did not answer; the caller should repeat the call.
        """
        if not requests.is_tiphys_template(request.template):
            return NOT_MINE
        identity = requests.identify_call(request.template)
        with self.metrics.answer_seconds.labels(op=identity.op).time():
            reply = self._answer(request, identity)
        answer = reply.phase.lower() if reply.phase else "foreign"
        self.metrics.answers.labels(op=identity.op, answer=answer).inc()
        return reply

    def preemption_loop(self) -> PreemptionLoop:
        """Build the background task that preempts trainings; only for a core without a tenant."""
        services = self._context
        return PreemptionLoop(
            services.ledger,
            services.cluster,
            services.stores,
            every_seconds=services.settings.preemption_interval_seconds,
            clock=services.clock,
        )

    def attempt_call(self, claim: AttemptClaim) -> StepCall:
        """A call about the step of an attempt that Argo does not call about now; raises as `read_binding` does."""
        bound = pods.read_submission_bound(self._context.store, self._context.cluster, claim)
        return end_attempt.attempt_call(self._context, read_binding(self._context.store, bound), claim)

    def forget_recovery(self) -> None:
        """Have the next `recover_leases` record leases again, because the ledger was lost."""
        self._recovered = False

    def recover_leases(self) -> None:
        """Record the leases of live attempts that the ledger lacks; does nothing once it has succeeded.

        Raises:
            StoreError: storage, cluster or ledger did not answer; the next call tries again.
        """
        if not self._recovered:
            recover_leases(self._context, self._tenant.namespace if self._tenant else None)
            self._recovered = True

    def check(self) -> None:
        """Raise `StoreError` unless storage and ledger answer."""
        self.check_store()
        self._context.ledger.snapshot()

    def check_store(self) -> None:
        """Raise `StoreError` unless storage answers."""
        next(self._context.store.list(RUNS), None)

    def close(self) -> None:
        """Stop the background work."""
        self._context.hasher.close()

    def _answer(self, request: ExecuteRequest, identity: requests.CallIdentity) -> ExecuteReply:
        try:
            return self._perform(request, requests.read_operation(request))
        except replies.REFUSED_ERRORS as error:
            _log.warning("call.refused", op=identity.op, node=identity.node[:_MAX_LOGGED_CHARACTERS], error=str(error))
            refusal = replies.refused_reply(error)
            if identity.op != "reuse":
                return refusal
            return ExecuteReply.model_validate({"node": take_nothing_over(request.template, refusal.message)})
        except LockTimeoutError:
            return pending_reply("Another call about this step is being answered", _BUSY_SECONDS)
        except StoreError as error:
            _log.error(
                "call.unavailable", op=identity.op, node=identity.node[:_MAX_LOGGED_CHARACTERS], error=str(error)
            )
            if isinstance(error, LedgerLostError):  # it lasts until a person acts, so no limit holds
                return pending_reply(f"Waiting: {error}", self._context.settings.requeue_max_seconds)
            self.metrics.answers.labels(op=identity.op, answer="unavailable").inc()
            raise

    def _perform(self, request: ExecuteRequest, operation: Operation) -> ExecuteReply:
        services = self._context
        # A run that is recorded can be resumed, whatever else does not answer.
        binding = self._find_binding(request.workflow.metadata, operation)
        self.recover_leases()
        if isinstance(operation, FinalizeOperation):
            return finalize(services, binding, operation)
        part = operation.op if isinstance(operation, ReuseOperation) else f"{operation.step}/{operation.item}"
        with self._locks.hold(f"{binding.run}/{part}", services.settings.lock_timeout_seconds):
            if isinstance(operation, ReuseOperation):
                names = dict.fromkeys(operation.steps)
                reply = decide_reuse([self._build_step_call(binding, name, operation.node) for name in names])
            else:
                call = self._build_step_call(binding, operation.step, operation.node, operation.item)
                reply = _dispatch(call, operation, request.template)
            return replies.keep_declared(reply, request.template)

    def _find_binding(self, metadata: WorkflowMetadata, operation: Operation) -> RunBinding:
        """The run and submission of a workflow, from the cache if possible.

        The binding never changes, and without the cache a waiting step would
        read the whole Workflow at each call. The steps of a new workflow arrive
        together, so one of them reads it for all under a lock.
        """
        cache_key = (metadata.uid, metadata.name, metadata.namespace, operation.run, operation.submission)
        if (binding := self._find_kept_binding(cache_key)) is not None:
            return binding
        slot = zlib.crc32(metadata.uid.encode()) % _CONCURRENT_BINDS
        with self._locks.hold(f"bind/{slot}", self._context.settings.lock_timeout_seconds):
            if (binding := self._find_kept_binding(cache_key)) is not None:
                return binding
            with self._bindings_lock:
                run = self._runs.get(metadata.uid)
            if run is not None and operation.run and make_run_name(operation.run) != run:
                raise ConflictError(
                    f"workflow {metadata.namespace}/{metadata.name} acts for run {run}, and a Workflow has one run; "
                    f"this call names {operation.run!r}: compile the pipeline again"
                )
            check = self._check_store_url if self._tenant else None
            binding = bind_workflow(
                self._context.store, self._context.cluster, metadata, operation.run, operation.submission, check
            )
            self._keep_binding(cache_key, binding)
        return binding

    def _find_kept_binding(self, cache_key: tuple[str, ...]) -> RunBinding | None:
        with self._bindings_lock:
            binding = self._bindings.get(cache_key)
            if binding is not None:
                self._runs[binding.uid] = binding.run
            return binding

    def _keep_binding(self, cache_key: tuple[str, ...], binding: RunBinding) -> None:
        with self._bindings_lock:
            self._runs[binding.uid] = binding.run
            self._bindings[cache_key] = binding

    def _check_store_url(self, pipeline: CompiledPipeline) -> None:
        store_url = self._context.store.url
        if pipeline.store.rstrip("/") != store_url.rstrip("/"):
            raise UsageError(
                f"the Workflow was compiled for the store {pipeline.store or '(none)'}, but runs of its namespace are "
                f"kept in {store_url}; compile it with `tiphys compile --store {store_url}`, or have the administrator "
                "change the store of the plugin"
            )

    def _build_step_call(self, binding: RunBinding, step: str, node: str, item: str = "") -> StepCall:
        spec, instance = binding.pipeline.step(step), step_instance_name(node)
        return StepCall(
            context=self._context,
            binding=binding,
            spec=spec,
            step=resolve_step_id(self._context.store, binding, spec, instance, item),
            instance=instance,
            node=node,
        )


def _measure_binding(binding: RunBinding) -> int:
    """Its share of `_MAX_BINDING_BYTES`, so that at most `_MAX_BINDINGS` fit; one larger than all is kept alone."""
    size = len(to_json(binding.pipeline.manifest))
    return min(max(size, _MAX_BINDING_BYTES // _MAX_BINDINGS), _MAX_BINDING_BYTES)


def _dispatch(call: StepCall, operation: StepOperation, template: dict[str, Any]) -> ExecuteReply:
    match operation:
        case AdmitOperation():
            return admit(call, operation, template)
        case ConcludeOperation():
            return conclude(call, operation)
