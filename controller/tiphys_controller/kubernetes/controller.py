"""Assembles the controller: leader election, watches, workers and the HTTP server.

Several replicas may run; one leads and runs the workers, the others wait for
its Lease.
"""

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from tiphys.errors import StoreError
from tiphys.kube import KubeApi, LeaderElector, Object, identify_cluster
from tiphys.kube.resources import DEFAULT_LEDGER_NAME, LEASES, WORKFLOW_TEMPLATES, WORKFLOWS
from tiphys.kube.whole_ledger import WholeLedgerReader
from tiphys.records import utc_now
from tiphys.store import Store
from tiphys_controller.alerts.rules import DEFAULT_ALERT_RULES, AlertRules
from tiphys_controller.alerts.webhook import AlertInbox
from tiphys_controller.auto_resume.act import AutoResumeReconciler
from tiphys_controller.auto_resume.observation_health import ObservationHealthTracker, TokenBucket
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits
from tiphys_controller.kubernetes.alert_worker import AlertWorker
from tiphys_controller.kubernetes.auto_resume_loop import AutoResumeLoop
from tiphys_controller.kubernetes.events.auto_resume_events import AutoResumeRecorder
from tiphys_controller.kubernetes.events.messages import steps_unrecorded_message
from tiphys_controller.kubernetes.events.recorder import EventRecorder
from tiphys_controller.kubernetes.janitor import Janitor
from tiphys_controller.kubernetes.kubernetes_submitter import KubernetesSubmitter
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.pod_cleanup import AgentPodCleaner, GangCleaner
from tiphys_controller.kubernetes.step_recorder import StepRecorder
from tiphys_controller.kubernetes.watch_cache import ClusterWatches, WatchCache, find_incomplete_reason
from tiphys_controller.kubernetes.workflow_view import build_workflow_view
from tiphys_controller.kubernetes.writer import COMPONENT, ClusterWriter
from tiphys_controller.submit.triggers.bucket import Buckets, S3Buckets
from tiphys_controller.submit.triggers.catalog import ObjectSources, TriggerCatalog, list_trigger_templates
from tiphys_controller.submit.triggers.worker import TriggerWorker

LEADER_LEASE_NAME = "tiphys-controller"
_SHUTDOWN_SECONDS = 5.0
WorkerSpec = tuple[str, Callable[[threading.Event], None]]
"""Name of a worker, and its function, which runs until the event is set."""


def submitter_of(api: KubeApi) -> Callable[[], KubernetesSubmitter]:
    """Return a function that connects the submitter at its first call, because that reads the cluster's identity."""
    return functools.cache(lambda: KubernetesSubmitter(api, identify_cluster(api)))


@dataclass(frozen=True)
class TriggerSettings:
    """What triggers may do."""

    sources: ObjectSources
    interval_seconds: float = 60.0
    """Time between two listings of a bucket."""
    runs_per_minute: float = 60.0
    """Largest average rate of runs in one namespace."""


@dataclass(frozen=True)
class ControllerDependencies:
    """Dependencies of `Controller`."""

    api: KubeApi
    namespaces: tuple[str, ...] | None
    """Namespaces of Workflows; None for all."""
    stores: Callable[[str], Store]
    identity: str
    """Name of the pod; unique among the replicas."""
    lease_namespace: str
    limits: AutoResumeLimits = field(default_factory=lambda: AutoResumeLimits(mode=AutomationMode.OFF))
    inbox: AlertInbox | None = None
    rules: AlertRules = field(default_factory=lambda: DEFAULT_ALERT_RULES)
    janitor_mode: AutomationMode = AutomationMode.OFF
    """Whether the janitor removes dead uploads and old alerts."""
    triggers: TriggerSettings | None = None
    """What triggers may do; None: there are none."""
    buckets: Buckets = field(default_factory=S3Buckets)
    agent_pods: bool = True
    """Whether Argo creates agent pods, of which failed ones must be deleted."""
    descriptions: bool = True
    """Whether to write title and description of Workflows."""
    now: Callable[[], datetime] = utc_now
    monotonic: Callable[[], float] = time.monotonic


@dataclass
class WorkerFactory:
    """Creates the workers of a controller that leads. The auto-resume loop and the alert worker share one reconciler
    and its limits.
    """

    dependencies: ControllerDependencies
    view: WatchCache
    watches: ClusterWatches
    writer: ClusterWriter
    metrics: ControllerMetrics
    is_leader: Callable[[], bool]
    triggers: TriggerWorker | None = None

    def __post_init__(self) -> None:
        dependencies = self.dependencies
        self._submitter = submitter_of(dependencies.api)
        self._health_tracker = ObservationHealthTracker(
            lambda: find_incomplete_reason(self.watches),
            lambda: sum(workflow.auto_resume and not workflow.finished for workflow in self.view.workflows()),
            dependencies.limits,
            dependencies.monotonic,
        )
        self._reconciler = AutoResumeReconciler(
            dependencies.stores,
            self._submitter,
            self.is_leader,
            self._health_tracker.measure_health,
            dependencies.monotonic,
            dependencies.limits,
        )

    def tenants(self) -> list[str]:
        """The namespaces that this controller serves: those of its settings, or all with a Workflow."""
        namespaces = self.dependencies.namespaces
        return self.view.namespaces() if namespaces is None else list(namespaces)

    def create_workers(self) -> Iterator[WorkerSpec]:
        """Workers that the configuration enables."""
        if self.dependencies.limits.mode is not AutomationMode.OFF:
            yield "resumer", self.create_auto_resume_loop().run
        if self.dependencies.inbox is not None:
            yield "alerts", self._create_alert_worker(self.dependencies.inbox).run
        if self.triggers is not None:
            yield "triggers", self.triggers.run
        if self.dependencies.janitor_mode is not AutomationMode.OFF:
            yield "janitor", self._create_janitor().run

    def create_auto_resume_loop(self) -> AutoResumeLoop:
        dependencies = self.dependencies
        stores, limits, monotonic = dependencies.stores, dependencies.limits, dependencies.monotonic
        reporter = AutoResumeRecorder(self.writer, stores, self.metrics, limits, monotonic)
        shared = (self._reconciler, self._health_tracker, stores, reporter, limits, monotonic)
        return AutoResumeLoop(self.view, *shared, self.tenants)

    def _create_alert_worker(self, inbox: AlertInbox) -> AlertWorker:
        shared = (self.dependencies.stores, self.view, self.writer, self.metrics, self.tenants)
        return AlertWorker(inbox, self.dependencies.rules, self._reconciler, *shared)

    def _create_janitor(self) -> Janitor:
        dependencies = self.dependencies
        return Janitor(
            dependencies.stores,
            self.tenants,
            self.view,
            lambda: find_incomplete_reason(self.watches),
            lambda: self._submitter().cluster,
            WholeLedgerReader(dependencies.api, dependencies.lease_namespace, DEFAULT_LEDGER_NAME).read,
            self.is_leader,
            self.metrics,
            dependencies.now,
            dependencies.janitor_mode,
        )


def create_trigger_worker(
    dependencies: ControllerDependencies, settings: TriggerSettings, metrics: ControllerMetrics
) -> TriggerWorker:
    """Create the worker that makes the runs of objects."""
    api, namespaces, monotonic = dependencies.api, dependencies.namespaces, dependencies.monotonic

    def list_templates() -> list[Object]:
        scopes: Sequence[str | None] = (None,) if namespaces is None else namespaces
        return [template for scope in scopes for template in list_trigger_templates(api, scope)]

    @functools.cache
    def rate(_: str) -> TokenBucket:
        return TokenBucket(settings.runs_per_minute / 60, int(settings.runs_per_minute), monotonic, starts_full=True)

    return TriggerWorker(
        TriggerCatalog(list_templates, settings.sources, monotonic),
        dependencies.buckets,
        dependencies.stores,
        submitter_of(api),
        lambda namespace, name: api.get(WORKFLOW_TEMPLATES, namespace, name),
        lambda namespace: rate(namespace).take(),
        metrics,
        monotonic,
        settings.interval_seconds,
    )


class Controller:
    """One candidate for leadership. Several may run; one leads.

    Another candidate leads after ``lease_seconds`` without a renewal.
    """

    def __init__(
        self, dependencies: ControllerDependencies, lease_seconds: float = 15.0, renew_seconds: float = 2.0
    ) -> None:
        self.metrics = ControllerMetrics()
        self.triggers: TriggerWorker | None = None
        if dependencies.triggers is not None:
            self.triggers = create_trigger_worker(dependencies, dependencies.triggers, self.metrics)
        self.metrics.registry.register(dependencies.api.unreadable)
        self._dependencies = dependencies
        self._lease = LeaderElector(
            dependencies.api,
            dependencies.lease_namespace,
            LEADER_LEASE_NAME,
            dependencies.identity,
            monotonic=dependencies.monotonic,
            duration_seconds=lease_seconds,
            renew_seconds=renew_seconds,
        )
        self._watches: ClusterWatches | None = None
        self._event_recorder: EventRecorder | None = None

    def run(self, stop: threading.Event) -> None:
        """Campaign for leadership and lead until ``stop``; returns within seconds of it."""
        self._lease.run(stop, self._run_workers)

    def check_ready(self) -> None:
        """Check readiness.

        A standby is ready if it can read the Lease. A leader is ready if its
        watches are complete and storage and API server answer.

        Raises:
            StoreError: the controller is not ready; the message says why.
        """
        watches, recorder = self._watches, self._event_recorder
        if watches is None or recorder is None:
            self._dependencies.api.get(LEASES, self._dependencies.lease_namespace, LEADER_LEASE_NAME)
            return
        # Callers have no token, so the reason names no namespace.
        if broken := sorted({target.partition(" of ")[0] for target in watches.errors}):
            raise StoreError(f"cannot watch {' and '.join(broken)}; the log says where and why (watch.lost)")
        if reason := find_incomplete_reason(watches):
            raise StoreError(reason)
        if recorder.last_error:
            raise StoreError("a store or the API server does not answer; the log says which (look.failed)")

    def _run_workers(self, stop: threading.Event) -> None:
        dependencies = self._dependencies
        writer = ClusterWriter(
            dependencies.api,
            lambda: self._lease.is_leader,
            self.metrics,
            dependencies.now,
            dependencies.identity or COMPONENT,
        )
        step_recorder = StepRecorder(
            lambda namespace, name: dependencies.api.get(WORKFLOWS, namespace, name),
            functools.cache(lambda: identify_cluster(dependencies.api)),
            dependencies.stores,
            self.metrics,
            dependencies.now,
            lambda workflow, why: writer.record_event(build_workflow_view(workflow), steps_unrecorded_message(why)),
            dependencies.monotonic,
        )
        view = WatchCache(dependencies.api.unreadable, step_recorder.note, step_recorder.forget)
        dependencies.api.unreadable.announce = writer.record_unreadable
        recorder = EventRecorder(
            *(view, dependencies.stores, writer, self.metrics, dependencies.now, dependencies.monotonic),
            descriptions=dependencies.descriptions,
        )
        gang_cleaner = GangCleaner(view, dependencies.api, writer, self.metrics, dependencies.monotonic)
        self._watches, self._event_recorder = (
            ClusterWatches(dependencies.api, dependencies.namespaces, view, self.metrics, dependencies.agent_pods),
            recorder,
        )
        specs: list[WorkerSpec] = [
            ("gang-cleaner", gang_cleaner.run),
            ("recorder", recorder.run),
            ("step-recorder", step_recorder.run),
        ]
        if dependencies.agent_pods:
            specs.append(("agent-cleaner", AgentPodCleaner(view, writer, self.metrics).run))
        factory = WorkerFactory(
            dependencies, view, self._watches, writer, self.metrics, lambda: self._lease.is_leader, self.triggers
        )
        specs += factory.create_workers()
        workers = [threading.Thread(target=work, args=(stop,), name=name, daemon=True) for name, work in specs]
        self.metrics.is_leader.set(1)
        self._watches.start(stop)
        for worker in workers:
            worker.start()
        stop.wait()
        view.wake()
        for worker in workers:
            # A worker that waits for storage may take longer. It cannot write any more, and ends with the process.
            worker.join(_SHUTDOWN_SECONDS)
        self.metrics.is_leader.set(0)
        self._watches = self._event_recorder = None
