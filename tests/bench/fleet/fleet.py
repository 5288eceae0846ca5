"""What the stories share: the cluster, its trainings, and what every part of it costs."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argo.settings import Settings
from bench.fleet.pods import Pods, PodSeen
from bench.fleet.trainings import STEPS_OF_SAVE, Trainings
from bench.processes import cost, find
from bench.samples import significant
from hera.workflows.models import Toleration

from hera_pipelines import Checkpoints, Pipeline, Train
from tiphys.kube import KubeApi, Object, connect_to_cluster
from tiphys.kube.resources import WORKFLOWS
from tiphys.store import Store, open_store

QUEUE, TIGHT_QUEUE = "fleet", "fleet-tight"
"""One with room for all of its trainings, and one in which those of higher priority take the GPUs of others."""
NODE_GROUP = "fleet"
GPUS = 8
"""Of a node, and of a training."""
_AT_ONCE = 8
_ACCOUNT = "tiphys-workflow"
_TOLERATION = Toleration(key="kwok.x-k8s.io/node", operator="Exists", effect="NoSchedule")
_PARTS = {
    "etcd": "etcd",
    "API server": "kube-apiserver",
    "scheduler": "kube-scheduler",
    "Argo's controller": "workflow-controller",
    "Tiphys plugin": "tiphys_plugin",
    "Tiphys controller": "tiphys_controller",
    "S3 server": "versitygw",
}
"""Parts whose processes are on this machine, by their programs or modules."""


@dataclass
class Fleet:
    """Many trainings on a cluster, and the programs of their pods."""

    api: KubeApi
    settings: Settings
    trainings: Trainings
    pods: Pods
    watch: threading.Event
    sent: list[str] = field(default_factory=list)
    """Runs, in their order."""

    def submit(self, count: int, queue: str = QUEUE, priority: int = 0) -> list[str]:
        """Create so many Workflows of one training each; the names of their runs."""
        manifest = training(self.settings, queue, priority)
        namespace = self.settings.namespace

        def create(_: int) -> str:
            name: str = self.api.create(WORKFLOWS, namespace, manifest)["metadata"]["name"]
            return name

        with ThreadPoolExecutor(_AT_ONCE) as threads:
            names = list(threads.map(create, range(count)))
        self.sent += names
        return names

    def rewatch(self) -> None:
        """Watch from the beginning, after the versions of the old cluster are gone."""
        self.watch.set()
        self.watch = self.pods.watch()

    def count_running(self, runs: Sequence[str]) -> int:
        """Runs whose program is up."""
        wanted = set(runs)
        return len({program.pod.run for program in self.trainings.running.values()} & wanted)

    def phases(self) -> dict[str, str]:
        """The phase of each Workflow, by its name."""
        found = self.api.list(WORKFLOWS, self.settings.namespace, transform=_phase_of)
        return {each["metadata"]["name"]: each.get("status", {}).get("phase", "") for each in found.items}

    def attempts_of(self, run: str) -> list[PodSeen]:
        """Pods of a run, in the order of their creation."""
        return sorted((pod for pod in self.pods.seen.values() if pod.run == run), key=lambda pod: pod.created)


def training(settings: Settings, queue: str, priority: int) -> Object:
    """The compiled Workflow of a training on one node."""
    with Pipeline("fleet", store=settings.store, service_account_name=_ACCOUNT) as pipeline:
        Train(
            name="fit",
            image=settings.image,
            command=["python", "train.py"],
            gpus=GPUS,
            queue=queue,
            priority=priority,
            checkpoints=Checkpoints(every=f"{STEPS_OF_SAVE} steps", keep_last=2),
            tolerations=[_TOLERATION],
        )()
    return pipeline.compile()


@contextmanager
def fleet(settings: Settings, steps: Any, save_seconds: Any) -> Iterator[Fleet]:
    """The cluster of the settings; its Workflows of the bench are deleted at the end."""
    api = connect_to_cluster(Path(settings.kubeconfig))
    pods = Pods(api, settings.namespace)
    store: Store = open_store(settings.store)
    here = Fleet(api, settings, Trainings(pods, store, steps, save_seconds), pods, pods.watch())
    try:
        yield here
    finally:
        here.watch.set()
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(lambda name: api.delete(WORKFLOWS, settings.namespace, name), here.sent))


def harness(*arguments: str) -> None:
    """A command of the project's own cluster."""
    subprocess.run(
        [sys.executable, "-m", "cluster.harness", *arguments], check=True, stdout=subprocess.DEVNULL, env={**os.environ}
    )


def add_nodes(count: int) -> None:
    """Nodes of paper with `GPUS` each."""
    harness("add-fake-nodes", NODE_GROUP, str(count), f"--gpus={GPUS}", "--model=A100")


def apply_queues(settings: Settings, trainings: int, in_tight: int = 0) -> None:
    """Quotas for so many trainings."""
    queues = [
        {"name": QUEUE, "gpus": {"*": trainings * GPUS}},
        {"name": TIGHT_QUEUE, "gpus": {"*": in_tight * GPUS}, "preempts_lower_priority": True},
    ]
    tiphys("queues", "apply", "-f", "-", "-n", settings.system_namespace, given=json.dumps({"queues": queues}))


def tiphys(*arguments: str, given: str = "") -> str:
    """All that a command says to a person."""
    done = subprocess.run(
        ["tiphys", *arguments], input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"tiphys {' '.join(arguments)} ended with {done.returncode}: {done.stdout}")
    return done.stdout


def costs() -> dict[str, dict[str, float]]:
    """CPU seconds and memory of each part, of all its processes."""
    found: dict[str, dict[str, float]] = {}
    for part, program in _PARTS.items():
        looks = [cost(pid) for pid in find(program)]
        if looks:
            found[part] = {
                "cpu_seconds": significant(sum(look.cpu_seconds for look in looks)),
                "rss_mib": significant(sum(look.rss_mib for look in looks)),
            }
    return found


def _phase_of(document: Object) -> Object:
    return {"metadata": document["metadata"], "status": {"phase": document.get("status", {}).get("phase", "")}}
