"""The services of the simulation: replicas of the plugin, controllers, and people at their desks."""

import contextlib
from collections.abc import Callable
from typing import Any

from support.builders.compiled_workflows import gated, pipeline_of
from tiphys_controller import resume_run, start_run
from tiphys_controller.auto_resume.act import AutoResumeReconciler
from tiphys_controller.auto_resume.observation_health import ObservationHealth
from tiphys_controller.auto_resume.state import AutoResumeLimits
from tiphys_controller.cleanup import WorkflowPresence, find_stalled_runs
from tiphys_plugin import PluginCore, PluginSettings
from tiphys_plugin.quota.ledger.kubernetes_ledger import KubernetesLedger

from chaos.cluster import ClusterState, SimulatedCluster, SimulatedLedgerApi
from chaos.programs import DELETE_AFTER_SECONDS, KEEP_LAST
from chaos.scheduler import Actor, Process
from chaos.seams import EPOCH
from chaos.world import NAMESPACE, SimulatedStore, World
from tiphys.errors import ConflictError, NotFoundError, StoreError, TiphysError
from tiphys.lineage.retention.gc import RunLineage, iter_run_lineages
from tiphys.lineage.retention.policy import pin_checkpoint, unpin_checkpoint
from tiphys.lineage.run_history import RunHistory
from tiphys.lineage.select import list_commits
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.protocol.step_spec import CheckpointPolicy, GpuRequest, RetryPolicy, StepKind
from tiphys.records import utc_now
from tiphys.store import list_runs

GPUS = 4
SETTINGS = PluginSettings(pod_end_timeout_seconds=600.0)


def build_manifest() -> dict[str, Any]:
    """The pipeline of every run: a step with a gate, and a training behind it that wants half of the quota."""
    fit = gated("fit", kind=StepKind.TRAIN, depends="prep") | {
        "_spec": {
            "artifacts": ("model",),
            "checkpoints": CheckpointPolicy(
                every=1, every_unit="steps", keep_last=KEEP_LAST, delete_after_seconds=DELETE_AFTER_SECONDS
            ),
            "gpu": GpuRequest(gpus=GPUS, gpu_type="A100", queue="research"),
            "retry": RetryPolicy(backoff_seconds=5.0),
        }
    }
    prep = gated("prep") | {"_spec": {"parameters": ("rows",)}}
    manifest = pipeline_of(prep, fit)
    manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = AutoResumePolicy().model_dump_json()
    return manifest


class Replica:
    """One replica of the plugin's service, which is started again once it was killed."""

    def __init__(self, world: World, state: ClusterState, number: int) -> None:
        self._world = world
        self._state = state
        self._number = number
        self._starts = 0
        self.process = Process("")
        self.core: PluginCore | None = None
        self.start()

    def start(self, delay_seconds: float = 0.0) -> None:
        """Begin a process."""
        self._starts += 1
        self.process, self.core = Process(f"plugin-{self._number}-{self._starts}"), None
        self._world.scheduler.spawn(self.process, self.process.name, self._serve, delay_seconds=delay_seconds)

    def call(self, document: dict[str, Any]) -> Actor | None:
        """Begin to answer a request; None while nobody listens."""
        core = self.core
        if core is None or not self.process.is_alive:
            return None
        name = f"{self.process.name}-call"
        return self._world.scheduler.spawn(
            self.process, name, lambda: core.execute_document(document), expected=(StoreError,)
        )

    def _serve(self) -> None:
        process, world = self.process, self._world
        store, cluster = SimulatedStore(world, process), SimulatedCluster(world, self._state, process)
        while True:
            try:
                api: Any = SimulatedLedgerApi(world, self._state, process)
                ledger = KubernetesLedger(
                    api, "tiphys", clock=utc_now, pause=world.scheduler.sleep, run_in_background=lambda work: work()
                )
                self.core = PluginCore(store, cluster, ledger, clock=utc_now, settings=SETTINGS)
                return
            except StoreError:
                world.scheduler.sleep(5.0)


class Controller:
    """One controller; two of them believe that they lead, as in the worst moment of an election."""

    def __init__(self, world: World, state: ClusterState, number: int) -> None:
        self._world = world
        self._state = state
        self._number = number
        self._starts = 0
        self.start()

    def start(self, delay_seconds: float = 0.0) -> None:
        """Begin a process."""
        self._starts += 1
        self.process = Process(f"controller-{self._number}-{self._starts}")
        self._world.scheduler.spawn(self.process, self.process.name, self._work, delay_seconds=delay_seconds)

    def _work(self) -> None:
        world, process = self._world, self.process
        store, cluster = SimulatedStore(world, process), SimulatedCluster(world, self._state, process)
        reconciler = AutoResumeReconciler(
            stores=lambda _: store,
            submitter=lambda: cluster,
            is_leader=lambda: True,
            observation_health=lambda _: ObservationHealth(),
            monotonic=lambda: world.scheduler.now,
            limits=AutoResumeLimits(),
        )
        uids = lambda: {workflow["metadata"]["uid"] for workflow in self._state.workflows.values()}  # noqa: E731
        presence, clean_at = WorkflowPresence(cluster.name, lambda bound: bound.uid in uids()), 0.0
        while True:
            world.scheduler.sleep(world.random.uniform(10.0, 40.0))
            with contextlib.suppress(StoreError):
                if world.scheduler.now >= clean_at:  # the janitor's round
                    clean_at = world.scheduler.now + world.random.uniform(60.0, 600.0)
                    for finding in find_stalled_runs(store, presence, utc_now()):
                        if finding.remove is not None:
                            finding.remove()
                for run in list_runs(store):
                    with contextlib.suppress(ConflictError, NotFoundError):
                        reconciler.reconcile((NAMESPACE, run))


class Desk:
    """People and their programs: each command is a process of its own.

    Attributes:
        failures: Errors of commands that no fault explains.
    """

    def __init__(self, world: World, state: ClusterState) -> None:
        self._world = world
        self._state = state
        self._commands = 0
        self.failures: list[str] = []
        self.on_command: Callable[[Process], None] = lambda _: None
        """Called with the process of each command."""
        self.answered: set[str] = set()
        """Keys of starts that were answered."""

    def start(self, key: str, delay_seconds: float = 0.0) -> Actor:
        """``tiphys submit --key``, repeated until it is answered."""

        def command(store: SimulatedStore, cluster: SimulatedCluster) -> None:
            while True:
                try:
                    started = start_run(store, cluster, build_manifest(), namespace=NAMESPACE, key=key)
                except StoreError:
                    self._world.scheduler.sleep(20.0)
                else:
                    self._world.record("start answered", key=key, run=started.run, uid=started.uid)
                    self.answered.add(key)
                    return

        return self._run(f"start-{key}", command, delay_seconds)

    def resume(self, run: str, key: str = "", *, force: bool = False) -> Actor:
        """``tiphys resume``; under a key as an alert does it; with ``--force`` although the run may go on."""

        def command(store: SimulatedStore, cluster: SimulatedCluster) -> None:
            if force:
                self._world.record("forced", run=run)
            resumed = resume_run(store, cluster, run, namespace=NAMESPACE, key=key or None, force=force)
            if key and resumed.submission is not None:
                self._world.record("resume answered", key=key, run=run, submission=resumed.submission)

        return self._run(f"resume-{run}", command)

    def collect(self, run: str) -> Actor:
        """``tiphys gc`` of a run."""

        def command(store: SimulatedStore, _: SimulatedCluster) -> None:
            for lineage in iter_run_lineages(RunHistory(store, run), lambda keep: keep):
                if isinstance(lineage, RunLineage):
                    lineage.collect()

        return self._run(f"gc-{run}", command)

    def pin(self, run: str, name: str, seconds: float) -> Actor:
        """Pin one of the checkpoints of a run, and unpin it later."""

        def command(store: SimulatedStore, _: SimulatedCluster) -> None:
            commits = list_commits(store, f"{run}/fit")
            if not commits:
                return
            ref = self._world.random.choice((self._world.random.choice(commits), commits[-1]))  # the oldest goes next
            pin_checkpoint(store, ref, name, "chaos")
            fields = {"lineage": ref.lineage, "attempt": ref.attempt, "global_step": ref.global_step, "name": name}
            self._world.record("pinned", **fields)
            self._world.scheduler.sleep(seconds)
            self._world.record("unpinning", **fields)
            unpin_checkpoint(store, ref, name)

        return self._run(f"pin-{run}", command)

    def _run(
        self, name: str, command: Callable[[SimulatedStore, SimulatedCluster], None], delay_seconds: float = 0.0
    ) -> Actor:
        self._commands += 1
        process = Process(f"desk-{self._commands}-{name}")
        self.on_command(process)
        store = SimulatedStore(self._world, process)
        cluster = SimulatedCluster(self._world, self._state, process)

        def work() -> None:
            # A run that goes on, a plan that another command has overtaken, storage that is away: the person sees it.
            with contextlib.suppress(TiphysError):
                command(store, cluster)

        return self._world.scheduler.spawn(process, process.name, work, delay_seconds=delay_seconds)


__all__ = ["EPOCH", "GPUS", "Controller", "Desk", "Replica", "build_manifest"]
