"""Records the steps without a gate of all Workflows, from the changes that the watch reports.

Changes of one Workflow are recorded one after the other, the newest alone: a Workflow that
changes while it is recorded is recorded again. A namespace gets a bounded share of the
threads, and a Workflow that cannot be recorded is tried again after a pause, so that neither
holds others up.
"""

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

import structlog
from cachetools import LRUCache

from tiphys.errors import ConflictError, IntegrityError, NotFoundError, TiphysError, UsageError
from tiphys.kube import Object
from tiphys.protocol.compiled_workflow import CompiledPipeline, read_template_specs, read_workflow_parameters
from tiphys.protocol.execute_api import WorkflowMetadata
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION, RUN_PARAMETER, SUBMISSION_PARAMETER
from tiphys.protocol.workflow_nodes import are_nodes_offloaded, parse_node_time, read_nodes
from tiphys.recording import WorkflowRecorder, bind_workflow, submitted_manifest
from tiphys.service.tenant_guard import TenantGuard
from tiphys.store import Store
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.submit.authored_facts import check_authored_name

_log = structlog.get_logger()
_THREADS, _THREADS_OF_NAMESPACE = 16, 4
_MAX_KEPT_DOCUMENTS = 64
"""Workflows of up to 1.5 MB that wait; further ones are read again when their turn comes."""
_MAX_RECORDERS = 1024
_PAUSE_SECONDS = 10.0
_OLD_SECONDS = 3600.0
"""A Workflow that ended longer ago has had its turn; a resume records what was missed."""
_FINAL_ERRORS = (UsageError, NotFoundError, ConflictError, IntegrityError)
"""Errors that a person has to fix; a repetition would meet them again."""


class _Waiting(NamedTuple):
    """A Workflow whose newest state is to be recorded; ``document`` is None if it has to be read."""

    namespace: str
    name: str
    document: Object | None
    not_before: float = 0.0


class _ClusterWorkflows(NamedTuple):
    """The `WorkflowReader` of a cluster."""

    name: str
    workflow: Callable[[str, str], Object | None]


@dataclass
class StepRecorder:
    """Records steps while this controller leads."""

    read: Callable[[str, str], Object | None]
    """Reads a Workflow by namespace and name."""
    cluster: Callable[[], str]
    """Returns the identity of the cluster; connects at its first call."""
    stores: Callable[[str], Store]
    metrics: ControllerMetrics
    now: Callable[[], datetime]
    warn: Callable[[Object, str], None]
    """Records an Event of the Workflow that says why steps of it are not recorded; each sentence once."""
    monotonic: Callable[[], float] = time.monotonic
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _large_workflow: threading.Lock = field(default_factory=threading.Lock)
    _waiting: OrderedDict[str, _Waiting] = field(default_factory=OrderedDict)
    _busy: dict[str, str] = field(default_factory=dict)
    """Namespace of each Workflow that is being recorded, by uid."""
    _recorders: LRUCache[str, WorkflowRecorder | None] = field(default_factory=lambda: LRUCache(_MAX_RECORDERS))
    """By uid; None for a Workflow that has nothing to record, or that is refused."""

    def __post_init__(self) -> None:
        self._guard = TenantGuard("steps", self.metrics.failures.labels("record").inc)

    def note(self, workflow: Object) -> None:
        """Note a new state of a Workflow, which is recorded soon."""
        metadata = workflow["metadata"]
        uid = metadata["uid"]
        is_ours = PIPELINE_ANNOTATION in (metadata.get("annotations") or {})
        if not is_ours or not workflow.get("status") or self._is_old(workflow):
            return
        with self._changed:
            if self._recorders.get(uid, self) is None:
                return
            before = self._waiting.get(uid)
            kept = sum(other != uid and waiting.document is not None for other, waiting in self._waiting.items())
            self._waiting[uid] = _Waiting(
                metadata["namespace"],
                metadata["name"],
                workflow if kept < _MAX_KEPT_DOCUMENTS else None,
                before.not_before if before else 0.0,
            )
            self._changed.notify()

    def forget(self, uid: str) -> None:
        """Forget a Workflow that is gone."""
        with self._changed:
            self._waiting.pop(uid, None)
            self._recorders.pop(uid, None)

    def run(self, stop: threading.Event) -> None:
        """Work until ``stop``."""
        with ThreadPoolExecutor(_THREADS, "tiphys-recorder") as pool:
            while not stop.is_set():
                with self._changed:
                    taken = self._take()
                    if taken is None:
                        self._changed.wait(1.0)
                        continue
                pool.submit(self._work, *taken)

    def record_waiting(self) -> None:
        """Record all that waits, in this thread."""
        while True:
            with self._changed:
                taken = self._take()
            if taken is None:
                return
            self._work(*taken)

    def _take(self) -> tuple[str, _Waiting] | None:
        """The next Workflow whose namespace has a free thread."""
        if len(self._busy) >= _THREADS:
            return None
        used, moment = Counter(self._busy.values()), self.monotonic()
        for uid, waiting in self._waiting.items():
            is_free = uid not in self._busy and used[waiting.namespace] < _THREADS_OF_NAMESPACE
            if is_free and waiting.not_before <= moment:
                del self._waiting[uid]
                self._busy[uid] = waiting.namespace
                return uid, waiting
        return None

    def _work(self, uid: str, waiting: _Waiting) -> None:
        is_repeated = False
        try:
            with self._guard.visit(namespace=waiting.namespace, workflow=waiting.name) as visit:
                is_repeated = self._record(uid, waiting)
            if visit.failure is not None:
                is_repeated = self._is_failure_repeated(uid, waiting, visit.failure)
        finally:
            with self._changed:
                del self._busy[uid]
                if is_repeated:
                    later = waiting._replace(document=None, not_before=self.monotonic() + _PAUSE_SECONDS)
                    self._waiting.setdefault(uid, later)
                self._changed.notify()

    def _is_failure_repeated(self, uid: str, waiting: _Waiting, error: Exception) -> bool:
        """Whether to record a Workflow again after an error. If not, a person learns of it."""
        if isinstance(error, TiphysError) and not isinstance(error, _FINAL_ERRORS):
            return True
        self._keep(uid, None)
        if isinstance(error, TiphysError):
            self._tell(waiting, str(error))
        return False

    def _record(self, uid: str, waiting: _Waiting) -> bool:
        """Record a Workflow; whether it has to be looked at again although it may not change."""
        workflow = waiting.document or self.read(waiting.namespace, waiting.name)
        if workflow is None or workflow["metadata"]["uid"] != uid:
            return False
        if self._is_old(workflow):
            return False
        with self._changed:
            recorder = self._recorders.get(uid)
        recorder = recorder or self._open(uid, workflow)
        if recorder is None:
            return False
        if are_nodes_offloaded(workflow):
            raise UsageError(
                "a database of Argo has the nodes of the Workflow, so its steps without a gate are not recorded: give "
                "them gate=True, or switch node status offloading off"
            )
        # Compressed nodes take twenty times as much memory once parsed, so one such Workflow is recorded at a time.
        is_compressed = bool((workflow.get("status") or {}).get("compressedNodes"))
        with self._large_workflow if is_compressed else nullcontext():
            recorded = recorder.record(workflow, read_nodes(workflow))
        if untold := sorted(recorded.faults.keys() - recorder.told):
            others = f" (and {len(untold) - 1} more)" if len(untold) > 1 else ""
            fault = f"step {untold[0]}{others} cannot be recorded: {recorded.faults[untold[0]]}"
            _log.warning("step.unrecorded", namespace=waiting.namespace, workflow=waiting.name, error=fault)
            if self._tell(waiting._replace(document=workflow), fault):
                recorder.told |= set(untold)
        return bool(recorded.waiting)

    def _tell(self, waiting: _Waiting, why: str) -> bool:
        try:
            if (workflow := waiting.document or self.read(waiting.namespace, waiting.name)) is not None:
                self.warn(workflow, why)
            return True
        except Exception as error:  # noqa: BLE001  the log has it all the same, and the Workflow may be malformed
            _log.warning("steps.untold", namespace=waiting.namespace, workflow=waiting.name, error=str(error))
            return False

    def _open(self, uid: str, workflow: Object) -> WorkflowRecorder | None:
        """The recorder of a Workflow, which is bound to a run if nobody has done so; None if there is nothing to do."""
        submitted = submitted_manifest(workflow)
        templates = submitted["spec"].get("templates") or []
        if not templates:  # Argo has not merged the WorkflowTemplate yet, and the next change will show it
            return None
        if all(spec.is_gated for _, spec in read_template_specs(templates)):
            self._keep(uid, None)
            return None
        metadata = workflow["metadata"]
        store = self.stores(metadata["namespace"])
        pipeline = CompiledPipeline.from_manifest(submitted)
        if pipeline.store.rstrip("/") not in ("", store.url.rstrip("/")):
            raise UsageError(
                f"the Workflow was compiled for the store {pipeline.store}, but runs of its namespace are kept in "
                f"{store.url}; compile it with `tiphys compile --store {store.url}`"
            )
        parameters = read_workflow_parameters(submitted)
        name = parameters.get(RUN_PARAMETER) or check_authored_name(pipeline, None)
        binding = bind_workflow(
            store,
            _ClusterWorkflows(self.cluster(), lambda *_: workflow),
            WorkflowMetadata(name=metadata["name"], namespace=metadata["namespace"], uid=uid),
            name,
            parameters.get(SUBMISSION_PARAMETER, ""),
        )
        recorder = WorkflowRecorder(store, binding, on_end=lambda _: self.metrics.recorded_steps.inc())
        self._keep(uid, recorder)
        return recorder

    def _keep(self, uid: str, recorder: WorkflowRecorder | None) -> None:
        with self._changed:
            self._recorders[uid] = recorder
            if recorder is None:
                self._waiting.pop(uid, None)  # noted in the meantime

    def _is_old(self, workflow: Object) -> bool:
        status = workflow.get("status")
        finished = parse_node_time(status.get("finishedAt")) if isinstance(status, dict) else None
        return finished is not None and (self.now() - finished).total_seconds() > _OLD_SECONDS
