"""Tries out a cluster: two small Workflows in a namespace, one of which loses a pod and one of which asks for too much.

Neither takes a GPU. Their objects and records are removed at the end, whatever becomes of them.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tiphys_controller import ClusterSubmitter, LiveWorkflow, start_run
from tiphys_controller.doctor import CheckStatus, Finding, check_cluster, observe_cluster
from tiphys_controller.doctor.check import passed
from tiphys_controller.doctor.observed import ClusterObservation, find_served_store, is_kueue_ledger
from tiphys_controller.doctor.store_probe import ProbeCheck
from tiphys_controller.kubernetes import KubernetesSubmitter
from tiphys_controller.run_deletion import delete_runs
from tiphys_controller.submit.submitter import find_obstacles
from tiphys_plugin.quota.ledger.usage import QueueUsage, compute_queue_usage

from hera_pipelines.authoring.loading import AnyPipeline
from hera_pipelines.cli.gpus.queues import parse_ledger
from hera_pipelines.cli.shared_options import SERVICE_ACCOUNT, compile_to_workflow, load_pipeline_file, with_parameters
from hera_pipelines.conformance.promises import ON_CLUSTER, UntriedError
from hera_pipelines.conformance.store_promises import read_digest
from hera_pipelines.demo.processes import check
from tiphys.errors import NotFoundError
from tiphys.kube import KubeApi, Object, identify_cluster
from tiphys.kube.resources import DEFAULT_LEDGER_NAME, PODS, WORKFLOWS
from tiphys.kube.whole_ledger import WholeLedgerReader
from tiphys.lineage.select import list_commits
from tiphys.protocol.compiled_workflow import Manifest
from tiphys.protocol.step_spec import STEP_LABEL
from tiphys.records import utc_now
from tiphys.store import Store, is_bucket_url, lineage_name, read_step_attempts
from tiphys.store.open import PLACEHOLDER

_TRAINING = "train"
_PAUSE_SECONDS = 0.5
"""Between two steps of the training, so that it lasts half a minute."""
_POLL_SECONDS = 1.0
_REMOVAL_SECONDS = 60.0
_NOT_IN_THE_WAY = frozenset({"workflows", "controller", "clocks", "gpu-ledger", "requeue-time"})
"""Failed checks of the doctor that stop none of these Workflows."""
T = TypeVar("T")


@dataclass
class ClusterPromises:
    """The trials in the namespace of ``api``, whose runs are in ``store``.

    ``image`` and ``queue`` are empty if none is named, ``name`` is that of a run that does not exist, and ``deadline``,
    by the monotonic clock, is when a Workflow is given up.
    """

    api: KubeApi
    store: Store
    observed: ClusterObservation
    submitter: ClusterSubmitter
    image: str
    queue: str
    name: str
    seed: int
    deadline: float
    runs: list[str] = field(default_factory=list)

    @classmethod
    def observe(
        cls, api: KubeApi, store: Store, image: str, queue: str, name: str, seed: int, deadline: float
    ) -> "ClusterPromises":
        """Look at the cluster of ``api``. Raises `StoreError` if it does not answer."""
        observed = observe_cluster(api, [api.namespace], opens_secrets=False, reads_workflows=False)
        submitter = KubernetesSubmitter(api, identify_cluster(api))
        return cls(api, store, observed, submitter, image, queue, name, seed, deadline)

    def trials(self) -> list[ProbeCheck]:
        """Every promise of a cluster, with its trial."""
        return list(zip(ON_CLUSTER, (self.submission, self.deleted_pod, self.quota), strict=True))

    def submission(self) -> Finding:
        """Submit one request twice at the same time."""
        self._require_ready()
        from hera_pipelines.conformance import program  # imports Hera and NumPy

        loaded = load_pipeline_file(Path(program.__file__), None)
        given = {"image": self.image, "seed": str(self.seed), "pause": str(_PAUSE_SECONDS)}
        manifest = with_parameters(self._compile(loaded), given, loaded)
        self.runs.append(self.name)

        def start(_: int) -> str:
            given = (deepcopy(manifest), self.name, self.api.namespace)
            return start_run(self.store, self.submitter, *given, key=self.name).workflow_name

        with ThreadPoolExecutor(2) as pool:
            answers = set(pool.map(start, range(2)))
        listed = [item["metadata"]["name"] for item in self.api.list(WORKFLOWS, self.api.namespace).items]
        made = [name for name in listed if name.startswith(self.name)]
        check(answers == {*made} and len(made) == 1, f"two requests under one key made {made}, and answered {answers}")
        return passed(f"two requests under one idempotency key made Workflow {made[0]}")

    def deleted_pod(self) -> Finding:
        """Delete the pod of a training after its first checkpoint."""
        if self.name not in self.runs:
            raise UntriedError("its Workflow was not submitted", "see submission")
        from hera_pipelines.conformance import program

        lineage = lineage_name(self.name, _TRAINING)
        acknowledged = self._wait(self.name, "a first checkpoint", lambda: list_commits(self.store, lineage))[0]
        pods = [pod for pod in self._pods(self.name) if (pod.get("status") or {}).get("phase") == "Running"]
        if not pods:
            raise UntriedError("the training had ended before its pod could be deleted", "run the command again")
        for pod in pods:
            self.api.delete(PODS, self.api.namespace, pod["metadata"]["name"], grace_seconds=0)
        live = self._wait(self.name, "the end of the Workflow", lambda: self._ended(self.name), is_promised=True)
        check(live.phase == "Succeeded", f"Workflow {self.name} ended as {live.phase} after its pod was deleted")
        attempts = read_step_attempts(self.store, self.name, _TRAINING)
        start = attempts[-1].claim.starts_from
        check(
            len(attempts) > 1 and start is not None and start.global_step >= acknowledged.global_step,
            f"checkpoint {acknowledged} was there, and attempt {len(attempts)} started from {start or 'the beginning'}",
        )
        digest = read_digest(self.store, self.name)
        check(digest == program.train_undisturbed(self.seed), f"its result is not that of an undisturbed one: {digest}")
        repeated = len(read_step_attempts(self.store, self.name, "choose-seed"))
        check(repeated == 1, f"the finished step before it has {repeated} attempts")
        return passed(f"its pod was deleted; attempt {len(attempts)} went on from {start}, to the same bits")

    def quota(self) -> Finding:
        """Ask a queue for one GPU more than it may ever hold."""
        self._require_ready()
        if not self.queue:
            raise UntriedError("no queue is named", "--queue NAME, of those that `tiphys queues show` lists")
        if is_kueue_ledger(self.observed.tiphys.found):
            raise UntriedError("Kueue grants the GPUs of this cluster", "try its quotas by its own means")
        limits = [usage.max_gpus for usage in self._usage() if usage.queue == self.queue and usage.max_gpus is not None]
        if not limits:
            raise UntriedError(f"queue {self.queue} has no quota", "name one of those that `tiphys queues show` lists")
        from hera_pipelines import Pipeline, Train

        with Pipeline("conformance-quota") as pipeline:
            asked = sum(limits) + 1
            Train(name=_TRAINING, image=self.image, command=["true"], gpus=asked, queue=self.queue)()
        run = f"{self.name}-quota"
        self.runs.append(run)
        start_run(self.store, self.submitter, self._compile(pipeline), run, self.api.namespace)
        live = self._wait(run, "the refusal of a request beyond its queue", lambda: self._ended(run), is_promised=True)
        pods = [pod["metadata"]["name"] for pod in self._pods(run)]
        check(live.phase != "Succeeded" and not pods, f"{asked} GPUs were asked for, and pods {pods} were made")
        usages = [usage for usage in self._usage() if usage.quota is not None]
        over = [f"{usage.queue} {usage.held} of {usage.max_gpus}" for usage in usages if usage.is_over_limit]
        check(not over, f"queues hold more than they may: {', '.join(over)}")
        held = sum(usage.held for usage in usages)
        return passed(f"{asked} GPUs were refused to {self.queue}; {len(usages)} quotas hold {held}, none too many")

    def remove(self, note: Callable[[str], object]) -> None:
        """Remove the Workflows and the records of the runs; ``note`` is told what is left.

        Raises:
            StoreError: cluster or store does not answer.
        """
        for run in self.runs:
            self.api.delete(WORKFLOWS, self.api.namespace, run)
            given_up_at = time.monotonic() + _REMOVAL_SECONDS
            while self.submitter.find(self.api.namespace, run) and time.monotonic() < given_up_at:
                time.sleep(_POLL_SECONDS)
            with suppress(NotFoundError):  # it was not recorded
                for kept in delete_runs(self.store, self.submitter, [run], force=True):
                    for reason in kept.kept_because:
                        note(f"run {run} is left: {reason}; `tiphys runs rm {run} --yes` removes it")

    def _require_ready(self) -> None:
        """Raise `UntriedError` if no Workflow can run here."""
        namespace, served = self.api.namespace, find_served_store(self.observed.tiphys.found, self.api.namespace)
        for found in check_cluster(self.observed):
            if found.state is CheckStatus.FAILED and found.check not in _NOT_IN_THE_WAY:
                raise UntriedError(f"`tiphys doctor --cluster` finds: {found.name}: {found.sentence}", found.remedy)
        if not self.image:
            raise UntriedError("no image for its programs is named", "--image IMAGE, with Python and tiphys[numpy]")
        if not is_bucket_url(self.store.url):
            raise UntriedError(f"pods cannot read {self.store.url}", "--store URL, the bucket of the installation")
        if served and (url := served.url.replace(PLACEHOLDER, namespace)).rstrip("/") != self.store.url.rstrip("/"):
            raise UntriedError(f"the services keep the runs of {namespace} in {url}", f"--store {url}")

    def _compile(self, pipeline: AnyPipeline) -> Manifest:
        manifest = compile_to_workflow(pipeline, store=self.store.url)
        manifest["spec"].setdefault("serviceAccountName", SERVICE_ACCOUNT)
        return manifest

    def _pods(self, run: str) -> list[Object]:
        labels = f"workflows.argoproj.io/workflow={run},{STEP_LABEL}={_TRAINING}"
        return self.api.list(PODS, self.api.namespace, labels=labels).items

    def _ended(self, run: str) -> LiveWorkflow | None:
        live = self.submitter.find(self.api.namespace, run)
        return live if live and not live.running else None

    def _usage(self) -> Iterator[QueueUsage]:
        for home in sorted({deployment["metadata"]["namespace"] for deployment in self.observed.tiphys.found}):
            if ledger := WholeLedgerReader(self.api, home, DEFAULT_LEDGER_NAME).read():
                yield from compute_queue_usage(parse_ledger(ledger))

    def _wait(self, run: str, what: str, happened: Callable[[], T | None], *, is_promised: bool = False) -> T:
        """Wait for what ``happened`` returns. In vain, it breaks a promise if nothing else is in the way."""
        while not (found := happened()):
            if not is_promised and (live := self._ended(run)):
                ends = [attempt.end for attempt in read_step_attempts(self.store, run, _TRAINING) if attempt.end]
                raise UntriedError(f"it ended as {live.phase} before {what}: {ends[-1].message if ends else '-'}")
            if time.monotonic() > self.deadline:
                workflow = f"{self.api.namespace}/{run}"
                obstacles = find_obstacles(self.submitter, [workflow], utc_now())[workflow]
                check(not is_promised or bool(obstacles), f"{workflow}: {what} did not come in time")
                reason, remedy = (str(obstacles[0]), obstacles[0].remedy) if obstacles else ("", "")
                raise UntriedError(f"{workflow}: {what} did not come in time; {reason}", remedy or "more --minutes")
            time.sleep(_POLL_SECONDS)
        return found
