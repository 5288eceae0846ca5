"""The loop that resumes runs, with its rounds and its clock in the test's hands, and an hour of bad sight."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tiphys_controller import start_run
from tiphys_controller.auto_resume.state import AutomationMode, AutoResumeLimits
from tiphys_controller.kubernetes import KubernetesSubmitter
from tiphys_controller.kubernetes.auto_resume_loop import AutoResumeLoop
from tiphys_controller.kubernetes.controller import ControllerDependencies, WorkerFactory
from tiphys_controller.kubernetes.metrics import ControllerMetrics
from tiphys_controller.kubernetes.watch_cache import WatchCache
from tiphys_controller.kubernetes.writer import ClusterWriter

from support.builders.argo_objects import posted_events
from support.builders.compiled_workflows import History, gated, pipeline_of
from support.fakes.submitter import FakeSubmitter
from support.servers.kube_server import KubeServer
from tiphys.errors import StoreError
from tiphys.kube import KubeApi, ListSnapshot, Object, identify_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.protocol.auto_resume_policy import AUTO_RESUME_ANNOTATION, AutoResumePolicy
from tiphys.protocol.step_spec import PIPELINE_ANNOTATION
from tiphys.records import utc_now
from tiphys.store import Store, read_submissions

RUN = "digits-1"


@dataclass
class Watches:
    """What `Watching` says of itself."""

    errors: dict[str, str] = field(default_factory=dict)
    synced: bool = True


class Bench:
    """A loop whose rounds and clock are in the test's hands."""

    def __init__(
        self, server: KubeServer, api: KubeApi, store: Store, mode: AutomationMode = AutomationMode.ON
    ) -> None:
        self.server, self.api, self.store, self.mode = server, api, store, mode
        self.moment = 1000.0
        self.watches = Watches()
        self.pool = ThreadPoolExecutor(4)
        self.restart()
        self.moment += 20  # its sight has been good for a while

    def restart(self) -> None:
        """A new process: nothing is remembered."""
        self.view, self.metrics = WatchCache(), ControllerMetrics()
        self.loop = self._made()

    def _made(self) -> AutoResumeLoop:
        writer = ClusterWriter(self.api, lambda: True, self.metrics, utc_now)
        watches: Any = self.watches
        limits = AutoResumeLimits(mode=self.mode, resumes_per_minute=600.0)
        clock = lambda: self.moment  # noqa: E731
        given = ControllerDependencies(
            self.api, ("ml",), lambda _: self.store, "bench", "tiphys", limits, monotonic=clock
        )
        factory = WorkerFactory(given, self.view, watches, writer, self.metrics, lambda: True)
        return factory.create_auto_resume_loop()

    def round(self, seconds: float = 1.0, times: int = 1, *, listed: bool = True) -> None:
        """``times`` rounds, each ``seconds`` after the last and with all that it begins carried out."""
        for _ in range(times):
            self.moment += seconds
            if listed:
                self.view.apply_workflow_change("ml", ListSnapshot(self.api.list(WORKFLOWS, "ml").items))
            for begun in self.loop.run_round(self.pool, threading.Event()):
                begun.result()

    def started(self, run: str = RUN, *, asks: bool = True) -> History:
        """A run whose first step is done, and whose Workflow runs."""
        manifest = pipeline_of(gated("prep"), gated("fit", depends="prep"))
        manifest["metadata"]["labels"] = {PIPELINE_ANNOTATION: "digits"}
        if asks:
            manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = AutoResumePolicy().model_dump_json()
        start_run(self.store, KubernetesSubmitter(self.api, identify_cluster(self.api)), manifest, run, namespace="ml")
        self.change(run, {"status": {"phase": "Running"}})
        history = History(self.store, run)
        history.done("prep")
        return history

    def change(self, name: str, patch: Object) -> None:
        self.api.patch(WORKFLOWS, "ml", name, patch)

    def fail(self, name: str = RUN) -> None:
        self.change(name, {"status": {"phase": "Failed"}})

    def delete(self, name: str = RUN) -> None:
        self.api.delete(WORKFLOWS, "ml", name)

    def names(self) -> list[str]:
        return sorted(one["metadata"]["name"] for one in self.server.objects("workflows"))

    def reasons(self) -> list[str]:
        return [reason for reason, _ in posted_events(self.server)]

    def count(self, metric: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"tiphys_controller_{metric}", labels) or 0.0


class Unreliable:
    """A store or a cluster of which every third call times out."""

    def __init__(self, real: Any, chance: random.Random) -> None:
        self._real, self._chance = real, chance
        self.failed = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        if not callable(found):
            return found

        def call(*args: Any, **given: Any) -> Any:
            if self._chance.random() < 1 / 3:
                self.failed += 1
                raise StoreError(f"{name} timed out")
            return found(*args, **given)

        return call


class Hour(NamedTuple):
    """What came of `hour_of_time_outs`."""

    resubmitted: int
    faults: int
    """Calls to store and cluster that really timed out."""


def hour_of_time_outs(server: KubeServer, store: Store, folder: Path, runs: int = 100, seed: int = 7) -> Hour:
    """A virtual hour in which every third call to store and cluster times out, and lists are empty or half."""
    chance = random.Random(seed)
    cluster = FakeSubmitter(folder / "west")
    flaky_store: Any = Unreliable(store, chance)
    flaky_cluster: Any = Unreliable(cluster, chance)
    names = [f"digits-{number}" for number in range(runs)]
    manifest = pipeline_of(gated("fit"))
    manifest["metadata"]["annotations"][AUTO_RESUME_ANNOTATION] = AutoResumePolicy().model_dump_json()
    for run in names:
        start_run(store, cluster, manifest, run, namespace="ml")
    objects = [{**cluster.manifest(run, "ml"), "status": {"phase": "Running"}} for run in names]
    for one in objects:
        one["metadata"]["uid"] = f"uid-of-{one['metadata']['name']}"
    submitters = "tiphys_controller.kubernetes.controller.submitter_of"
    with mock.patch(submitters, lambda _: lambda: flaky_cluster):
        bench = Bench(server, server.api("ml"), store)
        bench.store = flaky_store
        for minute in range(60):
            # A list that came back empty, or half, before the watch noticed that something is wrong.
            shown = chance.choice([objects, objects, [], objects[: runs // 2]])
            bench.view.apply_workflow_change("ml", ListSnapshot(shown))
            bench.watches.errors = {"workflows": "timed out"} if chance.random() < 0.5 else {}
            bench.round(60 if minute % 7 else 1, listed=False)
        bench.pool.shutdown()
    resubmitted = len(set(cluster.names()) - set(names)) + sum(
        len(read_submissions(store, run)) - 1 for run in names[:10]
    )
    return Hour(resubmitted, flaky_store.failed + flaky_cluster.failed)
